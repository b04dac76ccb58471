"""`python -m benchmarks.step_bench`: one step of the model, plain path against fast path, in milliseconds.

Decode of 1 and of 16 sequences at a context of about 160, and a prefill of 512 tokens. The two paths take turns, so
that whatever else the machine does meets both. Without a model directory: random weights in SmolLM2-135M's shape.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.common import bootstrap_ratio, report
from inferdbg.engine.config import CoreConfig
from inferdbg.engine.core.model.fast import make_fast_forward
from inferdbg.engine.core.model.forward import Forward
from inferdbg.engine.core.model.kv_pool import KVPool
from inferdbg.engine.core.model.plain import PlainForward
from inferdbg.engine.core.model.weights import load_model
from inferdbg.engine.core.model_info import ModelInfo, read_model_info
from inferdbg.engine.core.runner import StepBatch

CONTEXT, PREFILL, MAX_BATCH = 160, 512, 16


def random_model(dtype: torch.dtype) -> tuple[PreTrainedModel, ModelInfo]:
    """A model of SmolLM2-135M's shape."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    info = ModelInfo(
        architecture="LlamaForCausalLM",
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        eos_token_ids=frozenset(),
    )
    return LlamaForCausalLM(config).to(dtype).eval(), info


class Steps:
    """Batches over pages scattered at random; sequence s owns the s-th share of the pool."""

    def __init__(self, pool: KVPool, vocab_size: int, page_size: int) -> None:
        self.rng = np.random.default_rng(0)
        self.vocab_size, self.page_size = vocab_size, page_size
        shares = pool.num_pages // MAX_BATCH
        self.pages = self.rng.permutation(pool.num_pages)[: shares * MAX_BATCH].reshape(MAX_BATCH, shares)

    def chunk(self, sequences: int, start: int, end: int) -> StepBatch:
        """Positions [start, end) of each of the first sequences; a logits row for the last token of each."""
        width = end - start
        positions = np.tile(np.arange(start, end), sequences)
        owners = np.repeat(np.arange(sequences), width)
        pages = self.pages[owners, positions // self.page_size]
        return StepBatch(
            token_ids=self.rng.integers(0, self.vocab_size, sequences * width),
            positions=positions,
            slots=pages * self.page_size + positions % self.page_size,
            query_starts=np.arange(sequences + 1) * width,
            context_lens=np.full(sequences, end),
            page_tables=self.pages[:sequences].copy(),
            logits_rows=np.arange(1, sequences + 1) * width - 1,
            num_decodes=sequences if width == 1 else 0,
        )


def seconds(forward: Forward, batch: StepBatch) -> float:
    """Wall time of one step."""
    start = time.perf_counter()
    forward.logits(batch)
    return time.perf_counter() - start


def measure(model: PreTrainedModel, info: ModelInfo, config: CoreConfig, rounds: int) -> dict[str, Any]:
    """Median milliseconds of each path and the median of their paired ratios, for each kind of step."""
    pages = MAX_BATCH * -(-PREFILL // config.page_size)
    pools = [KVPool(info, pages, config.page_size, model.dtype, torch.device("cpu")) for _ in range(2)]
    fast = make_fast_forward(model, info, pools[1], config)
    if fast is None:
        raise SystemExit("there is no fast path for this model here")
    paths: tuple[Forward, Forward] = (PlainForward(model, pools[0]), fast)
    steps = Steps(pools[0], info.vocab_size, config.page_size)
    for forward in paths:
        forward.logits(steps.chunk(MAX_BATCH, 0, CONTEXT))  # real KV for the decodes
    kinds = {
        "decode_1": lambda i: steps.chunk(1, CONTEXT + i, CONTEXT + i + 1),
        "decode_16": lambda i: steps.chunk(MAX_BATCH, CONTEXT + i, CONTEXT + i + 1),
        "prefill_512": lambda i: steps.chunk(1, 0, PREFILL),
    }
    figures: dict[str, Any] = {"fast": fast.name, "dtype": config.dtype, "threads": torch.get_num_threads()}
    for kind, make in kinds.items():
        times: tuple[list[float], list[float]] = ([], [])
        for i in range(rounds):
            batch = make(i)
            for path, kept in zip(paths, times, strict=True):
                kept.append(seconds(path, batch))
        plain_ms, fast_ms = (round(statistics.median(kept[1:]) * 1e3, 2) for kept in times)
        figures[kind] = {"plain_ms": plain_ms, "fast_ms": fast_ms, "best_fast_ms": round(min(times[1]) * 1e3, 2)}
        figures[kind] |= {"plain_over_fast": bootstrap_ratio(times[0][1:], times[1][1:])}
    return figures


def main() -> None:
    """Parses the command line; see `--help`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_bench", description=__doc__)
    parser.add_argument("--model-dir", type=Path, help="a checkpoint directory (default: random weights)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--keep", action="store_true", help="append to benchmarks/results.jsonl")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    if options.model_dir is None:
        model, info = random_model(dtype)
    else:
        info = read_model_info(options.model_dir)
        model = load_model(options.model_dir, info, dtype, torch.device("cpu"))
    directory = options.model_dir or Path("random")
    config = CoreConfig(model_dir=directory, dtype=options.dtype, page_size=options.page_size)
    figures = measure(model, info, config, options.rounds)
    report("step", {"model": directory.name, "page_size": options.page_size} | figures, keep=options.keep)


if __name__ == "__main__":
    main()
