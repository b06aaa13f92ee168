"""Commands that talk to a running server, and completion."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from mlx_server.cli import chat
from mlx_server.cli.main import main
from mlx_server.cli.remote import KEY_VARIABLE, RemoteError, RemoteServer

EVENTS = {"content-type": "text/event-stream; charset=utf-8"}


class FakeServer:
    """Answers chats with `words`, one event each; `refusal` (status, message) instead, when set."""

    def __init__(self) -> None:
        self.words = ["Hel", "lo."]
        self.refusal: tuple[int, str] | None = None
        self.error_after_words: str | None = None
        self.models: list[dict[str, Any]] = [{"id": "fake"}]
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.keys.append(self.headers.get("authorization"))
                outer.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                if outer.refusal is not None:
                    status, message = outer.refusal
                    self._send(status, json.dumps({"error": {"message": message}}).encode())
                    return
                events = [{"choices": [{"delta": {"content": word}}]} for word in outer.words]
                events.append({"choices": [], "usage": {"completion_tokens": len(outer.words)}})
                if outer.error_after_words:
                    events[-1] = {"error": {"message": outer.error_after_words}}
                lines = [f"data: {json.dumps(event)}\n\n" for event in events]
                body = "".join([": keep-alive\n\n", *lines, "data: [DONE]\n\n"]).encode()
                self._send(200, body, "text/event-stream")

            def do_GET(self) -> None:
                outer.keys.append(self.headers.get("authorization"))
                self._send(200, json.dumps({"data": outer.models}).encode())

            def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server(monkeypatch) -> Iterator[FakeServer]:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    fake = FakeServer()
    yield fake
    fake.close()


def typed(monkeypatch, *lines: str) -> None:
    """A person at a terminal types these lines, then Ctrl-D."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    left = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)


# --- chat -------------------------------------------------------------------------------------------------


def test_a_message_on_the_command_line_is_answered_once(server, monkeypatch, capsys) -> None:
    typed(monkeypatch)
    assert main(["chat", "--url", server.url, "--model", "m", "--max-tokens", "9", "What", "is", "it?"]) == 0
    assert capsys.readouterr().out == "Hello.\n"
    (body,) = server.bodies
    assert body["messages"] == [{"role": "user", "content": "What is it?"}]
    assert (body["model"], body["max_completion_tokens"], body["stream"]) == ("m", 9, True)
    assert "temperature" not in body


def test_piped_text_comes_before_the_message(server, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("some diff\n"))
    assert main(["chat", "--url", server.url, "--system", "Be short.", "Sum it up."]) == 0
    assert server.bodies[0]["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "some diff\n\nSum it up."},
    ]


def test_a_conversation_remembers_and_forgets(server, monkeypatch, capsys) -> None:
    typed(monkeypatch, "one", "", "two", "/retry", "/clear", "three", "/help", "/halp", "/quit", "never")
    assert main(["chat", "--url", server.url]) == 0
    asked = [[message["content"] for message in body["messages"]] for body in server.bodies]
    two = ["one", "Hello.", "two"]
    assert asked == [["one"], two, two, ["three"]]
    shown = capsys.readouterr().out
    assert shown.startswith(f"fake at {server.url}. /clear starts again")
    assert shown.count("/retry repeats the last question") == 3  # at first, for /help, and for what is no command
    assert "Unknown command /halp" in shown


def test_an_error_forgets_the_question_and_goes_on(server, monkeypatch, capsys) -> None:
    typed(monkeypatch, "one", "two")
    server.error_after_words = "The engine has died."
    assert main(["chat", "--url", server.url]) == 0
    out, err = capsys.readouterr()
    assert err == "error: The engine has died.\n" * 2
    assert out.count("Hello.\n") == 2, "an error begins a line of its own"
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["two"]


def test_ctrl_c_keeps_what_there_is(server, monkeypatch, capsys) -> None:
    typed(monkeypatch, "one", "two")
    show = chat.Answer.show
    calls: list[str] = []

    def interrupt_second_event(answer: chat.Answer, event: dict[str, Any]) -> None:
        calls.append("")
        if len(calls) == 2:
            raise KeyboardInterrupt
        show(answer, event)

    monkeypatch.setattr(chat.Answer, "show", interrupt_second_event)
    assert main(["chat", "--url", server.url]) == 0
    assert "Hel [stopped]" in capsys.readouterr().out
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["one", "Hel", "two"]


def test_an_answer_stopped_before_its_first_word_leaves_no_gap(server, monkeypatch) -> None:
    typed(monkeypatch, "one", "two")
    show = chat.Answer.show
    calls: list[str] = []

    def interrupt_first_event(answer: chat.Answer, event: dict[str, Any]) -> None:
        calls.append("")
        if len(calls) == 1:
            raise KeyboardInterrupt
        show(answer, event)

    monkeypatch.setattr(chat.Answer, "show", interrupt_first_event)
    assert main(["chat", "--url", server.url]) == 0
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["two"]


