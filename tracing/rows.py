"""Rows of the tables out of events: pure functions. Knows no file, no queue, no state between events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from inferdbg.engine.core.events import StepFailed, StepRecord
from inferdbg.engine.core.sampling_params import SamplingParams
from inferdbg.engine.serving.events import (
    Arrived,
    Boundaries,
    ChoiceRecord,
    Closed,
    Rejected,
    Stage,
    stages_of,
)  # fmt: skip
from inferdbg.tracing.schema import STAGE_FIELDS
from inferdbg.tracing.token_log import PlainIds, TokenLog

__all__ = ["Row", "RowContext", "arrival_row", "rejected_row", "request_rows", "step_row", "to_batch"]

Row = dict[str, Any]
_INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class RowContext:
    """What every row of a writer shares."""

    replica: str
    incarnation: int
    model_version: str | None  # weight_version: the model's fingerprint
    tokens: TokenLog
    log_text: bool

    @property
    def logs_ids(self) -> bool:
        return isinstance(self.tokens, PlainIds)


def to_batch(rows: Sequence[Row], schema: Any) -> Any:
    """One record batch; a column that a row lacks is null.

    What Arrow cannot hold (a lone surrogate, an integer beyond 64 bits) is escaped or clamped, never raised.
    """
    try:
        return _batch(rows, schema)
    except (UnicodeEncodeError, OverflowError, pa.ArrowException):
        return _batch([{name: _storable(value) for name, value in row.items()} for row in rows], schema)


def _batch(rows: Sequence[Row], schema: Any) -> Any:
    # one conversion of all columns takes less than half the time of one conversion for each
    table: Any = pa.array(rows, type=pa.struct(list(schema)))
    return pa.RecordBatch.from_struct_array(table)


def _storable(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case int() if not -_INT64 <= value < _INT64:
            return _INT64 - 1 if value > 0 else -_INT64
        case dict():
            return {key: _storable(item) for key, item in value.items()}
        case list() | tuple():
            return [_storable(item) for item in value]
        case _:
            return value


def arrival_row(event: Arrived, context: RowContext) -> Row:
    """The row of `arrivals`."""
    return _identity(event, context) | {
        "parent_span_id": event.trace.parent_span_id,
        "trace_sampled": event.trace.sampled,
        "prompts": _prompts(event, context),
        "num_prompt_tokens": [len(prompt) for prompt in event.prompts],
        "seq_ids": event.seq_ids,
        "messages": event.messages_json if context.log_text else None,
        "prompt_text": event.prompt_text if context.log_text else None,
    }


def request_rows(event: Closed, context: RowContext, *, steps_complete: bool) -> list[Row]:
    """One row per choice; one per prompt where the request ended before it had any."""
    arrived = event.arrived
    shared = _identity(arrived, context) | {
        "end": event.end.value,
        "status": event.status,
        "error": _error_text(event.error, event.error_type, context),
        "error_type": event.error_type,
        "closed_ns": event.closed_ns,
        "request_boundaries": _boundaries(event.boundaries),
        "request_stages": _stages(stages_of(event.boundaries, event.closed_ns)),
        "busy": {
            "tokenize_wait_ns": event.busy.tokenize_wait_ns,
            "tokenize_ns": event.busy.tokenize_ns,
            "detokenize_ns": event.busy.detokenize_ns,
            "send_ns": event.busy.send_ns,
        },
        "first_text_ns": event.first_text_ns,
        "first_byte_ns": event.first_byte_ns,
        "bytes_in": event.bytes_in,
        "bytes_out": event.bytes_out,
        "steps_complete": steps_complete,
        "num_rows": len(event.choices) or len(arrived.prompts),
        "messages": arrived.messages_json if context.log_text else None,
        "prompt_text": arrived.prompt_text if context.log_text else None,
    }
    if event.choices:
        sampling = shared.pop("sampling")  # but for the seed, which is that of each prompt
        return [
            shared | _choice(choice, event, context) | {"sampling": sampling | {"seed": choice.seed}}
            for choice in event.choices
        ]
    return [
        shared
        | {"prompt_index": index, "choice_index": 0, "num_prompt_tokens": len(prompt), "num_output_tokens": 0}
        | {"prompt_token_ids": context.tokens.prompt(prompt)}
        for index, prompt in enumerate(arrived.prompts)
    ]


def rejected_row(event: Rejected, context: RowContext) -> Row:
    """A request that was never accepted has one row: no prompt, no tokens."""
    boundaries = event.boundaries or Boundaries(received_ns=event.time_ns)
    return {
        "request_id": event.request_id,
        "prompt_index": 0,
        "choice_index": 0,
        "client_request_id": event.client_request_id,
        "trace_id": event.trace.trace_id,
        "span_id": event.trace.span_id,
        "replica": context.replica,
        "incarnation": context.incarnation,
        "endpoint": event.endpoint,
        "arrival_ns": event.time_ns,
        "end": event.end.value,
        "status": event.status,
        "error": _error_text(event.message, event.reason, context),
        "error_type": event.reason,
        "closed_ns": event.closed_ns,
        "request_boundaries": _boundaries(boundaries),
        "request_stages": _stages(event.stages),
        "num_rows": 1,
    }


def step_row(event: StepRecord | StepFailed, context: RowContext) -> Row:
    """The row of `steps`; a step that raised has its place and its error, and no columns."""
    row: Row = {"replica": context.replica, "incarnation": context.incarnation, "step": event.step}
    if isinstance(event, StepFailed):
        return row | {
            "start_ns": event.time_ns,
            "end_ns": event.time_ns,
            "failed_stage": event.stage,
            "error": event.error if context.logs_ids else event.error.partition(":")[0],  # its type
            "failed_seq_ids": event.seq_ids,
        }
    sampled_ids, top_ids = context.tokens.step(event)
    row |= {name: getattr(event, name) for name in _STEP_FIELDS}
    row["sampled_ids"], row["sampled_top_ids"] = sampled_ids, top_ids
    row["end_ns"] = event.end_ns
    return row


_STEP_FIELDS = (
    "start_ns", "idle_ns", "handoff_ns", "schedule_ns", "prepare_ns", "execute_ns", "sample_ns", "publish_ns",
    "chunk_seq_ids", "chunk_starts", "chunk_lens", "chunk_is_prefill",
    "sampled_seq_ids", "sampled_logprobs", "sampled_top_k", "sampled_top_logprobs",
    "admitted_seq_ids", "admitted_cached", "admitted_is_resume", "preempted_seq_ids", "preempted_lost",
    "finished_seq_ids", "finished_reasons", "num_running", "waiting_reasons", "waiting_requests", "waiting_tokens",
    "oldest_waiting_ns", "token_budget", "pages_free", "pages_used", "pages_cached", "prefix_queried_tokens",
    "prefix_hit_tokens", "evicted_pages", "graph_bucket", "drafted_tokens", "accepted_tokens",
)  # fmt: skip


def _identity(event: Arrived, context: RowContext) -> Row:
    return {
        "request_id": event.request_id,
        "client_request_id": event.client_request_id,
        "replay_of": event.replay_of,
        "trace_id": event.trace.trace_id,
        "span_id": event.trace.span_id,
        "replica": context.replica,
        "incarnation": context.incarnation,
        "model": event.model,
        "weight_version": context.model_version,
        "endpoint": event.endpoint,
        "service_class": event.service_class,
        "tenant": event.tenant,
        "stream": event.stream,
        "arrival_ns": event.time_ns,
        "sampling": _sampling(event.sampling, context),
    }


_OWN_WORDS = frozenset({"engine_lost", "internal_error", "shutdown", "unavailable"})


def _error_text(text: str | None, error_type: str | None, context: RowContext) -> str | None:
    """What went wrong, in words. Without ids only words of our own: others may quote what the client sent, be it
    through a chat template, a model's name or an exception of the engine; `error_type` says it all the same."""
    return text if context.logs_ids or error_type in _OWN_WORDS else None


