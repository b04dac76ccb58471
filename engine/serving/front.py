"""What all endpoints of one front share: its core, its tokenizers, the requests it holds, and whom it takes in.

Knows the rules of admission; nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from inferdbg.engine.config import FrontConfig
from inferdbg.engine.core.admission import check_request
from inferdbg.engine.errors import EngineUnavailable, QueueFull
from inferdbg.engine.serving.api_errors import ApiError
from inferdbg.engine.serving.events import EndKind, Event, Observer
from inferdbg.engine.serving.generation import Plan, PromptLimits
from inferdbg.engine.serving.request_state import Failure, RequestState
from inferdbg.engine.serving.supervisor import CoreSupervisor
from inferdbg.engine.serving.tokenize import TokenizerPool

__all__ = ["Front", "GuardedObserver", "LoopLag"]

_log = logging.getLogger(__name__)

LAG_INTERVAL_SECONDS = 0.05
DRAINING = "the server is shutting down"
_MEAN_WEIGHT = 0.1


class GuardedObserver:
    """Passes events on; an observer that throws is counted, logged the first time, and never harms a request."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.num_errors = 0
        self.last_error: str | None = None

    def __call__(self, event: Event) -> None:
        try:
            self._observer(event)
        except Exception as error:
            if self.num_errors == 0:
                _log.exception("the observer failed on %s; further failures are only counted", type(event).__name__)
            self.num_errors += 1
            self.last_error = f"{type(error).__name__} on {type(event).__name__}: {error}"


class LoopLag:
    """How late the event loop is: a timer's delay past its time, measured twenty times a second."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self.last_ns = 0

    async def run(self) -> None:
        """Measures until cancelled."""
        while True:
            due = self._clock() + int(LAG_INTERVAL_SECONDS * 1e9)
            await asyncio.sleep(LAG_INTERVAL_SECONDS)
            self.last_ns = max(0, self._clock() - due)


class Front:
    """One per server; everything runs on its event loop."""

    def __init__(
        self, config: FrontConfig, supervisor: CoreSupervisor, pool: TokenizerPool, observer: GuardedObserver
    ) -> None:
        self.config = config
        self.supervisor = supervisor
        self.pool = pool
        self.observer = observer
        self.loop_lag = LoopLag()
        self.is_draining = False
        self._requests: set[RequestState] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_held = 0
        self._mean_seconds = 1.0  # of a finished request, first byte to end; a refused client is told to wait so long

    @property
    def num_requests(self) -> int:
        """Generation requests whose end has not been stated."""
        return len(self._requests)

    @property
    def problem(self) -> str | None:
        """Why requests cannot be served; None: they can."""
        return DRAINING if self.is_draining else self.supervisor.problem

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output that one sequence can have."""
        return self.supervisor.ready.max_model_len

    @contextmanager
    def track(self, request: RequestState) -> Iterator[None]:
        """Counts a request as held for as long as the block lasts."""
        self._requests.add(request)
        try:
            with self._holding():
                yield
        finally:
            self._requests.discard(request)
            if request.end is EndKind.FINISHED:  # a refusal takes no time, and says nothing of the queue's
                seconds = (time.monotonic_ns() - request.head.received_ns) / 1e9
                self._mean_seconds += _MEAN_WEIGHT * (seconds - self._mean_seconds)

    @contextmanager
    def admit_utility(self) -> Iterator[None]:
        """Holds a request that needs a tokenizer and not the core, for as long as the block lasts.

        Raises:
            EngineUnavailable: the server drains.
            QueueFull: too many requests are held.
        """
        if self.is_draining:
            raise EngineUnavailable(DRAINING)
        with self._holding():
            self._check_queue()
            yield

    def check_admission(self) -> None:
        """Asked by a tracked request before its body is read. Raises if the server drains, the core is down, or too
        many requests are held.
        """
        self.check_core()
        self._check_queue()

    def check_core(self) -> None:
        """Raises `EngineUnavailable` unless the core takes requests."""
        if (problem := self.problem) is not None:
            raise EngineUnavailable(problem)

    def check_model(self, name: str | None) -> None:
        """A request without a model means the one that is served."""
        if name is not None and name != self.config.model_name:
            raise ApiError(
                404,
                f"the model {name[:100]!r} does not exist; this server has {self.config.model_name!r}",
                code="model_not_found",
                param="model",
            )

    def context_left(self, prompts: Iterable[Sequence[int]]) -> int:
        """Tokens of output that the longest prompt leaves room for; may be negative."""
        return self.max_model_len - max((len(ids) for ids in prompts), default=0)

    @property
    def prompt_limits(self) -> PromptLimits:
        return PromptLimits(self.config.max_batch_prompts, self.max_model_len)

    def check_plan(self, plan: Plan) -> None:
        """Asks of every prompt what the core will ask.

        Raises:
            InvalidRequest: an id is out of range, or a prompt empty.
            ContextLengthExceeded: prompt and max_tokens do not fit.
        """
        ready = self.supervisor.ready
        for prompt in plan.prompts:
            check_request(prompt, plan.sampling, vocab_size=ready.vocab_size, max_model_len=ready.max_model_len)

    async def drain(self, seconds: float) -> None:
        """Takes no more requests, waits for those that are held, and aborts what is left after `seconds`."""
        self.is_draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            self.abort_all(f"the server was shut down and the request did not end within {seconds:g} s")

    def abort_all(self, message: str) -> None:
        """Ends every request that is held; their clients are told."""
        for request in list(self._requests):
            self.supervisor.dispatcher.abort(request)
            request.fail(Failure(end=EndKind.ABORTED, status=503, code="shutdown", message=message))

    async def wait_idle(self, seconds: float) -> bool:
        """Whether all requests ended within `seconds`."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    @contextmanager
    def _holding(self) -> Iterator[None]:
        self._num_held += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_held -= 1
            if self._num_held == 0:
                self._idle.set()

    def _check_queue(self) -> None:
        """Whoever asks is held already."""
        limit = self.config.max_queued_requests
        if self._num_held > limit:
            raise QueueFull(
                f"{self._num_held - 1} requests are held and the limit is {limit}; try again later",
                retry_after_seconds=min(60.0, max(1.0, self._mean_seconds)),
            )
