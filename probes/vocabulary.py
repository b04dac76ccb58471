"""What each token id stands for, read from a run's own tokenizer.json: pieces for people to look at.

Knows no text pipeline: it does not encode, and it does not join pieces into text that a client would have seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from inferdbg.engine.errors import RunError

__all__ = ["Vocabulary", "load_vocabulary"]

_SPACE = "\u2581"  # SentencePiece's mark of a space


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []
    decoder: dict[str, Any] | None = None


class Vocabulary:
    """Pieces by id. Bytes that are no UTF-8 by themselves come as lone surrogates (``surrogateescape``)."""

    def __init__(self, tokens: dict[int, str], added: dict[int, str], *, byte_level: bool) -> None:
        self._tokens = tokens
        self._added = added
        self._byte_level = byte_level

    @classmethod
    def from_file(cls, tokenizer_json: Path) -> Vocabulary:
        """Raises RunError where the file is absent or no tokenizer."""
        try:
            parsed = msgspec.json.decode(tokenizer_json.read_bytes(), type=_TokenizerFile)
        except (OSError, msgspec.DecodeError) as error:
            raise RunError(f"{tokenizer_json}: not a readable tokenizer.json ({type(error).__name__})") from None
        vocab = parsed.model.vocab
        pairs = ((i, t) for t, i in vocab.items()) if isinstance(vocab, dict) else enumerate(t for t, _ in vocab)
        added = {token.id: token.content for token in parsed.added_tokens}
        return cls(dict(pairs), added, byte_level="ByteLevel" in _decoder_types(parsed.decoder))

    def piece(self, token_id: int) -> str | None:
        """The piece of one id; None where the tokenizer has no such id."""
        if (added := self._added.get(token_id)) is not None:
            return added
        token = self._tokens.get(token_id)
        return None if token is None else self._raw(token).decode("utf-8", "surrogateescape")

    def text(self, token_ids: Iterable[int]) -> str:
        """Pieces joined, so that a character split over several tokens is whole; an unknown id is ``<id 7>``."""
        raw = bytearray()
        for token_id in token_ids:
            if (added := self._added.get(token_id)) is not None:
                raw += added.encode("utf-8", "surrogatepass")
            elif (token := self._tokens.get(token_id)) is not None:
                raw += self._raw(token)
            else:
                raw += f"<id {token_id}>".encode()
        return raw.decode("utf-8", "surrogateescape")

    def _raw(self, token: str) -> bytes:
        if self._byte_level:
            table = _byte_of_char()
            if all(char in table for char in token):
                return bytes(table[char] for char in token)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])  # byte fallback
            except ValueError:
                pass
        return token.replace(_SPACE, " ").encode("utf-8", "surrogatepass")


def load_vocabulary(tokenizer_dir: Path | None) -> Vocabulary | None:
    """The vocabulary of a run's tokenizer; None where the run has none that can be read."""
    path = tokenizer_dir / "tokenizer.json" if tokenizer_dir is not None else None
    if path is None or not path.is_file():
        return None
    try:
        return Vocabulary.from_file(path)
    except RunError:
        return None


def _decoder_types(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    nested = decoder.get("decoders")
    inner = (_decoder_types(d) for d in nested if isinstance(d, dict)) if isinstance(nested, list) else ()
    return {str(decoder.get("type"))}.union(*inner)


@cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the other 68 for the code points from 256 on."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(others)}
