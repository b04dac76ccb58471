"""What the engine asks of whatever runs the model, and the values that pass between them. Torch-free.

`ModelRunner` (in `model/`) runs a real model; a simulated one stands in for it in tests and predictions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from inferdbg.engine.core.sampling_params import SamplingParams

__all__ = ["RowsFailed", "Runner", "SampleRow", "SampledTokens", "ScoreRow", "StepBatch"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The tokens of one step, flattened to one row: T tokens of S sequences. Built in the prepare stage.

    Decode chunks (one token, all earlier positions computed) come first, prefill chunks after them.
    """

    token_ids: IntArray  # (T,)
    positions: IntArray  # (T,) position of each token in its sequence
    slots: IntArray  # (T,) page * page_size + offset: where the token's K and V are written
    query_starts: IntArray  # (S + 1,) tokens [query_starts[s], query_starts[s + 1]) belong to sequence s
    context_lens: IntArray  # (S,) tokens whose KV exists once this step has written its own
    page_tables: IntArray  # (S, max pages) page ids; entries past a sequence's own pages are 0
    logits_rows: IntArray  # (R,) rows of the T tokens whose logits are wanted, ascending
    num_decodes: int  # the first `num_decodes` sequences are decodes


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """What the sampler needs to know to sample one token."""

    logits_row: int  # index into the R rows
    seq_id: int
    params: SamplingParams
    seed: int
    choice_index: int
    output_index: int  # index of the token to be sampled among the outputs
    prompt_ids: tuple[int, ...]  # empty unless the parameters' penalties need them
    output_ids: tuple[int, ...]  # likewise
    forced_token_id: int | None = None  # "sampled" whatever the logits say; its logprobs are computed all the same


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    """A run of logits rows that score prompt tokens: row i of them scores `target_ids[i]`."""

    first_logits_row: int
    seq_id: int
    target_ids: tuple[int, ...]
    k: int  # alternatives wanted; a smaller vocabulary gives all it has


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Columns over the sampled rows (R'), then over the scored rows; raw fp32 logprobs."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_k: int
    top_ids: tuple[int, ...]  # (R' * top_k), best first
    top_logprobs: tuple[float, ...]
    scores: tuple[tuple[tuple[float, ...], tuple[int, ...], tuple[float, ...]], ...] = ()
    # one per ScoreRow: logprobs (m,), top ids (m * k,), top logprobs (m * k,)


class RowsFailed(Exception):
    """Some sequences of a step cannot be sampled, and the others can: raised by `sample` before it sampled any."""

    def __init__(self, seq_ids: tuple[int, ...], message: str) -> None:
        super().__init__(message)
        self.seq_ids = seq_ids


class Runner(Protocol):
    """Runs the model's execution and sampling for an `Engine`. Called from one thread."""

    def execute(self, batch: StepBatch) -> int | None:
        """Computes the logits of `batch.logits_rows` and keeps them until `sample`.

        Returns the number of rows the decode batch was padded to, None where it ran eagerly.
        """
        ...

    def sample(self, rows: list[SampleRow], scores: list[ScoreRow], top_k: int) -> SampledTokens:
        """Samples one token for each row from the logits of the last `execute`.

        `top_k` alternatives are reported per token (at least what any row's request asks for).

        Raises:
            RowsFailed: the logits of some sequences are of no use; called again without them, it samples the others.
        """
        ...
