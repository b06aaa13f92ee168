"""How chats become prompts, by the model's chat template; and a model's other text settings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from mlx_server.config import ModelConfig
from mlx_server.engine.grammar.constraints import GrammarCompiler
from mlx_server.engine.recent import Recent
from mlx_server.engine.text.messages import normalise_messages
from mlx_server.engine.text.reasoning import find_dialect
from mlx_server.engine.text.template_fit import Joints, find_joints, find_repairs
from mlx_server.engine.text.template_repairs import (
    Repairs,
    adapt,
    described_tools,
    developer_as_system,
    one_call_a_turn,
    tools_as_text,
)
from mlx_server.engine.text.tokenizer import PromptMemory, Tokenizer
from mlx_server.engine.tools.formats import Tool
from mlx_server.engine.vision.parts import Layout, Pictures, cut_images, text_parts
from mlx_server.errors import InvalidRequestError, ModelLoadError
from mlx_server.request import PromptImage
from mlx_server.runtime.models.folder import read_model_json
from mlx_server.runtime.models.tool_parsers import find_chat_renderer
from mlx_server.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

Message = dict[str, Any]

_RESERVED_KWARGS = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
_RESERVED_KWARGS = _RESERVED_KWARGS - {"documents", "kwargs"} | {"conversations", "messages"}
"""Names that are not template variables, but arguments of transformers or other fields of the request."""

_PROBE = "What is seen of this?"
_QUESTION = {"role": "user", "content": _PROBE}

_RENDERER = "{# in Python #}"
"""Stands for the template of models that have it in Python."""

_OF_RENDERERS = ("tools", "enable_thinking", "add_generation_prompt", "continue_final_message")
"""What all renderers take; they fail on other variables."""

_MAX_FITS = 16
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_THINKING_MODES = (("enabled", "disabled"), ("thinking", "chat"), ("on", "off"))
"""The words for on and off in templates that read `thinking_mode`: MiniMax M3's, DeepSeek V4's, Baichuan M2's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How to write the prompt.

    `add_generation_prompt` opens the assistant's turn (None: unless a message is continued);
    `continue_final_message` leaves the last message open. `chat_template` replaces the model's own; it runs in a
    sandbox, but without a time limit. `template_kwargs` are variables for the template; `reasoning_effort` is one,
    too, in the form that the template takes, and also sets `enable_thinking` unless that is given. That sets the other
    names that templates have for it.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What the model reads. `token_ids` are those of `text`, or of the part of it that was to be tokenized. The text
    has only one of the many tokens of an image. `opens_reasoning`: the output begins inside the reasoning.
    `asks_for_one_call`: the template cannot write several calls in a turn, or the tools are described in words."""

    text: str
    token_ids: tuple[int, ...]
    images: tuple[PromptImage, ...] = ()
    opens_reasoning: bool = False
    asks_for_one_call: bool = False


class ChatFormatter:
    """Writes prompts for one model. Any thread.

    `renderer` is a chat template in Python, for models that have one instead of a Jinja template; it takes the
    messages, and as keywords those variables that are in `_OF_RENDERERS`.
    """

    def __init__(self, tokenizer: Tokenizer, renderer: Callable[..., str] | None = None) -> None:
        """Tries the model's own templates, so that its first chat need not wait for that."""
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._memory = PromptMemory(tokenizer)
        self._fits = Recent[str, _Fit](_MAX_FITS)
        self.dialect = find_dialect(tokenizer)
        own = _RENDERER if renderer is not None else tokenizer.hf.chat_template
        for template in own.values() if isinstance(own, Mapping) else (own,):
            if template is not None:
                self._fit(template)

    def format(
        self,
        messages: Sequence[Any],
        tools: Sequence[Tool] | None = None,
        options: ChatOptions | None = None,
        cut: Callable[[str], str] | None = None,
        owner: str = "",
        pictures: Pictures | None = None,
    ) -> ChatPrompt:
        """Writes the prompt for OpenAI's messages and tools. `cut` returns the part of the text to tokenize (None: all
        of it). What an `owner` has sent before is not tokenized again. `pictures` are the images whose marks are in the
        messages. Raises `InvalidRequestError`, also for content that is neither text nor such a mark. Takes time in
        proportion to the prompt: not for the event loop."""
        options = options or ChatOptions()
        text, layout, is_one = self._written(messages, tools, options, pictures)
        part = text if cut is None else cut(text)
        opens_reasoning = self._opens_reasoning(text, messages[-1:] if options.continue_final_message else ())
        if layout is None:
            return ChatPrompt(text, tuple(self._memory.encode(part, owner)), (), opens_reasoning, is_one)
        if part != text:
            raise cut_images()
        token_ids, images = layout.encode(text, lambda piece: self._memory.encode(piece, owner))
        return ChatPrompt(layout.shown(text), tuple(token_ids), images, opens_reasoning, is_one)

    def _opens_reasoning(self, text: str, continued: Sequence[Any]) -> bool:
        reasoning = self.dialect.reasoning
        begun = normalise_messages(continued)[0]["content"] if continued else ""
        return reasoning is not None and reasoning.is_open_after(text, begun)

    def _written(
        self, messages: Sequence[Any], tools: Sequence[Tool] | None, options: ChatOptions, pictures: Pictures | None
    ) -> tuple[str, Layout | None, bool]:
        """The prompt's text, the places of its images, and whether it asks for one call."""
        template = self._template(options, tools)
        fit = self._fit(template)
        is_one = not fit.repairs.isdisjoint((tools_as_text, described_tools, one_call_a_turn))
        parser = self.dialect.tool_parser
        given = [fit.joints.without(message) for message in normalise_messages(messages)]
        chat, shown = adapt(given, tools, fit.repairs, parser)
        variables = {"tools": shown, **_template_variables(options, fit)}
        if pictures is None:
            try:
                return self._apply(chat, template, fit.needs_parts, variables), None, is_one
            except InvalidRequestError:
                if not shown:
                    raise
                # Some templates cannot write every schema (Hermes: the type `null`).
                chat, shown = adapt(given, tools, fit.repairs | {tools_as_text}, parser)
                return self._apply(chat, template, fit.needs_parts, {**variables, "tools": shown}), None, True
        layout = pictures.lay_out(chat, lambda trial: self._tried(template, False, trial, None), fit.needs_parts)
        return layout.fill(self._apply(layout.chat, template, False, variables)), layout, is_one

    def _template(self, options: ChatOptions, tools: Sequence[Tool] | None) -> str:
        if options.chat_template is not None:
            return options.chat_template
        if self._renderer is not None:
            return _RENDERER
        if self._tokenizer.hf.chat_template is None:
            raise InvalidRequestError(
                "This model has no chat template. Send the prompt as text to /v1/completions, "
                "or send a chat_template with the request.",
                "messages",
            )
        template: str = self._tokenizer.hf.get_chat_template(None, tools)  # some models have several
        return template

    def _apply(self, chat: Sequence[Message], template: str, needs_parts: bool, variables: Mapping[str, Any]) -> str:
        if needs_parts:
            chat = [{**message, "content": text_parts(message["content"])} for message in chat]
        if self._renderer is not None and template == _RENDERER:
            known = {name: variables[name] for name in _OF_RENDERERS if name in variables}
            return _guarded(self._renderer, chat, known)
        own = {"chat_template": template, "tokenize": False}
        return _guarded(self._tokenizer.hf.apply_chat_template, chat, {**variables, **own})

    def _fit(self, template: str) -> _Fit:
        """Tries the template, or returns what an earlier trial found. Requests may bring templates of their own, so
        only the most recent ones are remembered."""
        found = self._fits.get(template)
        if found is None:
            shown = [_PROBE in (self._tried(template, parts, [_QUESTION], None) or "") for parts in (False, True)]
            needs_parts = shown == [False, True]
            # Many templates write any role, whether the model was trained on it or not.
            known = frozenset() if "developer" in template else {developer_as_system}
            shows = partial(self._tried, template, needs_parts)
            end = self._tokenizer.hf.eos_token
            repairs = find_repairs(shows, self.dialect, end, frozenset(known))
            tried = _EFFORTS if "reasoning_effort" in template else ()
            efforts = [one for one in tried if shows([_QUESTION], None, reasoning_effort=one) is not None]
            modes = (mode for mode in _THINKING_MODES if f'thinking_mode == "{mode[0]}"' in template)
            joints = find_joints(shows, self.dialect, repairs)
            found = _Fit(needs_parts, repairs, joints, tuple(efforts) or _EFFORTS, next(modes, None))
            self._fits.put(template, found)
        return found

    def _tried(
        self,
        template: str,
        needs_parts: bool,
        chat: Sequence[Message],
        tools: Sequence[Tool] | None,
        **more: str,
    ) -> str | None:
        try:
            text = self._apply(chat, template, needs_parts, {"tools": tools, "add_generation_prompt": True, **more})
        except InvalidRequestError:
            return None
        return text


