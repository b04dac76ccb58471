"""The prepare stage: turns a schedule decision into the arrays the runner computes and the rows the sampler samples.
Knows nothing of what the runner is, nor of what becomes of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inferdbg.engine.core.runner import IntArray, SampleRow, ScoreRow, StepBatch
from inferdbg.engine.core.scheduler.decision import ScheduleDecision
from inferdbg.engine.core.sequence import Sequence

__all__ = ["PreparedStep", "prepare"]


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step ready to run. `sampled[i]` is the sequence that `rows[i]` samples for."""

    batch: StepBatch
    rows: list[SampleRow]
    sampled: list[Sequence]
    scores: list[ScoreRow]
    top_k: int


def prepare(decision: ScheduleDecision, page_size: int, min_top_k: int) -> PreparedStep:
    """Lays out a decision's chunks one after another; see `StepBatch` for the shapes. A decision may be empty.

    `min_top_k` alternatives are recorded per sampled token, more where a request asks for more.
    """
    logits_rows, rows, sampled, scores = _outputs(decision)
    batch = _layout(decision, page_size, logits_rows)
    top_k = max([min_top_k, *(row.params.logprobs or 0 for row in rows)])
    return PreparedStep(batch, rows, sampled, scores, top_k)


def _layout(decision: ScheduleDecision, page_size: int, logits_rows: list[int]) -> StepBatch:
    seqs, num_decodes = decision.seqs, decision.num_decodes
    lens = np.array(decision.lens, dtype=np.int64)
    starts = np.array(decision.starts, dtype=np.int64)
    query_starts = np.zeros(len(seqs) + 1, dtype=np.int64)
    np.cumsum(lens, out=query_starts[1:])
    num_tokens = int(query_starts[-1])

    token_ids = np.empty(num_tokens, dtype=np.int64)
    token_ids[:num_decodes] = [seq.token_ids[-1] for seq in seqs[:num_decodes]]
    for i in range(num_decodes, len(seqs)):
        start = decision.starts[i]
        token_ids[query_starts[i] : query_starts[i + 1]] = seqs[i].token_ids[start : start + decision.lens[i]]

    owner = np.repeat(np.arange(len(seqs)), lens)  # (T,) which sequence each token belongs to
    positions = np.arange(num_tokens) - query_starts[owner] + starts[owner]
    page_tables = _page_tables(seqs)
    slots = page_tables[owner, positions // page_size] * page_size + positions % page_size
    return StepBatch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        query_starts=query_starts,
        context_lens=starts + lens,
        page_tables=page_tables,
        logits_rows=np.array(logits_rows, dtype=np.int64),
        num_decodes=num_decodes,
    )


def _page_tables(seqs: tuple[Sequence, ...]) -> IntArray:
    tables = np.zeros((len(seqs), max((len(seq.pages) for seq in seqs), default=0)), dtype=np.int64)
    for row, seq in zip(tables, seqs, strict=True):
        row[: len(seq.pages)] = np.frombuffer(seq.pages, dtype=np.int64)
    return tables


def _outputs(
    decision: ScheduleDecision,
) -> tuple[list[int], list[SampleRow], list[Sequence], list[ScoreRow]]:
    """Which rows' logits are wanted, and for what: scores of prompt tokens, and the next token of each sequence whose
    chunk ends at its last one.
    """
    logits_rows: list[int] = []
    rows: list[SampleRow] = []
    sampled: list[Sequence] = []
    scores: list[ScoreRow] = []
    query_start = 0
    for seq, start, length in zip(decision.seqs, decision.starts, decision.lens, strict=True):
        end = start + length
        if seq.needs_prompt_scores and start < seq.num_prompt - 1:
            targets = seq.request.prompt_ids[start + 1 : end + 1]
            k = seq.request.sampling.prompt_logprobs or 0
            scores.append(ScoreRow(first_logits_row=len(logits_rows), seq_id=seq.seq_id, target_ids=targets, k=k))
            logits_rows += range(query_start, query_start + len(targets))
        if end == len(seq.token_ids):
            rows.append(_sample_row(seq, len(logits_rows)))
            sampled.append(seq)
            logits_rows.append(query_start + length - 1)
        query_start += length
    return logits_rows, rows, sampled, scores


def _sample_row(seq: Sequence, logits_row: int) -> SampleRow:
    request = seq.request
    params = request.sampling
    forced = params.forced_token_ids
    repeats = params.repetition_penalty != 1.0
    wants_outputs = repeats or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    return SampleRow(
        logits_row=logits_row,
        seq_id=request.seq_id,
        params=params,
        seed=params.seed or 0,
        choice_index=request.choice_index,
        output_index=seq.num_output,
        prompt_ids=request.prompt_ids if repeats else (),
        output_ids=tuple(seq.token_ids[seq.num_prompt :]) if wants_outputs else (),
        forced_token_id=forced[seq.num_output] if forced is not None else None,
    )
