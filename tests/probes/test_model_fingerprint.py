from pathlib import Path

from inferdbg.probes.model_fingerprint import fingerprint_model


def checkpoint(directory: Path, weights: bytes, config: str = "{}") -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(config)
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def test_a_copy_has_the_same_fingerprint_and_any_change_another(tmp_path: Path) -> None:
    weights = bytes(range(256)) * 1000
    original = fingerprint_model(checkpoint(tmp_path / "a", weights))
    assert fingerprint_model(checkpoint(tmp_path / "b", weights)) == original
    changed = bytearray(weights)
    changed[len(weights) // 2] ^= 1
    others = [
        checkpoint(tmp_path / "c", bytes(changed)),
        checkpoint(tmp_path / "d", weights[:-1]),
        checkpoint(tmp_path / "e", weights, '{"rope_theta": 1}'),
    ]
    assert len({fingerprint_model(path) for path in others} | {original}) == 4


def test_a_tiny_or_empty_weight_file(tmp_path: Path) -> None:
    assert fingerprint_model(checkpoint(tmp_path / "a", b"")) != fingerprint_model(checkpoint(tmp_path / "b", b"x"))
