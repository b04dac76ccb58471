"""What all endpoints of one front share: its core, its tokenizers, the requests it holds, and whom it takes in.

Knows the rules of admission; nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from inferdbg.engine.config import FrontConfig
from inferdbg.engine.errors import ContextLengthExceeded, EngineUnavailable, InvalidRequest, QueueFull
from inferdbg.engine.serving.api_errors import ApiError
from inferdbg.engine.serving.events import EndKind, Event, Observer
from inferdbg.engine.serving.generation import Plan
from inferdbg.engine.serving.request_state import Failure, RequestState
from inferdbg.engine.serving.supervisor import CoreSupervisor
from inferdbg.engine.serving.tokenize import TokenizerPool

__all__ = ["Front", "GuardedObserver", "Health", "LoopLag"]

LAG_INTERVAL_SECONDS = 0.05
_MEAN_WEIGHT = 0.1


class GuardedObserver:
    """Passes events on; an observer that throws is counted and never harms a request."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.num_errors = 0
        self.last_error: str | None = None

    def __call__(self, event: Event) -> None:
        try:
            self._observer(event)
        except Exception as error:
            self.num_errors += 1
            self.last_error = f"{type(error).__name__} on {type(event).__name__}: {error}"


class LoopLag:
    """How late the event loop is: a timer's delay past its time, measured twenty times a second."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self.last_ns = 0
        self.max_ns = 0  # since the last `take_max_ns`
        self.total_ns = 0
        self.num_samples = 0

    def take_max_ns(self) -> int:
        """The worst lag since the last call."""
        worst, self.max_ns = self.max_ns, 0
        return worst

    async def run(self) -> None:
        """Measures until cancelled."""
        while True:
            due = self._clock() + int(LAG_INTERVAL_SECONDS * 1e9)
            await asyncio.sleep(LAG_INTERVAL_SECONDS)
            self.last_ns = max(0, self._clock() - due)
            self.max_ns = max(self.max_ns, self.last_ns)
            self.total_ns += self.last_ns
            self.num_samples += 1


@dataclass(frozen=True, slots=True)
class Health:
    """`problem` is None when requests can be served."""

    problem: str | None

    @property
    def is_ok(self) -> bool:
        return self.problem is None


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
        self._mean_seconds = 1.0  # of a request, first byte to end; what a refused client is told to wait

    @property
    def num_requests(self) -> int:
        """Requests whose end has not been stated."""
        return len(self._requests)

    @property
    def health(self) -> Health:
        return Health("the server is shutting down" if self.is_draining else self.supervisor.problem)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output that one sequence can have: the model's context, or all the pages."""
        ready = self.supervisor.ready
        return min(ready.max_model_len, ready.num_pages * ready.page_size)

    @contextmanager
    def track(self, request: RequestState) -> Iterator[None]:
        """Counts a request as held for as long as the block lasts."""
        self._requests.add(request)
        self._idle.clear()
        try:
            yield
        finally:
            self._requests.discard(request)
            seconds = (time.monotonic_ns() - request.head.received_ns) / 1e9
            self._mean_seconds += _MEAN_WEIGHT * (seconds - self._mean_seconds)
            if not self._requests:
                self._idle.set()

    def check_admission(self, request: RequestState) -> None:
        """Raises before a body is read: draining, core down, or too many requests held."""
        self.check_core()
        if len(self._requests) > self.config.max_queued_requests:
            raise QueueFull(
                f"{len(self._requests) - 1} requests are held and the limit is {self.config.max_queued_requests}; "
                "try again later",
                retry_after_seconds=min(60.0, max(1.0, self._mean_seconds)),
            )

    def check_core(self) -> None:
        """Raises `EngineUnavailable` unless the core takes requests."""
        if (problem := self.health.problem) is not None:
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

    def check_plan(self, plan: Plan) -> None:
        """Checks what only the model can tell: ids against the vocabulary, lengths against the context.

        Raises:
            InvalidRequest: an id is out of range, a prompt empty, or there are too many sequences.
            ContextLengthExceeded: prompt and max_tokens do not fit.
        """
        sampling = plan.sampling
        num_sequences = len(plan.prompts) * sampling.n
        if num_sequences > self.config.max_batch_prompts:
            raise InvalidRequest(
                f"{len(plan.prompts)} prompts with n={sampling.n} are {num_sequences} sequences; "
                f"the limit is {self.config.max_batch_prompts}",
                "prompt" if len(plan.prompts) > 1 else "n",
            )
        vocab_size = self.supervisor.ready.vocab_size
        for name, ids in (
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", sampling.logit_bias),
            ("forced_token_ids", sampling.forced_token_ids or ()),
        ):
            _check_ids(name, ids, vocab_size)
        for prompt in plan.prompts:
            if not prompt:
                raise InvalidRequest("the prompt is empty: it has no tokens", "prompt")
            _check_ids("prompt", prompt, vocab_size)
            self._check_length(len(prompt), sampling.max_tokens)

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

    def _check_length(self, num_prompt: int, max_tokens: int) -> None:
        limit = self.max_model_len
        if num_prompt >= limit:
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt} tokens, and the context of {limit} must hold at least one more", "prompt"
            )
        if num_prompt + max_tokens > limit:
            raise ContextLengthExceeded(
                f"the prompt's {num_prompt} tokens and max_tokens={max_tokens} exceed the context of {limit} tokens",
                "max_tokens",
            )


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{name} holds the id {token_id}; ids of this model are 0 to {vocab_size - 1}", name)
