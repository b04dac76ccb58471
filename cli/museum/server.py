"""Runs `inferdbg serve` as a child process for the demo, and waits until it answers. Knows no request."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

from inferdbg.engine.errors import EnvironmentLacks, InferdbgError

__all__ = ["running_server"]

STOP_SECONDS = 30.0  # draining included
_LOG_LINES = 20
_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def running_server(arguments: Sequence[str]) -> Iterator[str]:
    """Starts a server on a free port and yields its base URL; stops it, drained, at the end.

    Raises:
        EnvironmentLacks: it did not come up; the end of what it printed is in the message.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "inferdbg.cli.main", "serve", "--port", "0", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C ends the demo, which then stops the server in order
            preexec_fn=_end_with_parent,
        )
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()  # serve prints its address once it answers
            if not url:
                raise EnvironmentLacks(f"the server did not start (exit code {process.wait()}):\n{_tail(log.fileno())}")
            yield url
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    if process.stdout is not None:
        process.stdout.close()
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise InferdbgError(f"the server did not stop within {STOP_SECONDS:.0f} s and was killed") from None


def _end_with_parent() -> None:
    """In the child: the kernel asks it to stop if the demo is killed. Linux; elsewhere it would be left running."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _tail(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    text = os.pread(descriptor, 16_384, max(0, size - 16_384)).decode("utf-8", "replace")
    return "\n".join(f"  {line}" for line in text.splitlines()[-_LOG_LINES:])
