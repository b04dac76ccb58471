"""Text to token ids on a pool of threads, so that no prompt holds up the event loop.

Uses the raw `tokenizers` library on tokenizer.json, which lets go of the GIL while it encodes a batch.
Waiting for a thread and working in it are timed apart. Knows nothing of HTTP or of the core.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from inferdbg.engine.errors import InvalidRequest, ModelError
from inferdbg.engine.serving.chat_template import ChatPrompt, TemplateSource, read_chat_template
from inferdbg.engine.serving.detokenize import DetokenizerTraits, IncrementalDetokenizer
from inferdbg.engine.serving.template_process import TemplateProcess

__all__ = ["Timed", "TokenizedPrompt", "TokenizerPool", "Vocabulary", "load_vocabulary"]

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


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """One model's tokenizer, its chat template and what detokenizing needs to know."""

    tokenizer: Tokenizer
    traits: DetokenizerTraits
    template: TemplateSource | None

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        # as a batch of one: `encode` itself keeps the GIL, and with it the event loop, for the whole of a long text
        (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

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
        except (OSError, ValueError) as error:
            raise ModelError(f"{config_file} is not valid JSON: {error}") from error
        if not isinstance(config, dict):
            raise ModelError(f"{config_file} is not a JSON object")
    return Vocabulary(tokenizer, DetokenizerTraits.of(tokenizer), read_chat_template(model_dir, config))


class TokenizerPool:
    """Runs tokenizing work on `num_threads` threads, first come, first served.

    Chats are rendered in processes beside them: one for each thread at most, started when it is needed.
    """

    def __init__(self, vocabulary: Vocabulary, num_threads: int, template_seconds: float = TEMPLATE_SECONDS) -> None:
        self.vocabulary = vocabulary
        self._template_seconds = template_seconds
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="inferdbg-tokenize")
        self._renderers: list[TemplateProcess] = []
        self._idle: deque[TemplateProcess] = deque()  # those of `_renderers` that no thread uses

    async def start(self) -> None:
        """Makes the first renderer, so that no chat waits for it.

        Raises:
            ModelError: the chat template is not valid.
        """
        if self.vocabulary.template is not None:
            await self.run(lambda: self._rendering(lambda renderer: renderer.start()))

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> tuple[list[TokenizedPrompt], Timed]:
        """Encodes prompts, in order."""

        def work() -> list[TokenizedPrompt]:
            encode = self.vocabulary.encode
            return [TokenizedPrompt(encode(text, add_special_tokens=add_special_tokens), text) for text in texts]

        return await self.run(work)

    async def encode_chat(self, prompt: ChatPrompt) -> tuple[TokenizedPrompt, Timed]:
        """Renders the chat template and encodes its text.

        Raises:
            InvalidRequest: there is no template, it refuses the messages, or it takes too much time or memory.
        """

        def work() -> TokenizedPrompt:
            text = self._rendering(lambda renderer: renderer.render(prompt))
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
        """Drops what no thread has begun, and ends the renderers."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for renderer in self._renderers:
            renderer.close()

    def _rendering(self, work: Callable[[TemplateProcess], Result]) -> Result:
        """Does `work` on a renderer that nobody else uses meanwhile. On a thread of the pool only."""
        template = self.vocabulary.template
        if template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        try:
            renderer = self._idle.pop()  # the one used last: the others may never be started
        except IndexError:
            renderer = TemplateProcess(template, self._template_seconds)
            self._renderers.append(renderer)
        try:
            return work(renderer)
        finally:
            self._idle.append(renderer)
