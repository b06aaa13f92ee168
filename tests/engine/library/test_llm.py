"""The library: what scripts and notebooks may give to `LLM` and `AsyncLLM`, and what comes back."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_server import LLM, AsyncLLM, SamplingParams
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.errors import ConfigError, EngineDeadError, InvalidRequestError, ModelLoadError, ModelNotFoundError
from mlx_server.request import FinishReason
from tests.adapter_files import plain_model, write_adapter
from tests.embedders import save_embedder
from tests.engine_worlds import built, greedy, make_folder, make_llm
from tests.homes import with_kernels
from tests.tiny_models import byte_tokenizer, reference_generate, save_model_folder

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
IDS = byte_tokenizer().encode("one string")
LONG = SamplingParams(max_tokens=500, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("models") / "m")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), num_kv_blocks=64, max_model_len=1024) as llm:
        yield llm


def texts(llm: LLM, prompts: Any, params: Any = None) -> list[str]:
    return [completion.text for completion in llm.generate(prompts, params or greedy(6), use_tqdm=False)]


@pytest.mark.parametrize(
    "alone",
    [
        "one string",
        IDS,
        np.array(IDS, dtype=np.uint16),
        {"prompt": "one string"},
        {"prompt_token_ids": IDS},
    ],
    ids=["text", "ids", "array", "text by name", "ids by name"],
)
def test_a_prompt_alone_is_a_list_of_one(llm: LLM, alone: Any) -> None:
    (expected,) = llm.generate(["one string"], greedy(6), use_tqdm=False)
    (found,) = llm.generate(alone, greedy(6), use_tqdm=False)
    assert found.outputs == expected.outputs
    assert found.prompt_token_ids == expected.prompt_token_ids == tuple(IDS)
    assert llm.generate([], use_tqdm=False) == []


def test_a_prompt_is_checked_once_however_many_answers_it_gets(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[str, Sequence[int]]] = []
    monkeypatch.setattr("mlx_server.engine.request_stream.check_ids", lambda *check: checked.append(check[:2]))
    done = llm.generate(["ab", "cd"], SamplingParams(max_tokens=2, n=3), use_tqdm=False)
    assert [len(one.outputs) for one in done] == [3, 3]
    assert [tuple(ids) for name, ids in checked if name == "prompt"] == [one.prompt_token_ids for one in done]


def test_the_first_answer_s_fields_are_the_completion_s(llm: LLM) -> None:
    (found,) = llm.generate(
        "ab", SamplingParams(max_tokens=5, temperature=1.0, seed=3, n=3, logprobs=1), use_tqdm=False
    )
    assert [output.index for output in found.outputs] == [0, 1, 2]
    first = found.outputs[0]
    assert (found.text, found.token_ids, found.logprobs) == (first.text, first.token_ids, first.logprobs)
    assert (found.finish_reason, found.stop_reason) == (first.finish_reason, first.stop_reason)
    assert len({output.token_ids for output in found.outputs}) > 1
    second = SamplingParams(max_tokens=5, temperature=1.0, seed=4)
    assert llm.generate("ab", second, use_tqdm=False)[0].token_ids == found.outputs[1].token_ids


def test_steps_are_as_long_as_they_like_where_nobody_reads_along(llm: LLM, folder: Path) -> None:
    limits = llm._llm.engine.scheduler.limits
    assert (limits.target_step_s, limits.max_step_s) == (3600.0, 3600.0)
    with LLM(str(folder), num_kv_blocks=64, max_model_len=64, target_step_ms=20.0) as other:
        assert other._llm.engine.scheduler.limits.target_step_s == 0.02


def test_one_stop_string_is_one_and_none_is_none(llm: LLM) -> None:
    (whole,) = texts(llm, "xyz", greedy(30))
    stop = whole[len(whole) // 2 :][:2]
    (found,) = texts(llm, "xyz", greedy(30, stop=stop))
    assert found == whole[: whole.index(stop)]
    assert SamplingParams(stop=stop).stop == (stop,)
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()  # type: ignore[arg-type]


def test_chats_are_written_by_the_template(llm: LLM) -> None:
    one, other = ([{"role": "user", "content": text}] for text in ("hello", "world"))
    (found,) = llm.chat(one, greedy(6), use_tqdm=False)
    assert found.prompt == "<user>hello<a>"
    assert found.text == texts(llm, "<user>hello<a>")[0]
    both = llm.chat([one, other], greedy(6), use_tqdm=False)
    assert [completion.prompt for completion in both] == ["<user>hello<a>", "<user>world<a>"]
    (own,) = llm.chat(
        one,
        greedy(1),
        use_tqdm=False,
        chat_template="{{ messages[0].content }}{{ more }}",
        chat_template_kwargs={"more": "!"},
    )
    assert own.prompt == "hello!"
    (goes_on,) = llm.chat(
        [*one, {"role": "a", "content": "so"}], greedy(1), use_tqdm=False, continue_final_message=True
    )
    assert goes_on.prompt == "<user>hello<a>so"


@pytest.fixture(scope="module")
def reasoning_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model with special tokens around reasoning and before calls. Its prompts open the reasoning, but for users who
    ask it not to think."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"]})
    opened = "{{ '' if 'no' in messages[-1].content else '[THINK]' }}{{ '[TOOL_CALLS]' if false }}"
    tokenizer.chat_template = CHAT_TEMPLATE + opened
    model, config = built("llama")
    folder = save_model_folder(model, dict(config), tmp_path_factory.mktemp("models") / "m", tokenizer)
    with LLM(str(folder), num_kv_blocks=64, max_model_len=1024) as llm:
        yield llm


def preferring(llm: LLM, token: str, max_tokens: int, **more: Any) -> SamplingParams:
    return greedy(max_tokens, logit_bias={llm.engine.tokenizer.added_tokens[token]: 100.0}, **more)


def test_a_chat_s_text_has_the_markers_of_reasoning_and_calls(reasoning_llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    for token, tools, expected in (
        ("[/THINK]", None, "[/THINK]" * 2),
        ("[TOOL_CALLS]", [tool], "[TOOL_CALLS]" * 2),
        ("[TOOL_CALLS]", None, ""),
        ("<|im_start|>", [tool], ""),
    ):
        params = preferring(reasoning_llm, token, 2)
        (found,) = reasoning_llm.chat([{"role": "user", "content": "a"}], params, tools=tools, use_tqdm=False)
        assert found.text == expected


def test_structured_outputs_bind_a_chat_s_answer_and_leave_its_reasoning_free(reasoning_llm: LLM) -> None:
    def answer(asked: str, token: str) -> str:
        params = preferring(reasoning_llm, token, 9, structured_outputs={"choice": ["yes", "no"]})
        (found,) = reasoning_llm.chat([{"role": "user", "content": asked}], params, use_tqdm=False)
        return found.text

    assert re.fullmatch(r"\[/THINK\]\n?(yes|no)", answer("a", "[/THINK]"))
    assert answer("a", "<|im_start|>") == "", "it goes on reasoning"
    assert answer("no", "<|im_start|>") in ("yes", "no")
    assert answer("no", "[THINK]") == "[THINK]" * 9
    params = greedy(9, structured_outputs={"choice": ["a[ARGS]b"]})
    (named,) = reasoning_llm.chat([{"role": "user", "content": "no"}], params, use_tqdm=False)
    assert named.text == "a[ARGS]b", "a special token that the choice names is its text"


def test_a_model_that_ends_in_its_reasoning_ends_there_unless_an_answer_has_to_come(reasoning_llm: LLM) -> None:
    ended = replace(preferring(reasoning_llm, "<|im_end|>", 9), ignore_eos=False)
    bound = replace(ended, structured_outputs={"choice": ["yes", "no"]})
    (end,) = ended.logit_bias
    also = replace(bound, logit_bias={end: 100.0, reasoning_llm.engine.tokenizer.added_tokens["[/THINK]"]: 90.0})
    chats = [[{"role": "user", "content": "a"}]] * 3
    found = reasoning_llm.chat(chats, [ended, bound, also], use_tqdm=False)
    assert (found[0].token_ids, found[0].finish_reason) == ((end,), FinishReason.STOP)
    assert (len(found[1].token_ids), found[1].finish_reason) == (9, FinishReason.LENGTH), "it goes on reasoning"
    assert re.fullmatch(r"\[/THINK\]\n?(yes|no)", found[2].text)


def test_each_prompt_and_each_chat_may_have_parameters_of_its_own(llm: LLM) -> None:
    default = llm.engine.default_sampling
    found = llm.generate(["ab", "cd", "ef"], [greedy(3), None, greedy(5)], use_tqdm=False, adapters=[None] * 3)
    assert [len(found[index].token_ids) for index in (0, 2)] == [3, 5]
    assert [completion.prompt for completion in found] == ["ab", "cd", "ef"]
    assert found[1].prompt_token_ids == llm.generate("cd", default, use_tqdm=False)[0].prompt_token_ids
    chats = [[{"role": "user", "content": text}] for text in ("hello", "world")]
    answers = llm.chat(chats, [greedy(2), greedy(4)], use_tqdm=False)
    assert [len(completion.token_ids) for completion in answers] == [2, 4]
    (unopened,) = llm.chat(chats[0], greedy(1), use_tqdm=False, add_generation_prompt=False)
    assert unopened.prompt == "<user>hello"
    with pytest.raises(InvalidRequestError, match="There are 2 chats and 1 sampling_params"):
        llm.chat(chats, [greedy(2)])
    with pytest.raises(InvalidRequestError, match="There are 2 chats and 3 adapters"):
        llm.chat(chats, greedy(2), adapters=[None] * 3)


def test_a_prompt_s_own_logprobs_and_what_was_cached_come_back(llm: LLM) -> None:
    prompt = "The same beginning of some length, which is cached. " * 2
    first, again = (llm.generate(prompt, greedy(2, prompt_logprobs=count), use_tqdm=False)[0] for count in (1, None))
    assert len(first.prompt_logprobs) == len(first.prompt_token_ids) - 1, "none of the first token"
    assert (again.prompt_logprobs, again.num_cached_tokens) == ((), 96)


def test_no_prompt_is_read_on_the_event_loop(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text takes up to a second, which other streams of the loop would wait."""
    save_embedder(tmp_path / "embedder")
    threads = set()
    encode = Tokenizer.encode

    def watched(self: Tokenizer, *arguments: Any, **options: Any) -> Any:
        threads.add(threading.current_thread())
        return encode(self, *arguments, **options)

    monkeypatch.setattr(Tokenizer, "encode", watched)

    async def answer_all() -> None:
        async with AsyncLLM(str(folder), num_kv_blocks=64, max_model_len=1024) as llm:
            await llm.complete(["a", "b"], greedy(1))
        async with AsyncLLM(str(tmp_path / "embedder"), num_kv_blocks=64, max_model_len=256) as llm:
            await llm.embed(["a"])
            await llm.score("a", ["b"])

    threads.clear()
    asyncio.run(answer_all())
    assert threads
    assert threading.current_thread() not in threads


