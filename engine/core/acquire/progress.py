"""How the slow parts of getting a model tell how far they are. Knows nothing of terminals."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["OnProgress", "no_progress"]

OnProgress = Callable[[str, float | None], None]
"""Called with what is being done, and the fraction of it that is done (None: not known). Must be cheap."""


def no_progress(stage: str, fraction: float | None) -> None:
    """Tells nobody."""