def test_an_only_answer_that_ctrl_c_stops_has_the_status_of_that(server, monkeypatch, capsys) -> None:
    typed(monkeypatch)
    show = chat.Answer.show

    def interrupt(answer: chat.Answer, event: dict[str, Any]) -> None:
        show(answer, event)
        raise KeyboardInterrupt

    monkeypatch.setattr(chat.Answer, "show", interrupt)
    assert main(["chat", "--url", server.url, "hi"]) == 130
    assert capsys.readouterr().out == "Hel [stopped]\n"


def test_a_conversation_without_a_server_ends_before_the_first_question(monkeypatch, capsys) -> None:
    typed(monkeypatch, "one")
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 1
    assert "No server answers" in capsys.readouterr().err


def test_the_key_comes_from_the_environment(server, monkeypatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret\r\n")
    typed(monkeypatch)
    assert main(["chat", "--url", f"{server.url}/v1/", "hi"]) == 0
    assert server.keys == ["Bearer secret"]


def test_a_refusal_is_shown_in_the_servers_words(server, monkeypatch, capsys) -> None:
    typed(monkeypatch)
    server.refusal = (401, "The API key is missing.")
    assert main(["chat", "--url", server.url, "hi"]) == 1
    assert capsys.readouterr().err.startswith("mlx-serve: error: The API key is missing. Put the key into MLX_SERVE")


def test_no_server_is_one_line_that_says_what_to_do(monkeypatch, capsys) -> None:
    typed(monkeypatch)
    assert main(["chat", "--url", "http://127.0.0.1:9", "hi"]) == 1
    assert "No server answers at http://127.0.0.1:9; start one with `mlx-serve serve`" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["ftp://host", "http://", "", "host:port", "http://[::1", "http://a b", "http://.", f"http://{'a' * 64}"]
)
def test_a_nonsensical_address_is_an_error_too(url) -> None:
    with pytest.raises(RemoteError, match=r"is not a URL; write one like http://127\.0\.0\.1:8000\.$"):
        RemoteServer(url)


@pytest.mark.parametrize("url", ["127.0.0.1:9\r\n", " http://127.0.0.1:9/v1 ", "http://127.0.0.1:9\n"])
def test_space_around_an_address_does_not_count(url) -> None:
    assert RemoteServer(url).url == "http://127.0.0.1:9"


@pytest.mark.parametrize("url", ["http://モデル.local:9", "http://my_mac.local", "https://[fe80::1%en0]:9/a"])
def test_names_and_addresses_of_any_kind_are_addresses(url) -> None:
    assert RemoteServer(url).url == url


def test_an_empty_variable_names_no_server(monkeypatch, capsys) -> None:
    monkeypatch.setenv("MLX_SERVE_URL", "")
    with pytest.raises(SystemExit):
        main(["chat", "--help"])
    assert "the server; default: http://127.0.0.1:8000, or MLX_SERVE_URL" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("timeout_s", ["nan", "-1", "soon"])
def test_a_wrong_time_is_refused_before_a_server_is_asked(timeout_s, capsys) -> None:
    assert main(["models", "unload", "a", "--drain-timeout-s", timeout_s]) == 2
    assert f"--drain-timeout-s: {timeout_s} is not a finite number of at least 0" in capsys.readouterr().err


def test_an_address_needs_no_scheme(server, monkeypatch) -> None:
    typed(monkeypatch)
    assert main(["chat", "--url", server.url.removeprefix("http://"), "hi"]) == 0


@pytest.mark.usefixtures("dead_proxy")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_on_this_machine_is_not_asked_through_a_proxy(server, monkeypatch, host: str) -> None:
    typed(monkeypatch)
    assert main(["chat", "--url", server.url.replace("127.0.0.1", host), "hi"]) == 0


@pytest.mark.usefixtures("dead_proxy")
def test_a_server_elsewhere_is_asked_through_the_proxy(server, monkeypatch) -> None:
    monkeypatch.setenv("http_proxy", server.url)
    assert RemoteServer("http://far.invalid").model_cards() == {"fake": {"id": "fake"}}


def test_a_page_instead_of_json_is_said_to_be_one() -> None:
    page = httpx.MockTransport(lambda request: httpx.Response(200, html="<html></html>"))
    with pytest.raises(RemoteError, match=r"answers with text/html; charset=utf-8 that is not in mlx-serve's format"):
        RemoteServer("http://host", transport=page).request("GET", "/v1/models")


@pytest.mark.parametrize("status", [200, 302])
def test_a_page_instead_of_an_answer_is_no_answer(monkeypatch, capsys, status: int) -> None:
    page = httpx.MockTransport(lambda request: httpx.Response(status, html="<html></html>"))
    monkeypatch.setattr(chat, "RemoteServer", lambda url: RemoteServer("http://host", transport=page))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["chat", "Hi"]) == 1
    out, errors = capsys.readouterr()
    assert out.strip() == ""
    assert ("http://host answered 302" if status == 302 else "answers with text/html; charset=utf-8 that") in errors
    with pytest.raises(RemoteError):
        RemoteServer("http://host", transport=page).text("/v1/load_lora_adapter", {})


