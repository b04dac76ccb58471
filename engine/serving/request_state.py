"""One HTTP request from its first byte to its end: the state machine that answers the client and makes the record.

    open ──reject──> rejected                     one `Rejected` (or aborted, or failed: its `end` says)
    open ──accept──> accepted ──close──> closed   one `Arrived`, one `Closed`

Whatever crosses (an abort while tokenizing, an abort and a finish, a core that dies while a stop string is being
found): the first end wins, and the others find the request closed. Does no I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from inferdbg.engine.core.sampling_params import SamplingParams
from inferdbg.engine.serving.choice_state import ChoiceState, Delta
from inferdbg.engine.serving.events import (
    Arrived,
    Boundaries,
    BusyTimes,
    Closed,
    EndKind,
    Observer,
    Rejected,
    TraceContext,
)
from inferdbg.engine.serving.tokenize import Timed

__all__ = ["Failure", "RequestHead", "RequestState"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """What is known of a request before its body is read."""

    request_id: str
    received_ns: int  # first byte at the socket
    endpoint: str
    trace: TraceContext
    client_request_id: str | None = None
    replay_of: str | None = None
    service_class: str | None = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a request cannot be finished."""

    end: EndKind
    status: int  # HTTP status if nothing was sent yet
    code: str  # short and stable, for error.type
    message: str


class _Phase(Enum):
    OPEN = auto()
    REJECTED = auto()
    ACCEPTED = auto()
    CLOSED = auto()


class RequestState:
    """Mutable; owned by the event loop. `wake` is set whenever there is something new to send or to notice."""

    def __init__(self, head: RequestHead, observer: Observer) -> None:
        self.head = head
        self.wake = asyncio.Event()
        self.choices: list[ChoiceState] = []
        self.failure: Failure | None = None
        self.is_disconnected = False
        self.is_streaming = False
        self.end: EndKind | None = None  # None: it has not ended
        self.parsed_ns: int | None = None
        self.tokenized_ns: int | None = None
        self.sent_ns: int | None = None
        self.first_byte_ns: int | None = None
        self.bytes_in = 0
        self.bytes_out = 0
        self.detokenize_ns = 0
        self.send_ns = 0
        self._tokenize = Timed(0, 0)
        self._observer = observer
        self._phase = _Phase.OPEN
        self._arrived: Arrived | None = None

    @property
    def is_accepted(self) -> bool:
        return self._phase is _Phase.ACCEPTED

    @property
    def is_over(self) -> bool:
        return self._phase in (_Phase.REJECTED, _Phase.CLOSED)

    @property
    def arrived(self) -> Arrived:
        assert self._arrived is not None, "the request was not accepted"
        return self._arrived

    @property
    def is_generated(self) -> bool:
        """Every choice has ended."""
        return all(choice.is_done for choice in self.choices)

    def mark_tokenized(self, timed: Timed, now_ns: int) -> None:
        self._tokenize = timed
        self.tokenized_ns = now_ns

    def reject(self, *, status: int, reason: str, message: str, now_ns: int, end: EndKind = EndKind.REJECTED) -> bool:
        """Ends a request that was never accepted; false if it has ended or was accepted."""
        if self._phase is not _Phase.OPEN:
            return False
        self._phase, self.end = _Phase.REJECTED, end
        self._observer(
            Rejected(
                request_id=self.head.request_id,
                client_request_id=self.head.client_request_id,
                time_ns=self.head.received_ns,
                closed_ns=now_ns,
                endpoint=self.head.endpoint,
                status=status,
                reason=reason,
                message=message,
                trace=self.head.trace,
                end=end,
                boundaries=Boundaries(
                    received_ns=self.head.received_ns, parsed_ns=self.parsed_ns, tokenized_ns=self.tokenized_ns
                ),
            )
        )
        return True

    def accept(
        self,
        *,
        model: str,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        stream: bool,
        messages_json: str | None,
        prompt_text: str | None,
        choices: Iterable[ChoiceState],
    ) -> None:
        """States `Arrived`. The sequences are to be submitted right after."""
        assert self._phase is _Phase.OPEN
        self._phase = _Phase.ACCEPTED
        self.choices.extend(choices)
        self.is_streaming = stream
        head = self.head
        self._arrived = Arrived(
            request_id=head.request_id,
            client_request_id=head.client_request_id,
            replay_of=head.replay_of,
            time_ns=head.received_ns,
            endpoint=head.endpoint,
            model=model,
            prompts=tuple(prompts),
            sampling=sampling,
            stream=stream,
            trace=head.trace,
            seq_ids=tuple(choice.seq_id for choice in self.choices),
            service_class=head.service_class,
            tenant=head.tenant,
            messages_json=messages_json,
            prompt_text=prompt_text,
        )
        self._observer(self._arrived)

    def fail(self, failure: Failure) -> None:
        """Notes why the request cannot be finished, unless it has ended or failed already."""
        if self.failure is None and not self.is_over:
            self.failure = failure
            self.wake.set()

    def disconnect(self) -> None:
        self.is_disconnected = True
        self.wake.set()

    def take_deltas(self, *, with_tokens: bool) -> list[Delta]:
        """What is new of every choice since the last call; nothing once the request has ended."""
        if self.is_over:
            return []
        deltas = (choice.take_delta(with_tokens=with_tokens) for choice in self.choices)
        return [delta for delta in deltas if delta is not None]

    def close(
        self, end: EndKind, *, status: int, now_ns: int, reason: str | None = None, error: str | None = None
    ) -> bool:
        """Ends an accepted request: states `Closed`. False if it has ended before."""
        if self._phase is not _Phase.ACCEPTED:
            return False
        self._phase, self.end = _Phase.CLOSED, end
        boundaries = self._boundaries()
        self._observer(
            Closed(
                request_id=self.head.request_id,
                end=end,
                closed_ns=now_ns,
                boundaries=boundaries,
                first_text_ns=_first(choice.first_text_ns for choice in self.choices),
                first_byte_ns=self.first_byte_ns,
                bytes_in=self.bytes_in,
                bytes_out=self.bytes_out,
                busy=BusyTimes(
                    tokenize_wait_ns=self._tokenize.wait_ns,
                    tokenize_ns=self._tokenize.service_ns,
                    detokenize_ns=self.detokenize_ns,
                    send_ns=self.send_ns,
                ),
                choices=tuple(choice.to_record(boundaries) for choice in self.choices),
                arrived=self.arrived,
                status=status,
                error=error,
                error_type=reason,
            )
        )
        return True

    def _boundaries(self) -> Boundaries:
        """First admission and token, last token and text over the choices; later ones only if all choices got there."""
        done = self.is_generated
        return Boundaries(
            received_ns=self.head.received_ns,
            parsed_ns=self.parsed_ns,
            tokenized_ns=self.tokenized_ns,
            admitted_ns=_first(choice.admitted_ns for choice in self.choices),
            first_token_ns=_first(choice.first_token_ns for choice in self.choices),
            last_token_ns=_last(choice.last_token_ns for choice in self.choices) if done else None,
            text_ready_ns=_last(choice.text_ready_ns for choice in self.choices) if done else None,
            sent_ns=self.sent_ns if done else None,
        )


def _first(times: Iterable[int | None]) -> int | None:
    return min((time for time in times if time is not None), default=None)


def _last(times: Iterable[int | None]) -> int | None:
    return max((time for time in times if time is not None), default=None)
