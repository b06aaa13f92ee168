"""Messages to prompts: what clients send, what templates see, what is refused."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_worlds import CHAT_TEMPLATE, EOS, make_tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from mlx_server.engine.text.chat import ChatFormatter, ChatOptions
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.errors import InvalidRequestError

USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
DUMP = "{{ messages | tojson }}"
TEXTS = (
    "[{% for message in messages %}{{ {'role': message['role'], 'content': message['content']} | tojson }}"
    "{{ ']' if loop.last else ', ' }}{% endfor %}"
)
"""Knows roles and texts alone."""


def formatter(template: Any = ..., **kwargs: Any) -> ChatFormatter:
    return ChatFormatter(make_tokenizer(**kwargs) if template is ... else make_tokenizer(chat_template=template))


def seen(messages: list[Any], template: str = DUMP) -> list[dict[str, Any]]:
    """The messages as the template sees them."""
    shown: list[dict[str, Any]] = json.loads(formatter(template).format(messages).text)
    return shown


def test_the_bundled_model_gets_its_own_format(bundled_model: Path) -> None:
    tokenizer = Tokenizer.from_folder(bundled_model)
    prompt = ChatFormatter(tokenizer).format([{"role": "system", "content": "Be brief."}, USER])
    assert prompt.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    start, end = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
    assert prompt.token_ids[0] == start
    assert prompt.token_ids.count(start) == 3
    assert prompt.token_ids.count(end) == 2
    assert tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == prompt.text


def test_the_assistants_turn_is_opened_unless_told_otherwise() -> None:
    chat = formatter()
    assert chat.format([USER]).text == f"<|user|>hello{EOS}<|assistant|>"
    assert chat.format([USER], options=ChatOptions(add_generation_prompt=False)).text == f"<|user|>hello{EOS}"


def test_the_final_message_may_be_continued() -> None:
    chat = formatter()
    messages = [USER, {"role": "assistant", "content": "Sure, "}]
    options = ChatOptions(continue_final_message=True)
    assert chat.format(messages, options=options).text == f"<|user|>hello{EOS}<|assistant|>Sure, "
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        chat.format(messages, options=ChatOptions(continue_final_message=True, add_generation_prompt=True))


def test_messages_are_normalised_and_not_changed() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "user", "content": [], "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}},
                {"id": "c3", "type": "function", "function": {"name": "h"}},
                {"id": "c4", "type": "function", "function": {"name": "i", "arguments": '{"a": "cut o'}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": ["42"]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "tool_calls": []},
    ]
    before = copy.deepcopy(messages)
    shown = seen(messages)
    assert messages == before
    assert shown[0] == {"role": "system", "content": "one\ntwo"}
    assert shown[1] == {"role": "user", "content": "", "name": "Ann"}
    assert shown[2]["content"] == ""
    assert shown[2]["reasoning_content"] == "hm"
    arguments = [call["function"]["arguments"] for call in shown[2]["tool_calls"]]
    assert arguments == [{"a": [1]}, {}, {}, {"invalid_json": '{"a": "cut o'}]
    assert shown[3] == {"role": "tool", "tool_call_id": "c1", "content": "42"}
    assert shown[4] == {"role": "assistant", "content": "no"}


def test_templates_that_know_developer_see_it() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert seen(messages)[0]["role"] == "system"
    assert seen(messages, DUMP + "{# developer #}")[0]["role"] == "developer"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "x"}], "messages[0]"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([USER, {"role": "user", "content": [{"text": "x"}]}], "messages[1].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": "f()"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_wrong_messages_are_refused_by_name(messages: list[Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        formatter().format(messages)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_parts_that_are_no_text_are_refused(kind: str) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": kind, kind: {}}]}
    with pytest.raises(InvalidRequestError, match=rf"messages\[0\]\.content\[1\] is of type {kind}") as caught:
        formatter().format([message])
    assert caught.value.param == "messages[0].content[1]"


def test_the_templates_own_complaint_reaches_the_client() -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('Start with the user!') }}{% endif %}"
    with pytest.raises(InvalidRequestError, match="Start with the user!") as caught:
        formatter(template).format([{"role": "system", "content": "x"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("template", ["{{ messages[0].nothing.at_all }}", "{{ 'a' + 1 }}", "{{ 1 / 0 }}"])
def test_any_failure_inside_a_template_is_the_requests(template: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template refused"):
        formatter(template).format([USER])


def test_a_model_without_template_names_the_way_out() -> None:
    chat = formatter(None)
    with pytest.raises(InvalidRequestError, match="/v1/completions"):
        chat.format([USER])
    assert chat.format([USER], options=ChatOptions(chat_template="{{ messages[0].content }}!")).text == "hello!"


def test_a_template_of_the_request_is_sandboxed_and_checked() -> None:
    chat = formatter()
    for attack in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        with pytest.raises(InvalidRequestError, match="refused"):
            chat.format([USER], options=ChatOptions(chat_template=attack))
    with pytest.raises(InvalidRequestError, match="not valid, line 1") as caught:
        chat.format([USER], options=ChatOptions(chat_template="{% if %}"))
    assert caught.value.param == "chat_template"


def test_variables_reach_the_template() -> None:
    chat = formatter("{{ messages[0].content }}|{{ enable_thinking }}|{{ reasoning_effort }}|{{ mood }}")
    assert chat.format([USER], options=ChatOptions(template_kwargs={"mood": "calm"})).text == "hello|||calm"
    assert chat.format([USER], options=ChatOptions(reasoning_effort="none")).text == "hello|False|none|"
    assert chat.format([USER], options=ChatOptions(reasoning_effort="high")).text == "hello|True|high|"
    options = ChatOptions(reasoning_effort="high", template_kwargs={"enable_thinking": False})
    assert chat.format([USER], options=options).text == "hello|False|high|"


LISTS_EFFORTS = """{%- if reasoning_effort is not defined %}{% set reasoning_effort = "default" %}
{%- elif reasoning_effort not in {taken} %}{{ raise_exception("effort " ~ reasoning_effort) }}{% endif -%}
{{ messages[0].content }} {{ reasoning_effort }}"""


@pytest.mark.parametrize(
    ("taken", "efforts"),
    [
        ("['none', 'high']", {"none": "none", "minimal": "high", "medium": "high", "high": "high", "max": "high"}),
        ("['no_think', 'low', 'high']", {"none": "default", "minimal": "low", "medium": "high", "xhigh": "high"}),
        ("[]", {}),
    ],
)
def test_an_effort_that_a_template_does_not_take_becomes_one_that_it_takes(taken: str, efforts: dict[str, str]) -> None:
    """The next higher one, or the highest; `none` leaves the variable out. Clients' own variables stay as they are."""
    chat = formatter(LISTS_EFFORTS.replace("{taken}", taken))
    assert chat.format([USER]).text == "hello default"
    for asked, written in efforts.items():
        assert chat.format([USER], options=ChatOptions(reasoning_effort=asked)).text == f"hello {written}"
    with pytest.raises(InvalidRequestError, match="effort medium"):
        chat.format([USER], options=ChatOptions(template_kwargs={"reasoning_effort": "medium"}))


