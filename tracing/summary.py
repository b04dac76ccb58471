"""A run at a glance: counts, percentiles, stage sums. The numbers of `show RUN`; knows no rendering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc

from inferdbg.engine.serving.events import STAGE_ENDS, EndKind, cached_prompt_tokens
from inferdbg.tracing.percentiles import Distribution
from inferdbg.tracing.reader import InFlight, Run, RunStatus, row_stages

__all__ = ["SUMMARY_SCHEMA", "Summary", "summarize"]

SUMMARY_SCHEMA = "inferdbg.show/1"
_COLUMNS = (
    "request_id", "prompt_index", "choice_index", "end", "arrival_ns", "closed_ns", "request_boundaries",
    "num_prompt_tokens", "num_output_tokens", "cached_tokens", "num_preemptions", "steps_complete",
    "token_offsets_ns", "token_steps",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What `show RUN --json` says. Times in seconds.

    TTFT is of every request that got a token, ITL of every gap between tokens, E2E of finished requests. Stage sums and
    `e2e_sum_seconds` are over accepted requests that have ended, however they did, so that the seven add up to it.
    A request counts once, however many choices it has. What retention deleted is in none of the figures but `deleted`.
    """

    status: RunStatus
    num_requests: int  # ended and in flight
    ends: dict[str, int]
    in_flight: int
    tokens: dict[str, int]  # prompt (each prompt once), output (of all choices), cached (of each prompt's first choice)
    ttft_seconds: dict[str, float | None]
    itl_seconds: dict[str, float | None]
    e2e_seconds: dict[str, float | None]
    stages_seconds: dict[str, float]
    e2e_sum_seconds: float
    dropped: dict[str, int]
    deleted: dict[str, Any]  # by retention, see `Run.deleted`
    num_preemptions: int
    num_steps_incomplete: int  # requests whose story lacks step records
    in_flight_requests: tuple[InFlight, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The document, with `schema`."""
        names = (
            "status", "num_requests", "ends", "in_flight", "tokens", "ttft_seconds", "itl_seconds", "e2e_seconds",
            "stages_seconds", "e2e_sum_seconds", "dropped", "deleted", "num_preemptions", "num_steps_incomplete",
        )  # fmt: skip
        document: dict[str, Any] = {"schema": SUMMARY_SCHEMA} | {name: getattr(self, name) for name in names}
        document["status"] = self.status.value
        document["in_flight_requests"] = [
            {
                "request_id": flight.request_id,
                "client_request_id": flight.arrival["client_request_id"],
                "prompt_tokens": sum(flight.arrival["num_prompt_tokens"] or []),
                "output_tokens": sum(len(output.steps) for output in flight.outputs),
            }
            for flight in self.in_flight_requests
        ]
        document["warnings"] = list(self.warnings)
        return document


class _Totals:
    """Sums over the rows, batch by batch."""

    def __init__(self) -> None:
        self.ends = {end.value: 0 for end in EndKind}
        self.tokens = {"prompt": 0, "output": 0, "cached": 0}
        self.ttft, self.itl, self.e2e = Distribution(), Distribution(), Distribution()
        self.stages_ns = {name: 0 for name, _ in STAGE_ENDS}
        self.e2e_ns = 0
        self.num_preemptions = 0
        self.num_incomplete = 0
        self._last_id: str | None = None

    def add(self, batch: Any) -> None:
        self._gaps(batch)
        scalars = batch.select([name for name in _COLUMNS if not name.startswith("token_")])
        for row in scalars.to_pylist():
            self._row(row)

    def _row(self, row: dict[str, Any]) -> None:
        if row["choice_index"] == 0:
            self.tokens["prompt"] += row["num_prompt_tokens"] or 0
        self.tokens["cached"] += cached_prompt_tokens([(row["choice_index"], row["cached_tokens"])])
        self.tokens["output"] += row["num_output_tokens"] or 0
        self.num_preemptions += row["num_preemptions"] or 0
        if row["request_id"] != self._last_id:  # rows of one request are adjacent
            self._last_id = row["request_id"]
            self._request(row)

    def _request(self, row: dict[str, Any]) -> None:
        end = row["end"]
        self.ends[end] = self.ends.get(end, 0) + 1
        self.num_incomplete += row["steps_complete"] is False
        first_token = (row["request_boundaries"] or {}).get("first_token_ns")
        if first_token is not None:
            self.ttft.add(np.array([first_token - row["arrival_ns"]]))
        stages = row_stages(row)
        was_accepted = row["num_prompt_tokens"] is not None and end != EndKind.REJECTED
        if not (was_accepted and stages):
            return
        for stage in stages:
            self.stages_ns[stage.name] += stage.end_ns - stage.start_ns
        e2e_ns = stages[-1].end_ns - stages[0].start_ns
        self.e2e_ns += e2e_ns
        if end == EndKind.FINISHED:
            self.e2e.add(np.array([e2e_ns]))

    def _gaps(self, batch: Any) -> None:
        """ITL: differences within a row, where the step differs too."""
        offsets, steps = batch.column("token_offsets_ns"), batch.column("token_steps")
        times = pc.list_flatten(offsets).to_numpy(zero_copy_only=False)
        numbers = pc.list_flatten(steps).to_numpy(zero_copy_only=False)
        if len(times) < 2 or len(times) != len(numbers):
            return
        row_of = pc.list_parent_indices(offsets).to_numpy(zero_copy_only=False)
        same_row = row_of[1:] == row_of[:-1]
        self.itl.add(np.diff(times)[same_row & (numbers[1:] != numbers[:-1])])


def summarize(run: Run) -> Summary:
    """Reads the whole run in batches, all of it as it was at one moment."""
    totals = _Totals()
    for batch in run.requests(_COLUMNS):
        totals.add(batch)
    in_flight = tuple(run.in_flight())
    return Summary(
        status=run.status,
        num_requests=sum(totals.ends.values()) + len(in_flight),
        ends=totals.ends,
        in_flight=len(in_flight),
        tokens=totals.tokens,
        ttft_seconds=totals.ttft.percentiles(),
        itl_seconds=totals.itl.percentiles(),
        e2e_seconds=totals.e2e.percentiles(),
        stages_seconds={name: ns / 1e9 for name, ns in totals.stages_ns.items()},
        e2e_sum_seconds=totals.e2e_ns / 1e9,
        dropped=run.dropped,
        deleted=run.deleted,
        num_preemptions=totals.num_preemptions,
        num_steps_incomplete=totals.num_incomplete,
        in_flight_requests=in_flight,
        warnings=(*run.warnings, *_doubts(run, len(in_flight))),
    )


def _doubts(run: Run, num_in_flight: int) -> list[str]:
    """What the figures cannot say by themselves."""
    if run.status is RunStatus.CLOSED and num_in_flight:
        return [
            f"the run ended in order, yet {num_in_flight} requests that arrived have no row: "
            "segments of its token log are missing"
        ]
    if run.status is RunStatus.LOST:
        return ["the run did not end in order: what its last moments dropped is not on record"]
    return []
