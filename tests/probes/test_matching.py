from inferdbg.probes.diff_tokens.matching import match
from inferdbg.probes.diff_tokens.rows import RowKey, RowSummary, TokenRow, summarize_row


def row(request_id: str, prompt: list[int], *, at: int = 0, choice: int = 0, **names: str) -> RowSummary:
    return summarize_row(
        TokenRow(key=RowKey(request_id, 0, choice), arrival_ns=at, prompt=list(prompt), output=[7], **names)  # type: ignore[arg-type]
    )


def names(pairs: list) -> list[tuple[str, str, str]]:  # type: ignore[type-arg]
    return [(pair.a.key.request_id, pair.b.key.request_id, pair.matched_by) for pair in pairs]


def test_replay_of_wins_over_the_clients_id() -> None:
    a = [row("r1", [1], client_request_id="x"), row("r2", [2], client_request_id="y")]
    b = [row("s1", [1], client_request_id="y", replay_of="r1"), row("s2", [2], client_request_id="x", replay_of="r2")]
    assert names(match(a, b).pairs) == [("r1", "s1", "replay_of"), ("r2", "s2", "replay_of")]


def test_two_replays_of_one_run_match_each_other() -> None:
    a = [row("a1", [1], replay_of="orig")]
    b = [row("b1", [9], replay_of="orig")]
    assert names(match(a, b).pairs) == [("a1", "b1", "replay_of")]


def test_client_id_finds_the_pair_although_the_prompts_differ() -> None:
    result = match([row("r1", [1], client_request_id="x")], [row("s1", [1, 1], client_request_id="x")])
    assert names(result.pairs) == [("r1", "s1", "client_request_id")]


def test_equal_prompts_pair_in_order_of_arrival() -> None:
    a = [row("late", [5], at=2), row("early", [5], at=1)]
    b = [row("first", [5], at=10), row("second", [5], at=20), row("third", [5], at=30)]
    result = match(a, b)
    assert names(result.pairs) == [("early", "first", "prompt"), ("late", "second", "prompt")]
    assert [r.key.request_id for r in result.unmatched_b] == ["third"]


def test_choices_pair_with_the_same_choice_only() -> None:
    a = [row("r", [1], choice=0, client_request_id="x"), row("r", [1], choice=1, client_request_id="x")]
    b = [row("s", [1], choice=1, client_request_id="x")]
    result = match(a, b)
    assert [(p.a.key.choice_index, p.b.key.choice_index) for p in result.pairs] == [(1, 1)]
    assert [r.key.choice_index for r in result.unmatched_a] == [0]


def test_unmatched_of_both_sides_are_kept() -> None:
    result = match([row("r", [1])], [row("s", [2])])
    assert (len(result.pairs), len(result.unmatched_a), len(result.unmatched_b)) == (0, 1, 1)