@pytest.mark.parametrize(
    ("template", "on", "off"),
    [
        ("{{ thinking }}", "True", "False"),  # Kimi K2.5, DeepSeek V3.1, Hermes 4
        ('{{ "a" if thinking_mode == "enabled" }}{{ thinking_mode }}', "aenabled", "disabled"),  # MiniMax M3
        ('{{ "a" if thinking_mode == "thinking" }}{{ thinking_mode }}', "athinking", "chat"),  # DeepSeek V4
        ('{{ "a" if thinking_mode == "on" }}{{ thinking_mode }}', "aon", "off"),  # Baichuan M2
    ],
)
def test_each_template_s_name_for_the_switch_of_thinking_is_set(template: str, on: str, off: str) -> None:
    chat = formatter(template)
    assert chat.format([USER]).text == ""
    for options, expected in (
        (ChatOptions(reasoning_effort="high"), on),
        (ChatOptions(template_kwargs={"enable_thinking": True}), on),
        (ChatOptions(template_kwargs={"enable_thinking": False}), off),
        (ChatOptions(reasoning_effort="none", template_kwargs={"thinking": "x", "thinking_mode": "x"}), "x"),
    ):
        assert chat.format([USER], options=options).text == expected
    assert formatter("{{ enable_thinking }}").format([USER], options=ChatOptions(template_kwargs={"thinking": 1})).text


