"""From token ids to text, piece by piece: an incremental detokenizer and a matcher of stop strings.

The pieces add up to what the tokenizer decodes from all ids at once, and no piece holds half a character.
Knows nothing of requests or of why a sequence ends.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer

__all__ = ["DetokenizerTraits", "IncrementalDetokenizer", "StopMatch", "StopMatcher", "TextDecoder"]

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _bytes_of_chars() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _bytes_of_chars()


class TextDecoder(Protocol):
    """What the detokenizer needs of a tokenizer."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...

    def id_to_token(self, token_id: int) -> str | None: ...


@dataclass(frozen=True, slots=True)
class DetokenizerTraits:
    """What the pieces of one tokenizer depend on; computed once per tokenizer."""

    special_ids: frozenset[int]
    added_ids: frozenset[int]  # special or not: their text stands for itself
    byte_fallback: bool  # the decoder joins runs of byte tokens like <0xE2>
    byte_level: bool  # a token's characters stand for bytes
    metaspace: bool  # a token's U+2581 stands for a space

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> DetokenizerTraits:
        added = tokenizer.get_added_tokens_decoder()
        decoder = json.dumps(json.loads(tokenizer.to_str()).get("decoder"), ensure_ascii=False)
        return cls(
            special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
            added_ids=frozenset(added),
            byte_fallback='"ByteFallback"' in decoder,
            byte_level='"ByteLevel"' in decoder,
            metaspace="\u2581" in decoder,
        )

    def token_bytes(self, token: str | None, token_id: int) -> bytes:
        """The bytes one token stands for; none for an id without a token."""
        if token is None:
            return b""
        if token_id in self.added_ids:
            return token.encode()
        if self.byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        if self.byte_level:
            values = [_BYTE_OF_CHAR.get(char) for char in token]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else token.encode()
        return (token.replace("\u2581", " ") if self.metaspace else token).encode()


class IncrementalDetokenizer:
    """Turns ids into text as they come.

    The ids since the last clean border are decoded together with those of the piece before it (the context), since a
    decoder may treat the very first token differently; the new text is what comes after the context's own.

        context ids        pending ids
        [already sent]     [not yet sent: may end within a character]

    A border is clean where the decoded text does not end within a UTF-8 character. A run of byte tokens is one unit:
    a later byte that makes the run invalid changes the text of all of it, so it is kept until the run ends.
    """

    def __init__(self, tokenizer: TextDecoder, traits: DetokenizerTraits, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._traits = traits
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Takes one id; returns the text that is certain now, often empty or one piece."""
        if self._skip_special_tokens and token_id in self._traits.special_ids:
            return ""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:  # a padded row of the embedding: decodes to nothing
            return ""
        self._pending.append(token_id)
        if self._traits.byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._decode(self._context + self._pending)
        if text.endswith(REPLACEMENT) or not text.startswith(self._context_text):
            return ""
        return self._release(text)

    def finish(self) -> str:
        """The rest, with U+FFFD for what never became a character."""
        if not self._pending:
            return ""
        return self._release(self._decode(self._context + self._pending))

    def _release(self, text: str) -> str:
        piece = text[len(self._context_text) :]
        if piece or not self._context:
            self._context, self._pending = self._pending, []
            self._context_text = self._decode(self._context)
        return piece

    def _decode(self, ids: list[int]) -> str:
        # specials are filtered above; those that are left are wanted
        return self._tokenizer.decode(ids, skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found; `text` is what may still be shown."""

    text: str
    stop: str


class StopMatcher:
    """Finds the first of several stop strings in a text that comes in pieces.

    The match is the one that ends first, of those the one that starts first: so the result does not depend on where the
    pieces are cut. Text that may be the beginning of a stop is held back until that is decided.
    One automaton per stop string (Knuth, Morris, Pratt); its table is built as far as it is needed.
    """

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        self._stops = [_Automaton(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> str | StopMatch:
        """Takes a piece; returns what may be shown now, or the match."""
        if not self._stops:
            return text
        buffer = self._held + text
        offset = len(self._held)
        for position, char in enumerate(text):
            matched = ""
            for automaton in self._stops:
                if automaton.advance(char) and len(automaton.stop) > len(matched):
                    matched = automaton.stop
            if matched:
                end = offset + position + 1
                self._held = ""
                return StopMatch(buffer[: end if self._include_stop else end - len(matched)], matched)
        num_held = max(automaton.state for automaton in self._stops)
        self._held = buffer[len(buffer) - num_held :]
        return buffer[: len(buffer) - num_held]

    def pass_through(self, text: str) -> str:
        """Takes a piece in which no stop counts, nor does one that began in it; returns what may be shown."""
        held, self._held = self._held, ""
        for automaton in self._stops:
            automaton.state = 0
        return held + text

    def finish(self) -> str:
        """What was held back for a stop that did not come."""
        return self.pass_through("")


class _Automaton:
    """Longest suffix of what was read that begins `stop`: its length is the state."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._fallbacks = [0, 0]  # [i]: length of the longest proper border of stop[:i], filled on demand

    def advance(self, char: str) -> bool:
        """Reads one character; true when the stop string ends with it."""
        state = self.state
        while state and self.stop[state] != char:
            state = self._fallback(state)
        if self.stop[state] == char:
            state += 1
        if state == len(self.stop):
            self.state = 0
            return True
        self.state = state
        return False

    def _fallback(self, length: int) -> int:
        while len(self._fallbacks) <= length:
            i = len(self._fallbacks)
            border = self._fallbacks[i - 1]
            while border and self.stop[border] != self.stop[i - 1]:
                border = self._fallbacks[border]
            if self.stop[border] == self.stop[i - 1]:
                border += 1
            self._fallbacks.append(border)
        return self._fallbacks[length]