@dataclass(frozen=True, slots=True)
class _Fit:
    """How chats are written for a template. `needs_parts`: it drops content that is a string, but shows lists of
    parts. It takes the reasoning `efforts`, in ascending order, and `thinking_mode` as one of two words, if at all."""

    needs_parts: bool
    repairs: Repairs
    joints: Joints
    efforts: tuple[str, ...]
    thinking_mode: tuple[str, str] | None

    def nearest(self, effort: str) -> str | None:
        """The effort that the template takes instead: the next higher one, or the highest; None to leave out `none`."""
        if effort in self.efforts or effort not in _EFFORTS:
            return effort
        higher = [one for one in self.efforts if _EFFORTS.index(one) > _EFFORTS.index(effort)]
        return None if effort == "none" else (higher or self.efforts[-1:])[0]


def _template_variables(options: ChatOptions, fit: _Fit) -> dict[str, Any]:
    reserved = sorted(_RESERVED_KWARGS & options.template_kwargs.keys())
    if reserved:
        raise InvalidRequestError(
            f"chat_template_kwargs must not set {reserved[0]}; it has a request field of its own.",
            "chat_template_kwargs",
        )
    if options.add_generation_prompt and options.continue_final_message:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message exclude each other.", "continue_final_message"
        )
    variables = dict(options.template_kwargs)
    if "thinking" in variables:
        variables.setdefault("enable_thinking", variables["thinking"])
    if options.reasoning_effort is not None:
        if (effort := fit.nearest(options.reasoning_effort)) is not None:
            variables.setdefault("reasoning_effort", effort)
        variables.setdefault("enable_thinking", options.reasoning_effort != "none")
    if "enable_thinking" in variables:
        variables.setdefault("thinking", variables["enable_thinking"])
        if fit.thinking_mode is not None:
            variables.setdefault("thinking_mode", fit.thinking_mode[not variables["enable_thinking"]])
    variables["continue_final_message"] = options.continue_final_message
    variables["add_generation_prompt"] = (
        not options.continue_final_message if options.add_generation_prompt is None else options.add_generation_prompt
    )
    return variables


