"""The routes beside generation: models, tokenize, detokenize, health, version, metrics."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from inferdbg.engine.errors import InferdbgError, InvalidRequest
from inferdbg.engine.serving.api_errors import ApiError, api_error_of
from inferdbg.engine.serving.chat import plain_messages
from inferdbg.engine.serving.chat_template import ChatPrompt
from inferdbg.engine.serving.connection import ClientDisconnected, read_body
from inferdbg.engine.serving.front import Front
from inferdbg.engine.serving.openai_protocol import DetokenizeRequest, TokenizeRequest, decode_body

__all__ = ["MetricsRenderer", "api_routes", "error_response", "json_response", "open_routes"]

MetricsRenderer = Callable[[str], tuple[bytes, str]]
"""From the Accept header to the body of /metrics and its content type."""

Handler = Callable[[Request], Awaitable[Response]]


def open_routes(front: Front, metrics: MetricsRenderer | None) -> list[Route]:
    """What needs no key; /metrics only where there is something to render it."""
    handlers = _Handlers(front)
    routes = [
        Route("/health", _answering(handlers.health), methods=["GET"]),
        Route("/version", _answering(handlers.version), methods=["GET"]),
    ]
    if metrics is not None:
        routes.append(Route("/metrics", _answering(_metrics_handler(metrics)), methods=["GET"]))
    return routes


def api_routes(front: Front) -> list[Route]:
    """What belongs to the API."""
    handlers = _Handlers(front)
    return [
        Route("/v1/models", _answering(handlers.models), methods=["GET"]),
        Route("/v1/models/{model_id:path}", _answering(handlers.model), methods=["GET"]),
        Route("/tokenize", _answering(handlers.tokenize), methods=["POST"]),
        Route("/detokenize", _answering(handlers.detokenize), methods=["POST"]),
    ]


def json_response(document: object, status: int = 200) -> Response:
    """A whole JSON response."""
    return Response(msgspec.json.encode(document), status, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """An error in OpenAI's shape."""
    response = json_response(error.document(), error.status)
    for name, value in error.headers():
        response.headers[name.decode("ascii")] = value.decode("ascii")
    return response


class _Handlers:
    def __init__(self, front: Front) -> None:
        self._front = front
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model_document()]})

    async def model(self, request: Request) -> Response:
        self._front.check_model(request.path_params["model_id"])
        return json_response(self._model_document())

    async def tokenize(self, request: Request) -> Response:
        with self._front.admit_utility():
            return await self._tokenize(decode_body(await self._body(request), TokenizeRequest))

    async def _tokenize(self, body: TokenizeRequest) -> Response:
        self._front.check_model(body.model)
        pool = self._front.pool
        if body.messages is not None:
            prompt, _ = await pool.encode_chat(
                ChatPrompt(
                    messages=plain_messages(body.messages),
                    tools=body.tools,
                    add_generation_prompt=not body.continue_final_message and body.add_generation_prompt is not False,
                    continue_final_message=bool(body.continue_final_message),
                    arguments=body.chat_template_kwargs,
                    add_special_tokens=bool(body.add_special_tokens),
                )
            )
        elif body.prompt is not None:
            prompts, _ = await pool.encode([body.prompt], add_special_tokens=body.add_special_tokens is not False)
            prompt = prompts[0]
        else:
            raise InvalidRequest("prompt or messages is missing", "prompt")
        strings = None
        if body.return_token_strs:
            name = pool.vocabulary.tokenizer.id_to_token
            strings, _ = await pool.run(lambda: [name(token_id) for token_id in prompt.ids])
        return json_response(
            {
                "count": len(prompt.ids),
                "max_model_len": self._front.max_model_len,
                "tokens": prompt.ids,
                "token_strs": strings,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        with self._front.admit_utility():
            return await self._detokenize(decode_body(await self._body(request), DetokenizeRequest))

    async def _detokenize(self, body: DetokenizeRequest) -> Response:
        self._front.check_model(body.model)
        vocab_size = self._front.supervisor.ready.vocab_size
        if body.tokens and (max(body.tokens) >= vocab_size or min(body.tokens) < 0):
            raise InvalidRequest(f"tokens holds an id out of range: 0 to {vocab_size - 1}", "tokens")
        text, _ = await self._front.pool.decode(body.tokens)
        return json_response({"prompt": text})

    async def health(self, request: Request) -> Response:
        if (problem := self._front.problem) is not None:
            return json_response({"status": "unavailable", "reason": problem}, 503)
        return json_response({"status": "ok"})

    async def version(self, request: Request) -> Response:
        return json_response({"version": importlib.metadata.version("inferdbg")})

    async def _body(self, request: Request) -> bytes:
        config = self._front.config
        return await read_body(request.scope, request.receive, config.max_body_bytes, config.slow_client_seconds)

    def _model_document(self) -> dict[str, object]:
        name = self._front.config.model_name
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "inferdbg",
            "root": name,
            "parent": None,
            "max_model_len": self._front.max_model_len,
        }


def _metrics_handler(metrics: MetricsRenderer) -> Handler:
    async def render(request: Request) -> Response:
        body, content_type = metrics(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return render


def _answering(handler: Handler) -> Handler:
    """Turns the project's errors into answers."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnected:
            return Response(status_code=499)  # nobody is there to read it
        except ApiError as error:
            return error_response(error)
        except InferdbgError as error:
            return error_response(api_error_of(error))

    return answer
