"""Keeps one engine core alive for the front: start, watch, end its requests when it dies or hangs, restart once.

A core hangs when work waits and no step that does something ends for `stall_seconds`, or when it is silent so long.
One whose every step raises is as good as dead.
Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from enum import Enum, auto

from inferdbg.engine.config import CoreConfig
from inferdbg.engine.errors import EngineUnavailable
from inferdbg.engine.serving.core_client import CoreProcess
from inferdbg.engine.serving.core_process import DEFAULT_ENGINE_FACTORY
from inferdbg.engine.serving.dispatch import Dispatcher
from inferdbg.engine.serving.events import CoreStarted, EngineLost, Observer
from inferdbg.engine.serving.messages import (
    CoreMessage,
    Failed,
    FrontMessage,
    Heartbeat,
    LoadFailed,
    Ready,
    Refused,
    Step,
)

_log = logging.getLogger(__name__)

__all__ = ["CoreSupervisor"]

START_SECONDS = 900.0  # weights may come from a slow disk
MIN_SILENCE_SECONDS = 5.0  # an idle core sends a heartbeat a second
NUM_RESTARTS = 1
MAX_FAILED_STEPS = 8  # in a row: no request can be that unlucky


class _State(Enum):
    STARTING = auto()
    UP = auto()
    RESTARTING = auto()
    DOWN = auto()
    STOPPED = auto()


class CoreSupervisor:
    """The core as the front sees it: `dispatcher` is how requests reach it, `ready` what it said of itself."""

    def __init__(
        self,
        config: CoreConfig,
        observer: Observer,
        *,
        stall_seconds: float,
        engine_factory: str = DEFAULT_ENGINE_FACTORY,
        start_seconds: float = START_SECONDS,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.config = config
        self.dispatcher = Dispatcher(self._send, config.client_credit, clock)
        self._observer = observer
        self._stall_ns = int(stall_seconds * 1e9)
        self._engine_factory = engine_factory
        self._start_seconds = start_seconds
        self._clock = clock
        self._state = _State.STARTING
        self._reason = "the engine core is starting"
        self._process: CoreProcess | None = None
        self._ready: Ready | None = None
        self._incarnation = 0
        self._restarts_left = NUM_RESTARTS
        self._last_heard_ns = 0
        self._last_work_ns = 0
        self._num_failed_steps = 0  # since a step sampled a token
        self._waiting_since_ns: int | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._recovery: asyncio.Task[None] | None = None

    @property
    def ready(self) -> Ready:
        """What the core said when it was ready; of the last incarnation that was.

        Raises:
            EngineUnavailable: none has been ready yet.
        """
        if self._ready is None:
            raise EngineUnavailable(self._reason)
        return self._ready

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def problem(self) -> str | None:
        """Why the core cannot take requests; None: it can."""
        return None if self._state is _State.UP else self._reason

    async def start(self) -> Ready:
        """Starts the first core.

        Raises:
            InferdbgError: it could not be built, died, or was not ready in time.
        """
        ready = await self._launch()
        self._watchdog = asyncio.create_task(self._watch(), name="inferdbg-watchdog")
        return ready

    async def stop(self) -> None:
        """Ends the core; whoever still waits for it fails."""
        self._state, self._reason = _State.STOPPED, "the server is shutting down"
        for task in (self._watchdog, self._recovery):
            if task is not None:
                task.cancel()
        self.dispatcher.lose_core(self._reason)
        if self._process is not None:
            await self._process.stop()

    def _send(self, message: FrontMessage) -> None:
        if self._process is not None and self._state is _State.UP:
            self._process.send(message)

    async def _launch(self) -> Ready:
        incarnation = self._incarnation

        def on_exit(reason: str) -> None:
            if incarnation == self._incarnation:
                self._lose(f"the engine core died: {reason}")

        self._process = CoreProcess(self.config, self._on_message, on_exit, self._engine_factory)
        ready = await self._process.start(self._start_seconds)
        now = self._clock()
        self._ready = ready
        self._state, self._reason = _State.UP, ""
        self._last_heard_ns = self._last_work_ns = now
        self._waiting_since_ns = None
        self._num_failed_steps = 0
        self._observer(CoreStarted(incarnation=incarnation, time_ns=now, pid=ready.pid, info=ready.info))
        return ready

    def _on_message(self, message: CoreMessage) -> None:
        if self._state is not _State.UP:
            return
        self._last_heard_ns = self._clock()
        match message:
            case Step(record):
                if record.chunk_seq_ids or record.finished_seq_ids:
                    self._last_work_ns = self._last_heard_ns
                if record.sampled_seq_ids:
                    self._num_failed_steps = 0
                self._observer(record)
                self.dispatcher.on_step(record)
            case Failed(failure):
                self._last_work_ns = self._last_heard_ns
                self._observer(failure)
                self.dispatcher.on_failed(failure)
                self._num_failed_steps += 1
                if self._num_failed_steps >= MAX_FAILED_STEPS:
                    self._lose(f"every step of the engine core fails, the last one in {failure.stage}: {failure.error}")
            case Refused():
                self.dispatcher.on_refused(message)
            case Heartbeat() | Ready() | LoadFailed():
                pass

    async def _watch(self) -> None:
        interval = min(1.0, self._stall_ns / 1e9 / 5)
        while True:
            await asyncio.sleep(interval)
            if self._state is _State.UP and (problem := self._stall()) is not None:
                self._lose(problem)

    def _stall(self) -> str | None:
        now = self._clock()
        if not self.dispatcher.has_runnable:
            self._waiting_since_ns = None
        elif self._waiting_since_ns is None:
            self._waiting_since_ns = now
        else:
            idle = now - max(self._waiting_since_ns, self._last_work_ns)
            if idle > self._stall_ns:
                return f"the engine core hangs: work waits and no step ended for {idle / 1e9:.1f} s"
        silent = now - self._last_heard_ns
        if silent > max(self._stall_ns, int(MIN_SILENCE_SECONDS * 1e9)):
            return f"the engine core hangs: it said nothing for {silent / 1e9:.1f} s"
        return None

    def _lose(self, reason: str) -> None:
        """States the loss, fails the requests in flight, and starts the one restart."""
        if self._state is not _State.UP:
            return
        will_restart = self._restarts_left > 0
        self._state = _State.RESTARTING if will_restart else _State.DOWN
        self._reason = f"{reason}; it is being restarted" if will_restart else f"{reason}; it will not be restarted"
        request_ids = tuple(request.head.request_id for request in self.dispatcher.live_requests())
        _log.error("%s (%d requests in flight failed)", self._reason, len(request_ids))
        self._observer(
            EngineLost(incarnation=self._incarnation, time_ns=self._clock(), reason=reason, request_ids=request_ids)
        )
        self.dispatcher.lose_core(reason)
        lost, self._incarnation = self._process, self._incarnation + 1
        self._recovery = asyncio.create_task(self._recover(lost, will_restart), name="inferdbg-core-recovery")

    async def _recover(self, lost: CoreProcess | None, will_restart: bool) -> None:
        if lost is not None:
            await lost.kill()
        if not will_restart:
            return
        self._restarts_left -= 1
        try:
            await self._launch()
        except Exception as error:  # the machine may lack a process or a descriptor: never wait for ever
            self._state = _State.DOWN
            self._reason = f"the engine core could not be restarted: {error}"