def test_a_bar_is_shown_where_it_is_asked_for(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    save_embedder(tmp_path / "embedder")

    def shown() -> str:
        text = terminal.getvalue()
        terminal.seek(0)
        terminal.truncate()
        return text

    async def answer_all() -> None:
        async with AsyncLLM(str(folder), num_kv_blocks=64, max_model_len=1024) as other:
            await other.complete(["a"], greedy(1))
        async with AsyncLLM(str(tmp_path / "embedder"), num_kv_blocks=64, max_model_len=256) as other:
            await other.embed(["a"])
            await other.score("a", ["b"])

    with LLM(str(folder), num_kv_blocks=64, max_model_len=1024) as llm:
        shown()
        for use_tqdm in (True, False):
            llm.generate(["a", "b"], greedy(1), use_tqdm=use_tqdm)
            assert ("2/2" in (bar := shown()), "Completions" in bar, bool(bar)) == (use_tqdm,) * 3
            llm.chat([{"role": "user", "content": "a"}], greedy(1), use_tqdm=use_tqdm)
            assert bool(shown()) is use_tqdm
    with LLM(str(tmp_path / "embedder"), num_kv_blocks=64, max_model_len=256) as llm:
        shown()
        for use_tqdm in (True, False):
            llm.embed(["a"], use_tqdm=use_tqdm)
            assert ("Inputs" in shown()) is use_tqdm
            llm.score("a", ["b"], use_tqdm=use_tqdm)
            assert bool(shown()) is use_tqdm
        llm.generate([], greedy(1))
        llm.embed(["a"])
        llm.score("a", ["b"])
        assert "1/1" in shown(), "by default"
    asyncio.run(answer_all())
    assert "Completions" not in (rest := shown())
    assert "Inputs" not in rest


def test_structured_outputs_bind_every_answer(llm: LLM) -> None:
    asked = {"json": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}}
    sampling = SamplingParams(max_tokens=60, temperature=1.0, n=4, structured_outputs=asked)
    (found,) = llm.generate("{}", sampling, use_tqdm=False)
    assert all(json.loads(output.text)["a"] in (1, 2) for output in found.outputs)
    choice = SamplingParams(max_tokens=9, structured_outputs={"choice": ["yes", "no"]})
    assert texts(llm, ["a", "b"], choice)[0] in ("yes", "no")
    free = SamplingParams(max_tokens=3, temperature=0.0)
    assert texts(llm, ["a"], replace(free, structured_outputs={"json_object": False})) == texts(llm, ["a"], free)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((5,), "prompts must be a text, token ids, or a list of such prompts, got int"),
        (([None],), "prompt must be made of integers"),
        (({"text": "a"},), "has prompt or prompt_token_ids"),
        ((["a"], 5), "sampling_params must be SamplingParams, or one for each, got int"),
        ((["a"], [5]), "sampling_params must be SamplingParams each, got int"),
        ((["a", "b"], [SamplingParams()]), "There are 2 prompts and 1 sampling_params"),
        ((["a"], SamplingParams(structured_outputs={"json": 5})), "structured_outputs.json"),
        (([[10**6]],), "prompt has the token id 1000000; ids are 0 to"),
        (([""],), "The prompt has no tokens"),
    ],
)
def test_what_is_wrong_is_named_and_harms_nobody(llm: LLM, arguments: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        llm.generate(*arguments, use_tqdm=False)
    assert len(texts(llm, "still there")) == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"stop": [5]}, "stop must be a string, or several, got 5"),
        ({"n": 0}, "n must be between 1 and 128, got 0"),
        ({"max_tokens": 1.5}, "max_tokens must be made of integers"),
    ],
)
def test_a_parameter_of_the_wrong_kind_is_named(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        SamplingParams(**wrong)


async def test_it_works_inside_a_running_loop_and_in_threads(folder: Path) -> None:
    """As in a notebook's cell, where a loop runs already."""
    with LLM(str(folder), num_kv_blocks=64, max_model_len=1024) as llm:
        expected = texts(llm, "loop")
        found = await asyncio.gather(*(asyncio.to_thread(texts, llm, "loop") for _ in range(4)))
    assert found == [expected] * 4


def test_it_is_closed_when_it_is_dropped_wherever_that_is() -> None:
    before = set(threading.enumerate())
    dropped = [make_llm("llama")]
    started = set(threading.enumerate()) - before
    assert started
    collector = threading.Thread(target=dropped.clear)
    collector.start()
    collector.join()
    gc.collect()
    for thread in started:
        thread.join(10)
        assert not thread.is_alive()


async def test_async_deltas_come_as_they_are_made_and_end_with_their_reader(folder: Path, llm: LLM) -> None:
    expected = texts(llm, "async", greedy(20))
    async with AsyncLLM(str(folder), num_kv_blocks=64, max_model_len=1024) as other:
        deltas = [delta async for delta in other.generate("async", greedy(20))]
        assert len(deltas) > 2
        assert ["".join(delta.text for delta in deltas)] == expected
        assert deltas[-1].finish_reason is not None
        chat = [delta async for delta in other.chat([{"role": "user", "content": "hello"}], greedy(6))]
        assert chat[-1].num_prompt_tokens == len("<user>hello<a>")
        (done,) = await other.complete("async", greedy(20))
        assert [done.text] == expected
        watched = other.generate("left", LONG)
        async for _ in watched:
            break
        await watched.aclose()
        assert other.engine.num_streams == 0
        with pytest.raises(InvalidRequestError, match="use complete for several"):
            await anext(other.generate("a", SamplingParams(n=2)))
    with pytest.raises(TypeError, match="no_such_option"):
        AsyncLLM(str(folder), no_such_option=1)


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_a_wrong_argument_leaves_no_thread(kind: type[Any], folder: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="kv_bits"):
        kind(str(folder), kv_bits="3")
    assert set(threading.enumerate()) <= before


async def test_async_vectors_scores_and_adapters_are_those_of_llm(tmp_path: Path) -> None:
    path = str(tmp_path / "embedder")
    save_embedder(tmp_path / "embedder")
    async with AsyncLLM(path, num_kv_blocks=64, max_model_len=256) as other:
        with LLM(path, num_kv_blocks=64, max_model_len=256) as llm:
            for prompts in ("one", ["one", "two"], [1, 2], {"prompt": "one"}):
                found, expected = await other.embed(prompts, dimensions=8), llm.embed(prompts, dimensions=8)
                assert len(found) == len(expected)
                for mine, theirs in zip(found, expected, strict=True):
                    assert np.array_equal(mine.embedding, theirs.embedding)
            assert await other.score("one", ["one", "two"]) == llm.score("one", ["one", "two"])
        with pytest.raises(ModelNotFoundError, match="nobody"):
            await other.complete(["a"], adapters="nobody")


async def test_prompts_are_answered_by_their_adapters(folder: Path, tmp_path: Path) -> None:
    terse = write_adapter(folder, tmp_path / "terse")
    adapters, prompts = {"terse": str(terse)}, [IDS, IDS]
    expected = [reference_generate(plain_model(folder, adapter), IDS, 8).token_ids for adapter in (None, terse)]
    assert expected[0] != expected[1]
    with LLM(str(folder), adapters=adapters, num_kv_blocks=64, max_model_len=256) as llm:
        found = llm.generate(prompts, greedy(8), use_tqdm=False, adapters=[None, "terse"])
    assert [list(completion.token_ids) for completion in found] == expected
    async with AsyncLLM(str(folder), adapters=[str(terse)], num_kv_blocks=64, max_model_len=256) as other:
        found = await other.complete(prompts, greedy(8), adapters=[None, "terse"])
    assert [list(completion.token_ids) for completion in found] == expected


NOTEBOOK = [
    "from mlx_server import LLM, AsyncLLM, SamplingParams\nllm = LLM({folder!r}, num_kv_blocks=32, max_model_len=512)",
    "llm.generate('Hello', SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)[0].text;",
    "four = SamplingParams(max_tokens=4, ignore_eos=True)\n"
    "print(len(llm.chat([{{'role': 'user', 'content': 'Hi'}}], four)[0].token_ids))",
    "llm.close()\nasync with AsyncLLM({folder!r}, num_kv_blocks=32, max_model_len=512) as llm:\n"
    "    async for delta in llm.generate('Hello', four):\n"
    "        print(len(delta.token_ids), end=' ')",
]


def test_a_notebook_loads_generates_chats_and_streams(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("MLX_SERVE_HOME", str(with_kernels(tmp_path / "home")))
    cells = [nbformat.v4.new_code_cell(cell.format(folder=str(folder))) for cell in NOTEBOOK]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    printed = ["".join(o.get("text", "") for o in c.outputs if o.get("name") == "stdout") for c in notebook.cells]
    assert printed[2].split() == ["4"]
    assert sum(map(int, printed[3].split())) == 4


def test_however_many_prompts_wait_and_however_long():
    scheduler = AsyncLLM("random:mini").engine.config.scheduler
    assert (scheduler.max_num_waiting, scheduler.max_queued_tokens) == (10**6, 10**9)
    assert scheduler.queue_timeout_s == 0.0, "without end"


async def test_one_that_cannot_start_leaves_no_thread(tmp_path: Path) -> None:
    llm = AsyncLLM(str(tmp_path / "nothing"))
    with pytest.raises(ModelLoadError):
        async with llm:
            pass
    with pytest.raises(EngineDeadError, match="has stopped"):
        llm._thread.call(lambda: None).result()


def test_it_is_closed_when_the_main_thread_drops_it() -> None:
    before = set(threading.enumerate())
    llm = make_llm("llama")
    started = set(threading.enumerate()) - before
    del llm
    gc.collect()
    assert started
    assert not any(thread.is_alive() for thread in started)


def test_the_first_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match=r"^alpha is no option of LLM or AsyncLLM, which take model, .*max_step_ms$"):
        AsyncLLM(zeta=1, alpha=2)  # type: ignore[call-arg]
