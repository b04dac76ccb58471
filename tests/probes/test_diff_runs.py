from collections.abc import Collection, Iterable, Iterator
from typing import Any

import pytest

from inferdbg.probes.diff_tokens.compare import Side, Undecided, Verdict, compare_rows
from inferdbg.probes.diff_tokens.document import Decoder, diff_document
from inferdbg.probes.diff_tokens.report import RunDiff, diff_runs, manifest_diff
from inferdbg.probes.diff_tokens.rows import RowKey, RowSummary, TokenRow, summarize_row
from inferdbg.probes.vocabulary import Vocabulary


class ListedLog:
    """A token log in memory, which notes how many rows were loaded at a time."""

    def __init__(self, rows: Iterable[TokenRow], hashed: bool = False) -> None:
        self._rows = list(rows)
        self.hashed = hashed
        self.loaded: list[int] = []

    def summaries(self) -> Iterator[RowSummary]:
        return map(summarize_row, list(self._rows))

    def rows(self, keys: Collection[RowKey]) -> Iterator[TokenRow]:
        self.loaded.append(len(keys))
        yield from (row for row in self._rows if row.key in keys)


def row(name: str, prompt: list[int] | None, output: list[int] | None, **more: Any) -> TokenRow:
    logprobs = [-0.5 - i for i in range(len(output or ()))]
    return TokenRow(
        key=RowKey(f"{more.pop('run', 'a')}-{name}"),
        client_request_id=name,
        prompt=None if prompt is None else list(prompt),
        output=None if output is None else list(output),
        logprobs=logprobs,
        finish_reason=more.pop("finish_reason", "stop"),
        **more,
    )


def diff(rows_a: list[TokenRow], rows_b: list[TokenRow]) -> RunDiff:
    return diff_runs(ListedLog(rows_a), ListedLog(rows_b))


def test_equal_runs_are_identical_and_no_row_is_loaded_twice() -> None:
    a, b = ListedLog([row("x", [1, 2], [3, 4])]), ListedLog([row("x", [1, 2], [3, 4], run="b")])
    result = diff_runs(a, b)
    assert (result.verdict, result.is_different, len(result.pairs)) == (Verdict.IDENTICAL, False, 1)
    assert result.pairs[0].outputs_agree_for == 2
    assert a.loaded == b.loaded == []


def test_an_inserted_bos_is_one_insertion_in_the_input() -> None:
    result = diff([row("x", [1, 504, 30], [9])], [row("x", [1, 1, 504, 30], [9], run="b")])
    (pair,) = result.pairs
    assert result.verdict is pair.verdict is Verdict.INPUT_DIFFERS
    assert pair.difference is not None
    assert (pair.difference.side, pair.difference.index, pair.difference.kind) == (Side.PROMPT, 1, "inserted")
    assert pair.difference.alignment is not None
    assert pair.difference.alignment.num_inserted == 1


def test_a_flip_gives_both_tokens_with_their_own_logprobs() -> None:
    a = row("x", [1], [5, 6, 7])
    b = row("x", [1], [5, 8, 7], run="b")
    pair = compare_rows(a, b, "client_request_id")
    assert pair.verdict is Verdict.OUTPUT_DIFFERS
    assert pair.difference is not None
    first_a, first_b = pair.difference.a, pair.difference.b
    assert first_a is not None
    assert first_b is not None
    assert (pair.difference.index, first_a.id, first_b.id) == (1, 6, 8)
    assert (first_a.logprob, first_b.logprob) == (-1.5, -1.5)
    assert pair.difference.kind == "replaced"
    assert pair.difference.before == (1, 5)  # the prompt's end, then the output so far


@pytest.mark.parametrize("cut", [None, "abort", "error"])
@pytest.mark.parametrize("rest", [[6], [6, 7]])
def test_an_output_that_was_cut_off_where_it_agreed_decides_nothing(cut: str | None, rest: list[int]) -> None:
    for swap in (False, True):
        rows = row("x", [1], [5, *rest]), row("x", [1], [5], run="b", finish_reason=cut)
        pair = compare_rows(*(reversed(rows) if swap else rows), "prompt")
        assert (pair.verdict, pair.undecided, pair.kind) == (Verdict.INCONCLUSIVE, Undecided.UNFINISHED, "cut_short")
        assert pair.difference is not None
        assert (pair.difference.a if swap else pair.difference.b) is None
        assert (pair.difference.index, pair.outputs_agree_for) == (1, 1)


