"""Wires a server and its recording together for `inferdbg serve`: start, tell where, serve, close. No flags here."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from inferdbg.cli.render.terminal import PrintableFormatter, diagnostics
from inferdbg.cli.runs import DID_NOT_START, RUNS, run_argument
from inferdbg.engine.config import CoreConfig, FrontConfig, cache_dir
from inferdbg.engine.core.fingerprint import fingerprint
from inferdbg.engine.errors import InvalidRequest
from inferdbg.engine.serving.api_errors import api_error_of
from inferdbg.engine.serving.server import RunningServer, serve
from inferdbg.probes.text import printable
from inferdbg.tracing.disclosure import disclose_url
from inferdbg.tracing.otlp_endpoint import choose_endpoint
from inferdbg.tracing.recording_config import RecordingConfig
from inferdbg.tracing.retention import parse_retention
from inferdbg.tracing.sampling import parse_sample_rule
from inferdbg.tracing.session import Recording, start_recording
from inferdbg.tracing.step_window import StepWindow
from inferdbg.tracing.token_log import TokenLogMode, load_key

__all__ = ["RecordOptions", "run_server", "step_window_route"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """The flags about recording, as given."""

    trace: bool
    run_dir: Path | None
    retain: str
    token_log: str
    token_log_key: Path | None
    log_text: bool
    trace_steps: bool
    otlp_endpoint: str | None
    otlp_sample: str
    slo_ttft_seconds: float | None
    replica: str
    replica_label: str


def run_server(core: CoreConfig, front: FrontConfig, options: RecordOptions) -> int:
    """Serves until a signal. Prints the address on stdout once it answers, everything else on stderr."""
    _log_to_stderr()
    running: list[RunningServer] = []
    config = _recording_config(core, front, options)
    recording = start_recording(
        config,
        loop_lag=lambda: running[0].front.loop_lag.last_ns / 1e9 if running else 0.0,
        observer_errors=lambda: running[0].front.observer.num_errors if running else 0,
    )
    reason = DID_NOT_START

    def on_ready(server: RunningServer) -> None:
        nonlocal reason
        reason = "stopped"
        running.append(server)
        _announce(server, front, config, recording)

    try:
        code = serve(
            core,
            front,
            recording.observer,
            metrics=recording.metrics_response,
            extra_routes=[step_window_route(recording.step_window)],
            on_ready=on_ready,
        )
    finally:
        recording.close(reason)
    _farewell(recording)
    return code


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("inferdbg: %(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def step_window_route(window: StepWindow) -> Route:
    """``POST /trace/steps?seconds=N``: opens the window in which engine steps become spans; 0 closes it."""

    async def open_window(request: Request) -> Response:
        text = request.query_params.get("seconds", "10")
        try:
            seconds = float(text)
        except ValueError:
            raise InvalidRequest(f"seconds must be a number, {text[:40]!r} given", "seconds") from None
        window.open(seconds)
        return JSONResponse({"seconds": seconds})

    return Route("/trace/steps", _answering(open_window), methods=["POST"])


def _answering(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except InvalidRequest as error:
            api_error = api_error_of(error)
            return JSONResponse(api_error.document(), api_error.status)

    return answer


def _recording_config(core: CoreConfig, front: FrontConfig, options: RecordOptions) -> RecordingConfig:
    token_log = TokenLogMode(options.token_log)
    key = None
    if token_log is TokenLogMode.HASHED:
        key = load_key(options.token_log_key or cache_dir() / "token-log.key")
    run_dir = options.run_dir
    if options.trace and run_dir is None:
        run_dir = RUNS / time.strftime("%Y-%m-%dT%H-%M-%S-serve")
    return RecordingConfig(
        run_dir=run_dir,
        replica=options.replica,
        replica_label=options.replica_label,
        token_log=token_log,
        token_log_key=key,
        log_text=options.log_text,
        retention=parse_retention(options.retain),
        otlp_endpoint=choose_endpoint(options.otlp_endpoint, os.environ, makes_spans=run_dir is not None),
        otlp_sample=parse_sample_rule(options.otlp_sample),
        trace_steps=options.trace_steps,
        slo_ttft_seconds=options.slo_ttft_seconds,
        core=core,
        front=front,
        model_fingerprint=fingerprint(core.model_dir) if options.trace else None,
        command=sys.argv,
        environ=os.environ,
    )


def _announce(server: RunningServer, front: FrontConfig, config: RecordingConfig, recording: Recording) -> None:
    print(server.url, flush=True)  # noqa: T201
    say = diagnostics()
    ready = server.ready
    name = printable(front.model_name)
    say.print(f"{name}: up to {ready.max_model_len:,} tokens a request, {ready.num_pages:,} KV pages")
    say.print(f"OpenAI API at {server.url}/v1, metrics at {server.url}/metrics, Ctrl-C stops")
    if recording.run_dir is None:
        say.print("nothing is recorded (--trace records)")
        return
    logged = {
        TokenLogMode.IDS: "token ids, which are text by another name",
        TokenLogMode.HASHED: "keyed hashes of token ids",
        TokenLogMode.OFF: "no token ids",
    }[config.token_log]
    text = " and the text itself" if config.log_text else ""
    where = printable(str(recording.run_dir))
    say.print(f"recording to {where}: stages, steps and {logged}{text}; at most {config.retention} is kept")
    if config.otlp_endpoint is not None:
        say.print(f"spans also go to the collector at {printable(disclose_url(config.otlp_endpoint))}")


def _farewell(recording: Recording) -> None:
    say = diagnostics()
    dropped = {signal: number for signal, number in recording.dropped().items() if number}
    if dropped:
        say.print(f"dropped: {', '.join(f'{number:,} {signal}' for signal, number in dropped.items())}")
    if recording.run_dir is not None:
        say.print(f"inferdbg show {run_argument(recording.run_dir)}", soft_wrap=True)
