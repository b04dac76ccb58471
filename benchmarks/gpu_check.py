"""`make gpu-check`: what the tests cannot show without a GPU. Correctness against the CPU, graph against eager, speed.

Readable lines on stderr, one JSON line on stdout. A pass on CUDA is kept in docs/gpu-status.json. `--device cpu` runs
the same code where there is no GPU (the captured graph becomes the padded eager step) and keeps nothing.
Exit codes: 0 passed, 1 a check failed, 4 no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inferdbg.engine.config import CoreConfig
from inferdbg.engine.core.events import CoreEvent, StepRecord
from inferdbg.engine.core.model.build import build_engine_on
from inferdbg.engine.core.model_info import ModelInfo
from inferdbg.engine.core.offline import Output, generate
from inferdbg.engine.core.sampling_params import SamplingParams
from inferdbg.engine.core.sequence import SequenceRequest

ROOT = Path(__file__).resolve().parent.parent
STATUS = ROOT / "docs" / "gpu-status.json"
MARGIN = 1e-4  # nats between best and runner-up under which float32 may choose either
LOGPROB_TOLERANCE = 1e-3
BUCKETS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Shape:
    """The size of a random Llama."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int


SMALL = Shape(1024, 256, 512, 4, 8, 2)
SMOLLM2 = Shape(49_152, 576, 1536, 30, 9, 3)


@dataclass(frozen=True)
class Comparison:
    """Two runs of the same requests, token by token up to each request's first difference."""

    num_tokens: int  # compared
    num_ties: int  # greedy requests that part where best and runner-up are closer than MARGIN
    num_flips: int  # seeded requests that part: the noise decided between near-equals, or something is wrong
    num_wrong: int  # greedy requests that part elsewhere
    max_difference: float  # between the logprobs of equal tokens after equal prefixes

    @property
    def has_passed(self) -> bool:
        return self.num_wrong == 0 and self.num_flips <= 1 and self.max_difference <= LOGPROB_TOLERANCE


class Bench:
    """A random seeded model that can be put on engines of several settings."""

    def __init__(self, shape: Shape, dtype: str) -> None:
        self._dtype = dtype
        config = LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            initializer_range=0.1,
        )
        torch.manual_seed(0)
        self._model = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
        self._info = ModelInfo(
            architecture="LlamaForCausalLM",
            vocab_size=shape.vocab_size,
            max_positions=2048,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.hidden_size // shape.num_heads,
            eos_token_ids=frozenset(),
        )

    def run(
        self, device: str, requests: list[SequenceRequest], **settings: Any
    ) -> tuple[list[Output], list[StepRecord]]:
        """Runs the requests on a fresh engine, with nothing cached; the records say how long each step took."""
        events: list[CoreEvent] = []
        config = CoreConfig(
            model_dir=Path(), device="cuda" if device == "cuda" else "cpu", dtype=self._dtype, fast_path="off",
            num_pages=1024, max_num_seqs=64, token_budget=512, **settings,
        )  # fmt: skip
        engine, _ = build_engine_on(config, events.append, self._model.to(device), self._info)
        outputs = generate(engine, requests)
        if errors := [output.error for output in outputs if output.error]:
            raise RuntimeError(f"a step failed on {device}: {errors[0]}")
        return outputs, [event for event in events if isinstance(event, StepRecord)]


def make_requests(
    vocab_size: int, num: int, num_prompt: int, num_output: int, *, first: int = 0
) -> list[SequenceRequest]:
    """Seeded prompts of about `num_prompt` tokens; every other request is sampled with a seed."""
    rng = Random(first)
    return [
        SequenceRequest(
            seq_id=first + i,
            prompt_ids=tuple(rng.randrange(vocab_size) for _ in range(max(1, num_prompt - i % 7))),
            sampling=SamplingParams(max_tokens=num_output, temperature=float(i % 2), seed=i, ignore_eos=True),
        )
        for i in range(num)
    ]


def compare(requests: list[SequenceRequest], a: list[Output], b: list[Output]) -> Comparison:
    """`a` is the reference: its logprobs decide what a tie is."""
    tokens = ties = flips = wrong = 0
    difference = 0.0
    for request, x, y in zip(requests, a, b, strict=True):
        pairs = list(zip(x.token_ids, y.token_ids, strict=True))
        same = next((i for i, (t, u) in enumerate(pairs) if t != u), len(pairs))
        tokens += min(same + 1, len(pairs))
        difference = max([difference, *(abs(x.logprobs[i] - y.logprobs[i]) for i in range(same))])
        if same == len(pairs):
            continue
        if not request.sampling.is_greedy:
            flips += 1
            continue
        first = sum(x.top_k[:same])
        best, runner_up = x.top_logprobs[first : first + 2]
        is_tie = best - runner_up < MARGIN
        ties, wrong = ties + is_tie, wrong + (not is_tie)
    return Comparison(tokens, ties, flips, wrong, difference)


