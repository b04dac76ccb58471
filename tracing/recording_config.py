"""What a recording is asked to do, resolved once. Knows no part that does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from inferdbg.engine.config import CoreConfig, FrontConfig
from inferdbg.tracing.clock import ClockPair
from inferdbg.tracing.retention import DEFAULT_RETENTION, Retention
from inferdbg.tracing.sampling import ALL_TRACES, SampleRule
from inferdbg.tracing.token_log import TokenLogMode

__all__ = ["RecordingConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingConfig:
    """What to record, and what the manifest is to say. Without `run_dir` and `otlp_endpoint` there are only metrics."""

    run_dir: Path | None = None
    kind: str = "serve"
    clock: ClockPair = field(default_factory=ClockPair.now)
    replica: str = "0"
    replica_label: str = "replica"
    token_log: TokenLogMode = TokenLogMode.IDS
    token_log_key: bytes | None = None  # for `hashed`; see `token_log.load_key`
    log_text: bool = False
    retention: Retention = DEFAULT_RETENTION
    otlp_endpoint: str | None = None
    otlp_sample: SampleRule = ALL_TRACES
    trace_steps: bool = False  # step spans from the start, for as long as the run lasts
    slo_ttft_seconds: float | None = None
    core: CoreConfig | None = None
    front: FrontConfig | None = None
    model_fingerprint: str | None = None
    command: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