@pytest.mark.parametrize(
    ("a", "reason_a", "b", "reason_b", "verdict"),
    [
        ([5, 6], "stop", [5], "stop", Verdict.OUTPUT_DIFFERS),  # both came to their own end
        ([5, 6], None, [5], "length", Verdict.OUTPUT_DIFFERS),  # the longer one was cut off: it has gone on already
        ([5, 6], None, [5, 7], None, Verdict.OUTPUT_DIFFERS),  # they parted before
        ([5, 6], None, [5], None, Verdict.INCONCLUSIVE),
        ([5, 6], "stop", [5, 6], None, Verdict.INCONCLUSIVE),  # the same so far, but only one of them has ended
        ([5, 6], None, [5, 6], None, Verdict.IDENTICAL),  # cut off at the same token
        ([], None, [], None, Verdict.INCONCLUSIVE),  # nothing was compared
        ([], "stop", [], "stop", Verdict.IDENTICAL),
    ],
)
def test_what_unfinished_outputs_can_decide(
    a: list[int], reason_a: str | None, b: list[int], reason_b: str | None, verdict: Verdict
) -> None:
    rows = row("x", [1], a, finish_reason=reason_a), row("x", [1], b, run="b", finish_reason=reason_b)
    assert compare_rows(*rows, "prompt").verdict is verdict
    assert diff([rows[0]], [rows[1]]).verdict is verdict  # also where the digests alone settle it


def test_different_prompts_differ_whatever_is_known_of_the_outputs() -> None:
    pair = compare_rows(row("x", [1], None), row("x", [2], [5], run="b"), "client_request_id")
    assert (pair.verdict, pair.outputs_agree_for, pair.undecided) == (Verdict.INPUT_DIFFERS, None, None)


def test_other_sampling_is_told_apart_from_other_output() -> None:
    a = row("x", [1], [5], sampling={"temperature": 1.0, "seed": 3})
    b = row("x", [1], [6], sampling={"temperature": 1.0, "seed": 4}, run="b")
    pair = compare_rows(a, b, "prompt")
    assert pair.verdict is Verdict.SAMPLING_DIFFERS
    assert pair.sampling_changes == {"seed": (3, 4)}


def test_the_drawn_seed_of_a_greedy_request_is_no_difference() -> None:
    a = row("x", [1], [5], sampling={"temperature": 0.0, "seed": 3})
    b = row("x", [1], [6], sampling={"temperature": 0.0, "seed": 4}, run="b")
    assert compare_rows(a, b, "prompt").verdict is Verdict.OUTPUT_DIFFERS


def test_unlogged_ids_are_inconclusive_not_identical() -> None:
    result = diff([row("x", None, None)], [row("x", None, None, run="b")])
    assert (result.verdict, result.is_different) == (Verdict.INCONCLUSIVE, False)
    assert diff([], []).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("outputs_b", "verdict"),
    [
        ([[5], [6]], Verdict.IDENTICAL),
        ([[5], None], Verdict.INCONCLUSIVE),  # one identical pair does not speak for the other
        ([[7], None], Verdict.OUTPUT_DIFFERS),  # and a difference is one whatever else is not known
    ],
)
def test_the_whole_is_identical_only_if_every_pair_is(outputs_b: list[list[int] | None], verdict: Verdict) -> None:
    a = [row(str(i), [i], [5 + i]) for i in range(2)]
    result = diff(a, [row(str(i), [i], output, run="b") for i, output in enumerate(outputs_b)])
    assert (result.verdict, result.is_different) == (verdict, verdict is Verdict.OUTPUT_DIFFERS)


def test_an_inconclusive_document_says_why_and_what_would_decide() -> None:
    a = [row("x", [1], [5, 6]), row("y", [2], [5]), row("z", [3], [5])]
    b = [row("x", [1], [5], finish_reason=None), row("y", [2], None), row("z", [3], [5])]
    document = diff_document(diff(a, b), "A", "B", [], Decoder(None), Decoder(None), ["A: torn"])
    assert document["verdict"] == "inconclusive"
    assert [(u["reason"], u["num_pairs"]) for u in document["undecided"]] == [("no_ids", 1), ("unfinished", 1)]
    assert "let them end" in document["undecided"][1]["would_decide"]
    assert [pair["evidence"]["undecided"] for pair in document["pairs"]] == ["unfinished", "no_ids", None]
    assert [pair["class"] for pair in document["pairs"]] == ["cut_short", None, None]
    assert document["warnings"] == ["A: torn"]
    nothing = diff_document(diff([], []), "A", "B", [], Decoder(None), Decoder(None))
    assert [u["reason"] for u in nothing["undecided"]] == ["no_pair"]


