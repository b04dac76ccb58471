from __future__ import annotations

import pytest
from tracing_factories import arrived, step

from inferdbg.engine.errors import UsageError
from inferdbg.tracing.token_log import HashedIds, NoIds, PlainIds, TokenLogMode, load_key, make_token_log

KEY = bytes(range(32))


def test_equal_prefixes_hash_alike_and_nothing_after_a_difference_does():
    log = HashedIds(KEY)
    a, b = log.prompt([1, 2, 3, 4, 5]), log.prompt([1, 2, 9, 4, 5])
    assert a[:2] == b[:2]
    assert not set(a[2:]) & set(b[2:])
    assert all(0 <= value < 1 << 63 for value in a)


def test_the_same_id_hashes_differently_at_each_place():
    hashed = HashedIds(KEY).prompt([7] * 50)
    assert len(set(hashed)) == 50


def test_another_key_gives_other_hashes_and_another_key_id():
    other = HashedIds(bytes(32))
    assert not set(HashedIds(KEY).prompt([1, 2, 3])) & set(other.prompt([1, 2, 3]))
    assert HashedIds(KEY).key_id != other.key_id


def test_outputs_continue_the_prompts_chain_and_the_sampled_alternative_is_recognised():
    log = HashedIds(KEY)
    output, tops = log.output([1, 2], [3, 4], 2, [3, 8, 9, 4])
    assert output == list(log.prompt([1, 2, 3, 4])[2:])
    assert tops[0] == output[0]
    assert tops[3] == output[1]
    assert len(set(tops)) == 4


def test_prompt_alternatives_hash_in_the_place_of_the_token_they_stand_beside():
    log = HashedIds(KEY)
    alternatives = log.prompt_alternatives([1, 2, 3], 2, [2, 5, 6, 3])
    assert alternatives[0] == log.prompt([1, 2])[1]
    assert alternatives[3] == log.prompt([1, 2, 3])[2]


def test_steps_hash_as_the_request_rows_do():
    log = HashedIds(KEY)
    log.arrived(arrived(prompts=((1, 2), (5, 6)), seq_ids=(0, 1)))
    steps = [step(1, (0, 1)), step(2, (1, 0)), step(3, (0,))]
    by_seq: dict[int, list[int]] = {0: [], 1: []}
    sampled: dict[int, list[int]] = {0: [], 1: []}
    for record in steps:
        hashed, tops = log.step(record)
        assert tops[0] == hashed[0]
        for seq_id, plain, value in zip(record.sampled_seq_ids, record.sampled_ids, hashed, strict=True):
            by_seq[seq_id].append(value)
            sampled[seq_id].append(plain)
    assert by_seq[0] == log.output([1, 2], sampled[0], 0, [])[0]
    assert by_seq[1] == log.output([5, 6], sampled[1], 0, [])[0]


def test_after_a_gap_a_chain_is_not_made_up():
    log = HashedIds(KEY)
    log.arrived(arrived(seq_ids=(0,)))
    log.gap()
    assert log.step(step(1)) == ([None], [None, None])


def test_plain_and_off():
    assert PlainIds().prompt([1, 2]) == [1, 2]
    assert NoIds().prompt([1, 2]) is None
    assert NoIds().output([1], [2], 1, [3]) == (None, None)
    assert NoIds().step(step(1)) == (None, None)
    assert isinstance(make_token_log(TokenLogMode.HASHED, KEY), HashedIds)


@pytest.mark.parametrize("key", [None, b"short"])
def test_hashing_needs_a_real_key(key):
    with pytest.raises(UsageError, match="at least 16 bytes"):
        make_token_log(TokenLogMode.HASHED, key)


def test_the_key_file_is_made_once_private_and_read_back(tmp_path):
    path = tmp_path / "keys" / "token-log"
    key = load_key(path)
    assert load_key(path) == key
    assert len(key) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("no hex")
    with pytest.raises(UsageError, match="hexadecimal"):
        load_key(path)
