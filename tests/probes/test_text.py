import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferdbg.probes.text import message_text, printable, shortened, valid_unicode

HOSTILE = [
    ("\x1b[2J\x1b[31mred", "\\x1b[2J\\x1b[31mred"),
    ("a\rb\nc\td", "a\\rb\\nc\\td"),
    ("\x9b31m", "\\x9b31m"),  # the one-byte form of ESC [
    ("user\u202etxt.exe", "user\\u202etxt.exe"),  # right-to-left override
    ("pay\u2066load\u2069", "pay\\u2066load\\u2069"),
    ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
    ("\U000e0041\U000e0042", "\\U000e0041\\U000e0042"),  # tag characters: text that nobody sees
    ("\udce2\udc80", "\\xe2\\x80"),  # bytes that are no UTF-8
    ("\\n", "\\\\n"),  # two characters, not a newline
    ("a" + "\u0301" * 40, "a\u0301\u0301" + "\\u0301" * 38),
    ("[bold red]markup[/]", "[bold red]markup[/]"),  # markup is left to consoles that do not read it
    ("naïve 展示 🎨", "naïve 展示 🎨"),
]


@pytest.mark.parametrize(("text", "shown"), HOSTILE)
def test_hostile_text_is_shown_not_obeyed(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text())
def test_nothing_that_moves_hides_or_reorders_comes_through(text: str) -> None:
    shown = printable(text)
    assert not {unicodedata.category(char) for char in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert len(shown.splitlines()) <= 1


@given(st.text(alphabet="ab\\\n\x1b\u202e"), st.text(alphabet="ab\\\n\x1b\u202e"))
def test_different_texts_look_different(a: str, b: str) -> None:
    assert (printable(a) == printable(b)) == (a == b)


@given(st.text(), st.integers(1, 40))
def test_shortened_keeps_the_limit_and_says_when_it_cut(text: str, limit: int) -> None:
    shown = shortened(text, limit)
    assert len(shown) <= limit
    assert shown == printable(text) or shown.endswith("…")


def test_a_message_keeps_its_lines_and_its_backslashes_and_nothing_else_a_terminal_obeys() -> None:
    told = "cannot read 'a\\x1b':\n  \x1b[2J\u202e\x9b\r"
    assert message_text(told) == "cannot read 'a\\x1b':\n  \\x1b[2J\\u202e\\x9b\\r"


def test_valid_unicode_can_be_encoded() -> None:
    assert valid_unicode("a\udce2b") == "a\ufffdb"
    assert valid_unicode(None) is None
