"""What is written where token ids occur: the ids, keyed hashes of them, or nothing. Knows no file.

A hash is a chained HMAC-SHA256 over the whole prefix, cut to 63 bits:

    h(-1) = HMAC(key, label)     h(i) = HMAC(key, h(i - 1) | id(i))     written: the first 63 bits of h(i)

So equal prefixes have equal hashes, two runs with one key can be compared up to their first difference, and the
log is no substitution cipher. An alternative at position i hashes as h(i - 1) | alternative.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from inferdbg.engine.core.events import StepRecord
from inferdbg.engine.errors import UsageError
from inferdbg.engine.serving.events import Arrived

__all__ = ["HashedIds", "Ids", "NoIds", "PlainIds", "TokenLog", "TokenLogMode", "load_key", "make_token_log"]

_LABEL = b"inferdbg.token-chain/1"
Ids = Sequence[int | None] | None


class TokenLogMode(StrEnum):
    """The values of `--token-log`."""

    OFF = "off"
    IDS = "ids"
    HASHED = "hashed"


class TokenLog(Protocol):
    """Decides what stands in the id columns. None: the column is null."""

    def arrived(self, event: Arrived) -> None: ...
    def closed(self, seq_ids: Sequence[int]) -> None: ...
    def gap(self) -> None:
        """Step records were lost: what follows in `step` cannot continue a chain."""
        ...

    def prompt(self, ids: Sequence[int]) -> Ids: ...
    def prompt_alternatives(self, ids: Sequence[int], k: int, top_ids: Sequence[int]) -> Ids: ...
    def output(self, prompt: Sequence[int], ids: Sequence[int], k: int, top_ids: Sequence[int]) -> tuple[Ids, Ids]: ...
    def step(self, record: StepRecord) -> tuple[Ids, Ids]:
        """For `sampled_ids` and `sampled_top_ids`; an entry is None where its chain is broken."""
        ...


def make_token_log(mode: TokenLogMode, key: bytes | None = None) -> TokenLog:
    """Raises UsageError where hashing is asked for without a key of at least 16 bytes."""
    match mode:
        case TokenLogMode.OFF:
            return NoIds()
        case TokenLogMode.IDS:
            return PlainIds()
        case TokenLogMode.HASHED:
            if key is None or len(key) < 16:
                raise UsageError("--token-log hashed needs a key of at least 16 bytes, kept outside the run")
            return HashedIds(key)


def load_key(path: Path) -> bytes:
    """The hashing key: read from the file, which is made (mode 0600, 32 random bytes in hex) if it is absent.

    Raises:
        UsageError: the file cannot be read or made, or holds no key.
    """
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w") as file:
                file.write(secrets.token_hex(32) + "\n")
        return bytes.fromhex(path.read_text(encoding="ascii").strip())
    except OSError as error:
        raise UsageError(f"the token log's key file {path} cannot be read or made: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"the token log's key file {path} does not hold hexadecimal digits") from None


class PlainIds:
    """Ids as they are."""

    def arrived(self, event: Arrived) -> None: ...
    def closed(self, seq_ids: Sequence[int]) -> None: ...
    def gap(self) -> None: ...

    def prompt(self, ids: Sequence[int]) -> Ids:
        return ids

    def prompt_alternatives(self, ids: Sequence[int], k: int, top_ids: Sequence[int]) -> Ids:
        return top_ids

    def output(self, prompt: Sequence[int], ids: Sequence[int], k: int, top_ids: Sequence[int]) -> tuple[Ids, Ids]:
        return ids, top_ids

    def step(self, record: StepRecord) -> tuple[Ids, Ids]:
        return record.sampled_ids, record.sampled_top_ids


class NoIds:
    """No ids anywhere; counts, times and logprobs stay."""

    def arrived(self, event: Arrived) -> None: ...
    def closed(self, seq_ids: Sequence[int]) -> None: ...
    def gap(self) -> None: ...

    def prompt(self, ids: Sequence[int]) -> Ids:
        return None

    def prompt_alternatives(self, ids: Sequence[int], k: int, top_ids: Sequence[int]) -> Ids:
        return None

    def output(self, prompt: Sequence[int], ids: Sequence[int], k: int, top_ids: Sequence[int]) -> tuple[Ids, Ids]:
        return None, None

    def step(self, record: StepRecord) -> tuple[Ids, Ids]:
        return None, None


class HashedIds:
    """Chained keyed hashes. Keeps the chain's state of every sequence in flight, for the step records."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._root = hmac.digest(key, _LABEL, "sha256")
        self._states: dict[int, bytes | None] = {}  # None: broken by a gap
        self._of_prompt = lru_cache(maxsize=64)(self._chain_prompt)  # a prompt is asked for at arrival, and at the end

    @property
    def key_id(self) -> str:
        """Tells whether two runs were hashed with one key, without telling the key."""
        return hmac.digest(self._key, b"inferdbg.key-id/1", "sha256")[:8].hex()

    def arrived(self, event: Arrived) -> None:
        if not event.seq_ids:
            return
        num_choices = len(event.seq_ids) // len(event.prompts)
        for index, prompt in enumerate(event.prompts):
            end = self._of_prompt(tuple(prompt))[1]
            for seq_id in event.seq_ids[index * num_choices : (index + 1) * num_choices]:
                self._states[seq_id] = end

    def closed(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._states.pop(seq_id, None)

    def gap(self) -> None:
        self._states = dict.fromkeys(self._states)

    def prompt(self, ids: Sequence[int]) -> Ids:
        return self._of_prompt(tuple(ids))[0]

    def prompt_alternatives(self, ids: Sequence[int], k: int, top_ids: Sequence[int]) -> Ids:
        # entry i of the scores is about prompt token i + 1, whose prefix ends with token i
        hashed: list[int | None] = []
        state = self._root
        for index, token_id in enumerate(ids[:-1]):
            state = self._next(state, token_id)
            hashed += [_cut(self._next(state, top)) for top in top_ids[index * k : (index + 1) * k]]
        return hashed

    def output(self, prompt: Sequence[int], ids: Sequence[int], k: int, top_ids: Sequence[int]) -> tuple[Ids, Ids]:
        state = self._of_prompt(tuple(prompt))[1]
        hashed: list[int | None] = []
        tops: list[int | None] = []
        for index, token_id in enumerate(ids):
            tops += [_cut(self._next(state, top)) for top in top_ids[index * k : (index + 1) * k]]
            state = self._next(state, token_id)
            hashed.append(_cut(state))
        return hashed, tops

    def step(self, record: StepRecord) -> tuple[Ids, Ids]:
        k = record.sampled_top_k
        hashed: list[int | None] = []
        tops: list[int | None] = []
        for index, (seq_id, token_id) in enumerate(zip(record.sampled_seq_ids, record.sampled_ids, strict=True)):
            alternatives = record.sampled_top_ids[index * k : (index + 1) * k]
            state = self._states.get(seq_id)
            if state is None:
                hashed.append(None)
                tops += [None] * len(alternatives)
                continue
            tops += [_cut(self._next(state, top)) for top in alternatives]
            state = self._states[seq_id] = self._next(state, token_id)
            hashed.append(_cut(state))
        return hashed, tops

    def _next(self, state: bytes, token_id: int) -> bytes:
        return hmac.digest(self._key, state + token_id.to_bytes(8, "little"), "sha256")

    def _chain_prompt(self, ids: tuple[int, ...]) -> tuple[tuple[int, ...], bytes]:
        """The written hashes, and the chain's state after them."""
        state = self._root
        hashed = []
        for token_id in ids:
            state = self._next(state, token_id)
            hashed.append(_cut(state))
        return tuple(hashed), state


def _cut(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big") >> 1
