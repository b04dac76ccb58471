"""The fast path against the plain path and against transformers' own forward over whole sequences."""

import sys

import numpy as np
import pytest
import torch
from fast_driver import CONFIGS, Driver, make_config, make_info, make_model, run_randomly
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from inferdbg.engine.core.model.fast import make_fast_forward
from inferdbg.engine.core.model.forward import Forward
from inferdbg.engine.core.model.kv_pool import KVPool
from inferdbg.engine.core.model.plain import PlainForward

LENGTHS = [40, 57, 3, 90, 17]
NUMBA_KERNELS = "inferdbg.engine.core.model.fast.numba_kernels"


def make_pool(model: PreTrainedModel, page_size: int, lengths: list[int] = LENGTHS) -> KVPool:
    """Its pages hold what a sequence whose values overflowed may have left behind."""
    num_pages = sum(-(-length // page_size) for length in lengths) + 5
    pool = KVPool(make_info(model), num_pages, page_size, model.dtype, torch.device("cpu"))
    for layer in pool.keys + pool.values:
        layer.fill_(torch.nan)
    return pool


def make_fast(model: PreTrainedModel, pool: KVPool) -> Forward:
    forward = make_fast_forward(model, make_info(model), pool, make_config(model.dtype, page_size=pool.page_size))
    assert forward is not None
    return forward


def random_sequences(lengths: list[int], vocab_size: int = 257) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def whole_sequence_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("family", CONFIGS)
def test_float32_logits_equal_transformers_whatever_the_chunks_and_pages(family: str, page_size: int) -> None:
    model, sequences = make_model(family, torch.float32), random_sequences(LENGTHS)
    pool = make_pool(model, page_size)
    outputs = run_randomly(Driver(make_fast(model, pool), pool, sequences), seed=page_size)
    for ids, logits in zip(sequences, outputs, strict=True):
        torch.testing.assert_close(logits, whole_sequence_logits(model, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kernels", ["torch", "numba"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("family", CONFIGS)
def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16(
    family: str, page_size: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "numba":
        pytest.importorskip("numba")
    else:
        monkeypatch.setitem(sys.modules, NUMBA_KERNELS, None)  # as where numba is not installed
    model, sequences = make_model(family, torch.bfloat16), random_sequences(LENGTHS)
    exact = make_model(family, torch.bfloat16).float()
    references = [whole_sequence_logits(exact, ids) for ids in sequences]
    transformers_error = rms([whole_sequence_logits(model, ids) for ids in sequences], references)
    pool = make_pool(model, page_size)
    forward = make_fast(model, pool)
    assert forward.name == f"fast-{kernels}"
    outputs = run_randomly(Driver(forward, pool, sequences), seed=page_size)
    assert rms(outputs, references) <= 1.15 * transformers_error


def rms(outputs: list[torch.Tensor], references: list[torch.Tensor]) -> float:
    return (torch.cat(outputs) - torch.cat(references)).square().mean().sqrt().item()


@pytest.mark.parametrize("family", CONFIGS)
def test_plain_and_fast_path_agree_on_the_same_steps(family: str) -> None:
    model, sequences = make_model(family, torch.float32), random_sequences(LENGTHS)
    fast_pool, plain_pool = make_pool(model, 8), make_pool(model, 8)
    fast = run_randomly(Driver(make_fast(model, fast_pool), fast_pool, sequences), seed=5)
    plain = run_randomly(Driver(PlainForward(model, plain_pool), plain_pool, sequences), seed=5)
    for ours, theirs in zip(fast, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    for ours, theirs in zip(fast_pool.keys + fast_pool.values, plain_pool.keys + plain_pool.values, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("num_threads", [2], indirect=True)
def test_the_shape_of_smollm2_with_long_chunks_and_a_batch_of_decodes() -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=1024,
        initializer_range=0.06,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval().bfloat16()
    lengths = [420, 300, *[35] * 14]
    sequences = random_sequences(lengths, 1000)
    pool = make_pool(model, 16, lengths)
    driver = Driver(make_fast(model, pool), pool, sequences)
    parts = [
        driver.step({0: 290}),  # more rows than one tile of scores
        driver.step({0: 129, **dict.fromkeys(range(2, 16), 34)}),  # a long chunk with context beside short ones
        driver.step({1: 299}),
        driver.step(dict.fromkeys(range(16), 1)),
    ]
    outputs = [torch.cat([part[s] for part in parts if s in part]) for s in range(16)]
    transformers_outputs = [whole_sequence_logits(model, ids) for ids in sequences]
    references = [whole_sequence_logits(model.float(), ids) for ids in sequences]
    assert rms(outputs, references) <= 1.1 * rms(transformers_outputs, references)
    chosen, best = torch.cat(outputs).argmax(-1), torch.cat(references).argmax(-1)
    theirs = torch.cat(transformers_outputs).argmax(-1)
    assert (chosen == best).sum() >= (theirs == best).sum() - len(best) // 100


def test_only_the_rows_asked_for_are_returned_in_their_order() -> None:
    model, sequences = make_model("llama", torch.float32), random_sequences([12, 9])
    pool = make_pool(model, 4, [12, 9])
    forward = make_fast(model, pool)
    driver = Driver(forward, pool, sequences)
    every = driver.step({0: 12, 1: 9})
    driver.computed = [0, 0]
    some = forward.logits(driver.batch({0: 12, 1: 9}, rows=[3, 11, 20]))
    torch.testing.assert_close(some, torch.stack([every[0][3], every[0][11], every[1][8]]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_without_logits_still_writes_its_keys_and_values(dtype: torch.dtype) -> None:
    model, sequences = make_model("qwen3", dtype), random_sequences([12])
    pool = make_pool(model, 4, [12])
    forward = make_fast(model, pool)
    driver = Driver(forward, pool, sequences)
    whole = driver.step({0: 12})[0]
    keys = [layer.clone() for layer in pool.keys]
    for layer in pool.keys + pool.values:
        layer.fill_(torch.nan)
    driver.computed = [0]
    assert forward.logits(driver.batch({0: 7}, rows=[])).shape == (0, 257)
    driver.computed = [7]
    tolerance = 1e-5 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(driver.step({0: 5})[0], whole[7:], rtol=0, atol=tolerance)
    for ours, before in zip(pool.keys, keys, strict=True):
        torch.testing.assert_close(ours, before, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_the_model_keeps_its_weights_and_its_own_forward() -> None:
    model = make_model("qwen2", torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    logits = whole_sequence_logits(model, [1, 2, 3, 4])
    make_fast(model, make_pool(model, 16))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(whole_sequence_logits(model, [1, 2, 3, 4]), logits)
