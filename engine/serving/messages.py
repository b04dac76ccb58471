"""What passes between a front and its core process, as msgspec messages over a pipe. Torch-free."""

from __future__ import annotations

import msgspec

from inferdbg.engine.core.events import StepFailed, StepRecord
from inferdbg.engine.core.sequence import SequenceRequest

__all__ = [
    "Abort", "CoreMessage", "Credit", "Failed", "FrontMessage", "Heartbeat", "LoadFailed", "Ready", "Refused",
    "Shutdown", "Step", "Submit",
]  # fmt: skip


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Sequences to run, in order."""

    sequences: list[SequenceRequest]


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Sequences nobody waits for; unknown or finished ids are ignored. Their pages are free in the next step.

    The core answers with `finished_reasons = ABORT` in the next record for those it knew.
    """

    seq_ids: list[int]


class Credit(msgspec.Struct, tag=True, frozen=True):
    """The client took `tokens` more tokens of a sequence: the core may send as many again."""

    seq_id: int
    tokens: int


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """End now; the front has drained."""


FrontMessage = Submit | Abort | Credit | Shutdown


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The core can take sequences."""

    pid: int
    max_model_len: int
    num_pages: int
    page_size: int
    vocab_size: int
    info: dict[str, str | int | float | bool | None]


class LoadFailed(msgspec.Struct, tag=True, frozen=True):
    """The core could not start; it exits after this. `exit_code` as in `inferdbg.engine.errors`."""

    error_type: str
    message: str
    exit_code: int


class Step(msgspec.Struct, tag=True, frozen=True):
    """A step ended."""

    record: StepRecord


class Failed(msgspec.Struct, tag=True, frozen=True):
    """A step raised."""

    failure: StepFailed


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A sequence the core cannot run at all (it would never fit its pages)."""

    seq_id: int
    message: str


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """Sent about once a second while the core's loop turns."""

    time_ns: int
    step: int
    num_running: int
    num_waiting: int


CoreMessage = Ready | LoadFailed | Step | Failed | Refused | Heartbeat
