"""Where there is no fast path, `make_fast_forward` says so; where an optional part is missing, a slower one serves."""

import sys

import pytest
import torch
from fast_driver import TINY, make_config, make_info, make_model
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedModel

from inferdbg.engine.core.model.fast import make_fast_forward
from inferdbg.engine.core.model.fast.products import Product
from inferdbg.engine.core.model.forward import Forward
from inferdbg.engine.core.model.kv_pool import KVPool


def try_fast(model: PreTrainedModel, **changes: object) -> Forward | None:
    info = make_info(model)
    pool = KVPool(info, 4, 16, model.dtype, torch.device("cpu"))
    return make_fast_forward(model, info, pool, make_config(model.dtype, **changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_supported_model_gets_one(dtype: torch.dtype) -> None:
    forward = try_fast(make_model("llama", dtype))
    assert forward is not None
    assert forward.name.startswith("fast-")


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**TINY, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
        LlamaConfig(**TINY, hidden_act="gelu"),
        Gemma2Config(**TINY),
    ],
    ids=["rope-by-length", "other-activation", "other-family"],
)
def test_a_model_that_it_would_compute_wrongly_gets_none(config: LlamaConfig | Gemma2Config) -> None:
    assert try_fast(AutoModelForCausalLM.from_config(config).eval()) is None


def test_settings_that_it_does_not_promise_get_none() -> None:
    assert try_fast(make_model("llama", torch.float32), batch_invariant=True) is None
    assert try_fast(make_model("llama", torch.float64)) is None
    assert try_fast(make_model("llama", torch.float32), device="cuda") is None


def test_without_numba_torch_operations_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "inferdbg.engine.core.model.fast.numba_kernels", None)
    forward = try_fast(make_model("llama", torch.bfloat16))
    assert forward is not None
    assert forward.name == "fast-torch"


@pytest.mark.parametrize("packing", [True, False])
def test_joined_products_equal_the_layers_one_by_one(packing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not packing:

        def refuse(_weight: torch.Tensor) -> None:
            raise RuntimeError("no such operator")

        monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(48, width, dtype=torch.bfloat16) for width in (33, 16, 7)]
    x = torch.randn(5, 48, dtype=torch.bfloat16)
    with torch.no_grad():
        one_by_one = torch.cat([layer(x) for layer in layers], dim=-1)
        product = Product(layers)
        joined = product(x)
        assert (product.packed is None) == (not packing)
        torch.testing.assert_close(joined, one_by_one, rtol=0.01, atol=0.01)
        again = torch.cat([layer(x) for layer in layers], dim=-1)  # the layers share the joined weight now
        assert torch.equal(again, one_by_one)
