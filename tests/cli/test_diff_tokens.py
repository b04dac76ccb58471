import io
import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from inferdbg.cli.render.diff_tokens import render_diff
from inferdbg.engine.serving.events import EndKind
from inferdbg.tracing.token_log import TokenLogMode

MS = 1_000_000


def load(
    events: Any, outputs: Iterable[tuple[int, ...]], prompt: tuple[int, ...] = (10, 11, 12), tag: str = ""
) -> list[Any]:
    """One request per output, with client ids c0, c1, …"""
    happened: list[Any] = [events.core_started()]
    for i, output in enumerate(outputs):
        arrival = events.arrived(
            f"{tag}r{i}", client_request_id=f"c{i}", prompts=(prompt,), seq_ids=(i,), time_ns=events.START_NS + i * MS
        )
        happened += [arrival, events.closed(arrival, choices=(events.choice(output, seq_id=i),))]
    return happened


def test_equal_runs_are_identical_with_exit_0(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any
) -> None:
    a = record("a", load(events, [(1, 2), (3, 4)]))
    b = record("b", load(events, [(1, 2), (3, 4)], tag="x"))
    outcome = inferdbg("diff-tokens", a, b, "--json")
    assert outcome.code == 0
    assert (outcome.document["verdict"], outcome.document["num_pairs"]) == ("identical", 2)
    assert outcome.document["unmatched"] == {"a": [], "b": []}
    assert outcome.document["manifest_diff"] == []
    assert "identical" in inferdbg("diff-tokens", a, b).out


def test_a_differing_output_is_found_with_exit_1_and_shown_with_its_text(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any
) -> None:
    a = record("a", load(events, [(1, 2, 3), (7, 8, 9)]))
    b = record("b", load(events, [(1, 2, 3), (7, 5, 9)]), core={"prefix_cache": False})
    outcome = inferdbg("diff-tokens", a, b, "--json")
    assert outcome.code == 1
    document = outcome.document
    assert (document["schema"], document["verdict"]) == ("inferdbg.diff-tokens/1", "output_differs")
    same, pair = document["pairs"]
    assert (same["verdict"], same["first_difference"]) == ("identical", None)
    assert (pair["class"], pair["evidence"]["matched_by"]) == ("replaced", "client_request_id")
    first = pair["first_difference"]
    assert (first["side"], first["index"]) == ("output", 1)
    assert (first["a"]["id"], first["a"]["piece"], first["b"]["id"], first["b"]["piece"]) == (8, "w8 ", 5, "w5 ")
    assert first["a"]["logprob"] == pytest.approx(-0.5)
    assert document["manifest_diff"] == [{"key": "config.core.prefix_cache", "a": True, "b": False}]
    text = inferdbg("diff-tokens", a, b).out
    assert "outputs differ" in text
    assert "prefix_cache" in text
    assert "w10 w11 w12 w7 ▸w8 ◂w9" in text
    assert "w10 w11 w12 w7 ▸w5 ◂w9" in text


def test_what_the_cores_said_of_themselves_is_compared_too(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any
) -> None:
    fast = events.core_started(info={"forward": "fast-numba"})
    plain = events.core_started(info={"forward": "plain"})
    outcome = inferdbg("diff-tokens", record("a", [fast, *load(events, [(1,)])[1:]]), record("b", [plain]), "--json")
    assert {"key": "engine.forward", "a": "fast-numba", "b": "plain"} in outcome.document["manifest_diff"]


def test_one_inserted_bos_is_one_insertion(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any
) -> None:
    prompt = (1, *range(20, 120))
    a, b = record("a", load(events, [(5,)], prompt)), record("b", load(events, [(5,)], (1, *prompt)))
    outcome = inferdbg("diff-tokens", a, b, "--json")
    (pair,) = outcome.document["pairs"]
    assert outcome.code == 1
    assert (pair["verdict"], pair["class"]) == ("input_differs", "inserted")
    assert pair["first_difference"]["index"] == 1
    alignment = pair["evidence"]["alignment"]
    assert (alignment["inserted"], alignment["deleted"], alignment["num_hunks"]) == (1, 0, 1)
    assert "1 token inserted, 0 deleted" in inferdbg("diff-tokens", a, b).out


def test_unmatched_requests_are_listed_and_count_with_exact(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any
) -> None:
    a, b = record("a", load(events, [(1,), (2,)])), record("b", load(events, [(1,)]))
    outcome = inferdbg("diff-tokens", a, b, "--json")
    assert outcome.code == 0
    assert [row["client_request_id"] for row in outcome.document["unmatched"]["a"]] == ["c1"]
    text = inferdbg("diff-tokens", a, b).out
    assert "only in A: 1 row: r1" in text
    assert "identical where matched   1 pair, 1 identical, 1 only in A" in text
    assert inferdbg("diff-tokens", a, b, "--exact").code == 1


