"""A soak: mixed load with random disconnects on a server that is short of pages; nothing may leak or go unexplained."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import httpx

from benchmarks.common import log
from benchmarks.servers import Server, inferdbg_server
from benchmarks.serving import model_name, random_prompt

__all__ = ["soak"]

NUM_CLIENTS = 12
NUM_PAGES = 80  # so few that running sequences take pages from one another
FLAGS = ("--num-pages", str(NUM_PAGES), "--page-size", "16", "--max-num-seqs", "8", "--token-budget", "256")


def _body(random: Random, model: str, shared: list[int]) -> tuple[str, dict[str, object]]:
    body: dict[str, object] = {
        "model": model,
        "max_tokens": random.randrange(1, 160),
        "temperature": random.choice([0, 0.7, 1.0]),
        "stream": random.random() < 0.7,
        "n": random.choice([1, 1, 1, 2]),
        "ignore_eos": random.random() < 0.5,
    }
    if random.random() < 0.4:
        text = " ".join(random.choice(["bronze", "vase", "why", "court", "river", "blue"]) for _ in range(20))
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
    prefix = shared[: random.randrange(len(shared))] if random.random() < 0.5 else []
    return "/v1/completions", body | {"prompt": prefix + random_prompt(random, random.randrange(1, 300))}


async def _client(url: str, model: str, seed: int, deadline: float, seen: Counter[str]) -> None:
    random = Random(seed)
    shared = random_prompt(Random(0), 256)
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        while time.monotonic() < deadline:
            path, body = _body(random, model, shared)
            patience = random.expovariate(1 / 3.0) if random.random() < 0.35 else 300.0
            try:
                async with asyncio.timeout(patience), http.stream("POST", path, json=body) as response:
                    await response.aread()
                    seen[str(response.status_code)] += 1
            except TimeoutError:
                seen["disconnected"] += 1


async def _load(url: str, model: str, seconds: float) -> Counter[str]:
    seen: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    await asyncio.gather(*(_client(url, model, seed, deadline, seen) for seed in range(NUM_CLIENTS)))
    return seen


def _drained(server: Server) -> None:
    deadline = time.monotonic() + 60
    while server.metric("inferdbg_requests_in_flight") or server.metric("inferdbg_pages", state="used"):
        if time.monotonic() > deadline:
            raise RuntimeError("pages or requests are still held a minute after the last client left")
        time.sleep(0.5)


def soak(model: Path, *, seconds: float) -> dict[str, Any]:
    """Runs the load for `seconds`, waits for the server to be idle, then counts.

    Raises:
        RuntimeError: a page leaked, or a request did not end exactly once.
    """
    with contextlib.ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        with inferdbg_server(model, "--trace", "--run-dir", str(run_dir), *FLAGS) as server:
            seen = asyncio.run(_load(server.url, model_name(server.url), seconds))
            log(f"clients saw {dict(seen)}")
            _drained(server)
            arrived = server.metric("inferdbg_requests_arrived_total")
            rejected = server.metric("inferdbg_requests_closed_total", end="rejected")
            closed = server.metric("inferdbg_requests_closed_total") - rejected
            pages = {s: int(server.metric("inferdbg_pages", state=s)) for s in ("free", "used", "cached")}
            preemptions = int(server.metric("inferdbg_preemptions_total"))
        show = [sys.executable, "-m", "inferdbg.cli.main", "show", str(run_dir), "--json"]
        run = json.loads(subprocess.run(show, capture_output=True, text=True, check=True).stdout)
    leaked = NUM_PAGES - sum(pages.values()) + pages["used"]
    unexplained = arrived - closed + run["in_flight"]
    recorded = sum(run["ends"].values()) - run["ends"].get("rejected", 0)
    if leaked or unexplained or recorded != closed:
        raise RuntimeError(
            f"{leaked} pages leaked, {unexplained:.0f} ends unexplained, {recorded} of {closed:.0f} ends on record"
        )
    return {
        "seconds": seconds,
        "clients": NUM_CLIENTS,
        "seen_by_clients": dict(seen),
        "ends": run["ends"],
        "preemptions": preemptions,
        "leaked_pages": leaked,
        "unexplained_ends": int(unexplained),
        "pages": pages,
        "dropped": run["dropped"],
    }
