"""The one list of names: metrics, spans, attributes, events, and the definitions of every figure. Plain data.

Dashboards, docs and exporters take their names from here. It knows neither how a value is measured nor how
it is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "ATTRIBUTES", "DEFINITIONS", "EVENTS", "METRICS", "SPANS", "AttributeSpec", "EventSpec", "MetricKind",
    "MetricSpec", "SpanSpec", "buckets_with_slo", "metric",
]  # fmt: skip


class MetricKind(StrEnum):
    """Prometheus' types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. `labels` come after the replica label, which every metric carries."""

    name: str  # as exposed, `_total` included
    kind: MetricKind
    unit: str  # seconds, tokens, pages, … ("" where the value is a plain number)
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SpanSpec:
    """One span name. `parent` is the name of the span it hangs under; "" for a root."""

    name: str
    parent: str
    help: str


@dataclass(frozen=True, slots=True)
class AttributeSpec:
    """One attribute of spans, span events or the resource."""

    name: str
    type: str  # string, int, double, boolean, string[]
    help: str


@dataclass(frozen=True, slots=True)
class EventSpec:
    """One event on a span."""

    name: str
    on: str  # the span that carries it
    help: str


DEFINITIONS: dict[str, str] = {
    "TTFT": "Time to first token: first byte of the request at the socket to the first token id at the front. The "
    "first text and the first byte out are kept beside it; an incomplete UTF-8 character or a possible stop string "
    "may delay them.",
    "ITL": "Inter-token latency: the gap between two steps that gave one sequence tokens. One value per gap, not per "
    "request.",
    "TPOT": "Time per output token of one sequence: (last token - first token) / (output tokens - 1). Not defined for "
    "one token.",
    "E2E": "End to end: first byte of the request at the socket to the last byte handed to the transport, or to the "
    "moment the request was closed if that came later. It is the sum of the seven stages, exactly.",
    "queue time": "The stage `schedule`: prompt ids ready to the first admission by the scheduler. Waiting again after "
    "a preemption is not part of it; that is `requeue`, a part of `decode` or `prefill`.",
    "io.receive": "First byte at the socket to body parsed.",
    "tokenize": "Body parsed to prompt ids ready; waiting for a tokenizer thread is a part of it.",
    "schedule": "Prompt ids ready to first admission by the scheduler.",
    "prefill": "First admission to the first token id at the front.",
    "decode": "First token id to last token id at the front. Waiting again after a preemption is a part of it.",
    "detokenize": "Last token id at the front to last text ready. Detokenizing overlaps decode while streaming; the "
    "overlapping work is a separate busy time.",
    "io.send": "Last text ready to the last byte handed to the transport. Sending overlaps decode while streaming; the "
    "overlapping work is a separate busy time.",
    "execute": "prefill + decode.",
    "step.schedule": "Of a step: choosing its sequences and pages. Scheduler CPU, not a request's wait.",
    "step.prepare": "Of a step: building the batch.",
    "step.execute": "Of a step: the model's forward pass.",
    "step.sample": "Of a step: choosing tokens and reading logprobs.",
    "step.publish": "Of a step: handing tokens to the front and writing the step's record.",
    "step.idle": "The gap before a step, since the end of the previous one.",
    "finished": "The request ended by EOS, a stop, its length limit, or its forced tokens.",
    "aborted": "The client went away at whatever moment, or took no bytes for too long; or the server was stopped.",
    "rejected": "The request was never accepted: malformed, too long, no valid key, queue full, engine unavailable.",
    "failed": "A fault of the engine or of the server ended the request.",
}

_SHORT_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5)
_LONG_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0
)  # fmt: skip
_TTFT_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0
)  # fmt: skip
_STEP_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
_POWERS = tuple(float(2**i) for i in range(14))

