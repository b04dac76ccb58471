"""The rows that a comparison works on: a token log's row cut down to what can be compared. Knows no file format."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from inferdbg.engine.core.events import FinishReason

__all__ = ["RowKey", "RowSummary", "Token", "TokenRow", "digest_tokens", "is_whole", "summarize_row"]

Token = int  # a token id, or its keyed hash (63 bits) where the run logged hashes


@dataclass(frozen=True, slots=True, order=True)
class RowKey:
    """One row of the token log within a run."""

    request_id: str
    prompt_index: int = 0
    choice_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One choice of one prompt. Ids are None where the run did not log them."""

    key: RowKey
    client_request_id: str | None = None
    replay_of: str | None = None
    arrival_ns: int = 0
    prompt: list[Token] | None
    output: list[Token] | None
    logprobs: list[float] = field(default_factory=list)  # one per output token, or empty
    sampling: dict[str, Any] | None = None
    finish_reason: str | None = None  # stop, length, …; None where the row was cut short


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSummary:
    """What is kept of every row while two runs are matched: about 200 bytes, whatever the row's length."""

    key: RowKey
    client_request_id: str | None
    replay_of: str | None
    arrival_ns: int
    prompt_digest: bytes | None  # None: not logged
    output_digest: bytes | None
    num_prompt: int
    num_output: int
    finish_reason: str | None

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_output


def is_whole(finish_reason: str | None) -> bool:
    """Whether the output came to its own end, and was not cut off: in flight, aborted or failed."""
    return finish_reason not in (None, FinishReason.ABORT, FinishReason.ERROR)


def summarize_row(row: TokenRow) -> RowSummary:
    """Digests stand in for the ids: equal digests, equal ids."""
    return RowSummary(
        key=row.key,
        client_request_id=row.client_request_id,
        replay_of=row.replay_of,
        arrival_ns=row.arrival_ns,
        prompt_digest=None if row.prompt is None else digest_tokens(row.prompt),
        output_digest=None if row.output is None else digest_tokens(row.output),
        num_prompt=len(row.prompt or ()),
        num_output=len(row.output or ()),
        finish_reason=row.finish_reason,
    )


def digest_tokens(tokens: Sequence[Token] | bytes) -> bytes:
    """16 bytes that stand for the tokens; given as bytes, they are little-endian 64-bit integers."""
    if not isinstance(tokens, bytes):
        packed = array("q", tokens)
        if sys.byteorder == "big":
            packed.byteswap()
        tokens = packed.tobytes()
    return hashlib.blake2b(tokens, digest_size=16).digest()
