"""Serving SmolLM2 through HTTP: throughput, one stream, first token; against transformers and vLLM's CPU build.

Rounds are interleaved (ours, transformers, vLLM, ours, …) and the ratios are taken pair by pair.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import urllib.request
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.client import Outcome, run_client
from benchmarks.common import bootstrap_ratio, log
from benchmarks.servers import inferdbg_server, vllm_server

__all__ = [
    "CONCURRENCY",
    "NUM_REQUESTS",
    "OUTPUT_TOKENS",
    "PROMPT_TOKENS",
    "completion_body",
    "model_name",
    "random_prompt",
    "serving",
]

NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS, CONCURRENCY = 64, 128, 64, 16
TTFT_PROMPT_TOKENS, STREAM_TOKENS, VOCABULARY = 512, 128, 49_000


def random_prompt(random: Random, length: int) -> list[int]:
    """Token ids that no earlier prompt began with."""
    return [random.randrange(100, VOCABULARY) for _ in range(length)]


def completion_body(model: str, prompt: list[int], max_tokens: int) -> dict[str, object]:
    """A streamed greedy completion of exactly `max_tokens` tokens."""
    return {
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


def model_name(url: str) -> str:
    """The id under which the server offers its model."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
        return str(json.load(response)["data"][0]["id"])


class _Measured:
    """One server under measurement; every prompt is new, so no prefix is ever found."""

    def __init__(self, name: str, url: str, random: Random) -> None:
        self.name, self.url, self.random = name, url, random
        self.model = model_name(url)
        self.figures: dict[str, list[float]] = {"throughput": [], "stream": [], "ttft": [], "client_cpu": []}

    def _run(self, count: int, prompt: int, output: int, concurrency: int) -> Outcome:
        bodies = [completion_body(self.model, random_prompt(self.random, prompt), output) for _ in range(count)]
        return asyncio.run(run_client(f"{self.url}/v1/completions", bodies, concurrency))

    def warm_up(self) -> None:
        self._run(CONCURRENCY, PROMPT_TOKENS, 4, CONCURRENCY)
        self._run(1, TTFT_PROMPT_TOKENS, 2, 1)

    def round(self) -> None:
        burst = self._run(NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS, CONCURRENCY)
        if (got := sum(a.output_tokens for a in burst.answers)) != NUM_REQUESTS * OUTPUT_TOKENS:
            raise RuntimeError(f"{self.name} answered {got} tokens, {NUM_REQUESTS * OUTPUT_TOKENS} were asked for")
        self.figures["throughput"].append(burst.output_tokens_per_second)
        self.figures["client_cpu"].append(burst.client_cpu)
        for _ in range(2):
            (answer,) = self._run(1, PROMPT_TOKENS, STREAM_TOKENS, 1).answers
            self.figures["stream"].append((STREAM_TOKENS - 1) / (answer.e2e - answer.ttft))
        for _ in range(3):
            (answer,) = self._run(1, TTFT_PROMPT_TOKENS, 2, 1).answers
            self.figures["ttft"].append(answer.ttft)
        log(f"{self.name}: {burst.output_tokens_per_second:.0f} output tok/s")


def _transformers(model: Path, random: Random) -> dict[str, Any]:
    order = {
        "model": str(model), "prompts": [random_prompt(random, PROMPT_TOKENS) for _ in range(NUM_REQUESTS)],
        "max_tokens": OUTPUT_TOKENS, "concurrency": CONCURRENCY,
        "ttft_prompt": random_prompt(random, TTFT_PROMPT_TOKENS), "repeats": 3,
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.transformers_peer"]
    done = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the transformers peer failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    log(f"transformers: {result['output_tokens_per_second']:.0f} output tok/s")
    return result


def serving(model: Path, *, rounds: int, vllm: Path | None) -> dict[str, Any]:
    """Medians of every figure and their ratios to each peer; `vllm` is the python of vLLM's environment."""
    random = Random(7)
    peer_throughput: list[float] = []
    peer_ttft: list[float] = []
    with contextlib.ExitStack() as stack:
        ours = _Measured("inferdbg", stack.enter_context(inferdbg_server(model)).url, random)
        servers = [ours]
        if vllm is not None:
            servers.append(_Measured("vLLM", stack.enter_context(vllm_server(vllm, model)).url, random))
        for server in servers:
            server.warm_up()
        for _ in range(rounds):
            for server in servers:
                server.round()
            peer = _transformers(model, random)
            peer_throughput.append(peer["output_tokens_per_second"])
            peer_ttft.extend(peer["ttft_seconds"])
    figures: dict[str, Any] = {
        server.name: {name: round(statistics.median(values), 4) for name, values in server.figures.items()}
        for server in servers
    }
    figures["transformers"] = {
        "throughput": round(statistics.median(peer_throughput), 4), "ttft": round(statistics.median(peer_ttft), 4)
    }  # fmt: skip
    ratios = {
        "throughput / transformers": bootstrap_ratio(ours.figures["throughput"], peer_throughput),
        "ttft / transformers": bootstrap_ratio(ours.figures["ttft"], peer_ttft),
    }
    for server in servers[1:]:
        for name in ("throughput", "stream", "ttft"):
            ratios[f"{name} / {server.name}"] = bootstrap_ratio(ours.figures[name], server.figures[name])
    units = {"throughput": "output tokens/s", "stream": "tokens/s", "ttft": "s", "client_cpu": "s"}
    return {"workload": f"{NUM_REQUESTS} x ({PROMPT_TOKENS} -> {OUTPUT_TOKENS}), {CONCURRENCY} at a time, bf16",
            "rounds": rounds, "units": units, "figures": figures, "ratios": ratios}  # fmt: skip
