"""Requests that arrived and never ended: who they are, and what their sequences had sampled by the last step.

After a crash the request that caused it is among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from inferdbg.tracing.schema import REQUESTS
from inferdbg.tracing.segment_reader import SegmentReader

__all__ = ["InFlight", "PartialOutput", "find_in_flight"]

Row = dict[str, Any]
_Key = tuple[str, int, int]  # replica, incarnation, seq_id


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
    steps_complete: bool = True  # False: step records are missing, and with them perhaps tokens in the middle
    is_admitted: bool = False


@dataclass(frozen=True, slots=True)
class InFlight:
    """One request in flight. `arrival` is its row of `arrivals`."""

    arrival: Row
    outputs: tuple[PartialOutput, ...]

    @property
    def request_id(self) -> str:
        return str(self.arrival["request_id"])

    def rows(self) -> list[Row]:
        """With the columns of the token log, null where nothing is known: one row per sequence; one per prompt where
        no sequence is known."""
        shared = {name: self.arrival.get(name) for name in REQUESTS.names} | {"num_prompt_tokens": None}
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
            "num_output_tokens": len(output.steps) if output.steps_complete else None,
            "output_token_ids": None if all(i is None for i in output.token_ids) else output.token_ids,
            "output_logprobs": output.logprobs,
            "token_offsets_ns": [ns - self.arrival["arrival_ns"] for ns in output.sampled_ns],
            "token_steps": output.steps,
            "cached_tokens": output.cached_tokens,
            "num_preemptions": output.num_preemptions,
            "steps_complete": output.steps_complete,
        }


def find_in_flight(
    tables: Mapping[str, SegmentReader], deleted: Callable[[], Mapping[str, Mapping[str, Any]]]
) -> list[InFlight]:
    """By arrival. A request whose end may have been in a segment that retention deleted is not counted.

    Args:
        deleted: says of each replica what was deleted of it; asked after the tables were read.
    """
    open_ids: set[str] = set()
    for batch in tables["arrivals"].batches(["request_id"]):
        open_ids.update(batch.column(0).to_pylist())
    first_closed: dict[str, int] = {}
    for batch in tables["requests"].batches(["request_id", "replica", "closed_ns"]):
        open_ids.difference_update(batch.column(0).to_pylist())
        ends = pa.table(batch.select(["replica", "closed_ns"])).group_by("replica").aggregate([("closed_ns", "min")])
        for end in ends.to_pylist():
            if (closed := end["closed_ns_min"]) is not None:
                first_closed[end["replica"]] = min(closed, first_closed.get(end["replica"], closed))
    if not open_ids:
        return []
    cut = {replica for replica, document in deleted().items() if _lacks_ends(document)}
    arrivals = [
        row
        for row in _rows(tables["arrivals"], open_ids)
        if row["replica"] not in cut or row["arrival_ns"] >= first_closed.get(row["replica"], 1 << 62)
    ]
    flights = [InFlight(row, tuple(_outputs(row))) for row in arrivals]
    _recover(flights, tables["steps"])
    return sorted(flights, key=lambda flight: (int(flight.arrival["arrival_ns"]), flight.request_id))


def _lacks_ends(deleted: Mapping[str, Any]) -> bool:
    """Whether segments of the token log are among what was deleted; so it may be where no table is named."""
    tables = deleted.get("tables")
    return bool(deleted.get("segments")) and (not tables or "requests" in tables)


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
    wanted: dict[_Key, PartialOutput] = {}
    arrivals_ns: dict[_Key, int] = {}
    for flight in flights:
        for output in flight.outputs:
            key = (flight.arrival["replica"], flight.arrival["incarnation"], output.seq_id)
            wanted[key], arrivals_ns[key] = output, flight.arrival["arrival_ns"]
    columns = [
        "step", "start_ns", "schedule_ns", "prepare_ns", "execute_ns", "sample_ns",
        "sampled_seq_ids", "sampled_ids", "sampled_logprobs",
        "admitted_seq_ids", "admitted_cached", "admitted_is_resume", "preempted_seq_ids", "finished_seq_ids",
    ]  # fmt: skip
    writers = {(replica, incarnation) for replica, incarnation, _ in wanted}
    last_steps: dict[tuple[str, int], int] = {}
    for name in reader.segments():
        core = (name.replica, name.incarnation)
        if core not in writers:
            continue
        for batch in reader.segment(name, columns):
            for step in batch.to_pylist():
                if core in last_steps and step["step"] > last_steps[core] + 1:
                    # what had arrived by now and not ended may have got tokens from the missing steps
                    for key, output in wanted.items():
                        if key[:2] == core and not output.has_ended and arrivals_ns[key] < step["start_ns"]:
                            output.steps_complete = False
                last_steps[core] = step["step"]
                _apply(step, name.replica, name.incarnation, wanted)


def _apply(step: Row, replica: str, incarnation: int, wanted: Mapping[_Key, PartialOutput]) -> None:
    stages = (step["schedule_ns"], step["prepare_ns"], step["execute_ns"], step["sample_ns"])
    sampled_ns = step["start_ns"] + sum(stage or 0 for stage in stages)
    columns = (step[name] or [] for name in ("admitted_seq_ids", "admitted_cached", "admitted_is_resume"))
    admissions = zip(*columns, strict=True)
    for seq_id, cached, is_resume in admissions:
        output = wanted.get((replica, incarnation, seq_id))
        if output is not None and not is_resume:
            output.cached_tokens = cached
            output.is_admitted = True
    ids = step["sampled_ids"]
    for position, seq_id in enumerate(step["sampled_seq_ids"] or []):
        if (output := wanted.get((replica, incarnation, seq_id))) is not None:
            output.token_ids.append(ids[position] if ids else None)
            output.logprobs.append(step["sampled_logprobs"][position])
            output.steps.append(step["step"])
            output.steps_complete &= output.is_admitted  # else the record that says so, or more, is missing
            output.sampled_ns.append(sampled_ns)
    for seq_id in step["preempted_seq_ids"] or []:
        if (output := wanted.get((replica, incarnation, seq_id))) is not None:
            output.num_preemptions += 1
    for seq_id in step["finished_seq_ids"] or []:
        if (output := wanted.get((replica, incarnation, seq_id))) is not None:
            output.has_ended = True