def _guarded(render: Callable[..., str], chat: Sequence[Message], variables: Mapping[str, Any]) -> str:
    """Renders. Every error of a template is the request's: of its messages, variables or own template."""
    try:
        return render(chat, **variables)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequestError(
            f"The chat template is not valid, line {error.lineno}: {error.message}.", "chat_template"
        ) from error
    except jinja2.UndefinedError as error:
        raise InvalidRequestError(
            f"The chat template refused the messages: {error.message}. If the template needs it as a variable, send it "
            "in chat_template_kwargs.",
            "messages",
        ) from error
    except Exception as error:  # templates call methods of any value, so any exception can come out
        raise InvalidRequestError(f"The chat template refused the messages: {error}", "messages") from error


_OTHER_FILES = ("chat_template.json", "tokenizer_config.json")


def check_chat_templates(hf: Any, folder: Path) -> None:
    """Compiles every template of the tokenizer `hf`, which came from `folder`, without rendering anything. Raises
    `ModelLoadError` with the file and the line."""
    templates = hf.chat_template or {}
    named = templates if isinstance(templates, Mapping) else {"default": templates}
    for name, text in named.items():
        try:
            render_jinja_template(conversations=[], chat_template=text)
        except jinja2.TemplateSyntaxError as error:
            which = "" if templates is text else f" `{name}`"
            raise ModelLoadError(
                f"The chat template{which} in {_source(folder, text)} is not valid, line {error.lineno}: "
                f"{error.message}. Fix it there, or fetch the model again."
            ) from error