_C, _G, _H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("inferdbg_time_to_first_token_seconds", _H, "seconds",
               "TTFT: first byte at the socket to first token id at the front.", (), _TTFT_SECONDS),
    MetricSpec("inferdbg_inter_token_latency_seconds", _H, "seconds",
               "ITL: gap between two steps that gave one sequence tokens.", (), _SHORT_SECONDS),
    MetricSpec("inferdbg_time_per_output_token_seconds", _H, "seconds",
               "TPOT of one sequence: (last - first token) / (tokens - 1).", (), _SHORT_SECONDS),
    MetricSpec("inferdbg_request_duration_seconds", _H, "seconds",
               "E2E of accepted requests, by how they ended.", ("end",), _LONG_SECONDS),
    MetricSpec("inferdbg_queue_time_seconds", _H, "seconds",
               "Prompt ids ready to first admission by the scheduler.", (), _LONG_SECONDS),
    MetricSpec("inferdbg_request_stage_seconds_total", _C, "seconds",
               "Time of accepted requests by stage; the seven stages add up to the sum of E2E.", ("stage",)),
    MetricSpec("inferdbg_request_busy_seconds_total", _C, "seconds",
               "Work that overlaps the stages of requests: tokenize_wait, tokenize, detokenize, send.", ("work",)),
    MetricSpec("inferdbg_request_prompt_tokens", _H, "tokens", "Prompt tokens per accepted request.", (), _POWERS),
    MetricSpec("inferdbg_request_output_tokens", _H, "tokens", "Output tokens per closed request.", (), _POWERS),
    MetricSpec("inferdbg_requests_arrived_total", _C, "requests", "Requests accepted."),
    MetricSpec("inferdbg_requests_closed_total", _C, "requests",
               "Requests by how they ended, accepted or not: finished, aborted, rejected, failed.", ("end",)),
    MetricSpec("inferdbg_requests_rejected_total", _C, "requests", "Rejected requests by reason.", ("reason",)),
    MetricSpec("inferdbg_choices_finished_total", _C, "choices",
               "Sequences by finish reason; none: cut short without one.", ("finish_reason",)),
    MetricSpec("inferdbg_requests_in_flight", _G, "requests", "Requests accepted and not closed yet."),
    MetricSpec("inferdbg_sequences_running", _G, "sequences", "Sequences running after the last step."),
    MetricSpec("inferdbg_slots", _G, "sequences", "Sequences that one step can hold."),
    MetricSpec("inferdbg_requests_waiting", _G, "requests",
               "Sequences waiting, by what kept them in the last step; unseen: accepted, and in no step's record yet.",
               ("reason",)),
    MetricSpec("inferdbg_waiting_tokens", _G, "tokens",
               "Tokens that waiting sequences must compute before their next output, by what kept them in the last "
               "step; unseen: in no step's record yet.", ("reason",)),
    MetricSpec("inferdbg_oldest_waiting_seconds", _G, "seconds",
               "Age of the oldest sequence that waits, by the last step's record, or was never admitted; 0: none."),
    MetricSpec("inferdbg_tokens_arrived_total", _C, "tokens", "Prompt tokens of accepted requests."),
    MetricSpec("inferdbg_tokens_processed_total", _C, "tokens",
               "Tokens computed by phase: prefill, decode.", ("phase",)),
    MetricSpec("inferdbg_tokens_sampled_total", _C, "tokens", "Output tokens sampled."),
    MetricSpec("inferdbg_steps_total", _C, "steps", "Engine steps by kind: prefill, decode, mixed, empty.", ("kind",)),
    MetricSpec("inferdbg_steps_failed_total", _C, "steps", "Engine steps that raised, by stage.", ("stage",)),
    MetricSpec("inferdbg_step_seconds", _H, "seconds", "Duration of engine steps by kind.", ("kind",), _STEP_SECONDS),
    MetricSpec("inferdbg_step_tokens", _H, "tokens", "Tokens computed in one step by kind.", ("kind",), _POWERS),
    MetricSpec("inferdbg_step_token_budget", _G, "tokens", "Tokens that one step may compute."),
    MetricSpec("inferdbg_step_stage_seconds_total", _C, "seconds",
               "Time of the engine loop by stage: schedule, prepare, execute, sample, publish, idle.", ("stage",)),
    MetricSpec("inferdbg_phase_busy_seconds_total", _C, "seconds",
               "Step time by phase; a mixed step is shared out by its tokens.", ("phase",)),
    MetricSpec("inferdbg_pages", _G, "pages", "KV pages by state: free, used, cached.", ("state",)),
    MetricSpec("inferdbg_pages_evicted_total", _C, "pages", "KV pages evicted from the prefix cache."),
    MetricSpec("inferdbg_prefix_cache_queried_tokens_total", _C, "tokens", "Tokens looked up in the prefix cache."),
    MetricSpec("inferdbg_prefix_cache_hit_tokens_total", _C, "tokens", "Tokens found in the prefix cache."),
    MetricSpec("inferdbg_preemptions_total", _C, "preemptions", "Sequences preempted."),
    MetricSpec("inferdbg_preemption_lost_tokens_total", _C, "tokens", "Computed tokens thrown away by preemptions."),
    MetricSpec("inferdbg_engine_incarnation", _G, "", "How often the core was started again: 0 is the first."),
    MetricSpec("inferdbg_engine_lost_total", _C, "", "Cores that died or hung."),
    MetricSpec("inferdbg_last_step_timestamp_seconds", _G, "seconds", "Unix time of the last step's end; 0: none."),
    MetricSpec("inferdbg_event_loop_lag_seconds", _G, "seconds", "How late the front's event loop runs its timers."),
    MetricSpec("inferdbg_slo_ttft_seconds", _G, "seconds", "The TTFT objective; absent without one."),
    MetricSpec("inferdbg_telemetry_dropped_total", _C, "items",
               "Telemetry lost, by signal: steps, spans, otlp_spans, requests, arrivals, refusals, events.",
               ("signal",)),
    MetricSpec("inferdbg_instrumentation_seconds_total", _C, "seconds",
               "CPU seconds spent in instrumentation, by place: observe, record, seal, export, scrape.", ("place",)),
    MetricSpec("inferdbg_build_info", _G, "", "1; the version as a label.", ("version", "model")),
)  # fmt: skip

