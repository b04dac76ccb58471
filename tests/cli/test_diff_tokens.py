from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

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
    assert "w10 w11 w12 w7 w8 w9" in text
    assert "w10 w11 w12 w7 w5 w9" in text


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
    assert "only in A: 1 row: r1" in inferdbg("diff-tokens", a, b).out
    assert inferdbg("diff-tokens", a, b, "--exact").code == 1


def test_requests_in_flight_are_compared_as_far_as_they_got(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any
) -> None:
    whole = load(events, [(1, 2, 3)])
    arrival = events.arrived("r0", client_request_id="c0", prompts=((10, 11, 12),), seq_ids=(0,))
    partial = [events.core_started(), arrival, events.step(1, (0,)), events.step(2, (0,))]
    outcome = inferdbg("diff-tokens", record("a", whole), record("b", partial), "--json")
    (pair,) = outcome.document["pairs"]
    assert (pair["class"], pair["first_difference"]["index"], pair["first_difference"]["b"]) == ("cut_short", 2, None)


def test_an_aborted_request_without_a_token_is_an_empty_output_and_a_rejected_one_is_none(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any
) -> None:
    arrival = events.arrived("r0", client_request_id="c0", prompts=((10, 11, 12),))
    gone = [
        arrival,
        events.closed(arrival, choices=(), end=EndKind.ABORTED),
        events.rejected("x", client_request_id="c1"),
    ]
    outcome = inferdbg("diff-tokens", record("a", load(events, [(1,), (2,)])), record("b", gone), "--json")
    (pair,) = outcome.document["pairs"]
    assert (pair["class"], pair["first_difference"]["index"]) == ("cut_short", 0)
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