def _source(folder: Path, text: str) -> Path:
    """The file that has the template, or the folder if no file is found."""
    paths = [*sorted(folder.glob("**/*.jinja")), *(folder / name for name in _OTHER_FILES)]
    found = (path for path in paths if path.is_file() and _holds(path, text))
    return next(found, folder)


def _holds(path: Path, text: str) -> bool:
    written = path.read_text(encoding="utf-8", errors="replace")
    return written == text if path.suffix == ".jinja" else '"chat_template"' in written


FILE = "generation_config.json"
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")


def read_default_sampling(folder: Path) -> SamplingParams:
    """Reads the default sampling parameters in `folder`; what it leaves out has OpenAI's defaults.

    `max_new_tokens` and `do_sample` are ignored: the first would cut answers short that nobody asked to be short, and
    the second is false in most files that also give a temperature. Raises `ModelLoadError` for invalid values.
    """
    content = read_model_json(folder / FILE)
    found = {name: content[name] for name in (*_NUMBERS, "top_k") if content.get(name) is not None}
    for name, value in found.items():
        wanted = int if name == "top_k" else int | float
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise _unusable(folder, f"{name} must be a {'whole ' if wanted is int else ''}number, got {value!r}.")
    try:
        sampling = SamplingParams(**found)
    except InvalidRequestError as error:
        raise _unusable(folder, error.message) from error
    if found:
        values = ", ".join(f"{name} {value}" for name, value in found.items())
        logger.info("The default sampling parameters are %s (from %s)", values, folder / FILE)
    return sampling


def _unusable(folder: Path, fault: str) -> ModelLoadError:
    return ModelLoadError(f"{folder / FILE}: {fault} Correct the file, or start with --generation-config none.")


@dataclass(frozen=True, slots=True)
class TextTools:
    """A model's tokenizer, chat template, grammar compiler and default sampling parameters."""

    tokenizer: Tokenizer
    chat: ChatFormatter
    grammars: GrammarCompiler
    default_sampling: SamplingParams

    @classmethod
    def load(cls, folder: Path, vocab_size: int, settings: ModelConfig) -> TextTools:
        """Reads a model's folder; `vocab_size` is the width of its logits. Takes up to some seconds: not for the event
        loop. Raises `ModelLoadError`."""
        reads_defaults = settings.generation_config == "auto"
        default_sampling = read_default_sampling(folder) if reads_defaults else SamplingParams()
        tokenizer = Tokenizer.from_folder(folder, trust_remote_code=settings.trust_remote_code)
        renderer = find_chat_renderer(tokenizer.hf)
        if renderer is None:
            check_chat_templates(tokenizer.hf, folder)
        grammars = GrammarCompiler(tokenizer, vocab_size)
        if grammars.fault is not None:  # requests without a grammar still work
            logger.warning("%s", grammars.fault)
        return cls(tokenizer, ChatFormatter(tokenizer, renderer), grammars, default_sampling)
