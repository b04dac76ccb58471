"""The engine core's own process: reads what the front asks, steps the engine, states what happened.

Started by `core_client.py` with one end of a socket pair and its parent's process id. Nothing here waits for the
front while there is work: a send never blocks, and a sequence out of credit is skipped by the scheduler.
Knows nothing of HTTP, text or telemetry; torch is imported by the engine factory alone.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec

from inferdbg.engine.config import CoreConfig
from inferdbg.engine.core.events import CoreEvent, CoreObserver, StepFailed
from inferdbg.engine.core.model_info import read_model_info
from inferdbg.engine.core.sequence import SequenceRequest
from inferdbg.engine.errors import InferdbgError, InvalidRequest
from inferdbg.engine.serving.messages import (
    Abort,
    Credit,
    Failed,
    FrontMessage,
    Heartbeat,
    LoadFailed,
    Ready,
    Refused,
    Shutdown,
    Step,
    Submit,
)
from inferdbg.engine.serving.transport import ChannelClosed, MessageChannel

__all__ = ["DEFAULT_ENGINE_FACTORY", "CoreLoop", "EngineFactory", "Launch", "SteppingEngine", "main"]

DEFAULT_ENGINE_FACTORY = "inferdbg.engine.core.model.build:build_engine"
HEARTBEAT_SECONDS = 1.0
MAX_CHECK_SECONDS = 0.01
LAUNCH_TIMEOUT_SECONDS = 30.0
FLUSH_TIMEOUT_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


class SteppingEngine(Protocol):
    """What the loop needs of an engine; `inferdbg.engine.core.engine.Engine` is one."""

    def add(self, request: SequenceRequest) -> None: ...

    def abort(self, seq_ids: Iterable[int]) -> None: ...

    def add_credit(self, seq_id: int, tokens: int) -> None: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    def step(self) -> object: ...

    def check_integrity(self) -> None: ...


Info = Mapping[str, str | int | float | bool | None]
EngineFactory = Callable[[CoreConfig, CoreObserver], tuple[SteppingEngine, Info]]


class Launch(msgspec.Struct, tag=True, frozen=True):
    """The first message to a core process."""

    config: CoreConfig
    engine_factory: str = DEFAULT_ENGINE_FACTORY  # "module:function", the seam for simulated and paced cores


class CoreLoop:
    """Turns messages into engine calls and engine events into messages, one step at a time."""

    def __init__(self, channel: MessageChannel[FrontMessage], heartbeat_seconds: float = HEARTBEAT_SECONDS) -> None:
        self._channel = channel
        self._heartbeat_seconds = heartbeat_seconds
        self._next_heartbeat = 0.0
        self._last_step = 0
        self._checked_step = 0
        self._stopping = False

    def observe(self, event: CoreEvent) -> None:
        """The engine's observer: sends the event at once, or leaves it to be sent with the next turn."""
        self._last_step = event.step
        self._channel.send(Failed(event) if isinstance(event, StepFailed) else Step(event))

    def run(self, engine: SteppingEngine) -> None:
        """Returns when the front says `Shutdown`; raises `ChannelClosed` when the front is gone."""
        while not self._stopping:
            timeout = 0.0 if engine.has_work else self._seconds_to_heartbeat()
            for message in self._channel.wait(timeout):
                self._apply(engine, message)
            if engine.has_work and not self._stopping:
                engine.step()
            self._beat(engine)

    def _apply(self, engine: SteppingEngine, message: FrontMessage) -> None:
        match message:
            case Submit(sequences):
                for request in sequences:
                    try:
                        engine.add(request)
                    except InvalidRequest as error:
                        self._channel.send(Refused(request.seq_id, str(error)))
            case Abort(seq_ids):
                engine.abort(seq_ids)
            case Credit(seq_id, tokens):
                engine.add_credit(seq_id, tokens)
            case Shutdown():
                self._stopping = True

    def _seconds_to_heartbeat(self) -> float:
        return max(0.0, self._next_heartbeat - time.monotonic())

    def _beat(self, engine: SteppingEngine) -> None:
        now = time.monotonic()
        if now < self._next_heartbeat:
            return
        self._next_heartbeat = now + self._heartbeat_seconds  # whatever happens: the loop waits until then
        if self._channel.has_unsent:  # a front that does not read gets no more heartbeats to queue
            return
        self._check_if_idle(engine)
        self._channel.send(Heartbeat(time.monotonic_ns(), self._last_step, engine.num_running, engine.num_waiting))

    def _check_if_idle(self, engine: SteppingEngine) -> None:
        """A lost page is found here, once per idle stretch, not as a slow decline. What it raises ends the core.

        Linear in pages; where that is felt, the next stretches go unchecked.
        """
        if self._checked_step >= self._last_step or engine.num_running or engine.num_waiting:
            return
        begun = time.monotonic()
        engine.check_integrity()
        costly = time.monotonic() - begun > MAX_CHECK_SECONDS
        self._checked_step = sys.maxsize if costly else self._last_step


