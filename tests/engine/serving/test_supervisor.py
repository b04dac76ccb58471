"""Starting, watching and replacing core processes, without a front."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time

import psutil
import pytest

from inferdbg.engine.config import CoreConfig
from inferdbg.engine.core.sampling_params import SamplingParams
from inferdbg.engine.core.sequence import SequenceRequest
from inferdbg.engine.errors import EngineUnavailable, InferdbgError
from inferdbg.engine.serving.core_client import CoreProcess
from inferdbg.engine.serving.core_process import CoreLoop
from inferdbg.engine.serving.events import CoreStarted, EngineLost
from inferdbg.engine.serving.front import GuardedObserver, LoopLag
from inferdbg.engine.serving.messages import Credit, FrontMessage, Heartbeat, Refused, Step, Submit
from inferdbg.engine.serving.supervisor import CoreSupervisor
from inferdbg.engine.serving.transport import ChannelClosed, MessageChannel, make_socket_pair

FACTORY = "fake_core:build"


@pytest.fixture
def config(fake_model_dir):
    return CoreConfig(model_dir=fake_model_dir, client_credit=4)


def sequence(seq_id=0, max_tokens=10):
    return SequenceRequest(
        seq_id=seq_id, prompt_ids=(60, 61, 62), sampling=SamplingParams(max_tokens=max_tokens, seed=1)
    )


async def until(condition, seconds=15):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def test_a_core_that_is_not_ready_in_time_is_stopped(config, monkeypatch):
    monkeypatch.setenv("FAKE_START_SECONDS", "60")

    async def run():
        process = CoreProcess(config, lambda message: None, lambda reason: None, FACTORY)
        with pytest.raises(EngineUnavailable, match="not ready within"):
            await process.start(0.5)
        return process.pid

    assert not psutil.pid_exists(asyncio.run(run()))


def test_a_core_that_dies_while_loading_is_told_at_once(config, monkeypatch):
    monkeypatch.setenv("FAKE_START_SECONDS", "60")

    async def run():
        process = CoreProcess(config, lambda message: None, lambda reason: None, FACTORY)
        starting = asyncio.create_task(process.start(30))
        await until(lambda: process.pid is not None)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailable, match="killed by signal 9"):
            await starting

    asyncio.run(run())


def test_an_unexpected_error_while_loading_keeps_its_type(config):
    async def run():
        process = CoreProcess(config, lambda message: None, lambda reason: None, "absent_module:build")
        with pytest.raises(InferdbgError, match="ModuleNotFoundError") as raised:
            await process.start(30)
        assert raised.value.exit_code == 70

    asyncio.run(run())


def test_a_paused_core_is_idle_and_goes_on_with_credit(config):
    async def run():
        messages = []
        process = CoreProcess(config, messages.append, lambda reason: None, FACTORY)
        await process.start(30)
        process.send(Submit([sequence()]))

        def tokens():
            return [t for m in messages if isinstance(m, Step) for t in m.record.sampled_ids]

        await until(lambda: len(tokens()) == 4)  # its credit
        seen = len(messages)
        await until(lambda: any(isinstance(m, Heartbeat) for m in messages[seen:]))
        beat = next(m for m in messages[seen:] if isinstance(m, Heartbeat))
        assert (beat.num_running, beat.num_waiting) == (0, 1)
        assert len(tokens()) == 4
        process.send(Credit(0, 100))
        await until(lambda: len(tokens()) == 10)
        assert tokens() == [60, 61, 62] * 3 + [60]
        await process.stop()
        assert not psutil.pid_exists(process.pid)

    asyncio.run(run())


def test_a_core_that_stops_answering_while_idle_is_replaced(config, monkeypatch):
    monkeypatch.setattr("inferdbg.engine.serving.supervisor.MIN_SILENCE_SECONDS", 1.5)

    async def run():
        events = []
        supervisor = CoreSupervisor(config, events.append, stall_seconds=0.5, engine_factory=FACTORY)
        await supervisor.start()
        os.kill(supervisor.pid, signal.SIGSTOP)
        await until(lambda: sum(isinstance(e, CoreStarted) for e in events) == 2)
        assert supervisor.problem is None
        (lost,) = [e for e in events if isinstance(e, EngineLost)]
        assert "said nothing" in lost.reason
        await supervisor.stop()
        assert "shutting down" in supervisor.problem

    asyncio.run(run())


def test_a_restart_that_the_machine_does_not_allow_leaves_the_core_down(config, monkeypatch):
    async def run():
        supervisor = CoreSupervisor(config, lambda event: None, stall_seconds=5, engine_factory=FACTORY)
        await supervisor.start()

        def no_more(*args, **kwargs):
            raise OSError(24, "Too many open files")

        monkeypatch.setattr("inferdbg.engine.serving.core_client.subprocess.Popen", no_more)
        os.kill(supervisor.pid, signal.SIGKILL)
        await until(lambda: "could not be restarted" in (supervisor.problem or ""))
        assert "Too many open files" in supervisor.problem
        await supervisor.stop()

    asyncio.run(run())


class IdleEngine:
    """Has nothing to do, and counts how often it was asked."""

    num_running = num_waiting = num_asked = 0

    @property
    def has_work(self):
        self.num_asked += 1
        return False


def test_an_idle_core_whose_front_does_not_read_waits():
    ours, theirs = make_socket_pair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    channel = MessageChannel(theirs, FrontMessage)
    loop = CoreLoop(channel, heartbeat_seconds=0.05)
    channel.send(Refused(0, "x" * (4 << 20)))
    assert channel.has_unsent
    engine = IdleEngine()

    def run():
        with contextlib.suppress(ChannelClosed):
            loop.run(engine)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(0.5)
    asked = engine.num_asked
    ours.close()
    thread.join(10)
    theirs.close()
    assert 4 <= asked < 60


def test_a_lost_page_is_found_when_the_core_falls_idle(config, monkeypatch):
    monkeypatch.setenv("FAKE_LOSES_PAGES", "1")

    async def run():
        messages, ends = [], []
        process = CoreProcess(config, messages.append, ends.append, FACTORY)
        await process.start(30)
        process.send(Submit([sequence(max_tokens=2)]))
        await until(lambda: bool(ends))
        await process.kill()
        return ends

    assert asyncio.run(run()) == ["it exited with code 1"]


def test_a_stop_while_the_core_is_loading_leaves_no_process(config, monkeypatch):
    monkeypatch.setenv("FAKE_START_SECONDS", "60")

    async def run():
        supervisor = CoreSupervisor(config, lambda event: None, stall_seconds=5, engine_factory=FACTORY)
        starting = asyncio.create_task(supervisor.start())
        await until(lambda: supervisor.pid is not None)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await supervisor.stop()
        assert not psutil.pid_exists(supervisor.pid)

    asyncio.run(run())


def test_the_loops_lag_is_what_held_it_up():
    async def run():
        lag = LoopLag()
        measuring = asyncio.create_task(lag.run())
        await asyncio.sleep(0.01)
        time.sleep(0.2)  # noqa: ASYNC251 - the fault that is to be seen
        await until(lambda: lag.last_ns > 0)
        measuring.cancel()
        return lag.last_ns

    assert 100e6 < asyncio.run(run()) < 2e9


def test_an_observers_errors_are_counted_and_the_first_is_logged(caplog):
    def broken(event):
        raise KeyError("x")

    guard = GuardedObserver(broken)
    for _ in range(3):
        guard(EngineLost(incarnation=0, time_ns=1, reason="r", request_ids=()))
    assert guard.num_errors == 3
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "EngineLost" in caplog.text
    assert "KeyError" in caplog.text
    assert guard.last_error == "KeyError on EngineLost: 'x'"
