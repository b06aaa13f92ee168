"""What `LLM` takes besides lists: iterators, paths, adapters by name; and what it refuses, with the argument's name."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_server import LLM, AsyncLLM
from mlx_server.engine.library.completions import complete
from mlx_server.errors import ConfigError, InvalidRequestError
from tests.adapter_files import plain_model, write_adapter
from tests.engine_worlds import greedy, make_folder
from tests.tiny_models import byte_tokenizer, reference_generate

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools[0].function.name if tools }}"
SMALL: Any = {"num_kv_blocks": 64, "max_model_len": 256}
CHAT = [{"role": "user", "content": "one"}]
IDS = byte_tokenizer().encode("one string")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("models") / "m")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **SMALL) as llm:
        yield llm


def test_iterators_of_chats_messages_and_tools_lose_nothing(llm: LLM) -> None:
    words = ("one", "two", "three")

    def prompts(chats: Any, **more: Any) -> list[str | None]:
        return [completion.prompt for completion in llm.chat(chats, greedy(1), use_tqdm=False, **more)]

    messages = [{"role": "user", "content": word} for word in words]
    assert prompts([message] for message in messages) == list(words)
    assert prompts(iter((message,)) for message in messages) == list(words)
    assert prompts(iter(messages)) == ["onetwothree"]
    assert prompts([], tools=None) == []
    tool = {"type": "function", "function": {"name": "f"}}
    assert prompts(CHAT, tools=(tool,)) == prompts(CHAT, tools=iter([tool])) == ["onef"]


@pytest.mark.parametrize(
    ("call", "words", "param"),
    [
        (lambda llm: llm.chat("hello"), "messages must be a chat, .*got str", "messages"),
        (lambda llm: llm.chat(CHAT[0]), "messages must be a chat, .*got dict", "messages"),
        (lambda llm: llm.chat(None), "messages must be a chat, .*got NoneType", "messages"),
        (lambda llm: llm.chat([CHAT, CHAT[0]]), r"messages\[1\] must be a chat, got dict", "messages[1]"),
        (lambda llm: llm.chat(CHAT, tools={"a": 1}), "tools must be a list of OpenAI's tools, got dict", "tools"),
        (lambda llm: llm.chat(CHAT, tools=5), "tools must be a list of OpenAI's tools, got int", "tools"),
        (lambda llm: llm.chat(CHAT, tools=[{"name": "f"}]), r"tools\[0\] must have a function with a name", "tools[0]"),
        (
            lambda llm: llm.generate({"prompt": "a", "multi_modal_data": {"image": b"a"}}),
            "prompt_token_ids alone, got prompt, multi_modal_data. Images are given in the messages of `chat`",
            "prompt",
        ),
        (
            lambda llm: llm.generate({"prompt": {"text": "a"}}),
            "has prompt or prompt_token_ids alone, got text",
            "prompt",
        ),
    ],
)
def test_what_is_no_prompt_chat_or_tool_is_refused(
    llm: LLM, call: Callable[[LLM], object], words: str, param: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        call(llm)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate("a"),
        lambda llm: llm.generate([1, 2]),
        lambda llm: llm.generate([]),
        lambda llm: llm.chat(CHAT),
        lambda llm: llm.embed("a"),
        lambda llm: llm.score("a", "b"),
        lambda llm: llm.info,
        lambda llm: llm.engine,
    ],
)
def test_a_closed_llm_says_so(folder: Path, call: Callable[[LLM], object]) -> None:
    llm = LLM(folder, **SMALL)
    llm.close()
    with pytest.raises(InvalidRequestError, match="This LLM is closed; make another one"):
        call(llm)


def test_a_call_that_close_overtakes_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another thread closed the LLM after the call has found it open."""
    llm = LLM(folder, **SMALL)

    def overtaken(*args: Any) -> Any:
        llm.close()
        return complete(*args)

    monkeypatch.setattr("mlx_server.engine.library.llm.complete", overtaken)
    with pytest.raises(InvalidRequestError, match="This LLM is closed; make another one"):
        llm.generate("a", use_tqdm=False)


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.complete("a"),
        lambda llm: anext(llm.generate("a")),
        lambda llm: anext(llm.chat(CHAT)),
        lambda llm: llm.embed("a"),
        lambda llm: llm.score("a", "b"),
    ],
)
async def test_an_async_llm_says_that_it_is_not_open(
    folder: Path, call: Callable[[AsyncLLM], Awaitable[object]]
) -> None:
    llm = AsyncLLM(folder, **SMALL)
    with pytest.raises(InvalidRequestError, match=r"This AsyncLLM is not started; use `async with`, or await `start`"):
        await call(llm)
    await llm.start()
    with pytest.raises(InvalidRequestError, match="This AsyncLLM was started before; make another one"):
        await llm.start()
    await asyncio.gather(llm.stop(), llm.stop())
    with pytest.raises(InvalidRequestError, match="This AsyncLLM is stopped; make another one"):
        await call(llm)
    with pytest.raises(InvalidRequestError, match="This AsyncLLM was started before; make another one"):
        await llm.start()
    await llm.stop()


def test_paths_are_taken_wherever_folders_are(folder: Path, tmp_path: Path) -> None:
    terse = write_adapter(folder, tmp_path / "terse")
    expected = reference_generate(plain_model(folder, terse), IDS, 8).token_ids
    for adapters in (terse, [terse], {"terse": terse}, str(terse)):
        with LLM(folder, adapters=adapters, **SMALL) as llm:
            (found,) = llm.generate([IDS], greedy(8), use_tqdm=False, adapters="terse")
        assert list(found.token_ids) == expected


@pytest.mark.parametrize("name", ["dora", None])
def test_the_only_adapter_may_be_asked_for_by_its_name_if_all_requests_have_it(
    folder: Path, tmp_path: Path, name: str | None
) -> None:
    dora = write_adapter(folder, tmp_path / "dora", kind="dora")
    expected = reference_generate(plain_model(folder, dora), IDS, 8).token_ids
    with LLM(folder, adapters=[dora], **SMALL) as llm:
        (found,) = llm.generate([IDS], greedy(8), use_tqdm=False, adapters=name)
    assert list(found.token_ids) == expected


@pytest.mark.parametrize(
    ("adapters", "words"),
    [
        (5, "adapters must be folders by name, or a list of folders, got int"),
        ([5], "adapters must be .*, got int"),
        ({"x": None}, "adapters must be .*, got NoneType"),
        ({"a"}, "adapters must be .*, got set"),
        ({"x": f"a{os.pathsep}1"}, f"adapters: a{os.pathsep}1 has a `{os.pathsep}`, which separates adapters.*a link"),
        ([Path(f"a{os.pathsep}1")], f"a{os.pathsep}1 has a `{os.pathsep}`"),
    ],
)
def test_what_is_no_folder_of_an_adapter_is_refused(folder: Path, adapters: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AsyncLLM(folder, adapters=adapters)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="model must be a name, a folder or a loaded model, got int"):
        AsyncLLM(5)  # type: ignore[arg-type]
