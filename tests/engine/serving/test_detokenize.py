from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from inferdbg.engine.serving.detokenize import DetokenizerTraits, IncrementalDetokenizer, StopMatch, StopMatcher

SPECIAL_ID = 3


def byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(["<a>", "<b>", "<c>", "<d>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<d>", special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback():
    """As sentencepiece models are converted: a leading space is stripped, unknown characters come as bytes."""
    words = ["<unk>", "<s>", "</s>", "<special>", "▁", "▁the", "the", "a", "▁a", "é", "▁▁", "st", "op"]
    vocab = {token: i for i, token in enumerate([*words, *(f"<0x{i:02X}>" for i in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.add_special_tokens([AddedToken("<special>", special=True)])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}
TRAITS = {name: DetokenizerTraits.of(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def stream(name, ids, *, skip=True):
    detokenizer = IncrementalDetokenizer(TOKENIZERS[name], TRAITS[name], skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_pieces_add_up_to_the_whole_for_any_ids(name, skip, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 5), max_size=25))
    assert "".join(stream(name, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(st.sampled_from("the a é🎉你👨‍👩‍👧 \n"), max_size=20))
@settings(max_examples=150, deadline=None)
def test_real_text_streams_without_half_characters(name, text):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = stream(name, ids)
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == tokenizer.decode(ids)


def test_a_split_character_comes_with_its_last_byte():
    ids = TOKENIZERS["byte_level"].encode("🎉").ids
    assert len(ids) == 4
    assert stream("byte_level", ids) == ["", "", "", "🎉", ""]


def test_an_unfinished_character_shows_at_the_end_as_the_whole_shows_it():
    ids = TOKENIZERS["byte_level"].encode("a🎉").ids[:-1]
    assert "".join(stream("byte_level", ids)) == TOKENIZERS["byte_level"].decode(ids) == "a\ufffd"


def test_a_byte_that_spoils_a_run_rewrites_nothing_that_was_sent():
    name = "byte_fallback"
    token = TOKENIZERS[name].token_to_id
    ids = [token("the"), token("<0xC3>"), token("<0xA9>"), token("<0xFF>"), token("a")]
    assert stream(name, ids) == ["the", "", "", "", "\ufffd\ufffd\ufffda", ""]


def test_the_leading_space_is_the_first_tokens_alone():
    token = TOKENIZERS["byte_fallback"].token_to_id
    assert stream("byte_fallback", [token("▁the"), token("▁the")]) == ["the", " the", ""]
    assert "".join(stream("byte_fallback", [SPECIAL_ID, token("▁the"), SPECIAL_ID, token("▁a")])) == "the a"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_bytes_of_tokens_join_to_the_text(name):
    text = "the aé 你🎉"
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    joined = b"".join(TRAITS[name].token_bytes(tokenizer.id_to_token(i), i) for i in ids)
    assert joined.decode() == text


def shown(pieces, stops, include=False):
    """What a client sees, and the stop that ended it."""
    matcher = StopMatcher(stops, include_stop=include)
    out = []
    for piece in pieces:
        result = matcher.push(piece)
        if isinstance(result, StopMatch):
            return "".join([*out, result.text]), result.stop, out
        out.append(result)
    return "".join([*out, matcher.finish()]), None, out


def expected(text, stops, include=False):
    """The definition: the stop that ends first, of those the longest."""
    for end in range(1, len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 5), max_size=30),
    include=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_stops_are_found_wherever_the_text_is_cut(text, stops, cuts, include):
    pieces, rest = [], text
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    pieces.append(rest)
    got, stop, sent = shown(pieces, tuple(stops), include)
    assert (got, stop) == expected(text, stops, include)
    # nothing of a stop was ever sent before it was known to be one
    assert got.startswith("".join(sent))


def test_a_prefix_of_a_stop_is_held_and_then_released():
    matcher = StopMatcher(("###",))
    assert [matcher.push(piece) for piece in ("a#", "#", "b", "#")] == ["a", "", "##b", ""]
    assert matcher.finish() == "#"


def test_a_stop_that_begins_before_min_tokens_does_not_count():
    matcher = StopMatcher(("ab",))
    assert matcher.pass_through("a") == "a"
    assert matcher.push("b") == "b"
    assert matcher.push("ab") == StopMatch("", "ab")
