"""A light streaming client for OpenAI-compatible servers, run in a process of its own.

It shares the machine with the server it measures, so it does as little as it can: raw HTTP/1.1 over asyncio
streams, no JSON parsing per chunk; it says how much CPU it used itself.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

__all__ = ["Answer", "Outcome", "run_client"]


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it, in seconds from its first byte out."""

    ttft: float
    e2e: float
    chunks: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """All requests of one load, plus the wall time from the first sent to the last answered."""

    wall: float
    client_cpu: float
    answers: list[Answer]

    @property
    def output_tokens_per_second(self) -> float:
        return sum(a.output_tokens for a in self.answers) / self.wall


async def _request(url: str, body: dict[str, object]) -> Answer:
    parts = urlsplit(url)
    payload = json.dumps(body).encode()
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(
        f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode()
        + payload
    )
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{url} answered {status!r} {(await reader.read())[:500]!r}")
    first = 0.0
    chunks = 0
    tokens = 0
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        if b'"usage":{' in line or b'"usage": {' in line:
            usage = json.loads(line[6:])["usage"]
            tokens = usage["completion_tokens"]
            if not json.loads(line[6:]).get("choices"):
                continue
        chunks += 1
        first = first or time.perf_counter() - start
    writer.close()
    return Answer(first, time.perf_counter() - start, chunks, tokens)


async def _load(url: str, bodies: list[dict[str, object]], concurrency: int) -> Outcome:
    gate = asyncio.Semaphore(concurrency)

    async def one(body: dict[str, object]) -> Answer:
        async with gate:
            return await _request(url, body)

    start = time.perf_counter()
    answers = await asyncio.gather(*(one(body) for body in bodies))
    wall = time.perf_counter() - start
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Outcome(wall, usage.ru_utime + usage.ru_stime, list(answers))


async def run_client(url: str, bodies: list[dict[str, object]], concurrency: int) -> Outcome:
    """Sends `bodies` to `url`, at most `concurrency` at a time, from a child process."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.client", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate(json.dumps({"url": url, "bodies": bodies, "concurrency": concurrency}).encode())
    if child.returncode:
        raise RuntimeError(f"the load client ended with {child.returncode}")
    data = json.loads(out)
    return Outcome(data["wall"], data["client_cpu"], [Answer(**answer) for answer in data["answers"]])


if __name__ == "__main__":
    order = json.load(sys.stdin)
    json.dump(asdict(asyncio.run(_load(order["url"], order["bodies"], order["concurrency"]))), sys.stdout)
