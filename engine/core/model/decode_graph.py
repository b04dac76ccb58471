"""The decode step over static buffers: padded to a few batch sizes, replayed as a CUDA graph where there is CUDA.

On a CPU the same padded buffers are computed eagerly, so that padding is tested without a GPU. Rows that pad a batch
decode token 0 at position 0 into the pool's scratch page; nobody reads what they compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inferdbg.engine.core.model.attention import PagedBatch
from inferdbg.engine.core.model.plain import PlainForward
from inferdbg.engine.core.runner import IntArray, StepBatch
from inferdbg.engine.errors import UsageError

__all__ = ["DecodeGraphs", "width_buckets"]

WARM_UP_RUNS = 3  # before a capture: cuBLAS and the allocator settle, as torch's documentation asks


def width_buckets(max_pages: int) -> tuple[int, ...]:
    """Widths of the page tables that get a graph: powers of two, the last one `max_pages` itself."""
    widths = [1]
    while widths[-1] * 2 < max_pages:
        widths.append(widths[-1] * 2)
    if max_pages > 1:
        widths.append(max_pages)
    return tuple(widths)


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The addresses a graph was captured with; all on the pool's device."""

    token_ids: torch.Tensor  # (B,)
    positions: torch.Tensor  # (B,)
    slots: torch.Tensor  # (B,)
    context_lens: torch.Tensor  # (B,)
    page_tables: torch.Tensor  # (B, W)


class DecodeGraphs:
    """Decode steps of up to ``max(buckets)`` sequences, padded to the next bucket.

    Args:
        buckets: batch sizes to pad to.
        max_pages: pages of the longest sequence; page tables are padded to `width_buckets` of it.
    """

    def __init__(self, forward: PlainForward, buckets: tuple[int, ...], max_pages: int) -> None:
        if not buckets or min(buckets) < 1:
            raise UsageError(f"decode_buckets must be batch sizes of at least 1, {buckets} given")
        self._forward = forward
        self._buckets = tuple(sorted(set(buckets)))
        self._widths = width_buckets(max_pages)
        self._is_cuda = forward.pool.device.type == "cuda"
        self._buffers: dict[tuple[int, int], _Buffers] = {}
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def bucket_of(self, batch: StepBatch) -> int | None:
        """The bucket a step is padded to; None for a step that is not decodes alone, or too large."""
        num = len(batch.context_lens)
        if not num or num != batch.num_decodes or len(batch.logits_rows) != num:
            return None
        if self._width_of(batch) is None:
            return None
        return next((bucket for bucket in self._buckets if bucket >= num), None)

    def logits(self, batch: StepBatch, bucket: int) -> torch.Tensor:
        """Logits (num_decodes, vocab); the tensor is overwritten by the next call of the same shape."""
        width = self._width_of(batch)
        assert width is not None
        with torch.inference_mode():
            buffers = self._fill(batch, bucket, width)
            if not self._is_cuda:
                return self._compute(buffers)[: batch.num_decodes]
            if (bucket, width) not in self._graphs:
                self._graphs[bucket, width] = self._capture(buffers)
            graph, logits = self._graphs[bucket, width]
            graph.replay()
            return logits[: batch.num_decodes]

    def _width_of(self, batch: StepBatch) -> int | None:
        pages = -(-int(batch.context_lens.max()) // self._forward.pool.page_size)
        return next((width for width in self._widths if width >= pages), None)

    def _fill(self, batch: StepBatch, bucket: int, width: int) -> _Buffers:
        if (bucket, width) not in self._buffers:
            self._buffers[bucket, width] = self._new_buffers(bucket, width)
        buffers = self._buffers[bucket, width]
        num, scratch = batch.num_decodes, self._forward.pool.scratch_page
        _refill(buffers.token_ids, batch.token_ids, 0)
        _refill(buffers.positions, batch.positions, 0)
        _refill(buffers.slots, batch.slots, scratch * self._forward.pool.page_size)
        _refill(buffers.context_lens, batch.context_lens, 1)
        columns = min(width, batch.page_tables.shape[1])
        tables = torch.full(buffers.page_tables.shape, scratch, dtype=torch.int64)
        tables[:num, :columns] = torch.from_numpy(batch.page_tables[:, :columns])
        buffers.page_tables.copy_(tables)
        return buffers

    def _new_buffers(self, bucket: int, width: int) -> _Buffers:
        device = self._forward.pool.device
        return _Buffers(
            token_ids=torch.zeros(bucket, dtype=torch.int64, device=device),
            positions=torch.zeros(bucket, dtype=torch.int64, device=device),
            slots=torch.zeros(bucket, dtype=torch.int64, device=device),
            context_lens=torch.ones(bucket, dtype=torch.int64, device=device),
            page_tables=torch.zeros((bucket, width), dtype=torch.int64, device=device),
        )

    def _compute(self, buffers: _Buffers) -> torch.Tensor:
        """Every operation's shape depends on the bucket and the width alone."""
        paged = PagedBatch(self._forward.pool, buffers.slots, buffers.page_tables, buffers.context_lens, ())
        rows = torch.arange(len(buffers.token_ids), device=buffers.token_ids.device)
        return self._forward.compute(buffers.token_ids, buffers.positions, rows, paged)

    def _capture(self, buffers: _Buffers) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Warms up on a side stream, then captures. Running the step again writes the same K and V once more."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_RUNS):
                self._compute(buffers)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Graphs replay one at a time and each one's logits are used before the next replay, so they share memory.
        pool = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            logits = self._compute(buffers)
        return graph, logits


def _refill(buffer: torch.Tensor, values: IntArray, padding: int) -> None:
    padded = torch.full(buffer.shape, padding, dtype=torch.int64)
    padded[: len(values)] = torch.from_numpy(values)
    buffer.copy_(padded)
