import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from inferdbg.engine.errors import RunError
from inferdbg.probes.vocabulary import Vocabulary

TEXT = "The Night Watch, 1642 – oil on canvas; naïve 展示 🎨"


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Vocabulary]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return tokenizer, Vocabulary.from_file(path)


def test_text_equals_the_tokenizers_own_decoding(byte_level: tuple[Tokenizer, Vocabulary]) -> None:
    tokenizer, vocabulary = byte_level
    ids = tokenizer.encode(TEXT).ids
    assert vocabulary.text(ids) == tokenizer.decode(ids, skip_special_tokens=False) == TEXT


def test_pieces_join_to_the_text_and_half_characters_are_bytes(byte_level: tuple[Tokenizer, Vocabulary]) -> None:
    tokenizer, vocabulary = byte_level
    ids = tokenizer.encode("x 🎉").ids
    pieces = [vocabulary.piece(i) or "" for i in ids]
    assert b"".join(piece.encode("utf-8", "surrogateescape") for piece in pieces).decode() == "x 🎉"
    assert any("\udc80" <= char <= "\udcff" for piece in pieces for char in piece)


def test_special_tokens_and_unknown_ids(byte_level: tuple[Tokenizer, Vocabulary]) -> None:
    tokenizer, vocabulary = byte_level
    end = tokenizer.token_to_id("<|end|>")
    assert vocabulary.piece(end) == "<|end|>"
    assert vocabulary.piece(10**6) is None
    assert vocabulary.text([end, 10**6]) == "<|end|><id 1000000>"


def test_sentencepiece_marks_and_byte_fallback(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "\u2581hello": 1, "<0xE2>": 2, "<0x80>": 3, "<0xA6>": 4}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "BPE", "vocab": vocab}, "decoder": {"type": "ByteFallback"}}))
    vocabulary = Vocabulary.from_file(path)
    assert vocabulary.text([1, 2, 3, 4]) == " hello…"


def test_unigram_vocabulary_is_a_list(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["\u2581a", -1.5]]}}))
    assert Vocabulary.from_file(path).piece(1) == " a"


def test_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{torn")
    with pytest.raises(RunError, match=r"tokenizer\.json"):
        Vocabulary.from_file(path)