def test_a_variable_that_a_template_lacks_is_named_with_the_field_for_it() -> None:
    chat = formatter("{{ 'Today is ' + datetime }}{{ messages[0].content }}")
    with pytest.raises(InvalidRequestError, match=r"'datetime' is undefined\. .* chat_template_kwargs\.$"):
        chat.format([USER])
    assert (
        chat.format([USER], options=ChatOptions(template_kwargs={"datetime": "Monday"})).text == "Today is Mondayhello"
    )


@pytest.mark.parametrize("name", ["tools", "messages", "tokenize", "chat_template", "self"])
def test_variables_may_not_replace_request_fields(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        formatter().format([USER], options=ChatOptions(template_kwargs={name: 1}))
    assert caught.value.param == "chat_template_kwargs"


def test_variables_may_have_the_names_of_our_own_arguments() -> None:
    """Of every function on the way; a name that transformers has for itself is refused."""
    names = {"self", "render", "chat", "template", "variables", "options", "messages", "kwargs", "args", "key"}
    functions = (PreTrainedTokenizerFast.apply_chat_template, render_jinja_template, jinja2.Template.render)
    names |= {name for function in functions for name in inspect.signature(function).parameters}
    taken = 0
    for name in names:
        chat = formatter(f"{{{{ {name} }}}}")
        try:
            text = chat.format([USER], options=ChatOptions(template_kwargs={name: "mine"})).text
        except InvalidRequestError:
            continue
        assert text == "mine"
        taken += 1
    assert taken >= 6


def test_tools_go_to_templates_that_know_them() -> None:
    chat = formatter("{{ messages | length }}{% for tool in tools %} {{ tool.function.name }}{% endfor %}")
    assert chat.format([USER], [TOOL]).text == "1 f"


def test_tools_are_explained_to_models_whose_template_knows_none() -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "42"},
    ]
    shown = json.loads(formatter(TEXTS).format(messages, [TOOL]).text)
    assert [message["role"] for message in shown] == ["system", "user", "assistant", "user"]
    assert shown[0]["content"].startswith("Be kind.\n\nYou can call functions.")
    assert shown[0]["content"].endswith('\n{"name": "f", "parameters": {"type": "object"}}')
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert shown[2] == {"role": "assistant", "content": call}
    assert shown[3]["content"] == "<tool_response>\n42\n</tool_response>"
    assert json.loads(formatter(TEXTS).format([USER], [TOOL]).text)[0]["role"] == "system"


def test_a_models_template_for_tools_is_taken_when_there_are_tools() -> None:
    chat = formatter({"default": "plain {{ messages[0].content }}", "tool_use": "{{ tools | length }} tools"})
    assert chat.format([USER]).text == "plain hello"
    assert chat.format([USER], [TOOL]).text == "1 tools"


PARTS_ONLY = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"


def test_templates_that_want_lists_of_parts_get_them() -> None:
    chat = formatter(PARTS_ONLY)
    assert chat.format([USER, {"role": "user", "content": ""}]).text == "[hello]"
    assert formatter().format([USER], options=ChatOptions(chat_template=PARTS_ONLY)).text == "[hello]"


