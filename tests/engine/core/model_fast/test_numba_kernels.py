"""The compiled kernels one by one against the same formulas in float64, at values that models rarely reach."""

import numpy as np
import pytest
import torch
from fast_driver import make_info, make_model
from torch import Tensor

from inferdbg.engine.core.model.fast.kernels import Kernels, choose_kernels
from inferdbg.engine.core.model.fast.plan import StepPlan
from inferdbg.engine.core.model.fast.products import Product
from inferdbg.engine.core.model.fast.weights import read_decoder
from inferdbg.engine.core.model.kv_pool import KVPool

pytest.importorskip("numba")
pytestmark = pytest.mark.parametrize("num_threads", [1, 2], indirect=True)


@pytest.fixture(scope="module")
def pool() -> KVPool:
    return KVPool(make_info(make_model("mistral", torch.bfloat16)), 64, 8, torch.bfloat16, torch.device("cpu"))


@pytest.fixture(scope="module")
def kernels(pool: KVPool) -> Kernels:
    with torch.no_grad():
        decoder = read_decoder(make_model("mistral", torch.bfloat16), 512)
        assert decoder is not None
        chosen = choose_kernels(decoder, pool)
    assert chosen.name == "numba"
    return chosen


def assert_rounded(result: Tensor, exact: Tensor) -> None:
    """Within one unit in the last place of bfloat16."""
    torch.testing.assert_close(result.double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_gate_over_the_whole_range(kernels: Kernels, rows: int) -> None:
    gate_up = torch.linspace(-300, 300, rows * 2 * 61).reshape(rows, 122).to(torch.bfloat16)
    gate, up = gate_up.double().chunk(2, dim=-1)
    exact = gate * torch.sigmoid(gate) * up
    assert_rounded(kernels.gate(gate_up), exact)


def test_what_is_not_a_number_stays_so(kernels: Kernels) -> None:
    gate_up = torch.ones(2, 122, dtype=torch.bfloat16)
    gate_up[0, 3] = gate_up[1, 70] = float("nan")
    unknown = torch.zeros(2, 61, dtype=torch.bool)
    unknown[0, 3] = unknown[1, 9] = True
    assert torch.equal(kernels.gate(gate_up).isnan(), unknown)
    normed = kernels.norm(gate_up, torch.ones(122, dtype=torch.bfloat16))
    assert normed.isnan().all()


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_norms(kernels: Kernels, rows: int) -> None:
    torch.manual_seed(rows)
    x, residual = torch.randn(2, rows, 93).mul(40).to(torch.bfloat16)
    weight = torch.randn(93).to(torch.bfloat16)

    def exact(of: Tensor) -> Tensor:
        wide = of.double()
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()

    assert_rounded(kernels.norm(x, weight), exact(x))
    total = residual + x
    result = kernels.add_norm(residual, x, weight)
    assert torch.equal(residual, total)
    assert_rounded(result, exact(total))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("depth", "width"), [(1, 1), (37, 3), (576, 961)])
def test_one_row_product(kernels: Kernels, depth: int, width: int, bias: bool) -> None:
    torch.manual_seed(width)
    layer = torch.nn.Linear(depth, width, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(1, depth).to(torch.bfloat16)
    with torch.no_grad():
        result = kernels.multiply(Product([layer]), x).double()
        torch.testing.assert_close(result, layer.double()(x.double()), rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("context_lens", [[1], [8, 9], [200], [3, 64, 11, 12, 10, 1, 100]])
def test_decode_attention_sees_its_window_and_no_more(kernels: Kernels, pool: KVPool, context_lens: list[int]) -> None:
    """Keys and values outside the window are set to what would ruin the result: not a number."""
    generator = torch.Generator().manual_seed(0)
    window, heads, kv_heads, dim = 11, 6, 2, 16
    tables = np.zeros((len(context_lens), 25), dtype=np.int64)
    pages = iter(np.random.default_rng(0).permutation(pool.num_pages).tolist())
    pool.keys[0].fill_(float("nan"))
    pool.values[0].fill_(float("nan"))
    qkv = torch.randn(len(context_lens), (heads + 2 * kv_heads) * dim, generator=generator).to(torch.bfloat16)
    exact = torch.empty(len(context_lens), heads, dim, dtype=torch.float64)
    for row, length in enumerate(context_lens):
        tables[row, : -(-length // 8)] = [next(pages) for _ in range(-(-length // 8))]
        seen = range(max(0, length - window), length)
        key, value = torch.randn(2, kv_heads, len(seen), dim, generator=generator).to(torch.bfloat16)
        for i, position in enumerate(seen):
            pool.keys[0][tables[row, position // 8], :, position % 8] = key[:, i]
            pool.values[0][tables[row, position // 8], :, position % 8] = value[:, i]
        query = qkv[row, : heads * dim].view(kv_heads, heads // kv_heads, dim).double()
        weights = torch.softmax(query @ key.double().transpose(1, 2) * dim**-0.5, dim=-1)
        exact[row] = (weights @ value.double()).view(heads, dim)
    positions = np.array(context_lens) - 1
    plan = StepPlan(positions, positions, len(context_lens), np.array(context_lens), tables, ())
    out = torch.empty(len(context_lens), heads * dim, dtype=torch.bfloat16)
    kernels.attend(qkv, 0, plan, out)
    torch.testing.assert_close(out.view(exact.shape).double(), exact, rtol=2**-8, atol=1e-3)


def test_kernels_compile_where_numba_finds_no_folder_for_its_cache(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    from numba.core import caching

    from inferdbg.engine.core.model.fast import numba_functions as functions
    from inferdbg.engine.core.model.fast.openmp import ParallelKernel

    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    kernel = ParallelKernel(functions.gate, 4, functions.COMPILE_OPTIONS)
    gate_up, out = torch.randn(3, 122).to(torch.bfloat16), torch.empty(3, 61, dtype=torch.bfloat16)
    kernel(torch.get_num_threads(), gate_up.data_ptr(), out.data_ptr(), 3, 61)
    assert torch.equal(out, kernels.gate(gate_up))