def in_flight(events: Any, tag: str, seq_id: int = 0, num_tokens: int = 2) -> list[Any]:
    """A request without an end; its tokens are 100 times the sequence's id plus 1, 2, …"""
    arrival = events.arrived(
        f"r-{tag}", client_request_id=f"c-{tag}", prompts=((10, 11, 12),), seq_ids=(seq_id,),
        time_ns=events.START_NS + 50 * MS,
    )  # fmt: skip
    admitted = {"admitted_seq_ids": (seq_id,), "admitted_cached": (0,), "admitted_is_resume": (False,)}
    steps = [events.step(n + 10, (seq_id,), **(admitted if n == 1 else {})) for n in range(1, num_tokens + 1)]
    return [arrival, *(replace(s, sampled_ids=(100 * seq_id + n,)) for n, s in enumerate(steps, 1))]


def finished(events: Any, tag: str, output: tuple[int, ...]) -> list[Any]:
    arrival = events.arrived(
        f"q-{tag}", client_request_id=f"c-{tag}", prompts=((10, 11, 12),), seq_ids=(50,),
        time_ns=events.START_NS + 60 * MS,
    )  # fmt: skip
    return [arrival, events.closed(arrival, choices=(events.choice(output, seq_id=50),))]


def test_a_request_in_flight_that_agrees_so_far_decides_nothing(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any
) -> None:
    a = record("a", [*load(events, [(7,)]), *finished(events, "x", (1, 2, 3))])
    b = record("b", [*load(events, [(7,)]), *in_flight(events, "x")])
    outcome = inferdbg("diff-tokens", a, b, "--json")
    same, pair = outcome.document["pairs"]
    assert (outcome.code, outcome.document["verdict"], same["verdict"]) == (3, "inconclusive", "identical")
    assert (pair["verdict"], pair["class"]) == ("inconclusive", "cut_short")
    assert (pair["first_difference"]["index"], pair["first_difference"]["b"]) == (2, None)
    text = inferdbg("diff-tokens", a, b).out
    assert "not decided   2 pairs, 1 identical, 1 inconclusive" in text
    assert "not decided: 1 pair: an output was cut off" in text
    assert "(c-x)" in text
    assert "what would decide: send these requests again and let them end" in text


def test_a_request_in_flight_that_differs_is_a_difference(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any
) -> None:
    a = record("a", [events.core_started(), *finished(events, "x", (1, 9, 3))])
    outcome = inferdbg("diff-tokens", a, record("b", [events.core_started(), *in_flight(events, "x")]), "--json")
    (pair,) = outcome.document["pairs"]
    assert (outcome.code, pair["verdict"], pair["first_difference"]["index"]) == (1, "output_differs", 1)


def test_tokens_lost_with_step_records_are_no_difference(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any
) -> None:
    a = record("a", [events.core_started(), *finished(events, "x", (1, 2, 3, 4))])
    arrival, first, _, third = in_flight(events, "x", num_tokens=3)
    outcome = inferdbg("diff-tokens", a, record("b", [events.core_started(), arrival, first, third]), "--json")
    (pair,) = outcome.document["pairs"]
    assert (outcome.code, pair["verdict"], pair["evidence"]["undecided"]) == (3, "inconclusive", "no_ids")


def test_what_retention_deleted_is_told_where_requests_have_no_partner(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any
) -> None:
    a, b = record("a", load(events, [(1,), (2,)])), record("b", load(events, [(1,)]))
    (file,) = (b / "replicas").glob("*.json")
    gone = {"segments": 1, "bytes": 9, "tables": {"requests": {"segments": 1, "rows": 1400}}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"deleted": gone}))
    outcome = inferdbg("diff-tokens", a, b, "--json")
    assert "b: retention deleted 1,400 rows" in outcome.err
    assert "only in a may have been among them" in outcome.err
    assert len(outcome.document["warnings"]) == 1
    assert inferdbg("diff-tokens", b, b).err == ""