@pytest.mark.parametrize("body", ["", "3", "[]", '{"models": []}', '{"data": 3}', '{"data": [{}]}', '{"data": ["a"]}'])
def test_an_answer_of_another_form_is_said_to_be_one(body: str) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=body))
    with pytest.raises(RemoteError, match="is it an mlx-serve server"):
        RemoteServer("http://host", transport=transport).model_cards()


@pytest.mark.parametrize("chunk_size", [1, 1000])
def test_characters_that_unicode_calls_ends_of_lines_are_text(chunk_size: int) -> None:
    text = "a\u0085b\u2028c\u2029d"
    event = json.dumps({"choices": [{"delta": {"content": text}}]}, ensure_ascii=False)
    body = f": hi\r\n\r\ndata: {event}\r\n\r\ndata: {event}\n\ndata: [DONE]\n\n".encode()
    parts = [body[start : start + chunk_size] for start in range(0, len(body), chunk_size)]
    transport = httpx.MockTransport(lambda request: httpx.Response(200, headers=EVENTS, content=iter(parts)))
    pieces = RemoteServer("http://host", transport=transport).stream("/v1/chat/completions", {}, chat.Piece.of)
    assert [piece.text for piece in pieces] == [text, text]


@pytest.mark.parametrize("event", ["hello", "3", "[]", '{"choices": 3}', '{"choices": ["a"]}', '{"usage": "a"}'])
def test_an_event_of_another_form_is_said_to_be_one(event: str) -> None:
    body = f"data: {event}\n\ndata: [DONE]\n\n".encode()
    transport = httpx.MockTransport(lambda request: httpx.Response(200, headers=EVENTS, content=body))
    with pytest.raises(RemoteError, match="is it an mlx-serve server"):
        list(RemoteServer("http://host", transport=transport).stream("/v1/chat/completions", {}, chat.Piece.of))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SSL_CERT_FILE", "/none", "SSL_CERT_FILE: /none cannot be used: No such file or directory."),
        ("MLX_SERVE_API_KEY", "schlüssel", "MLX_SERVE_API_KEY is not a key: it has characters other than printable"),
        ("MLX_SERVE_API_KEY", "a\nb", "MLX_SERVE_API_KEY is not a key"),
        ("ALL_PROXY", "ftp://host", "The proxy that the environment names cannot be used: Unknown scheme"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(monkeypatch, name: str, value: str, words: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(RemoteError, match=re.escape(words)):
        RemoteServer("http://host")


def test_text_that_is_not_utf_8_ends_no_conversation(server, monkeypatch, capsys) -> None:
    typed(monkeypatch, "a\udcff", "two")
    assert main(["chat", "--url", server.url]) == 0
    assert capsys.readouterr().err == (
        f"error: The request to {server.url} cannot be sent: it has text that is not UTF-8.\n"
    )
    assert [message["content"] for body in server.bodies for message in body["messages"]] == ["two"]


def test_a_number_that_json_has_not_is_refused(server, monkeypatch, capsys) -> None:
    typed(monkeypatch)
    assert main(["chat", "--url", server.url, "--temperature", "nan", "hi"]) == 1
    assert "cannot be sent: Out of range float values are not JSON compliant" in capsys.readouterr().err


# --- completion -------------------------------------------------------------------------------------------


def completions(script: str, *words: str) -> list[str]:
    """What bash offers for a command line whose last word is being typed."""
    line = " ".join(f"'{word}'" for word in words)
    act = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_mlx_serve; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    found = subprocess.run(["bash", "-c", f"{script}\n{act}"], capture_output=True, text=True, check=True)
    return found.stdout.split()


@pytest.fixture(scope="module")
def bash_script() -> str:
    if shutil.which("bash") is None:
        pytest.skip("bash is not here")
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", output)
        assert main(["completion", "bash"]) == 0
    return output.getvalue()


def test_bash_completes_commands_and_options(bash_script) -> None:
    assert {"serve", "chat", "bench"} <= set(completions(bash_script, "mlx-serve", ""))
    assert completions(bash_script, "mlx-serve", "cha") == ["chat"]
    assert set(completions(bash_script, "mlx-serve", "config", "")) == {"check", "default"}
    assert completions(bash_script, "mlx-serve", "serve", "--max-model") == ["--max-model-len"]
    assert completions(bash_script, "mlx-serve", "serve", "--port", "1", "--ho") == ["--host"]
    assert completions(bash_script, "mlx-serve", "completion", "") == ["bash", "zsh", "fish"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_is_valid_and_names_what_there_is(shell, capsys) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("serve", "doctor", "max-model-len", "kv-cache-memory"):
        assert word in script
    if shutil.which(shell) is not None:
        checked = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr
