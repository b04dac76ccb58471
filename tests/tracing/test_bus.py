from __future__ import annotations

import threading
import time

from tracing_factories import arrived, closed, step

from inferdbg.tracing.bus import Bus, Gap
from inferdbg.tracing.losses import Losses


class Held:
    """A handler that holds the background thread until it is let go."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.entered = threading.Event()
        self.release = threading.Event()

    def __call__(self, event) -> None:
        self.entered.set()
        assert self.release.wait(10)
        self.seen.append(event)


def test_events_arrive_in_order_and_flush_waits_for_them():
    seen = []
    flushed = []
    bus = Bus([seen.append], lambda: flushed.append(len(seen)), Losses(), period_seconds=60)
    bus.start()
    events = [arrived(), step(1), step(2), closed()]
    for event in events:
        bus(event)
    assert bus.flush()
    assert seen == events
    assert flushed[-1] == 4
    bus.close()


def test_step_records_are_dropped_under_pressure_and_a_gap_stands_in_their_place():
    held, losses = Held(), Losses()
    bus = Bus([held], lambda: None, losses, period_seconds=0.001, max_telemetry=3)
    bus.start()
    first = arrived("first")
    bus(first)
    assert held.entered.wait(10)  # the queue is empty now, and nothing is taken from it
    kept = [step(n) for n in range(1, 4)]
    for record in [*kept, step(4), step(5)]:
        bus(record)
    last = closed(first)
    bus(last)
    held.release.set()
    assert bus.flush()
    bus.close()
    assert held.seen == [first, *kept, Gap(2), last]
    assert losses.counts()["steps"] == 2


def test_requests_are_never_dropped():
    held, losses = Held(), Losses()
    bus = Bus([held], lambda: None, losses, period_seconds=0.001, max_telemetry=1)
    bus.start()
    bus(arrived("first"))
    assert held.entered.wait(10)
    for n in range(500):
        bus(arrived(f"r{n}"))
    held.release.set()
    assert bus.flush()
    bus.close()
    assert len(held.seen) == 501
    assert sum(losses.counts().values()) == 0


def test_a_handler_that_fails_is_counted_and_stops_nobody(caplog):
    seen = []

    def broken(event) -> None:
        raise RuntimeError("a fault of ours")

    losses = Losses()
    bus = Bus([broken, seen.append], lambda: None, losses, period_seconds=60)
    bus.start()
    for _ in range(3):
        bus(arrived())
    assert bus.flush()
    bus.close()
    assert len(seen) == 3
    assert losses.counts()["events"] == 3
    assert len([r for r in caplog.records if "instrumentation failed" in r.message]) == 1


def test_an_idle_bus_is_woken_by_the_next_event():
    seen, handled = [], threading.Event()

    def handle(event) -> None:
        seen.append(event)
        handled.set()

    bus = Bus([handle], lambda: None, Losses(), period_seconds=0.001)
    bus.start()
    for number in range(3):
        handled.clear()
        deadline = time.monotonic() + 5
        while not bus._is_idle and time.monotonic() < deadline:
            time.sleep(0.001)
        began = time.monotonic()
        bus(step(number))
        assert handled.wait(5)
        assert time.monotonic() - began < 0.5  # half of what it would sleep if nobody woke it
    bus.close()
    assert len(seen) == 3


def test_close_handles_what_has_queued_up_and_cpu_time_is_counted():
    seen = []
    bus = Bus([seen.append], lambda: None, Losses(), period_seconds=60)
    bus.start()
    for n in range(100):
        bus(step(n))
    bus.close()
    assert len(seen) == 100
    seconds = bus.cpu_seconds()
    assert 0 < seconds["observe"] < 1
    assert 0 < seconds["record"] < 1
