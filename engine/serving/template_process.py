"""Renders chat templates in a process of its own, whose memory and time the kernel bounds.

A template is untrusted code, and one operation of it (`'x'|center(10**10)`, `9**9**9`) can take all memory or all time:
no list of forbidden operations is complete. Compiling one evaluates its constants, so that happens here too.
Knows nothing of tokens, event loops or HTTP.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import subprocess
import sys
import time

import msgspec

from inferdbg.engine.errors import InferdbgError, InvalidRequest, ModelError
from inferdbg.engine.serving.chat_template import ChatPrompt, ChatTemplate, TemplateRefused, TemplateSource
from inferdbg.engine.serving.transport import ChannelClosed, MessageChannel, make_socket_pair

__all__ = ["TemplateProcess", "main"]

MEMORY_BYTES = 1 << 30  # of address space: a render takes a few times the size of its messages
START_SECONDS = 30.0
_GRACE_SECONDS = 5.0


class Load(msgspec.Struct, tag=True, frozen=True):
    """The first message: the template, and the seconds that compiling it and each rendering may take."""

    template: TemplateSource
    seconds: float


class Render(msgspec.Struct, tag=True, frozen=True):
    """A `ChatPrompt` as JSON, whose integers may exceed 64 bits."""

    prompt: bytes


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """The template is compiled."""


class Rendered(msgspec.Struct, tag=True, frozen=True):
    """The text of a prompt."""

    text: str


class Refused(msgspec.Struct, tag=True, frozen=True):
    """An error of the template's or of the request's; `error_type` is its class."""

    error_type: str
    message: str
    param: str | None = None


Order = Load | Render
Reply = Loaded | Rendered | Refused


class TemplateProcess:
    """One renderer, used by one thread at a time. A process that its template ended is replaced with the next use."""

    def __init__(self, template: TemplateSource, seconds: float) -> None:
        self._load = Load(template, seconds)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: MessageChannel[Reply] | None = None

    def start(self) -> None:
        """Starts the process, if none is running, and compiles the template.

        Raises:
            ModelError: the template is not valid, or compiling it takes too much time or memory.
        """
        if self._process is not None:
            return
        ours, theirs = make_socket_pair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "inferdbg.engine.serving.template_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,  # Ctrl-C in the terminal is the front's to handle
            )
        self._channel = MessageChannel(ours, Reply)
        match self._ask(self._load, START_SECONDS + self._load.seconds):
            case Loaded():
                return
            case Refused(message=message):
                self.close()
                raise ModelError(message)
            case reply:
                problem = reply if isinstance(reply, str) else "it does not answer as it should"
                self.close()
                raise ModelError(f"the model's chat template cannot be compiled: {problem}")

    def render(self, prompt: ChatPrompt) -> str:
        """The text of a chat.

        Raises:
            TemplateRefused: the template refuses the messages, or takes too much time or memory.
            InvalidRequest: see `ChatTemplate.render`.
        """
        self.start()
        try:
            order = Render(msgspec.json.encode(prompt))
        except RecursionError:
            raise InvalidRequest("the messages are nested too deeply", "messages") from None
        match self._ask(order, self._load.seconds + _GRACE_SECONDS):
            case Rendered(text):
                return text
            case Refused(TemplateRefused.__name__, message, param):
                raise TemplateRefused(message, param)
            case Refused(_, message, param):
                raise InvalidRequest(message, param)
            case reply:
                raise TemplateRefused(f"the chat template was stopped: {reply}")

    def close(self) -> None:
        """Ends the process. From another thread while one renders: that one finds its process gone."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        if self._channel is not None:
            self._channel.close()

    def _ask(self, order: Order, seconds: float) -> Reply | str:
        """The reply, or why there is none; then the process is gone."""
        channel, process = self._channel, self._process
        if channel is None or process is None:
            return "the server is shutting down"
        deadline = time.monotonic() + seconds
        try:
            channel.send(order)
            while (left := deadline - time.monotonic()) > 0:
                for reply in channel.wait(left):
                    return reply
        except ChannelClosed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
        code = process.poll()
        self.close()
        if code is None or code == -signal.SIGALRM:
            return f"it did not finish within {self._load.seconds:g} s"
        return f"its process ended with code {code}"


def main(argv: list[str]) -> int:
    """The process: `argv` is the number of the inherited socket."""
    sock = socket.socket(fileno=int(argv[0]))
    sock.set_inheritable(False)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel: MessageChannel[Order] = MessageChannel(sock, Order)
    with contextlib.suppress(ChannelClosed):  # the front is gone
        _serve(channel)
    return 0


def _serve(channel: MessageChannel[Order]) -> None:
    template: ChatTemplate | None = None
    seconds = 0.0
    while True:
        for order in channel.wait(None):
            if isinstance(order, Load):
                seconds = order.seconds
            # the alarm's default action ends the process, whatever operation it is in
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                match order:
                    case Load(source):
                        template = ChatTemplate(source)
                        reply: Reply = Loaded()
                    case Render(prompt):
                        assert template is not None
                        reply = Rendered(template.render(msgspec.json.decode(prompt, type=ChatPrompt)))
            except InvalidRequest as error:
                reply = Refused(type(error).__name__, str(error), error.param)
            except InferdbgError as error:
                reply = Refused(type(error).__name__, str(error))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
            channel.send(reply)
            while channel.has_unsent:
                channel.wait(None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
