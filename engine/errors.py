"""Every error that a user can cause, as a tree. Torch-free.

InferdbgError                     exit code 70 unless a subclass says otherwise
├── UsageError                    2   what was asked cannot be done as asked
│   ├── InvalidRequest            one request: HTTP 400; `param` names the field at fault
│   │   └── ContextLengthExceeded
│   ├── ModelError                a model that is absent, unsupported or corrupt
│   └── RunError                  a run directory that cannot be read
├── EnvironmentLacks              4   a tool, a port, a disk, a device is missing
├── QueueFull                     one request: HTTP 429; `retry_after_seconds` says when to try again
└── EngineUnavailable             one request: HTTP 503; the core died, hangs or is draining

A message says what happened, with which value, and what to do next. It never echoes prompt text.
"""

from __future__ import annotations

__all__ = [
    "ContextLengthExceeded",
    "EngineUnavailable",
    "EnvironmentLacks",
    "InferdbgError",
    "InvalidRequest",
    "ModelError",
    "QueueFull",
    "RunError",
    "UsageError",
]


class InferdbgError(Exception):
    """Root of the tree; raised itself only for a fault of ours."""

    exit_code = 70


class UsageError(InferdbgError):
    """Bad usage or unreadable input."""

    exit_code = 2


class InvalidRequest(UsageError):
    """One request that cannot be served; `param` is the name of the field at fault, if one is.

    `recorded` stands in the record where the message quotes the request.
    """

    def __init__(self, message: str, param: str | None = None, *, recorded: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.recorded = message if recorded is None else recorded


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus output would not fit the model's context or the engine's pages."""


class ModelError(UsageError):
    """A model that is absent, unsupported or corrupt."""


class RunError(UsageError):
    """A run directory that is absent or cannot be read."""


class EnvironmentLacks(InferdbgError):
    """The machine lacks something; the message says what and how to get it."""

    exit_code = 4


class QueueFull(InferdbgError):
    """Too much is waiting already."""

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class EngineUnavailable(InferdbgError):
    """The core is dead, hangs, or is being shut down."""
