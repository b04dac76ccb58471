"""A whole replica: core process, front, HTTP server; its start, its drain, its end.

`serve` runs one in this thread until a signal; `ServerHandle` runs one in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop
from starlette.routing import BaseRoute

from inferdbg.engine.config import CoreConfig, FrontConfig
from inferdbg.engine.errors import InferdbgError
from inferdbg.engine.serving.app import build_app
from inferdbg.engine.serving.auth import check_exposure
from inferdbg.engine.serving.core_process import DEFAULT_ENGINE_FACTORY
from inferdbg.engine.serving.events import Observer
from inferdbg.engine.serving.front import Front, GuardedObserver
from inferdbg.engine.serving.http_server import HttpServer, bind
from inferdbg.engine.serving.messages import Ready
from inferdbg.engine.serving.supervisor import CoreSupervisor
from inferdbg.engine.serving.tokenize import TokenizerPool, load_vocabulary
from inferdbg.engine.serving.utility_routes import MetricsRenderer

__all__ = ["RunningServer", "Server", "ServerHandle", "serve"]

_log = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0  # for answers on their way out once all requests have ended


@dataclass(frozen=True, slots=True)
class RunningServer:
    """What `on_ready` is given."""

    url: str
    host: str
    port: int
    ready: Ready  # what the core said of itself
    front: Front  # health, event-loop lag, observer errors, number of requests; read on the event loop


class Server:
    """One replica. `run` starts, serves until `request_stop`, drains and ends; once per object."""

    def __init__(
        self,
        core: CoreConfig,
        front: FrontConfig,
        observer: Observer,
        *,
        metrics: MetricsRenderer | None = None,
        extra_routes: Sequence[BaseRoute] = (),
        on_ready: Callable[[RunningServer], None] | None = None,
        engine_factory: str = DEFAULT_ENGINE_FACTORY,
    ) -> None:
        check_exposure(front)
        self._core = core
        self._config = front
        self._observer = GuardedObserver(observer)
        self._metrics = metrics
        self._extra_routes = extra_routes
        self._on_ready = on_ready
        self._engine_factory = engine_factory
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    def request_stop(self) -> None:
        """Begins the drain; the second call ends at once. On the event loop only."""
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    async def run(self) -> None:
        """The replica's whole life.

        Raises:
            EnvironmentLacks: the port is in use or may not be bound.
            ModelError: the checkpoint cannot be used.
            InferdbgError: the core could not be started.
        """
        config = self._config
        vocabulary = load_vocabulary(config.model_dir)
        with bind(config.host, config.port) as sock:
            supervisor = CoreSupervisor(
                self._core, self._observer, stall_seconds=config.stall_seconds, engine_factory=self._engine_factory
            )
            pool = TokenizerPool(vocabulary, config.tokenizer_threads)
            try:
                await pool.start()
                starting = asyncio.ensure_future(supervisor.start())
                if await _first_of(starting, self._stop.wait()):
                    await self._serve(Front(config, supervisor, pool, self._observer), starting.result(), sock)
            finally:
                await supervisor.stop()
                pool.close()

    async def _serve(self, front: Front, ready: Ready, sock: socket.socket) -> None:
        app = build_app(front, metrics=self._metrics, extra_routes=self._extra_routes)
        http = HttpServer(app, CLOSE_SECONDS)
        lag = asyncio.create_task(front.loop_lag.run(), name="inferdbg-loop-lag")
        serving = asyncio.create_task(http.serve([sock]), name="inferdbg-http")
        try:
            await http.wait_started(serving)
            if self._on_ready is not None:
                host, port = sock.getsockname()[:2]
                name = f"[{host}]" if ":" in host else host
                self._on_ready(RunningServer(f"http://{name}:{port}", host, port, ready, front))
            await self._stop.wait()
            if front.num_requests:
                _log.warning(
                    "stopping: %d requests in flight have up to %g s to end; a second Ctrl-C ends them at once",
                    front.num_requests,
                    self._config.drain_seconds,
                )
            if not await _first_of(
                asyncio.ensure_future(front.drain(self._config.drain_seconds)), self._stop_now.wait()
            ):
                front.abort_all("the server was stopped")
            await front.wait_idle(CLOSE_SECONDS)
        finally:
            lag.cancel()
            await http.stop(serving)


def serve(
    core: CoreConfig,
    front: FrontConfig,
    observer: Observer,
    *,
    metrics: MetricsRenderer | None = None,
    extra_routes: Sequence[BaseRoute] = (),
    on_ready: Callable[[RunningServer], None] | None = None,
    engine_factory: str = DEFAULT_ENGINE_FACTORY,
) -> int:
    """Serves in this (the main) thread until SIGINT or SIGTERM, drains, and returns the exit code 0.

    A second signal ends at once. `metrics` renders /metrics; `extra_routes` are administrative routes.

    Raises:
        UsageError: the host is reachable by others and there is no API key, or the model is unusable.
        EnvironmentLacks: the port is in use.
    """
    server = Server(
        core, front, observer,
        metrics=metrics, extra_routes=extra_routes, on_ready=on_ready, engine_factory=engine_factory,
    )  # fmt: skip

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, server.request_stop)
        await server.run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    return 0


class ServerHandle:
    """A server in a thread of this process, for tests and the demo.

    with ServerHandle(core, front, observer) as server:
        httpx.get(server.url + "/health")
    """

    def __init__(self, core: CoreConfig, front: FrontConfig, observer: Observer, **options: Any) -> None:
        self._arguments = (core, front, observer)
        self._options = options
        self._thread = threading.Thread(target=self._run, name="inferdbg-server", daemon=True)
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: Server | None = None
        self._running: RunningServer | None = None
        self._error: BaseException | None = None

    def start(self) -> ServerHandle:
        """Returns when requests can be served; raises what kept the server from starting."""
        self._thread.start()
        self._started.wait()
        if self._running is None:
            self._thread.join()
            raise self._error or InferdbgError("the server ended before it was ready")
        return self

    def stop(self, *, at_once: bool = False) -> None:
        """Drains, or ends at once, and waits for the end."""
        if self._loop is not None and self._server is not None and self._thread.is_alive():
            for _ in range(2 if at_once else 1):
                with contextlib.suppress(RuntimeError):  # the loop has just ended
                    self._loop.call_soon_threadsafe(self._server.request_stop)
        self._thread.join()
        if self._error is not None and self._running is not None:
            raise self._error

    def __enter__(self) -> ServerHandle:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def running(self) -> RunningServer:
        assert self._running is not None, "the server is not running"
        return self._running

    @property
    def url(self) -> str:
        return self.running.url

    @property
    def port(self) -> int:
        return self.running.port

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs `function` on the server's event loop and returns its result."""
        assert self._loop is not None

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._main())
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()

    async def _main(self) -> None:
        options = dict(self._options)
        theirs = options.pop("on_ready", None)

        def on_ready(running: RunningServer) -> None:
            self._running = running
            if theirs is not None:
                theirs(running)
            self._started.set()

        self._loop = asyncio.get_running_loop()
        self._server = Server(*self._arguments, on_ready=on_ready, **options)
        await self._server.run()


async def _first_of(wanted: asyncio.Future[Any], other: Coroutine[Any, Any, Any]) -> bool:
    """Waits for either; cancels the loser. True if `wanted` came; raises what it raised."""
    waiting = asyncio.ensure_future(other)
    await asyncio.wait((wanted, waiting), return_when=asyncio.FIRST_COMPLETED)
    if wanted.done():
        waiting.cancel()
        wanted.result()
        return True
    wanted.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await wanted
    return False
