"""`inferdbg serve`: one replica, OpenAI-compatible, recorded if asked. Only the flags live here; see `serving.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from inferdbg.engine.config import CoreConfig, FrontConfig

__all__ = ["EXAMPLE", "serve"]

EXAMPLE = "Example: inferdbg serve --model smollm2 --trace --slo ttft=0.5"
CORE = CoreConfig(model_dir=Path())  # the defaults, said once
FRONT = FrontConfig(model_name="", model_dir=Path())
SERVER, RECORD, ENGINE, LIMITS = "Server", "Recording", "Engine", "Limits"


def serve(
    model: Annotated[
        str,
        typer.Option(
            help="Alias (smollm2), checkpoint directory, Hugging Face repository id, or GGUF file.",
            rich_help_panel=SERVER,
        ),
    ] = "smollm2",
    served_model_name: Annotated[
        str | None,
        typer.Option(help="The model id that clients use. Default: --model's last part.", rich_help_panel=SERVER),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=SERVER)] = FRONT.host,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.", rich_help_panel=SERVER)
    ] = FRONT.port,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the key that clients must send.", rich_help_panel=SERVER)
    ] = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the key for administrative routes; without it they are off.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    replica: Annotated[
        str, typer.Option(help="This replica's name in metrics, spans and rows.", rich_help_panel=SERVER)
    ] = "0",
    trace: Annotated[
        bool, typer.Option("--trace", help="Record everything to a run directory.", rich_help_panel=RECORD)
    ] = False,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where to record. Default: runs/<time>-serve.", rich_help_panel=RECORD)
    ] = None,
    retain: Annotated[
        str, typer.Option(help="Keep at most so much: 24h, 10GB, 7d,10GB or off.", rich_help_panel=RECORD)
    ] = "10GB",
    token_log: Annotated[
        Literal["ids", "hashed", "off"], typer.Option(help="What is written of tokens.", rich_help_panel=RECORD)
    ] = "ids",
    token_log_key: Annotated[
        Path | None,
        typer.Option(
            help="Key file of --token-log hashed; made if absent. Default: one in the cache.", rich_help_panel=RECORD
        ),
    ] = None,
    log_text: Annotated[
        bool, typer.Option("--log-text", help="Write prompts and answers as text too.", rich_help_panel=RECORD)
    ] = False,
    trace_steps: Annotated[
        bool, typer.Option("--trace-steps", help="Spans for every engine step, from the start.", rich_help_panel=RECORD)
    ] = False,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            help="Send spans to a collector too: http://host:4317 (gRPC), http://host:4318/v1/traces (HTTP).",
            rich_help_panel=RECORD,
        ),
    ] = None,
    otlp_sample: Annotated[
        str,
        typer.Option(help="Which traces are sent: all, or a list such as errors,slow>1s,1%.", rich_help_panel=RECORD),
    ] = "all",
    slo: Annotated[
        str | None,
        typer.Option(help="Objective: ttft=SECONDS. It becomes a gauge and a bucket edge.", rich_help_panel=RECORD),
    ] = None,
    replica_label: Annotated[
        str, typer.Option(help="Name of the label that holds the replica in /metrics.", rich_help_panel=RECORD)
    ] = "replica",
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="Where the model runs.", rich_help_panel=ENGINE)
    ] = CORE.device,
    dtype: Annotated[
        Literal["float64", "float32", "bfloat16"],
        typer.Option(help="What the model computes in.", rich_help_panel=ENGINE),
    ] = CORE.dtype,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of the model. Default: torch's own.", rich_help_panel=ENGINE)
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of prompt and output. Default: the model's own.", rich_help_panel=ENGINE),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Sequences in one step.", rich_help_panel=ENGINE)
    ] = CORE.max_num_seqs,
    token_budget: Annotated[
        int,
        typer.Option(min=1, help="Tokens computed in one step, prefill and decode together.", rich_help_panel=ENGINE),
    ] = CORE.token_budget,
    page_size: Annotated[
        int, typer.Option(min=1, max=64, help="Tokens per KV page.", rich_help_panel=ENGINE)
    ] = CORE.page_size,
    num_pages: Annotated[
        int | None, typer.Option(min=1, help="KV pages. Default: what --kv-memory holds.", rich_help_panel=ENGINE)
    ] = None,
    kv_memory: Annotated[str, typer.Option(help="Memory for KV pages.", rich_help_panel=ENGINE)] = "1GiB",
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache", help="Share the KV of common prefixes.", rich_help_panel=ENGINE
        ),
    ] = CORE.prefix_cache,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant", help="Same numbers alone and in company, bit for bit; slower.", rich_help_panel=ENGINE
        ),
    ] = CORE.batch_invariant,
    fast_path: Annotated[
        Literal["auto", "off", "require"],
        typer.Option(
            help="The faster way to compute a family: use it if there is one, never, or fail without.",
            rich_help_panel=ENGINE,
        ),
    ] = CORE.fast_path,
    decode_buckets: Annotated[
        str,
        typer.Option(help="Pad decode steps to these batch sizes: 1,2,4,8,16. Empty: eager.", rich_help_panel=ENGINE),
    ] = "",
    policy: Annotated[str, typer.Option(help="Scheduling policy.", rich_help_panel=ENGINE)] = CORE.policy,
    top_logprobs: Annotated[
        int, typer.Option(min=0, max=20, help="Runner-ups recorded with every token.", rich_help_panel=ENGINE)
    ] = CORE.top_logprobs,
    max_queued: Annotated[
        int, typer.Option(min=1, help="Requests accepted and not finished; beyond that: 429.", rich_help_panel=LIMITS)
    ] = FRONT.max_queued_requests,
    max_body: Annotated[str, typer.Option(help="Largest request body.", rich_help_panel=LIMITS)] = "8MiB",
    max_batch_prompts: Annotated[
        int, typer.Option(min=1, help="Prompts in one completions request.", rich_help_panel=LIMITS)
    ] = FRONT.max_batch_prompts,
    client_credit: Annotated[
        int,
        typer.Option(
            min=1, help="Tokens a request may be ahead of a slow client before it is paused.", rich_help_panel=LIMITS
        ),
    ] = CORE.client_credit,
    tokenizer_threads: Annotated[
        int, typer.Option(min=1, max=64, help="Threads that tokenize.", rich_help_panel=LIMITS)
    ] = FRONT.tokenizer_threads,
    slow_client_seconds: Annotated[
        float,
        typer.Option(min=0.1, help="A client that takes no bytes for so long is dropped.", rich_help_panel=LIMITS),
    ] = FRONT.slow_client_seconds,
    stall_seconds: Annotated[
        float,
        typer.Option(min=0.1, help="Work waits and no step ends for so long: /health fails.", rich_help_panel=LIMITS),
    ] = FRONT.stall_seconds,
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, help="How long a shutdown waits for requests in flight.", rich_help_panel=LIMITS)
    ] = FRONT.drain_seconds,
) -> int:
    """Serve a model to OpenAI clients, and with --trace record what happens to every request.

    Prints its address on stdout once it answers. Ctrl-C or SIGTERM drains and stops it.
    """
    from inferdbg.cli.pull import resolve_with_progress
    from inferdbg.cli.serving import RecordOptions, run_server
    from inferdbg.cli.values import parse_buckets, parse_size, parse_slo, read_key_file
    from inferdbg.engine.core.acquire.resolve import model_name

    record = RecordOptions(
        trace=trace or run_dir is not None,
        run_dir=run_dir,
        retain=retain,
        token_log=token_log,
        token_log_key=token_log_key,
        log_text=log_text,
        trace_steps=trace_steps,
        otlp_endpoint=otlp_endpoint,
        otlp_sample=otlp_sample,
        slo_ttft_seconds=parse_slo(slo) if slo is not None else None,
        replica=replica,
        replica_label=replica_label,
    )
    api_key, admin_key = (
        read_key_file("--api-key-file", api_key_file),
        read_key_file("--admin-key-file", admin_key_file),
    )
    model_dir = resolve_with_progress(model)
    core = CoreConfig(
        model_dir=model_dir,
        device=device,
        dtype=dtype,
        num_threads=threads,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        page_size=page_size,
        num_pages=num_pages,
        kv_memory_bytes=parse_size("--kv-memory", kv_memory),
        prefix_cache=prefix_cache,
        policy=policy,
        batch_invariant=batch_invariant,
        fast_path=fast_path,
        decode_buckets=parse_buckets(decode_buckets),
        top_logprobs=top_logprobs,
        client_credit=client_credit,
    )
    front = FrontConfig(
        model_name=served_model_name or model_name(model),
        model_dir=model_dir,
        host=host,
        port=port,
        api_key=api_key,
        admin_key=admin_key,
        max_body_bytes=parse_size("--max-body", max_body),
        max_queued_requests=max_queued,
        max_batch_prompts=max_batch_prompts,
        tokenizer_threads=tokenizer_threads,
        stall_seconds=stall_seconds,
        slow_client_seconds=slow_client_seconds,
        drain_seconds=drain_seconds,
        keep_text=log_text,
    )
    return run_server(core, front, record)