def test_unmatched_requests_are_reported_and_weigh_only_when_asked() -> None:
    result = diff([row("x", [1], [2]), row("y", [3], [4])], [row("x", [1], [2], run="b")])
    assert (result.verdict, result.has_unmatched) == (Verdict.IDENTICAL, True)
    assert [r.client_request_id for r in result.unmatched_a] == ["y"]


@pytest.mark.parametrize("tokens_per_batch", [1, 7, 1000])
def test_differing_pairs_are_loaded_in_bounded_batches_with_the_same_result(tokens_per_batch: int) -> None:
    rows_a = [row(str(i), [i], [1, 2, 3]) for i in range(10)]
    rows_b = [row(str(i), [i], [1, 2, 3 + i % 2], run="b") for i in range(10)]
    log_a, log_b = ListedLog(rows_a), ListedLog(rows_b)
    result = diff_runs(log_a, log_b, tokens_per_batch)
    assert sum(log_a.loaded) == 5
    assert max(log_a.loaded) * 8 <= max(tokens_per_batch, 8)
    assert [pair.verdict is Verdict.IDENTICAL for pair in result.pairs] == [True, False] * 5


def test_rows_that_vanish_between_the_passes_are_inconclusive() -> None:
    log_a = ListedLog([row("x", [1], [2])])

    class LosingLog(ListedLog):
        def summaries(self) -> Iterator[RowSummary]:
            yield from super().summaries()
            self._rows = []

    log_b = LosingLog([row("x", [1], [3], run="b")])
    pair = diff_runs(log_a, log_b).pairs[0]
    assert (pair.verdict, pair.undecided) == (Verdict.INCONCLUSIVE, Undecided.DELETED)


def test_hashed_logs_are_compared_up_to_the_first_difference_only() -> None:
    a, b = [row("x", [11, 12], [21, 22, 23])], [row("x", [11, 12], [21, 32, 33], run="b")]
    result = diff_runs(ListedLog(a, hashed=True), ListedLog(b, hashed=True))
    difference = result.pairs[0].difference
    assert difference is not None
    assert (difference.index, difference.kind, difference.alignment) == (1, "diverged", None)


def test_the_document_has_the_promised_fields() -> None:
    vocabulary = Vocabulary({1: "<s>", 5: "Ġthe", 6: "Ġcat", 8: "âĢ"}, {}, byte_level=True)
    result = diff([row("x", [1], [5, 6])], [row("x", [1], [5, 8], run="b")])
    document = diff_document(result, "A", "B", [], Decoder(vocabulary), Decoder(vocabulary))
    assert document["schema"] == "inferdbg.diff-tokens/1"
    assert (document["verdict"], document["num_pairs"], document["unmatched"]) == (
        "output_differs",
        1,
        {"a": [], "b": []},
    )
    (pair,) = document["pairs"]
    assert (pair["request_a"], pair["request_b"], pair["class"]) == ("a-x", "b-x", "replaced")
    assert pair["first_difference"] == {
        "side": "output",
        "index": 1,
        "a": {"id": 6, "piece": " cat", "logprob": -1.5},
        "b": {"id": 8, "piece": "\ufffd\ufffd", "logprob": -1.5},
    }
    assert pair["evidence"]["context"]["before"] == "<s> the"
    assert {"manifest_diff", "enrichment"} <= document.keys()


def test_manifest_diff_names_the_nested_key_and_skips_what_always_differs() -> None:
    a = {"config": {"core": {"dtype": "float32", "page_size": 16}}, "clock": {"wall_ns": 1}, "model": {"sha": "x"}}
    b = {"config": {"core": {"dtype": "bfloat16", "page_size": 16}}, "clock": {"wall_ns": 2}}
    assert manifest_diff(a, b, ("clock",)) == [
        {"key": "config.core.dtype", "a": "float32", "b": "bfloat16"},
        {"key": "model.sha", "a": "x", "b": None},
    ]