def test_a_template_in_python_gets_the_messages_and_variables() -> None:
    calls: list[dict[str, Any]] = []

    def renderer(messages: list[dict[str, Any]], **variables: Any) -> str:
        calls.append({"messages": messages, **variables})
        if messages[0]["role"] == "tool":
            raise AssertionError("tool first")
        return json.dumps([messages, variables["tools"]])

    tokenizer = make_tokenizer(chat_template=None)
    chat = ChatFormatter(tokenizer, renderer)
    options = ChatOptions(reasoning_effort="high", template_kwargs={"mood": "calm"})
    prompt = chat.format([USER], [TOOL], options)
    assert prompt.text == json.dumps([[USER], [TOOL]])
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert calls[-1] == {
        "messages": [USER],
        "tools": [TOOL],
        "enable_thinking": True,
        "add_generation_prompt": True,
        "continue_final_message": False,
    }
    chat.format([USER], None, ChatOptions(template_kwargs={"thinking": False}))
    assert calls[-1]["enable_thinking"] is False
    with pytest.raises(InvalidRequestError, match="tool first"):
        chat.format([{"role": "tool", "content": "x"}])


KEYS = st.sampled_from(
    ["role", "content", "tool_calls", "function", "name", "arguments", "type", "text", "id", "reasoning"]
)
VALUES = st.sampled_from(
    ["user", "assistant", "tool", "system", "text", "refusal", "{}", "[1]", "", "\ud83d", "function"]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=15,
)
MESSAGES = st.lists(
    ANYTHING | st.fixed_dictionaries({"role": VALUES}, optional={"content": ANYTHING, "tool_calls": ANYTHING})
)
CALLS_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %}{{ k }}{% endfor %}{% endfor %}{% endfor %}"
)
TEMPLATES = [CHAT_TEMPLATE, DUMP, CALLS_TEMPLATE]


@settings(max_examples=300, deadline=None)
@given(MESSAGES, st.sampled_from(TEMPLATES), st.booleans())
def test_whatever_clients_send_is_rendered_or_refused(messages: list[Any], template: str, has_tools: bool) -> None:
    options = ChatOptions(chat_template=template)
    with contextlib.suppress(InvalidRequestError):
        prompt = FORMATTER.format(messages, [TOOL] if has_tools else None, options)
        assert len(prompt.token_ids) > 0 or not prompt.text


FORMATTER = formatter()


def counted(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The templates that are rendered from now on."""
    rendered: list[str] = []
    hf = tokenizer.hf
    render = hf.apply_chat_template

    def apply(messages: Any, **options: Any) -> Any:
        rendered.append(options["chat_template"])
        return render(messages, **options)

    monkeypatch.setattr(hf, "apply_chat_template", apply)
    return rendered


def test_a_template_is_tried_once_and_a_model_s_own_before_its_first_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer()
    rendered = counted(tokenizer, monkeypatch)
    chat = ChatFormatter(tokenizer)
    assert len(rendered) > 10, "with several small chats"
    rendered.clear()
    chat.format([USER])
    chat.format([USER, USER])
    assert len(rendered) == 2
    rendered.clear()
    chat.format([USER], options=ChatOptions(chat_template=DUMP))
    assert len(rendered) > 10
    rendered.clear()
    chat.format([USER], options=ChatOptions(chat_template=DUMP))
    assert rendered == [DUMP]


def test_each_of_a_model_s_templates_is_tried_and_of_none_or_one_in_python_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several = make_tokenizer(chat_template={"default": CHAT_TEMPLATE, "tool_use": DUMP})
    rendered = counted(several, monkeypatch)
    ChatFormatter(several)
    assert set(rendered) == {CHAT_TEMPLATE, DUMP}
    for quiet, renderer in ((make_tokenizer(chat_template=None), None), (make_tokenizer(), lambda messages, **_: "")):
        rendered = counted(quiet, monkeypatch)
        ChatFormatter(quiet, renderer)
        assert rendered == []


def test_only_the_templates_that_were_used_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests may bring any number of them."""
    tokenizer = make_tokenizer()
    chat = ChatFormatter(tokenizer)
    rendered = counted(tokenizer, monkeypatch)
    own = [f"{DUMP}{index}" for index in range(17)]
    for template in own:
        chat.format([USER], options=ChatOptions(chat_template=template))
    rendered.clear()
    for template, is_known in ((own[1], True), (own[0], False)):
        chat.format([USER], options=ChatOptions(chat_template=template))
        assert (len(rendered) == 1) is is_known
        rendered.clear()
