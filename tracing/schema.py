"""The tables of a run, as Arrow schemas. Columns are only ever added within a major version.

Knows no file and no event. All `*_ns` columns are ns of CLOCK_MONOTONIC or durations; the manifest's clock
pair turns them into dates.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from inferdbg.engine.serving.events import STAGE_ENDS

__all__ = [
    "ARRIVALS", "REQUESTS", "SCHEMA_MAJOR", "SCHEMA_MINOR", "SCHEMA_VERSION", "STAGE_FIELDS", "STEPS", "TABLES",
    "conform",
]  # fmt: skip

SCHEMA_MAJOR = 1
SCHEMA_MINOR = 0
SCHEMA_VERSION = f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}"

STAGE_FIELDS: dict[str, str] = {name: name.replace(".", "_") + "_ns" for name, _ in STAGE_ENDS}
"""Stage name to its field in the structs `stages` and `request_stages`: io.receive is `io_receive_ns`."""

_str, _bool = pa.string(), pa.bool_()
_i16, _i32, _i64 = pa.int16(), pa.int32(), pa.int64()
_f32, _f64 = pa.float32(), pa.float64()


def _list(item: Any) -> Any:
    return pa.list_(item)


_SAMPLING = pa.struct([
    ("max_tokens", _i64), ("min_tokens", _i64), ("n", _i32), ("temperature", _f64), ("top_p", _f64), ("top_k", _i64),
    ("min_p", _f64), ("seed", _i64), ("repetition_penalty", _f64), ("presence_penalty", _f64),
    ("frequency_penalty", _f64), ("logit_bias_ids", _list(_i64)), ("logit_bias_values", _list(_f64)),
    ("stop", _list(_str)), ("include_stop_str_in_output", _bool), ("stop_token_ids", _list(_i64)),
    ("ignore_eos", _bool), ("logprobs", _i32), ("prompt_logprobs", _i32), ("forced_token_ids", _list(_i64)),
    ("skip_special_tokens", _bool),
])  # fmt: skip
_STAGES = pa.struct([(field, _i64) for field in STAGE_FIELDS.values()])
_BUSY = pa.struct([("tokenize_wait_ns", _i64), ("tokenize_ns", _i64), ("detokenize_ns", _i64), ("send_ns", _i64)])
_BOUNDARIES = pa.struct([("received_ns", _i64), *((attribute, _i64) for _, attribute in STAGE_ENDS)])

ARRIVALS = pa.schema([
    ("request_id", _str), ("client_request_id", _str), ("replay_of", _str),
    ("trace_id", _str), ("span_id", _str), ("parent_span_id", _str), ("trace_sampled", _bool),
    ("replica", _str), ("incarnation", _i32), ("model", _str), ("endpoint", _str),
    ("service_class", _str), ("tenant", _str), ("stream", _bool),
    ("arrival_ns", _i64),
    ("prompts", _list(_list(_i64))),  # null where token ids are not logged
    ("num_prompt_tokens", _list(_i32)),
    ("seq_ids", _list(_i64)),  # prompt by prompt, choice by choice
    ("sampling", _SAMPLING),
    ("messages", _str), ("prompt_text", _str),
])  # fmt: skip
"""One row when a request is accepted."""

REQUESTS = pa.schema([
    ("request_id", _str), ("prompt_index", _i32), ("choice_index", _i32),
    ("client_request_id", _str), ("replay_of", _str), ("trace_id", _str), ("span_id", _str),
    ("replica", _str), ("incarnation", _i32), ("model", _str), ("weight_version", _str),
    ("endpoint", _str), ("service_class", _str), ("tenant", _str), ("stream", _bool),
    ("seq_id", _i64),
    ("arrival_ns", _i64),  # first byte at the socket
    # how the request ended; the same in all its rows
    ("end", _str), ("status", _i32), ("error", _str), ("error_type", _str), ("closed_ns", _i64),
    ("request_boundaries", _BOUNDARIES), ("request_stages", _STAGES), ("busy", _BUSY),
    ("first_text_ns", _i64), ("first_byte_ns", _i64), ("bytes_in", _i64), ("bytes_out", _i64),
    ("steps_complete", _bool),  # false: step records were dropped while it was in flight
    ("num_rows", _i32),  # rows of this request
    # the tokens of this choice
    ("num_prompt_tokens", _i32), ("num_output_tokens", _i32),
    ("prompt_token_ids", _list(_i64)), ("output_token_ids", _list(_i64)), ("output_logprobs", _list(_f32)),
    ("top_k", _i32), ("top_ids", _list(_i64)), ("top_logprobs", _list(_f32)),  # top_k per output token, best first
    ("prompt_logprobs", _list(_f32)),  # entry i scores prompt token i + 1
    ("prompt_top_k", _i32), ("prompt_top_ids", _list(_i64)), ("prompt_top_logprobs", _list(_f32)),
    ("token_offsets_ns", _list(_i64)),  # each token id at the front, since arrival_ns
    ("token_steps", _list(_i64)),
    ("sampling", _SAMPLING),
    ("finish_reason", _str), ("stop_matched", _str),
    ("cached_tokens", _i32), ("num_preemptions", _i32), ("requeue_ns", _i64),
    ("drafted_tokens", _i64), ("accepted_tokens", _i64),
    ("boundaries", _BOUNDARIES), ("stages", _STAGES),  # of this choice
    ("messages", _str), ("prompt_text", _str), ("output_text", _str),
])  # fmt: skip
"""The token log: one row per (request_id, prompt_index, choice_index)."""

STEPS = pa.schema([
    ("replica", _str), ("incarnation", _i32), ("step", _i64), ("start_ns", _i64), ("end_ns", _i64),
    ("idle_ns", _i64), ("handoff_ns", _i64), ("schedule_ns", _i64), ("prepare_ns", _i64), ("execute_ns", _i64),
    ("sample_ns", _i64), ("publish_ns", _i64),
    ("chunk_seq_ids", _list(_i64)), ("chunk_starts", _list(_i32)), ("chunk_lens", _list(_i32)),
    ("chunk_is_prefill", _list(_bool)),
    ("sampled_seq_ids", _list(_i64)), ("sampled_ids", _list(_i64)), ("sampled_logprobs", _list(_f32)),
    ("sampled_top_k", _i32), ("sampled_top_ids", _list(_i64)), ("sampled_top_logprobs", _list(_f32)),
    ("admitted_seq_ids", _list(_i64)), ("admitted_cached", _list(_i32)), ("admitted_is_resume", _list(_bool)),
    ("preempted_seq_ids", _list(_i64)), ("preempted_lost", _list(_i32)),
    ("finished_seq_ids", _list(_i64)), ("finished_reasons", _list(_str)),
    ("num_running", _i32), ("waiting_reasons", _list(_str)), ("waiting_requests", _list(_i32)),
    ("waiting_tokens", _list(_i64)), ("oldest_waiting_ns", _i64), ("token_budget", _i32),
    ("pages_free", _i32), ("pages_used", _i32), ("pages_cached", _i32),
    ("prefix_queried_tokens", _i64), ("prefix_hit_tokens", _i64), ("evicted_pages", _i32),
    ("graph_bucket", _i32), ("drafted_tokens", _i64), ("accepted_tokens", _i64),
    ("failed_stage", _str), ("error", _str), ("failed_seq_ids", _list(_i64)),  # a step that raised
])  # fmt: skip
"""One row per engine step; columns of equal prefix are parallel lists, as in `StepRecord`."""

TABLES: dict[str, Any] = {"arrivals": ARRIVALS, "requests": REQUESTS, "steps": STEPS}


def conform(batch: Any, schema: Any) -> Any:
    """The batch with exactly the schema's columns: unknown ones left out, missing ones null, types cast.

    A column whose type cannot be cast (another major version's) raises pyarrow's ArrowInvalid.
    """
    if batch.schema.equals(schema):
        return batch
    names = batch.schema.names
    columns = [
        batch.column(names.index(field.name)) if field.name in names else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays([_cast(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)


def _cast(array: Any, wanted: Any) -> Any:
    """Casts, structs field by field: a struct may have gained or lost fields."""
    if array.type.equals(wanted):
        return array
    if not (pa.types.is_struct(wanted) and pa.types.is_struct(array.type)):
        return array.cast(wanted)
    has = {array.type.field(i).name: array.field(i) for i in range(array.type.num_fields)}
    fields = [wanted.field(i) for i in range(wanted.num_fields)]
    children = [_cast(has[f.name], f.type) if f.name in has else pa.nulls(len(array), f.type) for f in fields]
    return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())
