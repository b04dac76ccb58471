from __future__ import annotations

from inferdbg.tracing.losses import SIGNALS, Losses


def test_what_is_counted_elsewhere_is_added_to_what_is_counted_here():
    losses = Losses()
    errors = 0
    losses.watch("events", lambda: errors)
    losses.add("events", 2)
    errors = 3
    assert losses.counts() == dict.fromkeys(SIGNALS, 0) | {"events": 5}
