"""Which traces go to the collector, decided when a request has ended: ``errors,slow>1s,1%``. Knows no span.

A trace goes if any rule takes it. The percentage is drawn from the trace id, so every process that uses the same rule
draws the same. A caller that marked its trace as not sampled is respected by the percentage, and only by it: errors
and slow requests go all the same, since they are what the collector is for. A caller's mark "sampled" forces nothing.
The run's own `spans/` are not sampled.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from inferdbg.engine.errors import UsageError
from inferdbg.engine.serving.events import TraceContext

__all__ = ["ALL_TRACES", "SampleRule", "parse_sample_rule"]

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0}
_IDS = 1 << 56  # W3C: the last seven bytes of a trace id are random


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRule:
    """`ratio` of all traces, and every trace that is an error or slow, if so chosen."""

    errors: bool = False
    slow_seconds: float | None = None
    ratio: float = 1.0

    def takes(self, trace: TraceContext, *, is_error: bool, seconds: float) -> bool:
        """Whether the trace goes to the collector. Every end but `finished` is an error."""
        if self.errors and is_error:
            return True
        if self.slow_seconds is not None and seconds > self.slow_seconds:
            return True
        if trace.parent_span_id is not None and not trace.sampled:
            return False
        return int(trace.trace_id, 16) % _IDS < self.ratio * _IDS


ALL_TRACES = SampleRule()


def parse_sample_rule(text: str) -> SampleRule:
    """Reads ``all``, or ``errors,slow>1s,1%``: any of the three, each once; no percentage means 0%.

    Raises:
        UsageError: it is none of these.
    """
    if text.strip().lower() == "all":
        return ALL_TRACES
    errors, slow, ratio = False, None, None
    for part in text.lower().replace(" ", "").split(","):
        if part == "errors" and not errors:
            errors = True
        elif (match := re.fullmatch(r"slow>(\d+(?:\.\d+)?)(ms|s|m)", part)) and slow is None:
            slow = float(match[1]) * _SECONDS[match[2]]
        elif (match := re.fullmatch(r"(\d+(?:\.\d+)?)%", part)) and ratio is None and float(match[1]) <= 100:
            ratio = float(match[1]) / 100
        else:
            raise UsageError(
                f"--otlp-sample takes all, or rules like errors,slow>1s,1% (each at most once); {text!r} given"
            )
    return SampleRule(errors=errors, slow_seconds=slow, ratio=ratio or 0.0)
