"""Tiny seeded models, and a driver that feeds a `Forward` sequences over randomly scattered pages."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from inferdbg.engine.config import CoreConfig
from inferdbg.engine.core.model.forward import Forward
from inferdbg.engine.core.model.kv_pool import KVPool
from inferdbg.engine.core.model_info import ModelInfo
from inferdbg.engine.core.runner import StepBatch

TINY = {
    "vocab_size": 257,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
CONFIGS = {
    "llama": lambda: LlamaConfig(**TINY),
    "llama-rope-scaled": lambda: LlamaConfig(**TINY, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "llama-biased": lambda: LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: Qwen2Config(**TINY),
    "qwen2-sliding": lambda: Qwen2Config(**TINY, **SLIDING),
    "qwen3": lambda: Qwen3Config(**TINY),
    "mistral": lambda: MistralConfig(**TINY, sliding_window=11),
}


def make_model(family: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # initialised to ones and zeros, which would hide a mistake
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype)


def make_info(model: PreTrainedModel) -> ModelInfo:
    config = model.config
    return ModelInfo(
        architecture=type(model).__name__,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=model.model.layers[0].self_attn.head_dim,
        eos_token_ids=frozenset(),
    )


def make_config(dtype: torch.dtype, **changes: object) -> CoreConfig:
    return CoreConfig(model_dir=Path("unused"), dtype=str(dtype).removeprefix("torch."), **changes)


class Driver:
    """Computes given sequences in steps of given chunks, each sequence's pages scattered over the pool."""

    def __init__(self, forward: Forward, pool: KVPool, sequences: list[list[int]], seed: int = 0) -> None:
        self.forward = forward
        self.sequences = sequences
        self.page_size = pool.page_size
        self.computed = [0] * len(sequences)
        free = np.random.default_rng(seed).permutation(pool.num_pages).tolist()
        self.pages = [[free.pop() for _ in range(-(-len(ids) // pool.page_size))] for ids in sequences]

    def batch(self, chunks: dict[int, int], rows: list[int] | None = None) -> StepBatch:
        """The step that computes the next `chunks[s]` tokens of each sequence s; logits of all rows or of `rows`."""
        order, num_decodes = self._order(chunks)
        spans = [(s, self.computed[s], self.computed[s] + chunks[s]) for s in order]
        tables = np.zeros((len(order), max(len(self.pages[s]) for s in order)), dtype=np.int64)
        for row, s in enumerate(order):
            tables[row, : len(self.pages[s])] = self.pages[s]
        places = [(s, position) for s, start, end in spans for position in range(start, end)]
        size = self.page_size
        return StepBatch(
            token_ids=np.array([self.sequences[s][p] for s, p in places]),
            positions=np.array([p for _, p in places]),
            slots=np.array([self.pages[s][p // size] * size + p % size for s, p in places]),
            query_starts=np.cumsum([0, *(end - start for _, start, end in spans)]),
            context_lens=np.array([end for _, _, end in spans]),
            page_tables=tables,
            logits_rows=np.array(range(len(places)) if rows is None else rows, dtype=np.int64),
            num_decodes=num_decodes,
        )

    def step(self, chunks: dict[int, int]) -> dict[int, torch.Tensor]:
        """Runs that step; each sequence's rows of logits in float32."""
        batch = self.batch(chunks)
        logits = self.forward.logits(batch).float().clone()
        order, _ = self._order(chunks)
        for s in order:
            self.computed[s] += chunks[s]
        starts = batch.query_starts.tolist()
        return {s: logits[starts[row] : starts[row + 1]] for row, s in enumerate(order)}

    def _order(self, chunks: dict[int, int]) -> tuple[list[int], int]:
        """Decodes first, and how many they are."""
        decodes = [s for s, count in chunks.items() if count == 1 and self.computed[s] > 0]
        return decodes + [s for s in chunks if s not in decodes], len(decodes)


def run_randomly(driver: Driver, seed: int) -> list[torch.Tensor]:
    """Computes all sequences in random chunks that mix prefill and decode; every position's logits."""
    rng = np.random.default_rng(seed)
    rows: list[list[torch.Tensor]] = [[] for _ in driver.sequences]
    while any(done < len(ids) for done, ids in zip(driver.computed, driver.sequences, strict=True)):
        chunks = {}
        for s, ids in enumerate(driver.sequences):
            left = len(ids) - driver.computed[s]
            if left and rng.random() < 0.8:
                chunks[s] = 1 if driver.computed[s] > len(ids) // 2 else int(rng.integers(1, min(left, 13) + 1))
        if chunks:
            for s, logits in driver.step(chunks).items():
                rows[s].append(logits)
    return [torch.cat(parts) for parts in rows]