def check_against_cpu(device: str) -> Comparison:
    """float32 on the device, eager, against float32 on the CPU."""
    bench = Bench(SMALL, "float32")
    requests = make_requests(SMALL.vocab_size, 8, 40, 32)
    expected, _ = bench.run("cpu", requests)
    return compare(requests, expected, bench.run(device, requests)[0])


def check_graph(device: str) -> tuple[Comparison, int]:
    """Padded and, on CUDA, captured decode steps against eager ones; also the number of steps that were padded."""
    bench = Bench(SMALL, "float32")
    requests = make_requests(SMALL.vocab_size, 11, 40, 32)
    expected, _ = bench.run(device, requests)
    got, records = bench.run(device, requests, decode_buckets=BUCKETS)
    return compare(requests, expected, got), sum(record.graph_bucket is not None for record in records)


def measure(device: str, shape: Shape, batch_sizes: tuple[int, ...], num_output: int) -> dict[str, float]:
    """Output tokens per second of bfloat16 decode steps (median step), eager and padded, by batch size."""
    bench = Bench(shape, "bfloat16")
    figures = {}
    for mode, settings in (("eager", {}), ("graph", {"decode_buckets": BUCKETS})):
        for size in batch_sizes:
            requests = make_requests(shape.vocab_size, size, 64, num_output)
            _, records = bench.run(device, requests, **settings)
            full = [record for record in records if record.chunk_is_prefill == (False,) * size]
            durations = sorted(record.end_ns - record.start_ns for record in full)
            figures[f"{mode}_{size}_tokens_per_second"] = round(size * 1e9 / durations[len(durations) // 2], 1)
    return figures


def run_checks(device: str, shape: Shape, batch_sizes: tuple[int, ...], num_output: int) -> tuple[bool, dict[str, Any]]:
    """All three parts; whether they passed, and what to keep."""
    started = time.monotonic()
    with_cpu = check_against_cpu(device)
    _say("against the CPU", with_cpu)
    with_eager, num_padded = check_graph(device)
    _say(f"graph against eager ({num_padded} steps padded)", with_eager)
    figures = measure(device, shape, batch_sizes, num_output)
    for name, value in figures.items():
        print(f"{name.replace('_', ' ')}: {value}", file=sys.stderr)
    has_passed = with_cpu.has_passed and with_eager.has_passed and num_padded > 0
    return has_passed, {
        "commit": _commit(),
        "machine": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "tokens_compared": with_cpu.num_tokens + with_eager.num_tokens,
        "ties": with_cpu.num_ties + with_eager.num_ties,
        "seeded_flips": with_cpu.num_flips + with_eager.num_flips,
        "max_logprob_difference": max(with_cpu.max_difference, with_eager.max_difference),
        "seconds": round(time.monotonic() - started, 1),
        **figures,
    }


def main(arguments: list[str] | None = None) -> int:
    """Runs the checks; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        print(f"no CUDA device here (torch {torch.__version__}, {build}): nothing was checked", file=sys.stderr)
        return 4
    on_gpu = options.device == "cuda"
    has_passed, status = run_checks(options.device, SMOLLM2 if on_gpu else SMALL, (1, 16, 64) if on_gpu else (1, 4), 64)
    print("passed" if has_passed else "FAILED", file=sys.stderr)
    if has_passed and on_gpu:
        STATUS.write_text(json.dumps(status, indent=2) + "\n", encoding="utf-8")
        print(f"kept in {STATUS.relative_to(ROOT)}; 'make docs' puts it on the page", file=sys.stderr)
    print(json.dumps({"benchmark": "gpu_check", "device": options.device, "passed": has_passed, **status}))
    return 0 if has_passed else 1


def _say(what: str, comparison: Comparison) -> None:
    print(
        f"{what}: {'ok' if comparison.has_passed else 'FAILED'}, {comparison.num_tokens} tokens, "
        f"{comparison.num_wrong} wrong, {comparison.num_ties} ties, {comparison.num_flips} seeded flips, "
        f"largest logprob difference {comparison.max_difference:.1e}",
        file=sys.stderr,
    )


def _commit() -> str:
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
