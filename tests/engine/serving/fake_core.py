"""The real engine over a runner that repeats the prompt: token i of the output is token i of the prompt, cyclically.

So a test writes the output it wants as the prompt. Some tokens make the runner misbehave when they come up.
Imported in the core process by name (`fake_core:build`), where torch must not be needed.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tokenizers import Tokenizer

from inferdbg.engine.core.engine import Engine
from inferdbg.engine.core.model_info import ModelInfo
from inferdbg.engine.core.runner import SampledTokens
from inferdbg.engine.errors import InferdbgError, ModelError

MAX_POSITIONS = 4096


class ParrotRunner:
    def __init__(self, tokenizer, step_seconds):
        self._hang = tokenizer.token_to_id("<hang>")
        self._die = tokenizer.token_to_id("<die>")
        self._raise = tokenizer.token_to_id("<raise>")
        self._step_seconds = step_seconds
        self.prompts = {}
        self.vocab_size = tokenizer.get_vocab_size()

    def execute(self, batch):
        time.sleep(self._step_seconds)
        return None

    def sample(self, rows, scores, top_k):
        ids = [self._next(row) for row in rows]
        for token_id in ids:
            if token_id == self._hang:
                time.sleep(3600)
            if token_id == self._die:
                os.kill(os.getpid(), signal.SIGKILL)
            if token_id == self._raise:
                raise RuntimeError("planted failure")
        tops = [self._tops(token_id, top_k) for token_id in ids]
        return SampledTokens(
            token_ids=tuple(ids),
            logprobs=tuple(-0.5 for _ in ids),
            top_k=top_k,
            top_ids=tuple(i for top in tops for i in top),
            top_logprobs=tuple(-0.5 - j for _ in ids for j in range(top_k)),
            scores=tuple(
                (
                    tuple(-1.0 for _ in score.target_ids),
                    tuple(i for target in score.target_ids for i in self._tops(target, score.k)),
                    tuple(-1.0 - j for _ in score.target_ids for j in range(score.k)),
                )
                for score in scores
            ),
        )

    def _tops(self, token_id, k):
        return [(token_id + j) % self.vocab_size for j in range(k)]

    def _next(self, row):
        if row.params.forced_token_ids is not None:
            return row.params.forced_token_ids[row.output_index]
        prompt = self.prompts[row.seq_id]
        return prompt[(row.output_index + row.choice_index) % len(prompt)]


class ParrotEngine(Engine):
    """Tells its runner the prompts, which an engine gives to a sampler only where penalties need them."""

    def __init__(self, *args, runner, **kwargs):
        super().__init__(*args, runner=runner, **kwargs)
        self._prompts = runner.prompts

    def add(self, request):
        self._prompts[request.seq_id] = request.prompt_ids
        super().add(request)

    def check_integrity(self):
        super().check_integrity()
        if "FAKE_LOSES_PAGES" in os.environ:
            raise InferdbgError("a page is lost")


def build(config, observer):
    time.sleep(float(os.environ.get("FAKE_START_SECONDS", "0")))
    if (Path(config.model_dir) / "corrupt").exists():
        raise ModelError(f"{config.model_dir} is corrupt")
    once = Path(config.model_dir) / "start_once"
    if once.exists():
        if once.read_text():
            raise ModelError("the second start fails")
        once.write_text("started")
    tokenizer = Tokenizer.from_file(str(config.model_dir / "tokenizer.json"))
    runner = ParrotRunner(tokenizer, float(os.environ.get("FAKE_STEP_SECONDS", "0")))
    info = ModelInfo(
        architecture="Parrot",
        vocab_size=runner.vocab_size,
        max_positions=MAX_POSITIONS,
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        eos_token_ids=frozenset({tokenizer.token_to_id("<|eos|>")}),
    )
    num_pages = config.num_pages or 1024
    engine = ParrotEngine(config, info, runner=runner, observer=observer, num_pages=num_pages)
    return engine, {
        "max_model_len": engine.max_model_len,
        "num_pages": num_pages,
        "page_size": config.page_size,
        "vocab_size": runner.vocab_size,
    }
