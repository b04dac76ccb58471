"""What happens when clients leave or stall, when the core dies or hangs, and when the server is stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest
from serving_events import Heard
from serving_models import write_tokenizer

from inferdbg.engine.config import CoreConfig, FrontConfig
from inferdbg.engine.core.events import FinishReason, StepRecord
from inferdbg.engine.errors import EnvironmentLacks, ModelError, UsageError
from inferdbg.engine.serving.events import Arrived, Closed, CoreStarted, EndKind, EngineLost, Rejected, stages_of
from inferdbg.engine.serving.server import Server, ServerHandle


@pytest.fixture
def heard():
    return Heard()


@pytest.fixture
def slow_steps(monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.01")


def completion(server, prompt="the quick brown fox", timeout=30, **fields):
    return httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt, **fields}, timeout=timeout)


def open_request(server, rcvbuf=None, path="/v1/completions", **fields):
    """Sends a request on a raw socket and returns it."""
    sock = socket.socket()
    if rcvbuf:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
    sock.settimeout(20)
    sock.connect(("127.0.0.1", server.port))
    body = json.dumps({"prompt": "the quick brown fox", **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def template_processes(parent):
    return [child for child in parent.children() if "template_process" in " ".join(child.cmdline())]


def assert_idle(server, heard):
    """No page is held, no sequence runs, no request is kept."""
    response = completion(server, max_tokens=1)  # makes a step, which tells
    assert response.status_code == 200
    heard.wait(lambda heard: heard.of(StepRecord)[-1].num_running == 0 and heard.of(StepRecord)[-1].pages_used == 0)
    assert server.call(lambda: server.running.front.num_requests) == 0
    assert server.call(lambda: server.running.front.supervisor.dispatcher.num_live) == 0


def test_a_finished_request_is_recorded_once_and_its_stages_add_up(start_server, heard):
    server = start_server(heard)
    response = completion(server, max_tokens=6, logprobs=1)
    (closed,) = heard.wait_for(Closed)
    (arrived,) = heard.of(Arrived)
    choice = closed.choices[0]
    assert closed.end is EndKind.FINISHED
    assert closed.status == 200
    assert closed.arrived is arrived
    assert response.json()["id"] == closed.request_id == response.headers["x-request-id"]
    assert arrived.seq_ids == (choice.seq_id,)
    assert len(choice.output_ids) == len(choice.token_steps) == len(choice.token_times_ns) == 6
    assert choice.output_text == response.json()["choices"][0]["text"]
    assert choice.finish_reason is FinishReason.LENGTH
    stages = stages_of(closed.boundaries, closed.closed_ns)
    assert [stage.name for stage in stages] == [
        "io.receive", "tokenize", "schedule", "prefill", "decode", "detokenize", "io.send",
    ]  # fmt: skip
    assert sum(s.end_ns - s.start_ns for s in stages) == closed.closed_ns - closed.boundaries.received_ns
    assert closed.bytes_out == len(response.content)
    assert closed.busy.tokenize_ns > 0
    assert closed.busy.detokenize_ns > 0
    assert closed.busy.send_ns > 0
    times = [closed.boundaries.text_ready_ns, closed.first_byte_ns, closed.boundaries.sent_ns, closed.closed_ns]
    assert times == sorted(times)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.usefixtures("slow_steps")
def test_a_client_that_vanishes_frees_its_pages_in_the_next_step(start_server, heard, stream):
    server = start_server(heard)
    sock = open_request(server, stream=stream, max_tokens=2000)
    heard.wait(lambda heard: any(r.sampled_seq_ids for r in heard.of(StepRecord)))
    sock.close()
    (closed,) = heard.wait_for(Closed)
    assert closed.end is EndKind.ABORTED
    assert closed.error_type == "client_closed"
    assert closed.choices[0].finish_reason is None
    assert 0 < len(closed.choices[0].output_ids) < 2000
    heard.wait(lambda heard: any(FinishReason.ABORT in r.finished_reasons for r in heard.of(StepRecord)))
    # the abort costs at most the step that was under way: its record shows the pages free
    ended = next(r for r in heard.of(StepRecord) if FinishReason.ABORT in r.finished_reasons)
    assert ended.pages_used == 0
    assert_idle(server, heard)


def test_a_client_that_leaves_before_its_body_is_complete_is_counted(start_server, heard):
    server = start_server(heard)
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        server.call(lambda: None)
    (rejected,) = heard.wait_for(Rejected)
    assert (rejected.end, rejected.status, rejected.reason) == (EndKind.ABORTED, 499, "client_closed")
    assert [stage.name for stage in rejected.stages] == ["io.receive"]
    assert not heard.of(Arrived)


def test_a_client_that_leaves_while_its_prompt_is_tokenized_never_reaches_the_core(start_server, heard):
    server = start_server(heard, front={"tokenizer_threads": 1})
    release = threading.Event()
    pool = server.running.front.pool
    server.call(lambda: pool._pool.submit(release.wait, 20))  # the only thread is taken
    sock = open_request(server, max_tokens=5)
    server.call(lambda: None)
    deadline = time.monotonic() + 10
    while server.call(lambda: pool._pool._work_queue.qsize()) == 0:
        assert time.monotonic() < deadline
    sock.close()
    (rejected,) = heard.wait_for(Rejected)
    release.set()
    assert (rejected.end, rejected.status, rejected.reason) == (EndKind.ABORTED, 499, "client_closed")
    assert [stage.name for stage in rejected.stages] == ["io.receive", "tokenize"]
    assert sum(s.end_ns - s.start_ns for s in rejected.stages) == rejected.closed_ns - rejected.time_ns
    assert not heard.of(Arrived)
    assert_idle(server, heard)


def test_a_slow_reader_is_paused_and_then_dropped_while_others_go_on(start_server, heard):
    # a reader that takes nothing: the kernel's and the transport's buffers fill, then credit runs out
    server = start_server(heard, core={"client_credit": 64}, front={"slow_client_seconds": 1.0})
    sock = open_request(server, rcvbuf=4096, stream=True, max_tokens=4000, return_token_ids=True, n=2, logprobs=2)
    assert completion(server, max_tokens=20).status_code == 200
    heard.wait(lambda heard: any(c.end is EndKind.ABORTED for c in heard.of(Closed)))
    closed = next(c for c in heard.of(Closed) if c.end is EndKind.ABORTED)
    assert "took no bytes" in closed.error
    assert closed.error_type == "slow_client"
    num_tokens = [len(choice.output_ids) for choice in closed.choices]
    assert max(num_tokens) < 3999
    # what lies in buffers, and the credit: nothing was generated that nobody could take
    assert all(n <= closed.bytes_out / 300 + 64 + 64 for n in num_tokens)
    with sock:
        try:
            while sock.recv(1 << 16):  # what was under way, and then the end
                pass
        except ConnectionResetError:
            pass  # as good an end
    assert_idle(server, heard)


def test_a_reader_that_resumes_gets_everything(start_server, heard):
    server = start_server(heard, core={"client_credit": 16}, front={"slow_client_seconds": 20})
    sock = open_request(server, rcvbuf=4096, stream=True, max_tokens=3000, return_token_ids=True)
    heard.wait(lambda heard: len(heard.of(StepRecord)) > 200)
    data = b""
    while b"[DONE]" not in data:
        data += sock.recv(1 << 16)
    sock.close()
    (closed,) = heard.wait_for(Closed)
    assert closed.end is EndKind.FINISHED
    assert len(closed.choices[0].output_ids) == 3000
    assert_idle(server, heard)


def test_a_killed_core_fails_its_requests_and_is_restarted_once(start_server, heard, caplog):
    server = start_server(heard)
    (first,) = heard.of(CoreStarted)
    failed = completion(server, "the quick <die> brown", max_tokens=50)
    assert failed.status_code == 503
    assert "killed by signal 9" in failed.json()["error"]["message"]
    heard.wait_for(CoreStarted, 2)
    second = heard.of(CoreStarted)[1]
    assert second.incarnation == first.incarnation + 1
    assert second.pid != first.pid
    assert httpx.get(server.url + "/health").status_code == 200
    assert_idle(server, heard)
    (closed,) = [c for c in heard.of(Closed) if c.end is EndKind.FAILED]
    (lost,) = heard.of(EngineLost)
    assert lost.request_ids == (closed.request_id,)
    assert closed.error_type == "engine_lost"
    assert heard.events.index(lost) < heard.events.index(closed)

    os.kill(second.pid, signal.SIGKILL)
    heard.wait_for(EngineLost, 2)
    health = httpx.get(server.url + "/health")
    assert health.status_code == 503
    assert "will not be restarted" in health.json()["reason"]
    assert completion(server).status_code == 503
    assert heard.of(Rejected)[-1].reason == "unavailable"
    assert len(heard.of(CoreStarted)) == 2
    told = [record.getMessage() for record in caplog.records if "killed by signal 9" in record.getMessage()]
    assert ["is being restarted" in line for line in told] == [True, False]
    assert "will not be restarted (0 requests in flight failed)" in told[1]


def test_a_stream_ends_with_an_error_when_the_core_dies(start_server, heard):
    server = start_server(heard)
    response = completion(server, "the quick <die> brown", max_tokens=50, stream=True)
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "engine_lost"
    (closed,) = heard.wait_for(Closed)
    assert closed.end is EndKind.FAILED
    assert closed.choices[0].output_text == "the quick "


def test_a_hanging_core_is_found_its_requests_fail_and_it_is_replaced(start_server, heard):
    server = start_server(heard, front={"stall_seconds": 0.5})
    pid = heard.of(CoreStarted)[0].pid
    failed = completion(server, "the <hang>", max_tokens=50)
    assert failed.status_code == 503
    assert "hangs" in failed.json()["error"]["message"]
    assert "no step ended" in heard.of(EngineLost)[0].reason
    heard.wait_for(CoreStarted, 2)
    assert not psutil.pid_exists(pid)
    assert_idle(server, heard)


def test_a_paused_sequence_is_no_hang(start_server, heard):
    server = start_server(heard, core={"client_credit": 4}, front={"stall_seconds": 0.3, "slow_client_seconds": 2.0})
    sock = open_request(server, rcvbuf=4096, stream=True, max_tokens=4000, return_token_ids=True, n=2, logprobs=2)
    heard.wait_for(Closed)  # as slow, long after the stall's time
    sock.close()
    assert not heard.of(EngineLost)


def test_a_step_that_raises_fails_its_requests_and_nothing_else(start_server, heard):
    server = start_server(heard)
    failed = completion(server, "a <raise>", max_tokens=50)
    assert failed.status_code == 500
    assert failed.json()["error"]["code"] == "engine_error"
    assert_idle(server, heard)
    assert [c.end for c in heard.of(Closed)] == [EndKind.FAILED, EndKind.FINISHED]


def test_a_core_whose_every_step_raises_is_replaced(start_server, heard):
    server = start_server(heard)
    for _ in range(7):
        assert completion(server, "<raise>").status_code == 500
    assert completion(server, max_tokens=1).status_code == 200  # so it is not every step
    for _ in range(8):
        assert not heard.of(EngineLost)
        assert completion(server, "<raise>").status_code == 500
    (lost,) = heard.wait_for(EngineLost)
    assert "every step of the engine core fails" in lost.reason
    heard.wait_for(CoreStarted, 2)
    assert_idle(server, heard)


@pytest.mark.parametrize("stream", [True, False])
def test_a_fault_of_ours_is_a_500_and_still_ends_the_request_once(start_server, heard, monkeypatch, stream):
    server = start_server(heard)

    def broken(self, token_id):
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as patched:
        patched.setattr("inferdbg.engine.serving.tokenize.Vocabulary.token_bytes", broken)
        response = completion(server, logprobs=1, stream=stream)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "planted" not in response.text
    (closed,) = heard.wait_for(Closed)
    assert (closed.end, closed.status, closed.error_type) == (EndKind.FAILED, 500, "internal_error")
    assert_idle(server, heard)


def test_a_fault_of_ours_before_acceptance_is_a_failure_and_no_rejection(start_server, heard, monkeypatch):
    server = start_server(heard)

    def broken(self, prompt):
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as patched:
        patched.setattr("inferdbg.engine.serving.tokenize.Vocabulary.encode", broken)
        response = completion(server)
    assert response.status_code == 500
    (rejected,) = heard.wait_for(Rejected)
    assert (rejected.end, rejected.status, rejected.reason) == (EndKind.FAILED, 500, "internal_error")
    assert not heard.of(Arrived)
    assert_idle(server, heard)


def test_an_observer_that_throws_breaks_nothing_and_is_counted(start_server):
    def broken(event):
        raise RuntimeError("no")

    server = start_server(broken)
    assert completion(server).status_code == 200
    guard = server.running.front.observer
    assert guard.num_errors > 2
    assert "RuntimeError" in guard.last_error


@pytest.mark.usefixtures("slow_steps")
def test_a_request_that_is_cancelled_with_the_server_is_not_blamed_on_its_client(start_server, heard):
    server = start_server(heard)
    sock = open_request(server, stream=True, max_tokens=2000)
    heard.wait(lambda heard: any(r.sampled_seq_ids for r in heard.of(StepRecord)))

    def cancel():
        for task in asyncio.all_tasks():
            if "run_asgi" in repr(task):
                task.cancel()

    server.call(cancel)
    (closed,) = heard.wait_for(Closed)
    sock.close()
    assert (closed.end, closed.error_type) == (EndKind.ABORTED, "shutdown")


@pytest.mark.usefixtures("slow_steps")
def test_a_stop_waits_for_requests_in_flight(start_server, heard):
    server = start_server(heard)
    results = []
    client = threading.Thread(target=lambda: results.append(completion(server, max_tokens=30)))
    client.start()
    heard.wait_for(Arrived)
    server.stop()
    client.join()
    assert results[0].status_code == 200
    assert heard.of(Closed)[0].end is EndKind.FINISHED


@pytest.mark.usefixtures("slow_steps")
def test_new_requests_are_refused_while_draining_and_the_rest_is_aborted(start_server, heard):
    server = start_server(heard, front={"drain_seconds": 0.6})
    sock = open_request(server, stream=True, max_tokens=3000)
    heard.wait_for(Arrived)
    with httpx.Client() as client:
        assert client.get(server.url + "/health").status_code == 200
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        deadline = time.monotonic() + 5
        while client.get(server.url + "/health").status_code == 200:
            assert time.monotonic() < deadline
        refused = client.post(server.url + "/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    data = b""
    while chunk := sock.recv(1 << 16):
        data += chunk
    stopping.join()
    sock.close()
    assert b'"code":"shutdown"' in data
    (closed,) = heard.of(Closed)
    assert closed.end is EndKind.ABORTED
    assert closed.error_type == "shutdown"


def test_the_core_ends_with_the_server(start_server, heard):
    server = start_server(heard)
    pid = heard.of(CoreStarted)[0].pid
    renderers = template_processes(psutil.Process())
    assert renderers
    server.stop()
    assert not psutil.pid_exists(pid)
    assert not any(psutil.pid_exists(renderer.pid) for renderer in renderers)


def test_an_invalid_chat_template_is_said_before_anything_is_loaded(start_server, tmp_path, tokenizer):
    write_tokenizer(tmp_path, tokenizer, template="{% for %}")
    with pytest.raises(ModelError, match="chat template is not valid"):
        start_server(model_dir=tmp_path, engine_factory="absent:absent")


def test_a_port_in_use_is_said_before_anything_is_loaded(fake_model_dir):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        handle = ServerHandle(
            CoreConfig(model_dir=fake_model_dir),
            FrontConfig(model_name="m", model_dir=fake_model_dir, port=port),
            lambda event: None,
            engine_factory="absent:absent",
        )
        with pytest.raises(EnvironmentLacks, match=f"{port} cannot be bound"):
            handle.start()


def test_another_machine_needs_a_key(fake_model_dir):
    core = CoreConfig(model_dir=fake_model_dir)
    with pytest.raises(UsageError, match="api-key-file"):
        Server(core, FrontConfig(model_name="m", model_dir=fake_model_dir, host="0.0.0.0"), lambda event: None)


def test_a_model_that_cannot_be_built_is_reported_as_the_core_reports_it(start_server, tmp_path, tokenizer):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "corrupt").touch()
    with pytest.raises(ModelError, match="is corrupt"):
        start_server(model_dir=tmp_path)


def test_a_restart_that_fails_leaves_the_server_up_and_unhealthy(start_server, heard, tmp_path, tokenizer):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "start_once").touch()
    server = start_server(heard, model_dir=tmp_path)
    os.kill(heard.of(CoreStarted)[0].pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while "could not be restarted" not in (reason := httpx.get(server.url + "/health").json().get("reason", "")):
        assert time.monotonic() < deadline, reason


def test_a_checkpoint_without_a_tokenizer_is_refused(start_server, tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json is absent"):
        start_server(model_dir=tmp_path)


MAIN = """
import sys
from pathlib import Path
from inferdbg.engine.config import CoreConfig, FrontConfig
from inferdbg.engine.serving.server import serve
model = Path(sys.argv[1])
sys.exit(serve(
    CoreConfig(model_dir=model), FrontConfig(model_name="m", model_dir=model, port=0, drain_seconds=20),
    lambda event: None, engine_factory="fake_core:build",
    on_ready=lambda server: print(server.port, server.ready.pid, flush=True),
))
"""


@pytest.fixture
def process(fake_model_dir):
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, str(fake_model_dir)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as started:
        port, core_pid = map(int, started.stdout.readline().split())
        yield started, port, core_pid
        started.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("slow_steps")
def test_a_signal_to_the_group_drains(process, number):
    started, port, core_pid = process
    with httpx.stream(
        "POST",
        f"http://127.0.0.1:{port}/v1/completions",
        json={"prompt": "the quick brown fox", "max_tokens": 40, "stream": True},
    ) as response:
        lines = response.iter_lines()
        next(lines)
        os.killpg(started.pid, number)  # what Ctrl-C in a terminal does
        os.kill(core_pid, number)  # what a service manager does
        rest = list(lines)
    assert rest[-2] == "data: [DONE]"
    assert started.wait(10) == 0
    assert not psutil.pid_exists(core_pid)


@pytest.mark.usefixtures("slow_steps")
def test_a_second_signal_ends_at_once(process):
    started, port, _ = process
    with httpx.stream(
        "POST",
        f"http://127.0.0.1:{port}/v1/completions",
        json={"prompt": "the quick brown fox", "max_tokens": 4000, "stream": True},
    ) as response:
        lines = response.iter_lines()
        next(lines)
        started.send_signal(signal.SIGTERM)
        with httpx.Client() as client:
            while client.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                pass
        begun = time.monotonic()
        started.send_signal(signal.SIGTERM)
        assert any('"shutdown"' in line for line in lines)
    assert started.wait(10) == 0
    assert time.monotonic() - begun < 8


def test_the_core_dies_with_a_killed_front(process):
    started, _, core_pid = process
    children = [psutil.Process(core_pid), *template_processes(psutil.Process(started.pid))]
    assert len(children) == 2
    started.send_signal(signal.SIGKILL)
    started.wait(10)
    for child in children:
        assert child.wait(10) is None or not child.is_running()


def test_the_front_starts_without_torch():
    code = (
        "import sys, inferdbg.engine.serving.server, inferdbg.engine.serving.core_process;"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
