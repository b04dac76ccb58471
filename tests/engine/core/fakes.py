"""A model that is a hash. Its KV holds, per slot, the hash of the whole prefix up to that token, computed from what the
slot of the token before holds. So a page with two owners, a wrong prefix hit or a token computed too early changes the
output, and `check_kv` can say of every slot what ought to be in it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferdbg.engine.config import CoreConfig
from inferdbg.engine.core.engine import Engine
from inferdbg.engine.core.events import CoreEvent, FinishReason, StepFailed, StepRecord
from inferdbg.engine.core.model_info import ModelInfo
from inferdbg.engine.core.runner import RowsFailed, SampledTokens, SampleRow, ScoreRow, StepBatch
from inferdbg.engine.core.sampling_params import SamplingParams
from inferdbg.engine.core.sequence import SequenceRequest

VOCAB = 64
EOS = 0
NO_EOS = frozenset[int]()
_MASK = (1 << 64) - 1
_EMPTY = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """splitmix64's finalizer (Steele, Lea, Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def extend(prefix: int, token_id: int) -> int:
    return mix(prefix ^ (token_id + 1))


def prefix_hashes(token_ids: Seq[int]) -> list[int]:
    """The hash after each token."""
    hashes, h = [], _EMPTY
    for token_id in token_ids:
        h = extend(h, token_id)
        hashes.append(h)
    return hashes


def choose(prefix: int, masked: frozenset[int]) -> int:
    """The token that follows a prefix."""
    h = mix(prefix)
    while h % VOCAB in masked:
        h = mix(h)
    return h % VOCAB


def logprob(prefix: int, token_id: int) -> float:
    return -(mix(prefix ^ (token_id << 32)) % 4096) / 256


def top(prefix: int, k: int) -> list[int]:
    return [(prefix + i) % VOCAB for i in range(k)]


def masked_ids(params: SamplingParams, output_index: int, eos: frozenset[int]) -> frozenset[int]:
    if output_index >= params.min_tokens:
        return frozenset()
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)


