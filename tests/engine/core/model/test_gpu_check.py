"""The parts of `make gpu-check` that need no GPU, and its judgement."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from inferdbg.engine.core.offline import Output

SCRIPT = Path(__file__).resolve().parents[4] / "benchmarks" / "gpu_check.py"


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_says_so_and_exits_4(gpu_check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 4
    captured = capsys.readouterr()
    assert "no CUDA device" in captured.err
    assert captured.out == ""


def test_all_parts_run_on_a_cpu(
    gpu_check: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_check, "STATUS", tmp_path / "gpu-status.json")
    assert gpu_check.main(["--device", "cpu"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["passed"]
    assert line["tokens_compared"] == 8 * 32 + 11 * 32
    assert line["eager_4_tokens_per_second"] > 0
    assert line["graph_4_tokens_per_second"] > 0
    assert not gpu_check.STATUS.exists(), "only a pass on a GPU is kept"


def output(token_ids: list[int], margin: float, logprob: float = -1.0) -> Output:
    return Output(
        seq_id=0,
        token_ids=token_ids,
        logprobs=[logprob] * len(token_ids),
        top_k=[2] * len(token_ids),
        top_ids=[0, 1] * len(token_ids),
        top_logprobs=[-1.0, -1.0 - margin] * len(token_ids),
    )


def test_a_tie_passes_and_a_wrong_token_fails(gpu_check: ModuleType) -> None:
    greedy = gpu_check.make_requests(10, 1, 4, 3)
    tie = gpu_check.compare(greedy, [output([1, 2, 3], 1e-6)], [output([1, 9, 9], 1e-6)])
    assert (tie.num_ties, tie.num_wrong, tie.num_tokens, tie.has_passed) == (1, 0, 2, True)
    wrong = gpu_check.compare(greedy, [output([1, 2, 3], 0.5)], [output([1, 9, 9], 0.5)])
    assert (wrong.num_ties, wrong.num_wrong, wrong.has_passed) == (0, 1, False)


def test_logprobs_that_drift_fail(gpu_check: ModuleType) -> None:
    greedy = gpu_check.make_requests(10, 1, 4, 3)
    drifted = gpu_check.compare(greedy, [output([1, 2, 3], 0.5, -1.0)], [output([1, 2, 3], 0.5, -1.01)])
    assert drifted.max_difference == pytest.approx(0.01)
    assert not drifted.has_passed
