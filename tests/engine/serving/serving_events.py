"""An observer that tests can wait on."""

from __future__ import annotations

import threading


class Heard:
    """Keeps what it hears, on the server's thread; `wait` is for the test's."""

    def __init__(self):
        self.events = []
        self._new = threading.Condition()

    def __call__(self, event):
        with self._new:
            self.events.append(event)
            self._new.notify_all()

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def wait(self, condition, timeout=20):
        with self._new:
            assert self._new.wait_for(lambda: condition(self), timeout), [type(e).__name__ for e in self.events[-20:]]

    def wait_for(self, kind, count=1):
        self.wait(lambda heard: len(heard.of(kind)) >= count)
        return self.of(kind)
