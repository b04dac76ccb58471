"""What a scheduling policy is, and the registry of those there are. A new one is a file beside this and a line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from inferdbg.engine.core.scheduler.fcfs import Fcfs
from inferdbg.engine.core.sequence import Sequence
from inferdbg.engine.errors import UsageError

__all__ = ["POLICIES", "Policy", "make_policy"]


class Policy(Protocol):
    """Orders sequences. What can be done with that order (budget, pages, slots) is not its business."""

    def rank(self, seq: Sequence) -> tuple[int, ...]:
        """The smallest rank is served first and preempted last.

        Ranks are unique and never change while a sequence lives, or two sequences could preempt each other for ever.
        """
        ...


POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": Fcfs}


def make_policy(name: str) -> Policy:
    """The policy of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in POLICIES:
        raise UsageError(f"policy must be one of {', '.join(sorted(POLICIES))}, {name!r} given")
    return POLICIES[name]()
