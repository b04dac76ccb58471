"""Seeded mixed load with clients that leave at random: every request ends once, and nothing is left."""

from __future__ import annotations

import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving_events import Heard

from inferdbg.engine.core.events import StepRecord
from inferdbg.engine.serving.events import Arrived, Boundaries, Closed, EndKind, Rejected, stages_of

NUM_CLIENTS = 8
NUM_REQUESTS = 25  # per client


def body_of(draw: random.Random) -> dict:
    body = {
        "prompt": draw.choice(
            ["the quick brown fox", "museum placard: oil on canvas", [60 + draw.randrange(200)] * 40]
        ),
        "max_tokens": draw.randrange(1, 120),
        "n": draw.choice([1, 1, 2, 3]),
        "stream": draw.random() < 0.6,
        "stop": draw.choice([None, "brown", ["vas", "lazy"]]),
    }
    if draw.random() < 0.1:
        body["temperature"] = -1  # refused
    return body


def one_request(port: int, draw: random.Random) -> str:
    """Sends a request and reads its answer, or leaves at a random moment; returns which."""
    raw = json.dumps(body_of(draw)).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(raw)}\r\n\r\n".encode()
    )
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        if draw.random() < 0.1:
            sock.sendall((head + raw)[: draw.randrange(len(head), len(head) + len(raw))])
            return "left"
        sock.sendall(head + raw)
        leaves_after = draw.choice([None, None, 0, 1, 3])
        num_reads = 0
        while leaves_after is None or num_reads < leaves_after:
            if not sock.recv(4096):
                return "answered"
            num_reads += 1
    return "left"


def boundaries_of(boundaries: Boundaries) -> list[int]:
    names = (
        "received_ns", "parsed_ns", "tokenized_ns", "admitted_ns", "first_token_ns", "last_token_ns", "text_ready_ns",
        "sent_ns",
    )  # fmt: skip
    return [value for name in names if (value := getattr(boundaries, name)) is not None]


@pytest.mark.parametrize("seed", [1, 2])
def test_every_request_ends_once_and_nothing_is_left(start_server, monkeypatch, seed):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.001")
    heard = Heard()
    # few pages and little credit: preemptions and pauses happen
    server = start_server(heard, core={"num_pages": 20, "client_credit": 16, "max_num_seqs": 6, "token_budget": 64})

    def client(number):
        draw = random.Random(seed * 1000 + number)
        return [one_request(server.port, draw) for _ in range(NUM_REQUESTS)]

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        results = [result for results in pool.map(client, range(NUM_CLIENTS)) for result in results]
    num_requests = NUM_CLIENTS * NUM_REQUESTS
    assert len(results) == num_requests
    heard.wait(lambda heard: len(heard.of(Closed)) + len(heard.of(Rejected)) == num_requests)
    heard.wait(lambda heard: heard.of(StepRecord)[-1].pages_used == 0)
    assert server.call(lambda: server.running.front.num_requests) == 0
    assert server.call(lambda: server.running.front.supervisor.dispatcher.num_live) == 0

    arrived, closed = heard.of(Arrived), heard.of(Closed)
    assert sorted(a.request_id for a in arrived) == sorted(c.request_id for c in closed)
    assert len({c.request_id for c in closed} | {r.request_id for r in heard.of(Rejected)}) == num_requests
    ends = {kind: sum(c.end is kind for c in closed) for kind in EndKind}
    assert ends[EndKind.FINISHED] > 0
    assert ends[EndKind.ABORTED] > 0
    assert ends[EndKind.FAILED] == ends[EndKind.REJECTED] == 0
    assert any(record.preempted_seq_ids for record in heard.of(StepRecord))
    sampled = {}
    for record in heard.of(StepRecord):
        for seq_id, token_id in zip(record.sampled_seq_ids, record.sampled_ids, strict=True):
            sampled.setdefault(seq_id, []).append(token_id)
    for request in closed:
        for part in (request.boundaries, *(choice.boundaries for choice in request.choices)):
            times = boundaries_of(part)
            assert times == sorted(times)
        stages = stages_of(request.boundaries, request.closed_ns)
        assert sum(s.end_ns - s.start_ns for s in stages) == request.closed_ns - request.boundaries.received_ns
        for choice in request.choices:
            # the record is what the core sampled, up to the stop or the abort
            assert list(choice.output_ids) == sampled.get(choice.seq_id, [])[: len(choice.output_ids)]
            if request.end is EndKind.FINISHED:
                assert choice.finish_reason is not None
