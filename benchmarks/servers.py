"""Starts the servers that are measured, each as its users start it, and stops them by the handle it holds."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common import log

__all__ = ["Server", "free_port", "inferdbg_server", "vllm_server"]


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers."""

    url: str
    pid: int

    def cpu_seconds(self) -> float:
        """User and system seconds of the process and its children so far."""
        process = psutil.Process(self.pid)
        times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
        return sum(t.user + t.system for t in times)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry `labels`."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            families = list(text_string_to_metric_families(response.read().decode()))
        samples = [s for f in families for s in f.samples if s.name == name]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _running(name: str, command: Sequence[str], port: int, env: dict[str, str], seconds: float) -> Iterator[Server]:
    url = f"http://127.0.0.1:{port}"
    log(f"starting {name} at {url}")
    process = subprocess.Popen(command, env={**os.environ, **env}, stdout=sys.stderr, stderr=sys.stderr)
    try:
        deadline = time.monotonic() + seconds
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with {process.returncode} before it was healthy")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} was not healthy after {seconds:.0f} s")
            time.sleep(0.2)
        yield Server(url, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def inferdbg_server(model: Path, *flags: str) -> Iterator[Server]:
    """`inferdbg serve` on a free port."""
    port = free_port()
    command = [sys.executable, "-m", "inferdbg.cli.main", "serve", "--model", str(model), "--port", str(port), *flags]
    with _running("inferdbg", command, port, {}, 120) as server:
        yield server


@contextlib.contextmanager
def vllm_server(python: Path, model: Path) -> Iterator[Server]:
    """vLLM's CPU build out of another environment (see benchmarks/README.md)."""
    port = free_port()
    command = [
        str(python.with_name("vllm")), "serve", str(model), "--served-model-name", "smollm2", "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "16",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip
    env = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
    env["VLLM_LOGGING_LEVEL"] = "WARNING"
    env["PATH"] = f"{python.parent}:{os.environ['PATH']}"
    with _running("vLLM", command, port, env, 400) as server:
        yield server
