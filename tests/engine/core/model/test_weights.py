"""Checkpoints on disk: what loads, and what each kind of damage is told as."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, info_of, tiny_model

from inferdbg.engine.core.fingerprint import fingerprint
from inferdbg.engine.core.model.families import FAMILIES
from inferdbg.engine.core.model.weights import load_model
from inferdbg.engine.core.model_info import ModelInfo, read_model_info
from inferdbg.engine.errors import ModelError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    tiny_model("llama", torch.float32).save_pretrained(directory)
    return directory


@pytest.fixture
def damaged(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return shutil.copytree(checkpoint, tmp_path / "damaged")


def load(directory: Path, info: ModelInfo | None = None) -> Any:
    return load_model(directory, info or info_of(tiny_model("llama")), torch.float32, CPU)


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_loads_what_was_saved(name: str, tmp_path: Path) -> None:
    model = tiny_model(name, torch.float32)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, read_model_info(tmp_path), torch.float32, CPU)
    saved = dict(model.named_parameters())
    assert {key for key, _ in loaded.named_parameters()} == set(saved)
    assert all(torch.equal(parameter, saved[key]) for key, parameter in loaded.named_parameters())
    assert not loaded.training


def test_tied_weights_and_shards_load(tmp_path: Path) -> None:
    model = tiny_model("llama", torch.float32)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    loaded = load(tmp_path)
    assert torch.equal(loaded.lm_head.weight, model.model.embed_tokens.weight)


def test_the_dtype_is_the_one_asked_for(checkpoint: Path) -> None:
    model = load_model(checkpoint, info_of(tiny_model("llama")), torch.bfloat16, CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_absent_weights(damaged: Path) -> None:
    (damaged / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors; weights are read from safetensors"):
        load(damaged)


def test_pickled_weights_are_never_read(damaged: Path) -> None:
    (damaged / "model.safetensors").rename(damaged / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is not read: pickled files can run code"):
        load(damaged)


@pytest.mark.parametrize("size", [0, 4, 100, 10_000])
def test_cut_off_weights(damaged: Path, size: int) -> None:
    path = damaged / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"cut off|incomplete or corrupt"):
        load(damaged)


def test_a_header_of_garbage(damaged: Path) -> None:
    path = damaged / "model.safetensors"
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])
    with pytest.raises(ModelError, match="incomplete or corrupt"):
        load(damaged)


def rewrite(directory: Path, change: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def test_a_missing_tensor(damaged: Path) -> None:
    rewrite(damaged, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"1 missing keys, such as model\.layers\.1\.mlp\.up_proj\.weight"):
        load(damaged)


def test_a_tensor_of_another_model(damaged: Path) -> None:
    rewrite(damaged, lambda tensors: tensors.update(extra=torch.zeros(3)))
    with pytest.raises(ModelError, match="1 unexpected keys, such as extra"):
        load(damaged)


def test_a_tensor_of_another_shape(damaged: Path) -> None:
    edit_config(damaged, intermediate_size=41)
    with pytest.raises(ModelError, match=r"incomplete|corrupt"):
        load(damaged)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_a_number(damaged: Path, value: float) -> None:
    rewrite(damaged, lambda tensors: tensors["model.norm.weight"].__setitem__(3, value))
    with pytest.raises(ModelError, match=r"model\.norm\.weight .* holds NaN or infinity"):
        load(damaged)


def test_a_shard_that_is_not_there(damaged: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (damaged / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"has no model-00001-of-00002\.safetensors"):
        load(damaged)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_an_index_of_garbage(damaged: Path, text: str) -> None:
    (damaged / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError):
        load(damaged)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
            "'GPT2LMHeadModel'.*Supported: .*LlamaForCausalLM",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not supported"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "deepseek_v3"}, "not supported"),
        ({"architectures": None}, "not supported"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantized \\('mxfp4'\\)"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'.*length of each"),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                    "original_max_position_embeddings": 64,
                }
            },
            "'longrope'.*outgrows",
        ),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "rope scaling 'proportional'"),
        ({"rope_parameters": {"rope_type": "unheard-of", "rope_theta": 1e4}}, "unheard-of"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
        ({"is_causal": False}, "bidirectional"),
        ({"hidden_size": -3}, "refused by transformers"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refusals_name_the_reason(damaged: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(damaged, **changes)
    with pytest.raises(ModelError, match=message):
        load(damaged)


def test_code_in_a_checkpoint_is_never_run(damaged: Path) -> None:
    marker = damaged / "ran"
    (damaged / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    edit_config(
        damaged,
        model_type="evil",
        architectures=["EvilForCausalLM"],
        auto_map={"AutoConfig": "modeling_evil.C", "AutoModelForCausalLM": "modeling_evil.M"},
    )
    with pytest.raises(ModelError, match="EvilForCausalLM"):
        load(damaged)
    edit_config(damaged, model_type="llama", architectures=["LlamaForCausalLM"])
    load(damaged)
    assert not marker.exists()


def test_bidirectional_gemma_is_refused(tmp_path: Path) -> None:
    model = tiny_model("gemma3", torch.float32)
    model.save_pretrained(tmp_path)
    edit_config(tmp_path, use_bidirectional_attention=True)
    with pytest.raises(ModelError, match="bidirectional"):
        load(tmp_path, info_of(model))


def test_the_fingerprint_follows_the_bytes(checkpoint: Path, damaged: Path) -> None:
    assert fingerprint(checkpoint) == fingerprint(damaged)
    (damaged / "README.md").write_text("hello")
    assert fingerprint(checkpoint) == fingerprint(damaged)
    rewrite(damaged, lambda tensors: tensors["model.norm.weight"].__setitem__(3, 0.5))
    changed = fingerprint(damaged)
    assert changed != fingerprint(checkpoint)
    edit_config(damaged, rms_norm_eps=1e-3)
    assert fingerprint(damaged) != changed


def test_the_table_names_real_classes() -> None:
    import transformers

    for family in FAMILIES.values():
        assert getattr(transformers, family.architecture).config_class.model_type == family.model_type