def main(argv: list[str]) -> int:
    """The process: `argv` is the number of the inherited socket and the parent's process id."""
    sock = socket.socket(fileno=int(argv[0]))
    sock.set_inheritable(False)
    _die_with_parent(int(argv[1]))
    # Ctrl-C and a service manager's TERM reach the whole group; the front drains first and then says Shutdown
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        return _serve(sock)
    except ChannelClosed:
        return 0  # the front is gone, and so is everyone who could be told


def _serve(sock: socket.socket) -> int:
    launch = _receive_launch(sock)
    channel: MessageChannel[FrontMessage] = MessageChannel(sock, FrontMessage)
    loop = CoreLoop(channel)
    try:
        engine, ready = _build(launch, loop.observe)
    except InferdbgError as error:
        channel.send(LoadFailed(type(error).__name__, str(error), error.exit_code))
        _flush(channel)
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        channel.send(LoadFailed(type(error).__name__, str(error), InferdbgError.exit_code))
        _flush(channel)
        return InferdbgError.exit_code
    channel.send(ready)
    loop.run(engine)
    _flush(channel)
    return 0


def _receive_launch(sock: socket.socket) -> Launch:
    channel: MessageChannel[Launch] = MessageChannel(sock, Launch)
    deadline = time.monotonic() + LAUNCH_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if messages := channel.wait(deadline - time.monotonic()):
            return messages[0]
    raise ChannelClosed("the front sent no launch message")


def _build(launch: Launch, observer: CoreObserver) -> tuple[SteppingEngine, Ready]:
    module_name, _, function_name = launch.engine_factory.partition(":")
    factory: EngineFactory = getattr(importlib.import_module(module_name), function_name)
    engine, info = factory(launch.config, observer)
    vocab_size = info.get("vocab_size")
    if not isinstance(vocab_size, int):  # said by a factory that runs no checkpoint
        vocab_size = read_model_info(launch.config.model_dir).vocab_size
    ready = Ready(
        pid=os.getpid(),
        max_model_len=_int(info, "max_model_len"),
        num_pages=_int(info, "num_pages"),
        page_size=_int(info, "page_size"),
        vocab_size=vocab_size,
        info=dict(info),
    )
    return engine, ready


def _int(info: Info, name: str) -> int:
    value = info.get(name)
    if not isinstance(value, int):
        raise InferdbgError(f"the engine factory reports {name}={value!r}; an integer is needed")
    return value


def _flush(channel: MessageChannel[FrontMessage]) -> None:
    """Sends what is left before the process ends, for as long as the front still reads."""
    deadline = time.monotonic() + FLUSH_TIMEOUT_SECONDS
    while channel.has_unsent and time.monotonic() < deadline:
        channel.wait(0.1)


def _die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when the front dies. Linux; elsewhere the closed socket ends the loop."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the call
        raise ChannelClosed("the front died while its core was starting")


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(exit_code)  # tearing torch down takes seconds and frees nothing that the kernel does not
