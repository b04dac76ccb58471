"""The socket and the HTTP server of a front. Knows uvicorn; nothing of what is served."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from inferdbg.engine.errors import EnvironmentLacks, InferdbgError
from inferdbg.engine.serving.connection import ServingProtocol

__all__ = ["HttpServer", "bind"]

SEND_BUFFER_BYTES = 128 << 10  # what the kernel holds for a client that does not read
KEEP_ALIVE_SECONDS = 75


@contextlib.contextmanager
def bind(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket, not listening yet: the address is taken before the model is loaded.

    Raises:
        EnvironmentLacks: the address is in use, not ours, or not allowed.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # inherited by connections
        try:
            sock.bind((host.strip("[]"), port))
        except OSError as error:
            raise EnvironmentLacks(
                f"{host}:{port} cannot be bound: {error.strerror}; choose another with --port (0 takes a free one)"
            ) from error
        yield sock


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: whoever runs the replica decides when it ends."""

    def __init__(self, app: ASGIApp, close_seconds: float) -> None:
        super().__init__(
            uvicorn.Config(
                app, http=ServingProtocol, ws="none", lifespan="off", log_config=None, access_log=False,
                timeout_graceful_shutdown=int(close_seconds), timeout_keep_alive=KEEP_ALIVE_SECONDS,
                server_header=False,
            )
        )  # fmt: skip

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def wait_started(self, serving: asyncio.Task[None]) -> None:
        """Until connections are accepted.

        Raises:
            EnvironmentLacks: another process took the port after it was bound here.
        """
        while not self.started:
            if serving.done():
                try:
                    serving.result()
                except OSError as error:
                    raise EnvironmentLacks(f"the server cannot listen: {error.strerror}") from error
                raise InferdbgError("the HTTP server ended before it was ready")
            await asyncio.sleep(0.005)

    async def stop(self, serving: asyncio.Task[None]) -> None:
        self.should_exit = True
        await asyncio.wait((serving,))
