"""The front's side of one core process: starts it, talks to it, notices its end. One object per incarnation.

Everything runs on the event loop of the thread that calls `start`; that thread must outlive the process, since
the kernel ties the core's life to it. Knows nothing of requests, restarts or stalls: see `supervisor.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable

from inferdbg.engine import errors
from inferdbg.engine.config import CoreConfig
from inferdbg.engine.errors import EngineUnavailable, InferdbgError
from inferdbg.engine.serving.core_process import DEFAULT_ENGINE_FACTORY, Launch
from inferdbg.engine.serving.messages import CoreMessage, FrontMessage, LoadFailed, Ready, Shutdown
from inferdbg.engine.serving.transport import ChannelClosed, ChannelCorrupt, MessageChannel, make_socket_pair

__all__ = ["CoreProcess"]

EXIT_SECONDS = 5.0
EXIT_CODE_SECONDS = 0.2


class CoreProcess:
    """A running core. `on_message` hears everything after `Ready`; `on_exit` is called once with the reason."""

    def __init__(
        self,
        config: CoreConfig,
        on_message: Callable[[CoreMessage], None],
        on_exit: Callable[[str], None],
        engine_factory: str = DEFAULT_ENGINE_FACTORY,
    ) -> None:
        self._launch = Launch(config, engine_factory)
        self._on_message = on_message
        self._on_exit = on_exit
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: MessageChannel[CoreMessage] | None = None
        self._pidfd: int | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._exited = asyncio.Event()
        self._is_writing = False
        self._is_closing = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, timeout_seconds: float) -> Ready:
        """Starts the process and waits until its engine is built.

        Raises:
            InferdbgError: the engine could not be built (of the class the core names, exit code kept), the process
                died while loading, or was not ready in time.
        """
        loop = asyncio.get_running_loop()
        ours, theirs = make_socket_pair()
        self._ready = loop.create_future()
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - a fork takes a millisecond, and the loop has nothing to serve yet
                [
                    sys.executable, "-P", "-m", "inferdbg.engine.serving.core_process",
                    str(theirs.fileno()), str(os.getpid()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what libraries print is diagnostics: stdout belongs to the command's data
                start_new_session=True,  # Ctrl-C in the terminal must not reach the core before the drain
            )  # fmt: skip
        self._channel = MessageChannel(ours, CoreMessage)
        loop.add_reader(ours.fileno(), self._on_readable)
        self._watch_process(loop)
        self.send(self._launch)
        try:
            return await asyncio.wait_for(self._ready, timeout_seconds)
        except TimeoutError:
            await self.kill()
            raise EngineUnavailable(
                f"the engine core was not ready within {timeout_seconds:.0f} s and has been stopped"
            ) from None
        except BaseException:
            await self.kill()
            raise

    def send(self, message: FrontMessage | Launch) -> None:
        """Sends, or queues what the socket does not take now. Silent when the core is gone: `on_exit` tells."""
        if self._channel is None or self._is_closing or self._exited.is_set():
            return
        try:
            self._channel.send(message)
        except ChannelClosed:
            self._on_closed()
            return
        self._watch_writable()

    async def stop(self) -> None:
        """Asks the core to end and waits; kills it if it does not."""
        self.send(Shutdown())
        if self._process is None:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wait_for_process(), EXIT_SECONDS)
        await self.kill()

    async def kill(self) -> None:
        """Ends the process at once and reaps it."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        await self._wait_for_process()
        self._finish("it was stopped")

    def _watch_process(self, loop: asyncio.AbstractEventLoop) -> None:
        """A death also ends the socket; the pidfd shows it even where a child of the core keeps the socket open."""
        assert self._process is not None
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(self._process.pid)
                loop.add_reader(self._pidfd, self._on_process_end)

    def _on_process_end(self) -> None:
        self._on_readable()  # what it said last counts
        self._finish(self._exit_reason())

    def _on_readable(self) -> None:
        if self._channel is None or self._is_closing or self._exited.is_set():
            return
        try:
            messages = self._channel.receive()
        except ChannelClosed:
            self._on_closed()
            return
        except ChannelCorrupt as error:
            self._finish(str(error))
            return
        for message in messages:
            self._deliver(message)

    def _deliver(self, message: CoreMessage) -> None:
        assert self._ready is not None
        if self._ready.done():
            self._on_message(message)
        elif isinstance(message, Ready):
            self._ready.set_result(message)
        elif isinstance(message, LoadFailed):
            self._ready.set_exception(_load_error(message))

    def _on_writable(self) -> None:
        assert self._channel is not None
        try:
            self._channel.flush()
        except ChannelClosed:
            self._on_closed()
            return
        self._watch_writable()

    def _watch_writable(self) -> None:
        assert self._channel is not None
        if self._channel.has_unsent == self._is_writing:
            return
        loop = asyncio.get_running_loop()
        self._is_writing = self._channel.has_unsent
        if self._is_writing:
            loop.add_writer(self._channel.sock.fileno(), self._on_writable)
        else:
            loop.remove_writer(self._channel.sock.fileno())

    def _on_closed(self) -> None:
        """A process that dies closes its socket a moment before its exit code can be had: waits for that."""
        assert self._channel is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._channel.sock.fileno())
        loop.remove_writer(self._channel.sock.fileno())
        if not self._is_closing:
            self._is_closing = True
            loop.call_later(EXIT_CODE_SECONDS, lambda: self._finish(self._exit_reason()))

    def _exit_reason(self) -> str:
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return "its connection to the front closed"
        return f"it was killed by signal {-code}" if code < 0 else f"it exited with code {code}"

    def _finish(self, reason: str) -> None:
        """Lets go of the descriptors and tells once. The process itself is reaped by `kill`."""
        if self._exited.is_set():
            return
        self._exited.set()
        loop = asyncio.get_running_loop()
        if self._channel is not None:
            loop.remove_reader(self._channel.sock.fileno())
            loop.remove_writer(self._channel.sock.fileno())
            self._channel.close()
        if self._pidfd is not None:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineUnavailable(f"the engine core ended while loading: {reason}"))
        else:
            self._on_exit(reason)

    async def _wait_for_process(self) -> None:
        """Reaps the process. Polls: a child watcher would need the main thread, a pidfd may be absent."""
        while self._process is not None and self._process.poll() is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def _load_error(message: LoadFailed) -> InferdbgError:
    """The core's error as the same class here, so that the command exits with the same code."""
    kind = getattr(errors, message.error_type, None)
    if isinstance(kind, type) and issubclass(kind, InferdbgError):
        with contextlib.suppress(TypeError):
            return kind(message.message)
    failure = InferdbgError(f"the engine could not be built: {message.error_type}: {message.message}")
    failure.exit_code = message.exit_code
    return failure