SPANS: tuple[SpanSpec, ...] = (
    SpanSpec("chat", "", "Root of a chat completion, kind SERVER; named `chat {model}`."),
    SpanSpec("text_completion", "", "Root of a completion, kind SERVER; named `text_completion {model}`."),
    SpanSpec("io.receive", "chat | text_completion", DEFINITIONS["io.receive"]),
    SpanSpec("tokenize", "chat | text_completion", DEFINITIONS["tokenize"]),
    SpanSpec("schedule", "chat | text_completion", DEFINITIONS["schedule"]),
    SpanSpec("execute", "chat | text_completion", DEFINITIONS["execute"]),
    SpanSpec("prefill", "execute", DEFINITIONS["prefill"]),
    SpanSpec("decode", "execute", DEFINITIONS["decode"]),
    SpanSpec("detokenize", "chat | text_completion", DEFINITIONS["detokenize"]),
    SpanSpec("io.send", "chat | text_completion", DEFINITIONS["io.send"]),
    SpanSpec("step", "", "One engine step, while a step window is open; linked to the requests it computed."),
    SpanSpec("step.schedule", "step", DEFINITIONS["step.schedule"]),
    SpanSpec("step.prepare", "step", DEFINITIONS["step.prepare"]),
    SpanSpec("step.execute", "step", DEFINITIONS["step.execute"]),
    SpanSpec("step.sample", "step", DEFINITIONS["step.sample"]),
    SpanSpec("step.publish", "step", DEFINITIONS["step.publish"]),
)

EVENTS: tuple[EventSpec, ...] = (
    EventSpec(
        "inferdbg.prefix_cache.hit", "execute", "Tokens of the prompt were found in the prefix cache at admission."
    ),
    EventSpec("inferdbg.preempted", "execute", "A sequence lost its KV pages and waits again."),
    EventSpec("inferdbg.resumed", "execute", "A preempted sequence was admitted again."),
)

