"""msgspec messages over a stream socket, in frames of a 4-byte little-endian length and a msgpack body.

Both ends are non-blocking: `send` never waits, what the socket does not take stays in a buffer until `flush`.
The buffer needs no limit of its own: credit bounds the tokens in flight, and the queue limit the requests.
Knows nothing of event loops, processes, or what the messages mean.
"""

from __future__ import annotations

import select
import socket
import struct
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from inferdbg.engine.errors import InferdbgError

__all__ = ["MAX_FRAME_BYTES", "ChannelClosed", "ChannelCorrupt", "MessageChannel", "make_socket_pair"]

Incoming = TypeVar("Incoming")

MAX_FRAME_BYTES = 1 << 30
SOCKET_BUFFER_BYTES = 1 << 20
READ_BYTES = 1 << 18
_LENGTH = struct.Struct("<I")


class ChannelClosed(InferdbgError):
    """The peer is gone."""


class ChannelCorrupt(InferdbgError):
    """What came is not a frame of ours: the peer is another version, or the stream is out of step."""


class MessageChannel(Generic[Incoming]):
    """One end of a connection that receives messages of type `incoming`."""

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_path)
        self._decoder = msgspec.msgpack.Decoder(incoming, dec_hook=_decode_path)
        self._unread = bytearray()
        self._unsent = bytearray()
        self._peer_gone = False

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: object) -> None:
        """Hands a message to the socket, or keeps what the socket does not take. Never blocks.

        Raises:
            ChannelClosed: the peer is gone.
        """
        body = self._encoder.encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise ChannelCorrupt(f"a message of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
        self._unsent += _LENGTH.pack(len(body))
        self._unsent += body
        self.flush()

    def flush(self) -> bool:
        """Sends what the socket takes now; true when nothing is left."""
        while self._unsent:
            try:
                sent = self.sock.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                raise ChannelClosed(f"the peer of the channel is gone: {error}") from error
            del self._unsent[:sent]
        return True

    def receive(self) -> list[Incoming]:
        """All messages that are complete now; possibly none. Never blocks.

        Raises:
            ChannelClosed: the peer is gone and everything it sent has been returned.
            ChannelCorrupt: a frame cannot be decoded.
        """
        if not self._peer_gone:
            self._fill()
        messages = self._complete_frames()
        if self._peer_gone and not messages:
            raise ChannelClosed("the peer of the channel is gone")
        return messages

    def wait(self, timeout_seconds: float | None) -> list[Incoming]:
        """Like `receive`, but waits for something to come, and sends what was left unsent meanwhile."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        events = poll.poll(None if timeout_seconds is None else max(0.0, timeout_seconds) * 1000)
        if not events:
            return []
        mask = events[0][1]
        if mask & select.POLLOUT:
            self.flush()
        if mask & ~select.POLLOUT:
            return self.receive()
        return []

    def close(self) -> None:
        self.sock.close()

    def _fill(self) -> None:
        while True:
            try:
                data = self.sock.recv(READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._peer_gone = True
                return
            if not data:
                self._peer_gone = True
                return
            self._unread += data
            if len(data) < READ_BYTES:
                return

    def _complete_frames(self) -> list[Incoming]:
        messages: list[Incoming] = []
        position = 0
        unread = self._unread
        while len(unread) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(unread, position)
            if length > MAX_FRAME_BYTES:
                raise ChannelCorrupt(f"a frame announces {length} bytes; the limit is {MAX_FRAME_BYTES}")
            end = position + _LENGTH.size + length
            if len(unread) < end:
                break
            try:
                messages.append(self._decoder.decode(bytes(unread[position + _LENGTH.size : end])))
            except (msgspec.MsgspecError, ValueError) as error:
                raise ChannelCorrupt(f"a frame of {length} bytes cannot be decoded: {error}") from error
            position = end
        if position:
            del unread[:position]
        return messages


def make_socket_pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair of stream sockets with room for a burst of step records."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    return ours, theirs


def _encode_path(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")


def _decode_path(kind: type, value: object) -> object:
    if issubclass(kind, Path):
        return Path(str(value))
    raise NotImplementedError(f"{kind.__name__} cannot be received")
