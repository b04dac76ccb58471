"""Text to token ids on a pool of threads, so that no prompt holds up the event loop.

Uses the raw `tokenizers` library on tokenizer.json, which lets go of the GIL while it encodes.
Waiting for a thread and working in it are timed apart. Knows nothing of HTTP or of the core.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from inferdbg.engine.errors import InvalidRequest, ModelError
from inferdbg.engine.serving.chat_template import ChatTemplate, Interruptible, TemplateTimeout, read_chat_template
from inferdbg.engine.serving.detokenize import DetokenizerTraits, IncrementalDetokenizer

__all__ = ["ChatPrompt", "Timed", "TokenizedPrompt", "TokenizerPool", "Vocabulary", "load_vocabulary"]

Result = TypeVar("Result")

TEMPLATE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Timed:
    """How long a piece of work waited for a thread, and how long it took in it."""

    wait_ns: int
    service_ns: int


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt's ids, and its text where it came as text."""

    ids: tuple[int, ...]
    text: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """What a chat request gives the template."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    arguments: Mapping[str, Any] | None = None
    add_special_tokens: bool = False  # templates write them themselves


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """One model's tokenizer, its chat template and what detokenizing needs to know."""

    tokenizer: Tokenizer
    traits: DetokenizerTraits
    template: ChatTemplate | None

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def render(self, prompt: ChatPrompt) -> str:
        """The text of a chat.

        Raises:
            InvalidRequest: the model has no template, or it refuses these messages.
        """
        if self.template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        if prompt.tools and not self.template.takes_tools:
            raise InvalidRequest("this model's chat template takes no tools", "tools")
        return self.template.render(
            prompt.messages,
            tools=prompt.tools,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            arguments=prompt.arguments,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """One token's bytes: those of an output's tokens joined are the bytes of its text with special tokens."""
        return self.traits.token_bytes(self.tokenizer.id_to_token(token_id), token_id)

    def token_text(self, token_id: int) -> str:
        """One token's text by itself; a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def detokenizer(self, *, skip_special_tokens: bool) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.tokenizer, self.traits, skip_special_tokens=skip_special_tokens)


def load_vocabulary(model_dir: Path) -> Vocabulary:
    """Reads tokenizer.json, tokenizer_config.json and the chat template of a checkpoint.

    Raises:
        ModelError: a file is absent or corrupt.
    """
    file = model_dir / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{file} is absent; the server needs a tokenizer in the `tokenizers` format")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file} cannot be read: {error}") from error
    # a checkpoint may carry the limits it was trained with; a prompt is never shortened here
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config_file = model_dir / "tokenizer_config.json"
    config: dict[str, Any] = {}
    if config_file.is_file():
        try:
            config = json.loads(config_file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"{config_file} is not valid JSON: {error}") from error
    return Vocabulary(tokenizer, DetokenizerTraits.of(tokenizer), read_chat_template(model_dir, config))


class TokenizerPool:
    """Runs tokenizing work on `num_threads` threads, first come, first served."""

    def __init__(self, vocabulary: Vocabulary, num_threads: int, template_seconds: float = TEMPLATE_SECONDS) -> None:
        self.vocabulary = vocabulary
        self._template_seconds = template_seconds
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="inferdbg-tokenize")

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> tuple[list[TokenizedPrompt], Timed]:
        """Encodes prompts, in order."""

        def work() -> list[TokenizedPrompt]:
            encode = self.vocabulary.encode
            return [TokenizedPrompt(encode(text, add_special_tokens=add_special_tokens), text) for text in texts]

        return await self.run(work)

    async def encode_chat(self, prompt: ChatPrompt) -> tuple[TokenizedPrompt, Timed]:
        """Renders the chat template and encodes its text.

        Raises:
            InvalidRequest: the template refuses the messages or takes too long.
        """
        rendering = Interruptible()
        loop = asyncio.get_running_loop()

        def work() -> TokenizedPrompt:
            try:
                with rendering:
                    # the clock starts when a thread does, not while the request waits for one
                    loop.call_soon_threadsafe(loop.call_later, self._template_seconds, rendering.interrupt)
                    text = self.vocabulary.render(prompt)
            except TemplateTimeout:
                raise InvalidRequest(
                    f"the chat template did not finish within {self._template_seconds:g} s", "messages"
                ) from None
            return TokenizedPrompt(self.vocabulary.encode(text, add_special_tokens=prompt.add_special_tokens), text)

        return await self.run(work)

    async def decode(self, ids: Sequence[int]) -> tuple[str, Timed]:
        """The text of ids, special tokens included."""
        return await self.run(lambda: self.vocabulary.tokenizer.decode(list(ids), skip_special_tokens=False))

    async def run(self, work: Callable[[], Result]) -> tuple[Result, Timed]:
        """Runs `work` on a thread. Cancelling the wait drops the work if no thread has begun it."""
        queued = time.monotonic_ns()

        def timed() -> tuple[Result, Timed]:
            begun = time.monotonic_ns()
            result = work()
            return result, Timed(begun - queued, time.monotonic_ns() - begun)

        return await asyncio.get_running_loop().run_in_executor(self._pool, timed)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
