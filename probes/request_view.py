"""The `show RUN REQUEST --json` document: one request's row, its stages, and its tokens beside the engine's steps.

Knows no rendering.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from inferdbg.engine.errors import RunError
from inferdbg.probes.run_view import run_name
from inferdbg.probes.text import valid_unicode
from inferdbg.probes.vocabulary import Vocabulary, load_vocabulary
from inferdbg.tracing.reader import Run, row_stages

__all__ = ["REQUEST_SCHEMA", "request_document"]

REQUEST_SCHEMA = "inferdbg.show-request/1"
_STEP_COLUMNS = (
    "replica", "incarnation", "step", "start_ns", "end_ns", "chunk_seq_ids", "chunk_starts", "chunk_lens",
    "chunk_is_prefill", "preempted_seq_ids", "preempted_lost", "admitted_seq_ids", "admitted_cached",
    "pages_free", "graph_bucket",
)  # fmt: skip


def request_document(run: Run, request: str, prompt_index: int = 0, choice_index: int = 0) -> dict[str, Any]:
    """The document of one row of a request.

    Args:
        request: its id, its client's id, or a beginning of its id that is unique.

    Raises:
        RunError: there is no such request, or it has no such prompt or choice.
    """
    rows = run.find_request(request)
    places = [(row["prompt_index"] or 0, row["choice_index"] or 0) for row in rows]
    if (prompt_index, choice_index) not in places:
        known = ", ".join(f"{p}/{c}" for p, c in places) or "none"
        raise RunError(f"request {request!r} has no prompt/choice {prompt_index}/{choice_index}; it has {known}")
    row = rows[places.index((prompt_index, choice_index))]
    is_hashed = (run.manifest.get("logged") or {}).get("token_log") == "hashed"
    vocabulary = None if is_hashed else load_vocabulary(run.tokenizer_dir)
    stages = [{"name": s.name, "start_ns": s.start_ns, "end_ns": s.end_ns} for s in row_stages(row)]
    tokens = _tokens(row, vocabulary)
    _add_engine(tokens, row, run)
    return row | {
        "schema": REQUEST_SCHEMA,
        "run": run_name(run.path),
        "run_status": run.status.value,
        "places": [{"prompt_index": p, "choice_index": c} for p, c in places],
        "stages": stages,
        "token_log": (run.manifest.get("logged") or {}).get("token_log"),
        "prompt_pieces": _pieces(row["prompt_token_ids"], vocabulary),
        "tokens": tokens,
        "warnings": [*run.warnings, *_warnings(row, is_hashed)],
    }


def _pieces(ids: list[int] | None, vocabulary: Vocabulary | None) -> list[str | None] | None:
    return None if ids is None or vocabulary is None else [valid_unicode(vocabulary.piece(token)) for token in ids]


def _tokens(row: dict[str, Any], vocabulary: Vocabulary | None) -> list[dict[str, Any]]:
    """One entry per output token; what was not logged is None."""
    ids, offsets = row["output_token_ids"] or [], row["token_offsets_ns"] or []
    logprobs, steps = row["output_logprobs"] or [], row["token_steps"] or []

    def entry(index: int) -> dict[str, Any]:
        token_id = ids[index] if index < len(ids) else None
        offset = offsets[index] if index < len(offsets) else None
        piece = vocabulary.piece(token_id) if vocabulary is not None and token_id is not None else None
        return {
            "index": index,
            "id": token_id,
            "piece": valid_unicode(piece),
            "logprob": logprobs[index] if index < len(logprobs) else None,
            "time_ns": None if offset is None else row["arrival_ns"] + offset,
            "offset_seconds": None if offset is None else offset / 1e9,
            "step": steps[index] if index < len(steps) else None,
            "engine": None,
        }

    return [entry(index) for index in range(max(len(ids), len(steps)))]


def _add_engine(tokens: list[dict[str, Any]], row: dict[str, Any], run: Run) -> None:
    """Fills `engine` of each token: its step, and what was done for the sequence since the token before."""
    by_step = {token["step"]: token for token in tokens if token["step"] is not None}
    if not by_step or row.get("seq_id") is None:
        return
    seq_id: int = row["seq_id"]
    pending: dict[str, Any] = _nothing_yet()
    for step in _steps(run, row, last_step=max(by_step)):
        for preempted, lost in zip(step["preempted_seq_ids"] or [], step["preempted_lost"] or [], strict=True):
            if preempted == seq_id:
                pending["preempted"] = True
                pending["lost"] += lost
        for admitted, cached in zip(step["admitted_seq_ids"] or [], step["admitted_cached"] or [], strict=True):
            if admitted == seq_id:
                pending["cached"] = cached
        columns = (step["chunk_seq_ids"], step["chunk_starts"], step["chunk_lens"], step["chunk_is_prefill"])
        chunks = list(zip(*columns, strict=True))
        pending["chunks"] += [{"start": s, "len": n, "prefill": p} for owner, s, n, p in chunks if owner == seq_id]
        if (token := by_step.get(step["step"])) is not None:
            others = sum(n for owner, _, n, p in chunks if p and owner != seq_id)
            token["engine"] = pending | {
                "batch": len(chunks),
                "other_prefill_tokens": others,
                "pages_free": step["pages_free"],
                "graph_bucket": step["graph_bucket"],
            }
            pending = _nothing_yet()


def _nothing_yet() -> dict[str, Any]:
    return {"chunks": [], "cached": None, "preempted": False, "lost": 0}


def _steps(run: Run, row: dict[str, Any], last_step: int) -> list[dict[str, Any]]:
    """The steps that computed or preempted the row's sequence, from its arrival to its last token, in order."""
    found: list[dict[str, Any]] = []
    bounds: tuple[Any, Any] = (row["arrival_ns"], last_step)
    for batch in run.steps(_STEP_COLUMNS):
        core = pc.and_(
            pc.equal(batch.column("replica"), row["replica"]), pc.equal(batch.column("incarnation"), row["incarnation"])
        )
        span = pc.and_(
            pc.greater_equal(batch.column("end_ns"), bounds[0]), pc.less_equal(batch.column("step"), bounds[1])
        )
        near = batch.filter(pc.and_(core, span))
        lists = (near.column("chunk_seq_ids"), near.column("preempted_seq_ids"))
        places = {place for ids in lists for place in _places_of(ids, row["seq_id"])}
        found += near.take(pa.array(sorted(places), pa.int64())).to_pylist()
    return sorted(found, key=lambda step: int(step["step"]))


def _places_of(lists: Any, item: Any) -> list[int]:
    """Which lists of a column hold the item."""
    found: list[int] = pc.list_parent_indices(lists).filter(pc.equal(pc.list_flatten(lists), item)).to_pylist()
    return found


def _warnings(row: dict[str, Any], is_hashed: bool) -> Iterator[str]:
    if row["end"] is None:
        yield "in flight: its stages and its end are not known; its tokens are what the engine's steps say"
    if row.get("steps_complete") is False:
        yield "step records were dropped while it was in flight: what the engine was doing is not known for every token"
    if is_hashed:
        yield "hashed token log: ids are keyed hashes and have no pieces"
    elif row["output_token_ids"] is None and (row["num_output_tokens"] or 0) > 0:
        yield "token ids were not logged (--token-log off)"