def test_runs_of_one_name_are_told_apart(
    tmp_path: Path, record: Callable[..., Path], inferdbg: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("monday", "tuesday"):
        (tmp_path / name).mkdir()
        shutil.move(record("run", []), tmp_path / name / "run")
    monkeypatch.chdir(tmp_path / "monday" / "run")
    document = inferdbg("diff-tokens", ".", "../../tuesday/run", "--json").document
    assert document["runs"] == {"a": "monday/run", "b": "tuesday/run"}
    assert inferdbg("diff-tokens", ".", ".", "--json").document["runs"] == {"a": "run", "b": "run"}


def test_an_aborted_request_without_a_token_is_an_empty_output_and_a_rejected_one_is_none(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any
) -> None:
    arrival = events.arrived("r0", client_request_id="c0", prompts=((10, 11, 12),))
    gone = [
        arrival,
        events.closed(arrival, choices=(), end=EndKind.ABORTED),
        events.rejected("x", client_request_id="c1"),
        events.rejected("y", client_request_id="c0", end=EndKind.ABORTED),  # its client left before it was accepted
    ]
    outcome = inferdbg("diff-tokens", record("a", load(events, [(1,), (2,)])), record("b", gone), "--json")
    (pair,) = outcome.document["pairs"]
    assert (pair["verdict"], pair["class"], pair["first_difference"]["index"]) == ("inconclusive", "cut_short", 0)
    assert len(outcome.document["unmatched"]["a"]) == 1
    assert outcome.document["unmatched"]["b"] == []


def test_nothing_to_compare_is_inconclusive_with_exit_3(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any
) -> None:
    empty = record("empty", [])
    assert inferdbg("diff-tokens", empty, empty).code == 3
    silent = record("silent", load(events, [(1,)]), token_log=TokenLogMode.OFF)
    outcome = inferdbg("diff-tokens", silent, silent, "--json")
    assert (outcome.code, outcome.document["verdict"]) == (3, "inconclusive")
    assert "what would decide: record both runs with --token-log ids" in inferdbg("diff-tokens", silent, silent).out


def test_hashed_logs_compare_up_to_the_first_difference_under_one_key_only(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any
) -> None:
    def hashed(name: str, outputs: list[tuple[int, ...]], key: bytes = b"k" * 32) -> Path:
        return record(name, load(events, outputs), token_log=TokenLogMode.HASHED, token_log_key=key)

    a, b = hashed("a", [(1, 2, 3), (4,)]), hashed("b", [(1, 9, 3), (4,)])
    outcome = inferdbg("diff-tokens", a, b, "--json")
    pair, same = outcome.document["pairs"]
    assert (outcome.code, pair["class"], pair["first_difference"]["index"]) == (1, "diverged", 1)
    assert pair["first_difference"]["a"]["piece"] is None
    assert (same["verdict"], pair["evidence"]["alignment"]) == ("identical", None)
    assert "hashed" in inferdbg("diff-tokens", a, b).out
    other = inferdbg("diff-tokens", a, hashed("c", [(1, 2, 3), (4,)], b"q" * 32))
    assert other.code == 2
    assert "same key" in other.err
    assert inferdbg("diff-tokens", a, record("plain", load(events, [(1,)]))).code == 2


def test_limit_bounds_what_is_printed(record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any) -> None:
    a = record("a", load(events, [(i,) for i in range(5)]))
    b = record("b", load(events, [(i + 100,) for i in range(5)]))
    text = inferdbg("diff-tokens", a, b, "--limit", 2).out
    assert text.count("replaced from output token 0") == 2
    assert "3 more differences" in text


def test_a_run_that_cannot_be_read_is_2(
    tmp_path: Path, record: Callable[..., Path], inferdbg: Callable[..., Any]
) -> None:
    outcome = inferdbg("diff-tokens", record("a", []), tmp_path / "nowhere")
    assert outcome.code == 2
    assert "nowhere" in outcome.err


@pytest.mark.parametrize("width", [40, 80])
def test_in_a_narrow_window_the_context_is_cut_and_nothing_else(
    record: Callable[..., Path],
    inferdbg: Callable[..., Any],
    events: Any,
    monkeypatch: pytest.MonkeyPatch,
    width: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    before, after = tuple(range(500, 520)), tuple(range(700, 720))
    a = record("a", load(events, [(*before, 801, *after)]))
    b = record("b", load(events, [(*before, 802, *after)]))
    lines = inferdbg("diff-tokens", a, b).out.splitlines()
    for side, token in (("A", 801), ("B", 802)):
        (line,) = (line for line in lines if re.match(rf"  {side} +80", line))
        assert re.match(rf"  {side} +{token} +-5\.250 +….*w519 ▸w{token} ◂w700 .*…$", line)
        assert len(line) <= width


def test_on_a_terminal_with_colours_the_token_is_underlined(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any
) -> None:
    a, b = record("a", load(events, [(1, 2)])), record("b", load(events, [(1, 3)]))
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    render_diff(console, inferdbg("diff-tokens", a, b, "--json").document, 5)
    assert isinstance(console.file, io.StringIO)
    assert "\x1b[1;4;31mw2 " in console.file.getvalue()
    assert "▸" not in console.file.getvalue()
