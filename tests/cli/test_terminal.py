import json
import logging

import pytest

from inferdbg.cli.render.terminal import (
    PrintableFormatter,
    bar,
    count,
    diagnostics,
    duration,
    output,
    print_json,
    print_json_list,
    share,
    table,
    warn,
)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (None, "–"),
        (0, "0 µs"),
        (1.5e-6, "1.50 µs"),
        (0.000999, "999 µs"),
        (0.0009996, "1.00 ms"),
        (0.0451, "45.1 ms"),
        (0.9996, "1.00 s"),
        (2.314, "2.31 s"),
        (99.96, "100 s"),
        (119.4, "119 s"),
        (119.6, "2 min 00 s"),
        (185, "3 min 05 s"),
        (3725, "1 h 02 min"),
    ],
)
def test_durations_have_three_digits_and_a_unit(seconds: float | None, told: str) -> None:
    assert duration(seconds) == told


@pytest.mark.parametrize(
    ("part", "whole", "told"),
    [(0, 10, "0.0%"), (1, 1e6, "<0.1%"), (1, 3, "33.3%"), (9999, 10000, "99.9%"), (10, 10, "100.0%"), (1, 0, "–")],
)
def test_a_share_rounds_nothing_away(part: float, whole: float, told: str) -> None:
    assert share(part, whole) == told


@pytest.mark.parametrize(
    ("part", "drawn"), [(0, ""), (0.001, "▏"), (5, "█████"), (5.5, "█████▌"), (10, "█" * 10), (20, "█" * 10)]
)
def test_a_bar_is_as_long_as_its_part_and_never_nothing(part: float, drawn: str) -> None:
    assert bar(part, 10, width=10).plain == drawn


def test_counts_agree_with_their_noun() -> None:
    assert [count(n, "request") for n in (0, 1, 2000)] == ["0 requests", "1 request", "2,000 requests"]


def test_data_and_diagnostics_go_their_own_ways_and_markup_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    output().print("[red]data[/] :smile:")
    diagnostics().print("progress")
    out, err = capsys.readouterr()
    assert (out, err) == ("[red]data[/] :smile:\n", "progress\n")


def test_a_warning_and_a_log_line_may_quote_anything(capsys: pytest.CaptureFixture[str]) -> None:
    warn("a\x1b[2J\nb [red]")
    assert capsys.readouterr().err == "inferdbg: a\\x1b[2J\\nb [red]\n"
    record = logging.LogRecord("x", logging.WARNING, "", 0, "lost %s", ("\x1b]0;owned\x07",), None)
    assert PrintableFormatter("inferdbg: %(message)s").format(record) == "inferdbg: lost \\x1b]0;owned\\x07"


def test_a_json_document_means_the_same_and_moves_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"text": "é 展 \x1b[2J \x9b31m \x7f \u202e \U000e0041 🎨", "number": float("-inf")}
    print_json(document)
    printed = capsys.readouterr().out
    assert json.loads(printed) == document | {"number": None}
    assert "é 展" in printed
    assert not set("\x1b\x9b\x7f\u202e\U000e0041") & set(printed)
    print_json({"file": "a\udcff"})
    assert json.loads(capsys.readouterr().out) == {"file": "a\ufffd"}


def test_a_list_is_one_document_with_an_item_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for items in ([], [{"a": 1}, {"a": "\x1b"}]):
        print_json_list({"schema": "s"}, "items", iter(items))
        printed = capsys.readouterr().out
        assert json.loads(printed) == {"schema": "s", "items": items}
        assert len(printed.splitlines()) == len(items) + 2
        assert "\x1b" not in printed


def test_a_pipe_gets_no_padding(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table("a", "b")
    rows.add_row("long", "  longer")
    rows.add_row("x", "y")
    output().print(rows)
    assert capsys.readouterr().out.splitlines() == ["a      b", "─" * 15, "long     longer", "x      y"]


def test_lines_are_not_folded_to_80_columns_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    output().print("x" * 110)
    assert capsys.readouterr().out == "x" * 110 + "\n"
    monkeypatch.setenv("COLUMNS", "60")
    output().print("x" * 110)
    assert len(capsys.readouterr().out.splitlines()) == 2
