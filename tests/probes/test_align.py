from hypothesis import given, settings
from hypothesis import strategies as st

from inferdbg.probes.diff_tokens.align import Hunk, align, common_prefix

IDS = st.lists(st.integers(0, 3), max_size=14)


def longest_common_subsequence(a: list[int], b: list[int]) -> int:
    """The textbook table: the oracle."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


def apply(hunks: tuple[Hunk, ...], a: list[int], b: list[int]) -> list[int]:
    made: list[int] = []
    position = 0
    for hunk in hunks:
        made += a[position : hunk.a_start]
        assert len(made) == hunk.b_start
        made += b[hunk.b_start : hunk.b_end]
        position = hunk.a_end
    return made + a[position:]


@given(IDS, IDS)
@settings(max_examples=400, deadline=None)
def test_the_script_turns_a_into_b_with_the_fewest_edits(a: list[int], b: list[int]) -> None:
    alignment = align(a, b)
    assert alignment.complete
    assert apply(alignment.hunks, a, b) == b
    fewest = len(a) + len(b) - 2 * longest_common_subsequence(a, b)
    assert alignment.num_inserted + alignment.num_deleted == fewest


@given(IDS, IDS)
def test_common_prefix_ends_at_the_first_difference(a: list[int], b: list[int]) -> None:
    length = common_prefix(a, b)
    assert a[:length] == b[:length]
    assert length == min(len(a), len(b)) or a[length] != b[length]


@given(IDS, IDS)
def test_beyond_the_bound_the_rest_is_one_hunk(a: list[int], b: list[int]) -> None:
    alignment = align(a, b, max_edits=2)
    assert apply(alignment.hunks, a, b) == b
    assert alignment.complete or len(alignment.hunks) == 1


def test_one_inserted_bos_is_one_insertion() -> None:
    prompt = [1, 504, 30, 28, 504, 77, 2]
    (hunk,) = align(prompt, [1, *prompt]).hunks
    assert (hunk.kind, hunk.b_end - hunk.b_start) == ("inserted", 1)


def test_a_long_inserted_block_is_one_insertion_however_long() -> None:
    body, block = list(range(5000)), list(range(9000, 10000))
    alignment = align(body, body[:3000] + block + body[3000:])
    assert alignment.hunks == (Hunk(3000, 3000, 3000, 4000),)


def test_texts_with_nothing_in_common_meet_the_bound() -> None:
    alignment = align(list(range(4000)), list(range(5000, 9000)))
    assert alignment.hunks == (Hunk(0, 4000, 0, 4000),)
    assert not alignment.complete
