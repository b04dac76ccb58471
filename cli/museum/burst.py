"""Sends the placard requests, all at once, through the openai client, and tells how each one goes on.

Knows no server but its address. The answers are streamed; nothing is kept of them but their length and last words.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType

from inferdbg.cli.museum.placards import SYSTEM_PROMPT, Artwork
from inferdbg.engine.errors import EnvironmentLacks

__all__ = ["Progress", "import_openai", "send_burst"]

MAX_TOKENS = 48  # two sentences; the second server, on the plain path, decodes them about three times slower
TIMEOUT_SECONDS = 600.0  # a busy machine is slow, not broken


@dataclass(slots=True)
class Progress:
    """One request, as its client sees it. Times in seconds since the burst began."""

    slug: str
    first_text_seconds: float | None = None
    done_seconds: float | None = None
    num_chunks: int = 0
    text: str = field(default="", repr=False)
    error: str | None = None


async def send_burst(
    base_url: str, model: str, artworks: Sequence[Artwork], on_change: Callable[[Sequence[Progress]], None]
) -> list[Progress]:
    """Sends every artwork's request at the same moment, greedy, with the slug as request id.

    Raises:
        EnvironmentLacks: the openai package is missing.
    """
    openai = import_openai()
    client = openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_SECONDS)
    progress = [Progress(artwork.slug) for artwork in artworks]
    begun = time.monotonic()

    async def ask(artwork: Artwork, state: Progress) -> None:
        try:
            stream = await client.chat.completions.create(
                model=model,
                messages=[
                    {"role": "system", "content": SYSTEM_PROMPT},
                    {"role": "user", "content": artwork.facts},
                ],
                max_tokens=MAX_TOKENS,
                temperature=0,
                stream=True,
                extra_headers={"x-request-id": f"placard-{artwork.slug}"},
            )
            async for chunk in stream:
                piece = chunk.choices[0].delta.content if chunk.choices else None
                if piece:
                    state.first_text_seconds = state.first_text_seconds or time.monotonic() - begun
                    state.num_chunks += 1
                    state.text += piece
                    on_change(progress)
            state.done_seconds = time.monotonic() - begun
        except openai.OpenAIError as error:
            state.error = type(error).__name__
        on_change(progress)

    async with client:
        await asyncio.gather(*(ask(artwork, state) for artwork, state in zip(artworks, progress, strict=True)))
    return progress


def import_openai() -> ModuleType:
    """The openai package. Raises EnvironmentLacks where it is not installed."""
    try:
        import openai
    except ImportError:
        raise EnvironmentLacks(
            "the demo talks through the openai package, which is not installed: pip install 'inferdbg[demo]'"
        ) from None
    return openai
