"""What a recording is asked to do, checked and resolved once. Knows no part that does it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from inferdbg.engine.config import CoreConfig, FrontConfig
from inferdbg.engine.errors import UsageError
from inferdbg.tracing.catalog import METRICS
from inferdbg.tracing.clock import ClockPair
from inferdbg.tracing.retention import DEFAULT_RETENTION, Retention
from inferdbg.tracing.sampling import ALL_TRACES, SampleRule
from inferdbg.tracing.token_log import TokenLogMode

__all__ = ["RecordingConfig"]

_REPLICA = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")  # a part of file names and a label's value
_LABEL = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]{0,127}")
_PROMETHEUS_LABELS = frozenset({"le", "quantile"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingConfig:
    """What to record, and what the manifest is to say. Without `run_dir` and `otlp_endpoint` there are only metrics.

    Raises:
        UsageError: a replica or a replica label of a form that files and metrics cannot carry.
    """

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

    def __post_init__(self) -> None:
        if not _REPLICA.fullmatch(self.replica):
            raise UsageError(
                f"--replica must be 1 to 64 letters, digits, dots, dashes or underscores, no dot first; "
                f"{self.replica!r} given"
            )
        if not _LABEL.fullmatch(self.replica_label):
            raise UsageError(
                f"--replica-label must be a Prometheus label name (letters, digits, underscores; no digit and no two "
                f"underscores first); {self.replica_label!r} given"
            )
        taken = _PROMETHEUS_LABELS.union(*(spec.labels for spec in METRICS))
        if self.replica_label in taken:
            raise UsageError(
                f"--replica-label {self.replica_label!r} is a label that metrics have already; "
                f"it must be none of {', '.join(sorted(taken))}"
            )
