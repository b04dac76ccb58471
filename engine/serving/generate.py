"""Serves one generation request: admission, body, tokenizing, submission, answer, end. The same for both endpoints.

However it goes, the client gets an answer or a closed connection, the core learns of an abort at once, and the
observer hears one `Rejected`, or one `Arrived` and one `Closed`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from inferdbg.engine.errors import InferdbgError
from inferdbg.engine.serving.api_errors import ApiError, api_error_of
from inferdbg.engine.serving.choice_state import Delta
from inferdbg.engine.serving.connection import ClientDisconnected, Connection, connection_of, read_body
from inferdbg.engine.serving.events import EndKind
from inferdbg.engine.serving.front import Front
from inferdbg.engine.serving.generation import Endpoint, Formatter, Plan, usage_document
from inferdbg.engine.serving.openai_protocol import GenerationRequest
from inferdbg.engine.serving.request_head import head_of
from inferdbg.engine.serving.request_state import RequestState
from inferdbg.engine.serving.responder import Responder, SlowClient
from inferdbg.engine.serving.sequences import build_sequences

__all__ = ["GenerationApp"]

CLIENT_CLOSED = 499  # nginx's status for a client that left before it was sent one


class GenerationApp:
    """The ASGI application of one endpoint."""

    def __init__(self, front: Front, endpoint: Endpoint) -> None:
        self._front = front
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, connection = self._begin(scope)
        responder = Responder(send, request, self._front.config.slow_client_seconds)
        with self._front.track(request):
            await _Exchange(self._front, self._endpoint, request, connection, responder, scope, receive).run()

    def note_refused(self, scope: Scope, error: ApiError) -> None:
        """States the end of a request that never got here: the caller had no right to it."""
        request, _ = self._begin(scope)
        request.reject(status=error.status, reason=error.reason, message=error.recorded, now_ns=time.monotonic_ns())

    def _begin(self, scope: Scope) -> tuple[RequestState, Connection]:
        connection = connection_of(scope)
        head = head_of(scope, self._endpoint.id_prefix, connection.received_ns)
        return RequestState(head, self._front.observer), connection


@dataclass(slots=True)
class _Exchange:
    """One request and its connection."""

    front: Front
    endpoint: Endpoint
    request: RequestState
    connection: Connection
    responder: Responder
    scope: Scope
    receive: Receive

    async def run(self) -> None:
        request = self.request
        watch: asyncio.Task[None] | None = None
        try:
            self.front.check_admission()
            body = await self._read()
            watch = asyncio.create_task(self._watch_disconnect())
            plan, formatter = await self._prepare(body)
            self._submit(plan)
            if plan.stream:
                await self._stream(plan, formatter)
            else:
                await self._respond(plan, formatter)
        except ClientDisconnected:
            self._abort(CLIENT_CLOSED, "client_closed", "the client left before its answer was complete")
        except SlowClient:
            patience = self.front.config.slow_client_seconds
            self._abort(CLIENT_CLOSED, "slow_client", f"the client took no bytes for {patience:g} s")
            self.connection.cut()
        except ApiError as error:
            await self._refuse(error)
        except InferdbgError as error:
            await self._refuse(api_error_of(error))
        except asyncio.CancelledError:
            self._abort(503, "shutdown", "the server was stopped")
            raise
        except Exception as error:
            # a fault of ours: the request ends, the error goes on to the server's log
            await self._refuse(ApiError(500, f"internal error: {type(error).__name__}", code="internal_error"))
            raise
        finally:
            if watch is not None:
                watch.cancel()
            self.front.supervisor.dispatcher.abort(request)

    async def _read(self) -> GenerationRequest:
        config = self.front.config
        raw = await read_body(self.scope, self.receive, config.max_body_bytes, config.slow_client_seconds)
        self.request.bytes_in = len(raw)
        body = self.endpoint.decode(raw)
        self.front.check_model(body.model)
        self.request.parsed_ns = time.monotonic_ns()
        return body

    async def _prepare(self, body: GenerationRequest) -> tuple[Plan, Formatter]:
        """Tokenizes and validates; nothing is queued yet. Gives up as soon as the client leaves."""
        front, request = self.front, self.request
        # a request that cannot be valid is refused before it costs a tokenizer's time
        self.endpoint.check_size(body, front.prompt_limits)
        self.endpoint.sampling(body, context_left=front.max_model_len)
        tokenizing = asyncio.ensure_future(self.endpoint.tokenize(body, front.pool))
        leaving = asyncio.ensure_future(request.wake.wait())
        try:
            await asyncio.wait((tokenizing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if request.is_disconnected or request.failure is not None:
                tokenizing.cancel()
                self._check_alive()
            prompts, timed = await tokenizing
        finally:
            leaving.cancel()
        request.mark_tokenized(timed, time.monotonic_ns())
        sampling = self.endpoint.sampling(body, context_left=front.context_left([prompt.ids for prompt in prompts]))
        keep_text = front.config.keep_text
        texts = [prompt.text for prompt in prompts if prompt.text is not None] if keep_text else []
        stream = bool(body.stream)
        plan = Plan(
            prompts=tuple(prompt.ids for prompt in prompts),
            sampling=sampling,
            is_seeded=body.seed is not None,
            stream=stream,
            include_usage=stream and body.stream_options is not None and bool(body.stream_options.include_usage),
            return_token_ids=bool(body.return_token_ids),
            cache_salt=body.cache_salt,
            messages_json=self.endpoint.content_json(body) if keep_text else None,
            prompt_text="\n".join(texts) if texts else None,
        )
        front.check_plan(plan)
        front.check_core()
        formatter = self.endpoint.formatter(
            request.head.request_id, int(time.time()), front.config.model_name, plan, front.pool.vocabulary
        )
        return plan, formatter

    def _submit(self, plan: Plan) -> None:
        front = self.front
        dispatcher = front.supervisor.dispatcher
        pairs = build_sequences(
            plan,
            front.pool.vocabulary,
            new_seq_id=dispatcher.new_seq_id,
            top_logprobs=front.supervisor.config.top_logprobs,
            now_ns=time.monotonic_ns(),
        )
        self.request.accept(
            model=front.config.model_name,
            prompts=plan.prompts,
            sampling=plan.sampling,
            stream=plan.stream,
            messages_json=plan.messages_json,
            prompt_text=plan.prompt_text,
            choices=[choice for choice, _ in pairs],
        )
        dispatcher.submit(self.request, [sequence for _, sequence in pairs])

    async def _stream(self, plan: Plan, formatter: Formatter) -> None:
        request = self.request
        while not all(choice.is_sent for choice in request.choices):
            await self._wait()
            deltas = request.take_deltas(with_tokens=plan.wants_tokens)
            await self.responder.send_events(chunk for delta in deltas for chunk in formatter.chunks(delta))
            self._note_sent(deltas)
        tail = [formatter.usage_chunk(usage_document(plan.prompts, request.choices))] if plan.include_usage else []
        await self.responder.send_events(tail, last=True)
        self._finish()

    async def _respond(self, plan: Plan, formatter: Formatter) -> None:
        request = self.request
        while not request.is_generated:
            await self._wait()
        await self.responder.send_document(formatter.response(request, usage_document(plan.prompts, request.choices)))
        self._note_sent(request.take_deltas(with_tokens=True))
        self._finish()

    async def _wait(self) -> None:
        """Until there is something new; raises what ends the request."""
        self._check_alive()
        await self.request.wake.wait()
        self.request.wake.clear()
        self._check_alive()

    def _check_alive(self) -> None:
        if self.request.is_disconnected:
            raise ClientDisconnected
        if (failure := self.request.failure) is not None:
            raise ApiError(failure.status, failure.message, code=failure.code)

    def _note_sent(self, deltas: Sequence[Delta]) -> None:
        now = time.monotonic_ns()
        for delta in deltas:
            if delta.finish_reason is not None:
                delta.choice.sent_ns = now
        if self.request.is_streaming:
            for choice in self.request.choices:
                self.front.supervisor.dispatcher.grant(choice)

    def _finish(self) -> None:
        now = time.monotonic_ns()
        if self.request.is_disconnected:
            raise ClientDisconnected
        self.request.sent_ns = now
        self.request.close(EndKind.FINISHED, status=200, now_ns=now)

    async def _refuse(self, error: ApiError) -> None:
        """Answers with an error, or ends the stream with one; then ends the request."""
        try:
            await self.responder.send_error(error)
        except (ClientDisconnected, SlowClient):
            self.connection.cut()  # nobody to tell; the request still ends for its own reason
        finally:
            self._end(self._end_of(error), error.status, error.reason, error.recorded)

    def _end_of(self, error: ApiError) -> EndKind:
        """How a request ends that is answered with an error."""
        if (failure := self.request.failure) is not None:
            return failure.end
        is_ours = error.status == 500 or self.request.is_accepted
        return EndKind.FAILED if is_ours else EndKind.REJECTED

    def _abort(self, status: int, reason: str, message: str) -> None:
        # the core frees the pages in its next step
        self.front.supervisor.dispatcher.abort(self.request)
        self._end(EndKind.ABORTED, status, reason, message)

    def _end(self, end: EndKind, status: int, reason: str, message: str) -> None:
        """Ends the request, accepted or not; `status` stands where none was sent."""
        now, sent = time.monotonic_ns(), self.responder.status
        if not self.request.reject(status=status, reason=reason, message=message, now_ns=now, end=end):
            self.request.close(end, status=status if sent is None else sent, now_ns=now, reason=reason, error=message)

    async def _watch_disconnect(self) -> None:
        """The body has been read: what comes next is the client's end."""
        while (await self.receive())["type"] != "http.disconnect":
            pass
        if not self.request.is_over:
            self.front.supervisor.dispatcher.abort(self.request)
            self.request.disconnect()
