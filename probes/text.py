"""Makes untrusted text safe to show: whatever a prompt or a model wrote cannot move a cursor, reorder a line or hide.

Knows nothing of terminals or markup languages: the result is plain printable characters, one line, reversible.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

__all__ = ["is_invisible", "message_text", "printable", "shortened", "valid_unicode"]

_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\"}
_KEPT_IN_MESSAGES = {"\n": "\n", "\\": "\\"}
# Controls, formatting (bidirectional marks, zero-width, tags), surrogates, unassigned, line and paragraph separators.
_ESCAPED_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"})
_MARK_CATEGORIES = frozenset({"Mn", "Me"})
_MAX_MARKS = 2  # combining marks in a row; more are drawn over the neighbouring lines


def printable(text: str) -> str:
    r"""One line in which every character is visible: controls, bidirectional and zero-width marks become escapes.

    A backslash becomes two, so that the token ``\n`` (two characters) and a newline stay apart.
    """
    if text.isascii() and text.isprintable() and "\\" not in text:
        return text
    return _visible(text, _NAMED)


def message_text(text: str) -> str:
    """A message of our own that may quote a file name or a foreign string: its lines stay lines, and its backslashes
    (mostly escapes already) stay single; all else is as in `printable`."""
    return _visible(text, _NAMED | _KEPT_IN_MESSAGES)


def _visible(text: str, named: Mapping[str, str]) -> str:
    out: list[str] = []
    marks = 0
    for char in text:
        category = unicodedata.category(char)
        marks = marks + 1 if category in _MARK_CATEGORIES else 0
        if char in named:
            out.append(named[char])
        elif category in _ESCAPED_CATEGORIES or marks > _MAX_MARKS or (category == "Zs" and char != " "):
            out.append(_escape(char))
        else:
            out.append(char)
    return "".join(out)


def shortened(text: str, limit: int) -> str:
    """`printable` text of at most `limit` characters; an ellipsis says that something is missing."""
    # Escapes only lengthen: no more than `limit` characters of the source can matter.
    safe = printable(text[: limit + 1])
    return safe if len(safe) <= limit else safe[: max(0, limit - 1)] + "…"


def is_invisible(char: str) -> bool:
    """Whether a terminal would obey the character, hide it, or let it reorder what stands around it."""
    return unicodedata.category(char) in _ESCAPED_CATEGORIES


def valid_unicode(text: str | None) -> str | None:
    """The text with U+FFFD for every lone surrogate, which JSON readers refuse. None stays None."""
    return None if text is None else "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)


def _escape(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8, carried by surrogateescape
        code -= 0xDC00
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
