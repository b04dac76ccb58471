"""Renders a model's chat template: untrusted code out of a checkpoint, in jinja2's sandbox.

Follows the conventions that templates are written for (those of transformers): `raise_exception`, `strftime_now`,
`tojson`, loop controls, the `generation` tag, special tokens as variables. The sandbox keeps a template from reaching
anything; it bounds neither memory nor time, so `template_process.py` runs this in a process of its own.
Knows nothing of token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inferdbg.engine.errors import InvalidRequest, ModelError

__all__ = ["ChatPrompt", "ChatTemplate", "TemplateRefused", "TemplateSource", "read_chat_template"]

MAX_TEXT_CHARS = 16 << 20  # more than any context holds
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TemplateRefused(InvalidRequest):
    """The template would not render a request. Its own words may quote the prompt: they are for the client alone."""

    def __init__(self, message: str, param: str | None = "messages") -> None:
        super().__init__(message, param, recorded="the chat template does not render this request")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """What a chat request gives the template."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    arguments: Mapping[str, Any] | None = None
    add_special_tokens: bool = False  # to the rendered text; templates write them themselves


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A template as the checkpoint has it, neither checked nor compiled: compiling runs parts of it."""

    source: str
    special_tokens: Mapping[str, str]


class ChatTemplate:
    """One compiled template and the special tokens it may name.

    Raises:
        ModelError: the template is not valid jinja.
    """

    def __init__(self, source: TemplateSource) -> None:
        environment = _Environment()
        try:
            self._template = environment.from_string(source.source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source.source))
        except Exception as error:  # the compiler evaluates constant expressions, which may raise anything
            raise ModelError(f"the model's chat template is not valid: {error}") from error
        self._takes_tools = "tools" in names
        self._special_tokens = dict(source.special_tokens)

    def render(self, prompt: ChatPrompt) -> str:
        """The prompt's text. With `continue_final_message` it ends with the last message's own text, unaltered.

        Raises:
            TemplateRefused: the template refuses these messages, or writes too much.
            InvalidRequest: it takes no tools, or the last message cannot be continued.
        """
        if prompt.tools and not self._takes_tools:
            raise InvalidRequest("this model's chat template takes no tools", "tools")
        shown = [{key: value for key, value in message.items() if value is not None} for message in prompt.messages]
        if prompt.continue_final_message:
            shown[-1]["content"] = _final_text(shown[-1]) + _CONTINUE_MARK
        try:
            text = self._template.render(
                {
                    **self._special_tokens,
                    **(prompt.arguments or {}),
                    "messages": shown,
                    "tools": list(prompt.tools) if prompt.tools else None,
                    "documents": None,
                    "add_generation_prompt": prompt.add_generation_prompt,
                }
            )
        except jinja2.TemplateError as error:
            raise TemplateRefused(f"the chat template refuses these messages: {error}") from error
        except Exception as error:  # untrusted code may raise anything; its text may quote the prompt
            raise TemplateRefused(f"the chat template cannot render these messages ({type(error).__name__})") from error
        if len(text) > MAX_TEXT_CHARS:
            raise TemplateRefused(f"the chat template writes {len(text)} characters; the limit is {MAX_TEXT_CHARS}")
        return _cut_at_mark(text) if prompt.continue_final_message else text


def read_chat_template(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> TemplateSource | None:
    """The template of a checkpoint: chat_template.jinja, else that of tokenizer_config.json; None: there is none.

    Raises:
        ModelError: the file cannot be read as UTF-8.
    """
    file = model_dir / "chat_template.jinja"
    source = _read_text(file) if file.is_file() else tokenizer_config.get("chat_template")
    if isinstance(source, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    return TemplateSource(source, _special_tokens(tokenizer_config))


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        value = tokenizer_config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _final_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise InvalidRequest("continue_final_message needs a last message with text", "continue_final_message")
    return content


def _cut_at_mark(text: str) -> str:
    position = text.rfind(_CONTINUE_MARK.strip())
    if position < 0:
        raise InvalidRequest(
            "the chat template leaves the last message out, so it cannot be continued", "continue_final_message"
        )
    # a template that trims its messages has trimmed the mark's space; then the message's own is trimmed too
    kept = text[:position]
    return kept if text.startswith(_CONTINUE_MARK, position) else kept.rstrip()


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with the functions that templates expect."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