def _prompts(event: Arrived, context: RowContext) -> list[Any] | None:
    prompts = [context.tokens.prompt(prompt) for prompt in event.prompts]
    return None if any(prompt is None for prompt in prompts) else prompts


def _sampling(params: SamplingParams, context: RowContext) -> Row:
    """Ids and stop strings are content: they are written only where ids are."""
    row = {name: getattr(params, name) for name in _SAMPLING_FIELDS}
    if context.logs_ids:
        row["logit_bias_ids"] = list(params.logit_bias)
        row["logit_bias_values"] = list(params.logit_bias.values())
        row["stop"] = params.stop
        row["stop_token_ids"] = params.stop_token_ids
        row["forced_token_ids"] = params.forced_token_ids
    return row


_SAMPLING_FIELDS = (
    "max_tokens", "min_tokens", "n", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "include_stop_str_in_output", "ignore_eos", "logprobs",
    "prompt_logprobs", "skip_special_tokens",
)  # fmt: skip


def _choice(choice: ChoiceRecord, event: Closed, context: RowContext) -> Row:
    arrived = event.arrived
    prompt = arrived.prompts[choice.prompt_index]
    output_ids, top_ids = context.tokens.output(prompt, choice.output_ids, choice.top_k, choice.top_ids)
    arrival_ns = arrived.time_ns
    ended_ns = choice.boundaries.sent_ns or event.closed_ns
    row: Row = {
        "prompt_index": choice.prompt_index,
        "choice_index": choice.choice_index,
        "seq_id": choice.seq_id,
        "sampling": _sampling(arrived.sampling, context) | {"seed": choice.seed},
        "num_prompt_tokens": len(prompt),
        "num_output_tokens": len(choice.output_ids),
        "prompt_token_ids": context.tokens.prompt(prompt),
        "output_token_ids": output_ids,
        "output_logprobs": choice.output_logprobs,
        "top_k": choice.top_k,
        "top_ids": top_ids,
        "top_logprobs": choice.top_logprobs,
        "token_offsets_ns": [time_ns - arrival_ns for time_ns in choice.token_times_ns],
        "token_steps": choice.token_steps,
        "finish_reason": None if choice.finish_reason is None else choice.finish_reason.value,
        "stop_matched": choice.stop_matched if context.logs_ids else None,
        "cached_tokens": choice.cached_tokens,
        "num_preemptions": choice.num_preemptions,
        "requeue_ns": choice.requeue_ns,
        "boundaries": _boundaries(choice.boundaries),
        "stages": _stages(stages_of(choice.boundaries, ended_ns)),
        "output_text": choice.output_text if context.log_text else None,
    }
    if (scores := choice.prompt_scores) is not None:
        row["prompt_logprobs"] = scores.logprobs
        row["prompt_top_k"] = scores.k
        row["prompt_top_ids"] = context.tokens.prompt_alternatives(prompt, scores.k, scores.top_ids)
        row["prompt_top_logprobs"] = scores.top_logprobs
    return row


def _boundaries(boundaries: Boundaries) -> Row:
    return {name: getattr(boundaries, name) for name in Boundaries.__dataclass_fields__}


def _stages(stages: Sequence[Stage]) -> Row:
    return {STAGE_FIELDS[stage.name]: stage.end_ns - stage.start_ns for stage in stages}
