"""A long prompt is tokenized beside everything else, not instead of it."""

from __future__ import annotations

import threading
import time

from inferdbg.engine.serving.tokenize import load_vocabulary


def test_a_long_text_leaves_the_gil_to_others(fake_model_dir):
    vocabulary = load_vocabulary(fake_model_dir)
    text = "the quick brown fox " * 150_000
    took: list[float] = []

    def encode() -> None:
        begun = time.perf_counter()
        vocabulary.encode(text, add_special_tokens=False)
        took.append(time.perf_counter() - begun)

    thread = threading.Thread(target=encode)
    longest, last = 0.0, time.perf_counter()
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    assert longest < 0.5 * took[0]


def test_encoding_as_a_batch_of_one_changes_no_id(fake_model_dir):
    vocabulary = load_vocabulary(fake_model_dir)
    for text in ("", "the quick brown fox", " jumps\n\nover 12 lazy dogs 🙂"):
        for special in (True, False):
            wanted = vocabulary.tokenizer.encode(text, add_special_tokens=special).ids
            assert list(vocabulary.encode(text, add_special_tokens=special)) == wanted
