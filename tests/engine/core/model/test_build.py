"""From a configuration to an engine that steps: pages, context, path, and settings that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import info_of, tiny_model
from workloads import random_plan, reference_outputs

from inferdbg.engine.config import CoreConfig
from inferdbg.engine.core.engine import Engine
from inferdbg.engine.core.events import FinishReason
from inferdbg.engine.core.model.build import build_engine, build_engine_on
from inferdbg.engine.core.model.kv_pool import KVPool
from inferdbg.engine.core.offline import generate
from inferdbg.engine.core.sampling_params import SamplingParams
from inferdbg.engine.core.sequence import SequenceRequest
from inferdbg.engine.errors import EnvironmentLacks, InvalidRequest, ModelError, UsageError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    tiny_model("llama", torch.float32).save_pretrained(directory)
    return directory


def build(directory: Path, **settings: Any) -> tuple[Engine, dict[str, Any]]:
    values = {"dtype": "float32", "kv_memory_bytes": 1 << 20, "fast_path": "off"} | settings
    return build_engine(CoreConfig(model_dir=directory, **values), lambda event: None)


def test_an_engine_from_disk_says_what_transformers_says(checkpoint: Path) -> None:
    engine, info = build(checkpoint, dtype="float64")
    plan = random_plan(11, aborts=False)
    outputs = generate(engine, [planned.request for planned in plan])
    reference = tiny_model("llama", torch.float32, attention="sdpa").double()
    assert {o.seq_id: o.token_ids for o in outputs} == reference_outputs(reference, plan)
    assert info == {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 97,
        "device": "cpu",
        "device_name": None,
        "dtype": "float64",
        "num_threads": torch.get_num_threads(),
        "num_pages": (1 << 20) // (2 * 2 * 2 * 16 * 8 * 8),
        "page_size": 16,
        "kv_bytes": 1 << 20 | 2 * 2 * 2 * 16 * 8 * 8,
        "max_model_len": 256,
        "forward": "plain",
        "batch_invariant": False,
        "decode_buckets": None,
    }


def test_pages_follow_the_memory(checkpoint: Path) -> None:
    model_info = info_of(tiny_model("llama"))
    page = KVPool.bytes_per_page(model_info, 8, torch.bfloat16)
    assert page == 2 * 2 * 2 * 8 * 8 * 2  # K and V, layers, heads, positions, dimensions, bytes
    _, info = build(checkpoint, dtype="bfloat16", page_size=8, kv_memory_bytes=10 * page + page - 1)
    assert info["num_pages"] == 10
    assert info["max_model_len"] == 80


def test_too_little_memory_for_one_page(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match=r"kv_memory_bytes \(100\) does not hold one page"):
        build(checkpoint, kv_memory_bytes=100)


def test_pages_that_do_not_hold_the_context_asked_for(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match=r"3 KV pages \(from num_pages\).*100 tokens, 7 pages"):
        build(checkpoint, num_pages=3, max_model_len=100)
    _, info = build(checkpoint, num_pages=7, max_model_len=100)
    assert info["max_model_len"] == 100
    _, info = build(checkpoint, num_pages=3)  # nothing was promised: what the pages hold is the context
    assert info["max_model_len"] == 48


def test_more_pages_than_memory(checkpoint: Path) -> None:
    with pytest.raises(EnvironmentLacks, match="lower num_pages"):
        build(checkpoint, num_pages=1 << 40)


def test_a_context_beyond_the_models_own(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match=r"max_model_len \(257\)"):
        build(checkpoint, max_model_len=257)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there(checkpoint: Path) -> None:
    with pytest.raises(EnvironmentLacks, match="no CUDA device"):
        build(checkpoint, device="cuda")


def test_a_fast_path_that_is_not_there(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="no fast path for LlamaForCausalLM in float64"):
        build(checkpoint, dtype="float64", fast_path="require")
    _, info = build(checkpoint, dtype="float64", fast_path="auto")
    assert info["forward"] == "plain"


def test_absent_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        build(tmp_path / "nothing")


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float64", "fast_path": "off"},
        {"dtype": "float64", "batch_invariant": True},
        {"dtype": "float64", "decode_buckets": (4,)},
        {"dtype": "float32", "fast_path": "require"},
        {"dtype": "bfloat16", "fast_path": "require"},
    ],
    ids=lambda settings: "-".join(map(str, settings)),
)
def test_a_sequence_that_becomes_nan_harms_none_of_its_neighbours(settings: dict[str, Any]) -> None:
    """Neither in its own steps nor by what it leaves in pages that others get."""
    model = tiny_model("llama", getattr(torch, settings["dtype"]))
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan
    config = CoreConfig(model_dir=Path(), page_size=4, num_pages=16, max_num_seqs=4, **settings)
    engine, _ = build_engine_on(config, lambda event: None, model, info_of(model))

    def requests(first: int, *prompts: tuple[int, ...]) -> list[SequenceRequest]:
        greedy = SamplingParams(max_tokens=10, temperature=0.0, logit_bias={7: -100.0})
        return [SequenceRequest(seq_id=i, prompt_ids=p, sampling=greedy) for i, p in enumerate(prompts, start=first)]

    healthy = ((1, 2, 3), (4, 5, 6, 8, 9), (10, 11), (12, 13, 14, 15), (16, 17), (18, 19, 20), (21, 22))
    alone = [generate(engine, [request])[0].token_ids for request in requests(0, *healthy)]
    spoilt = (7, 3, 9, 11, 2, 4, 4, 8, 1)
    outputs = generate(engine, requests(100, spoilt, *healthy[:3], spoilt, *healthy[3:5], spoilt, *healthy[5:]))
    failed = [output for output in outputs if output.finish_reason is FinishReason.ERROR]
    assert [output.seq_id for output in failed] == [100, 104, 107]
    assert "logits that are not numbers for sequence 100;" in str(failed[0].error)
    others = [output.token_ids for output in outputs if output not in failed]
    assert [len(token_ids) for token_ids in others] == [10] * len(healthy)
    if settings["dtype"] != "bfloat16":  # whose sums depend on the company, and a near tie on them
        assert others == alone
    engine.check_integrity()


def test_ids_that_cannot_be_computed_never_reach_the_model() -> None:
    model = tiny_model("llama", torch.float32)
    config = CoreConfig(model_dir=Path(), dtype="float32", num_pages=8, fast_path="off")
    engine, _ = build_engine_on(config, lambda event: None, model, info_of(model))
    request = random_plan(1)[0].request
    bad = type(request)(seq_id=0, prompt_ids=(1, model.config.vocab_size), sampling=request.sampling)
    with pytest.raises(InvalidRequest):
        engine.add(bad)
