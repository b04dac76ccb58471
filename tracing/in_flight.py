"""Requests that arrived and never ended: who they are, and what their sequences had sampled by the last step.

After a crash the request that caused it is among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from inferdbg.tracing.segment_reader import SegmentReader

__all__ = ["InFlight", "PartialOutput", "find_in_flight"]

Row = dict[str, Any]


@dataclass(slots=True)
class PartialOutput:
    """What one sequence had sampled. `token_ids` has None where ids are not logged."""

    seq_id: int
    prompt_index: int
    choice_index: int
    token_ids: list[int | None] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    sampled_ns: list[int] = field(default_factory=list)  # when each step's ids were known
    cached_tokens: int | None = None
    num_preemptions: int = 0
    has_ended: bool = False  # the engine had finished it; its request's row was not written


@dataclass(frozen=True, slots=True)
class InFlight:
    """One request in flight. `arrival` is its row of `arrivals`."""

    arrival: Row
    outputs: tuple[PartialOutput, ...]

    @property
    def request_id(self) -> str:
        return str(self.arrival["request_id"])

    def rows(self) -> list[Row]:
        """In the shape of the token log, as far as is known: one per sequence; one per prompt where none is known."""
        hidden = ("prompts", "num_prompt_tokens", "seq_ids")
        shared = {name: value for name, value in self.arrival.items() if name not in hidden}
        shared |= {"end": None, "closed_ns": None}
        if self.outputs:
            rows = [self._prompt(output.prompt_index) | self._output(output) for output in self.outputs]
        else:
            numbers = range(len(self.arrival["num_prompt_tokens"] or []) or 1)
            rows = [self._prompt(index) | {"choice_index": 0, "num_output_tokens": 0} for index in numbers]
        return [shared | row | {"num_rows": len(rows)} for row in rows]

    def _prompt(self, index: int) -> Row:
        prompts, lengths = self.arrival["prompts"], self.arrival["num_prompt_tokens"] or []
        return {
            "prompt_index": index,
            "num_prompt_tokens": lengths[index] if index < len(lengths) else None,
            "prompt_token_ids": prompts[index] if prompts else None,
        }

    def _output(self, output: PartialOutput) -> Row:
        return {
            "choice_index": output.choice_index,
            "seq_id": output.seq_id,
            "num_output_tokens": len(output.steps),
            "output_token_ids": None if all(i is None for i in output.token_ids) else output.token_ids,
            "output_logprobs": output.logprobs,
            "token_offsets_ns": [ns - self.arrival["arrival_ns"] for ns in output.sampled_ns],
            "token_steps": output.steps,
            "cached_tokens": output.cached_tokens,
            "num_preemptions": output.num_preemptions,
        }


def find_in_flight(tables: Mapping[str, SegmentReader]) -> list[InFlight]:
    """By arrival. A request whose end may have been in a segment that retention deleted is not counted."""
    open_ids: set[str] = set()
    for batch in tables["arrivals"].batches(["request_id"]):
        open_ids.update(batch.column(0).to_pylist())
    horizons: dict[str, int] = {}
    cut = _cut_replicas(tables["requests"])
    for batch in tables["requests"].batches(["request_id", "replica", "closed_ns"]):
        open_ids.difference_update(batch.column(0).to_pylist())
        for replica in cut:
            closed = pc.min(
                batch.column("closed_ns").filter(pc.equal(batch.column("replica"), pa.scalar(replica)))
            ).as_py()
            if closed is not None:
                horizons[replica] = min(closed, horizons.get(replica, closed))
    if not open_ids:
        return []
    arrivals = [
        row
        for row in _rows(tables["arrivals"], open_ids)
        if row["replica"] not in cut or row["arrival_ns"] >= horizons.get(row["replica"], 1 << 62)
    ]
    flights = [InFlight(row, tuple(_outputs(row))) for row in arrivals]
    _recover(flights, tables["steps"])
    return sorted(flights, key=lambda flight: (int(flight.arrival["arrival_ns"]), flight.request_id))


def _cut_replicas(reader: SegmentReader) -> set[str]:
    """Replicas whose first segments are gone."""
    firsts: dict[tuple[str, int], int] = {}
    for name in reader.segments():
        firsts.setdefault((name.replica, name.incarnation), name.seq)
    return {replica for (replica, _), seq in firsts.items() if seq > 0}


def _rows(reader: SegmentReader, ids: set[str]) -> Iterator[Row]:
    wanted = pa.array(sorted(ids), pa.string())
    for batch in reader.batches():
        yield from batch.filter(pc.is_in(batch.column("request_id"), value_set=wanted)).to_pylist()


def _outputs(arrival: Row) -> Iterator[PartialOutput]:
    seq_ids = arrival["seq_ids"] or []
    num_prompts = len(arrival["num_prompt_tokens"] or []) or 1
    num_choices = max(1, len(seq_ids) // num_prompts)
    for position, seq_id in enumerate(seq_ids):
        yield PartialOutput(seq_id, position // num_choices, position % num_choices)


def _recover(flights: list[InFlight], reader: SegmentReader) -> None:
    """Fills the outputs from the steps of the incarnation that each request ran in."""
    wanted = {
        (flight.arrival["replica"], flight.arrival["incarnation"], output.seq_id): output
        for flight in flights
        for output in flight.outputs
    }
    columns = [
        "step", "start_ns", "schedule_ns", "prepare_ns", "execute_ns", "sample_ns",
        "sampled_seq_ids", "sampled_ids", "sampled_logprobs",
        "admitted_seq_ids", "admitted_cached", "admitted_is_resume", "preempted_seq_ids", "finished_seq_ids",
    ]  # fmt: skip
    writers = {(replica, incarnation) for replica, incarnation, _ in wanted}
    for name in reader.segments():
        if (name.replica, name.incarnation) not in writers:
            continue
        for batch in reader.segment(name, columns):
            for step in batch.to_pylist():
                _apply(step, name.replica, name.incarnation, wanted)


def _apply(step: Row, replica: str, incarnation: int, wanted: Mapping[tuple[str, int, int], PartialOutput]) -> None:
    stages = (step["schedule_ns"], step["prepare_ns"], step["execute_ns"], step["sample_ns"])
    sampled_ns = step["start_ns"] + sum(stage or 0 for stage in stages)
    ids = step["sampled_ids"]
    for position, seq_id in enumerate(step["sampled_seq_ids"] or []):
        if (output := wanted.get((replica, incarnation, seq_id))) is not None:
            output.token_ids.append(ids[position] if ids else None)
            output.logprobs.append(step["sampled_logprobs"][position])
            output.steps.append(step["step"])
            output.sampled_ns.append(sampled_ns)
    columns = (step[name] or [] for name in ("admitted_seq_ids", "admitted_cached", "admitted_is_resume"))
    admissions = zip(*columns, strict=True)
    for seq_id, cached, is_resume in admissions:
        output = wanted.get((replica, incarnation, seq_id))
        if output is not None and not is_resume:
            output.cached_tokens = cached
    for seq_id in step["preempted_seq_ids"] or []:
        if (output := wanted.get((replica, incarnation, seq_id))) is not None:
            output.num_preemptions += 1
    for seq_id in step["finished_seq_ids"] or []:
        if (output := wanted.get((replica, incarnation, seq_id))) is not None:
            output.has_ended = True