ATTRIBUTES: tuple[AttributeSpec, ...] = (
    # OpenTelemetry's, GenAI conventions v0.1.0
    AttributeSpec("gen_ai.operation.name", "string", "chat or text_completion."),
    AttributeSpec("gen_ai.provider.name", "string", "Always inferdbg."),
    AttributeSpec("gen_ai.request.model", "string", "The model the client named."),
    AttributeSpec("gen_ai.request.stream", "boolean", "The client asked for a stream."),
    AttributeSpec("gen_ai.request.seed", "int", "The effective seed."),
    AttributeSpec("gen_ai.request.choice.count", "int", "n, where it is not 1."),
    AttributeSpec("gen_ai.request.max_tokens", "int", "Limit of output tokens."),
    AttributeSpec("gen_ai.request.temperature", "double", "Sampling temperature; 0 is greedy."),
    AttributeSpec("gen_ai.request.top_p", "double", "Nucleus."),
    AttributeSpec("gen_ai.request.top_k", "int", "Where it is on."),
    AttributeSpec("gen_ai.request.frequency_penalty", "double", "Where it is not 0."),
    AttributeSpec("gen_ai.request.presence_penalty", "double", "Where it is not 0."),
    AttributeSpec("gen_ai.output.type", "string", "Always text."),
    AttributeSpec("gen_ai.response.id", "string", "The request id."),
    AttributeSpec("gen_ai.response.model", "string", "The model that answered."),
    AttributeSpec("gen_ai.response.finish_reasons", "string[]", "One per choice that has one; absent where none has."),
    AttributeSpec("gen_ai.response.time_to_first_chunk", "double", "Seconds to the first byte out, for a stream."),
    AttributeSpec("gen_ai.usage.input_tokens", "int", "Prompt tokens, over all prompts."),
    AttributeSpec("gen_ai.usage.output_tokens", "int", "Sampled tokens, over all choices."),
    AttributeSpec("gen_ai.usage.cache_read.input_tokens", "int", "Of those, found in the prefix cache."),
    AttributeSpec("error.type", "string", "A short stable code for every end but finished."),
    AttributeSpec("http.response.status_code", "int", "The status sent."),
    AttributeSpec("url.path", "string", "The endpoint."),
    AttributeSpec("server.address", "string", "Where the server listens."),
    AttributeSpec("server.port", "int", "Where the server listens."),
    AttributeSpec("service.name", "string", "On the resource; OTEL_SERVICE_NAME overrides it."),
    AttributeSpec("service.version", "string", "On the resource."),
    AttributeSpec("service.instance.id", "string", "On the resource: the replica."),
    # our own
    AttributeSpec("inferdbg.run", "string", "On the resource: the name of the run directory."),
    AttributeSpec("inferdbg.request_id", "string", "Key of the request's rows."),
    AttributeSpec("inferdbg.client_request_id", "string", "What the client called it."),
    AttributeSpec("inferdbg.replay_of", "string", "The request that this one repeats."),
    AttributeSpec("inferdbg.replica", "string", "Which replica answered."),
    AttributeSpec("inferdbg.end", "string", "finished, aborted, rejected or failed."),
    AttributeSpec("inferdbg.service_class", "string", "The request's class of service."),
    AttributeSpec("inferdbg.ttft_seconds", "double", DEFINITIONS["TTFT"]),
    AttributeSpec("inferdbg.busy_seconds", "double", "Work in this stage that overlaps others, or its service time."),
    AttributeSpec("inferdbg.wait_seconds", "double", "Waiting for a tokenizer thread."),
    AttributeSpec("inferdbg.requeue_seconds", "double", "Waiting again after preemptions, the longest over choices."),
    AttributeSpec("inferdbg.num_preemptions", "int", "Over all choices."),
    AttributeSpec("inferdbg.cached_tokens", "int", "Tokens found in the prefix cache."),
    AttributeSpec("inferdbg.lost_tokens", "int", "Computed tokens thrown away."),
    AttributeSpec("inferdbg.bytes_in", "int", "Bytes of the request's body."),
    AttributeSpec("inferdbg.bytes_out", "int", "Bytes of the answer."),
    AttributeSpec("inferdbg.prompt_index", "int", "Which prompt of the request."),
    AttributeSpec("inferdbg.choice_index", "int", "Which choice of the prompt."),
    AttributeSpec("inferdbg.step", "int", "Number of the engine step."),
    AttributeSpec("inferdbg.step.kind", "string", "prefill, decode, mixed or empty."),
    AttributeSpec("inferdbg.step.num_sequences", "int", "Sequences that computed something."),
    AttributeSpec("inferdbg.step.prefill_tokens", "int", "Prompt tokens computed."),
    AttributeSpec("inferdbg.step.decode_tokens", "int", "Output tokens computed."),
    AttributeSpec("inferdbg.step.idle_seconds", "double", DEFINITIONS["step.idle"]),
    AttributeSpec("inferdbg.step.pages_free", "int", "Free KV pages after the step."),
    AttributeSpec("inferdbg.step.graph_bucket", "int", "Rows the decode batch was padded to."),
    AttributeSpec("inferdbg.step.num_waiting", "int", "Sequences waiting after the step."),
)

_BY_NAME = {spec.name: spec for spec in METRICS}


def metric(name: str) -> MetricSpec:
    """The spec of a metric.

    Raises:
        KeyError: there is no such metric.
    """
    return _BY_NAME[name]


def buckets_with_slo(spec: MetricSpec, slo_seconds: float | None) -> tuple[float, ...]:
    """The histogram's bucket edges, the SLO among them: a ratio of good events needs it as an edge."""
    edges = set(spec.buckets)
    if slo_seconds is not None and slo_seconds > 0:
        edges.add(float(slo_seconds))
    return tuple(sorted(edges))
