"""Renders a model's chat template: untrusted code out of a checkpoint, in jinja2's sandbox.

Follows the conventions that templates are written for (those of transformers): `raise_exception`, `strftime_now`,
`tojson`, loop controls, the `generation` tag, special tokens as variables. Knows nothing of token ids.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inferdbg.engine.errors import InferdbgError, InvalidRequest, ModelError

__all__ = ["ChatTemplate", "Interruptible", "TemplateTimeout", "read_chat_template"]

MAX_REPEAT = 1_000_000
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TemplateTimeout(InferdbgError):
    """A template took longer than it may."""


class ChatTemplate:
    """One compiled template and the special tokens it may name.

    Raises:
        ModelError: the template is not valid jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _Environment()
        try:
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template is not valid: {error}") from error
        self.source = source
        self.takes_tools = "tools" in names
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. With `continue_final_message` it ends with the last message's own text, unaltered.

        Raises:
            InvalidRequest: the template refuses these messages, or the last message cannot be continued.
        """
        shown = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if continue_final_message:
            shown[-1]["content"] = _final_text(shown[-1]) + _CONTINUE_MARK
        variables = {**self._special_tokens, **(arguments or {})}
        try:
            text = self._template.render(
                {
                    **variables,
                    "messages": shown,
                    "tools": list(tools) if tools else None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", "messages") from error
        except TemplateTimeout:
            raise
        except Exception as error:  # untrusted code may raise anything; its text may quote the prompt
            raise InvalidRequest(
                f"the chat template cannot render these messages ({type(error).__name__})", "messages"
            ) from error
        return _cut_at_mark(text) if continue_final_message else text


class Interruptible:
    """Runs a function in this thread so that another thread can end it with `TemplateTimeout`.

    Works between two bytecodes, which is where a template's loops are; the sandbox bounds single operations.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread_id: int | None = None

    def __enter__(self) -> Interruptible:
        with self._lock:
            self._thread_id = threading.get_ident()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._thread_id = None

    def interrupt(self) -> None:
        """Ends the block from another thread, if it is still running."""
        with self._lock:
            if self._thread_id is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread_id), ctypes.py_object(TemplateTimeout)
                )


def read_chat_template(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
    """The template of a checkpoint: chat_template.jinja, else that of tokenizer_config.json; None: there is none."""
    file = model_dir / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else tokenizer_config.get("chat_template")
    if isinstance(source, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, _special_tokens(tokenizer_config))


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
    """The sandbox, with the functions templates expect and a bound on what one operation can allocate."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("a chat template may not use powers")
        for value, times in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(times, int) and len(value) * times > MAX_REPEAT:
                raise SecurityError(f"a chat template may not repeat a value to more than {MAX_REPEAT} items")
        return super().call_binop(context, operator, left, right)


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