class HashRunner:
    """Stands in for the model. `fail_next` names the stage whose next call raises, after half its writes; sequences in
    `unsamplable` have logits that nothing can be sampled from.
    """

    def __init__(self, num_pages: int, page_size: int, eos: frozenset[int] = frozenset({EOS})) -> None:
        self.slots = [0] * (num_pages * page_size)
        self.fail_next: str | None = None
        self.batches: list[StepBatch] = []
        self.sample_calls: list[tuple[list[SampleRow], list[ScoreRow], int]] = []
        self.unsamplable: set[int] = set()
        self._page_size = page_size
        self._eos = eos
        self._logits: list[int] = []

    def execute(self, batch: StepBatch) -> int | None:
        self.batches.append(batch)
        hashes: list[int] = []
        num_tokens = len(batch.token_ids)
        assert len(set(batch.slots.tolist())) == num_tokens, "two tokens are written to one slot"
        for s, table in enumerate(batch.page_tables.tolist()):
            first, last = batch.query_starts[s : s + 2].tolist()
            positions = batch.positions[first:last].tolist()
            assert positions == list(range(batch.context_lens[s] - (last - first), batch.context_lens[s]))
            assert s >= batch.num_decodes or last - first == 1
            for row, position in zip(range(first, last), positions, strict=True):
                assert batch.slots[row] == self._slot(table, position)
                before = self.slots[self._slot(table, position - 1)] if position else _EMPTY
                hashes.append(extend(before, int(batch.token_ids[row])))
                if self.fail_next == "execute" and row >= num_tokens // 2:
                    self.slots[batch.slots[row]] = 1  # a step that breaks half-way leaves rubbish
                    self.fail_next = None
                    raise RuntimeError("planted: execute")
                self.slots[batch.slots[row]] = hashes[-1]
        self._logits = [hashes[row] for row in batch.logits_rows.tolist()]
        assert batch.logits_rows.tolist() == sorted(batch.logits_rows.tolist())
        return None

    def sample(self, rows: list[SampleRow], scores: list[ScoreRow], top_k: int) -> SampledTokens:
        self.sample_calls.append((rows, scores, top_k))
        if self.fail_next == "sample":
            self.fail_next = None
            raise RuntimeError("planted: sample")
        wanted = dict.fromkeys([*(row.seq_id for row in scores), *(row.seq_id for row in rows)])
        if failed := tuple(seq_id for seq_id in wanted if seq_id in self.unsamplable):
            raise RowsFailed(failed, "planted: rows")
        hashes = [self._logits[row.logits_row] for row in rows]
        ids = [self._choose(row, h) for row, h in zip(rows, hashes, strict=True)]
        tops = [(h, t) for h in hashes for t in top(h, top_k)]
        return SampledTokens(
            token_ids=tuple(ids),
            logprobs=tuple(logprob(h, t) for h, t in zip(hashes, ids, strict=True)),
            top_k=top_k,
            top_ids=tuple(t for _, t in tops),
            top_logprobs=tuple(logprob(h, t) for h, t in tops),
            scores=tuple(self._score(row) for row in scores),
        )

    def _choose(self, row: SampleRow, prefix: int) -> int:
        if row.forced_token_id is not None:
            return row.forced_token_id
        return choose(prefix, masked_ids(row.params, row.output_index, self._eos))

    def _score(self, row: ScoreRow) -> tuple[tuple[float, ...], tuple[int, ...], tuple[float, ...]]:
        hashes = self._logits[row.first_logits_row : row.first_logits_row + len(row.target_ids)]
        tops = [(h, t) for h in hashes for t in top(h, row.k)]
        return (
            tuple(logprob(h, t) for h, t in zip(hashes, row.target_ids, strict=True)),
            tuple(t for _, t in tops),
            tuple(logprob(h, t) for h, t in tops),
        )

    def _slot(self, table: list[int], position: int) -> int:
        return int(table[position // self._page_size]) * self._page_size + position % self._page_size


@dataclass(slots=True)
class TickClock:
    """Monotonic ns that advance by `tick` with every look."""

    now: int = 1_000_000
    tick: int = 10

    def __call__(self) -> int:
        self.now += self.tick
        return self.now


@dataclass(slots=True)
class Rig:
    """An engine on a `HashRunner`, with all it has said."""

    engine: Engine
    runner: HashRunner
    events: list[CoreEvent]
    eos: frozenset[int]

    @property
    def records(self) -> list[StepRecord]:
        return [event for event in self.events if isinstance(event, StepRecord)]

    @property
    def failures(self) -> list[StepFailed]:
        return [event for event in self.events if isinstance(event, StepFailed)]

    def add(self, seq_id: int, prompt: Seq[int], **fields: Any) -> SequenceRequest:
        """Adds a sequence; what is no field of the request is one of its sampling."""
        made = request(seq_id, prompt, **fields)
        self.engine.add(made)
        return made

    def step(self) -> StepRecord:
        """One step, which must not fail."""
        assert self.engine.step()
        record = self.events[-1]
        assert isinstance(record, StepRecord), record
        self.check()
        return record

    def drain(self, limit: int = 10_000) -> None:
        while self.engine.has_work:
            assert limit > 0, "no end in sight"
            limit -= 1
            self.engine.step()
        self.check()

    def check(self) -> None:
        self.engine.check_integrity()
        check_kv(self.engine, self.runner)

    def outputs(self) -> dict[int, list[int]]:
        """Sampled tokens by sequence."""
        tokens: dict[int, list[int]] = {}
        for record in self.records:
            for seq_id, token_id in zip(record.sampled_seq_ids, record.sampled_ids, strict=True):
                tokens.setdefault(seq_id, []).append(token_id)
        return tokens

    def ends(self) -> dict[int, FinishReason]:
        """How each sequence ended; none may end twice."""
        ends: dict[int, FinishReason] = {}
        for event in self.events:
            match event:
                case StepRecord():
                    told = list(zip(event.finished_seq_ids, event.finished_reasons, strict=True))
                case StepFailed():
                    told = [(seq_id, FinishReason.ERROR) for seq_id in event.seq_ids]
            for seq_id, reason in told:
                assert seq_id not in ends, f"sequence {seq_id} ended twice"
                ends[seq_id] = reason
        return ends


def rig(
    *, num_pages: int = 64, page_size: int = 4, eos: frozenset[int] = NO_EOS, context: int = 4096, **config: Any
) -> Rig:
    """By default no token is EOS, so that lengths are what max_tokens says."""
    events: list[CoreEvent] = []
    runner = HashRunner(num_pages, page_size, eos)
    model = ModelInfo(
        architecture="Hash",
        vocab_size=VOCAB,
        max_positions=context,
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        eos_token_ids=eos,
    )
    core = CoreConfig(model_dir=Path("unused"), page_size=page_size, **config)
    engine = Engine(core, model, runner, events.append, num_pages=num_pages, clock=TickClock())
    return Rig(engine, runner, events, eos)


def request(seq_id: int, prompt: Seq[int], **fields: Any) -> SequenceRequest:
    own = {name: fields.pop(name) for name in ("leader_id", "cache_salt", "arrival_ns") if name in fields}
    return SequenceRequest(seq_id=seq_id, prompt_ids=tuple(prompt), sampling=SamplingParams(**fields), **own)


def expected(request: SequenceRequest, eos: frozenset[int]) -> tuple[list[int], FinishReason]:
    """What a sequence must give, computed token by token, alone and without any cache."""
    params = request.sampling
    if params.forced_token_ids is not None:
        return list(params.forced_token_ids), FinishReason.FORCED
    ids = list(request.prompt_ids)
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
    output: list[int] = []
    prefix = prefix_hashes(ids)[-1]
    while True:
        output.append(choose(prefix, masked_ids(params, len(output), eos)))
        if output[-1] in stops and len(output) > params.min_tokens:
            return output, FinishReason.STOP
        if len(output) == params.max_tokens:
            return output, FinishReason.LENGTH
        prefix = extend(prefix, output[-1])


def check_kv(engine: Engine, runner: HashRunner) -> None:
    """Every slot that a sequence or the prefix cache vouches for holds the hash of the prefix it is said to hold."""
    kv = engine._kv
    size = kv.page_size
    for seq, _ in kv._held.values():
        hashes = prefix_hashes(seq.token_ids[: seq.num_computed])
        for position, h in enumerate(hashes):
            slot = seq.pages[position // size] * size + position % size
            assert runner.slots[slot] == h, f"sequence {seq.seq_id}, position {position}"
    ends: dict[int, int] = {}  # hash at the end of each node's path
    for node in kv._tree.nodes():
        h = ends[node.parent.serial] if node.parent is not None else _EMPTY
        for key, page in zip(node.keys, node.pages, strict=True):
            for offset, token_id in enumerate([key] if size == 1 else key):
                h = extend(h, token_id)
                assert runner.slots[page * size + offset] == h, f"cached page {page}"
        ends[node.serial] = h
