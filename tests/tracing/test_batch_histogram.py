from __future__ import annotations

import numpy as np
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from inferdbg.tracing.batch_histogram import BatchHistogram

EDGES = (0.01, 0.1, 1.0)
VALUES = np.array([0.001, 0.01, 0.0100001, 0.5, 1.0, 7.0, 0.02])


def samples(registry):
    text = generate_latest(registry).decode()
    families = [f for f in text_string_to_metric_families(text) if f.name == "h_seconds"]
    return {
        (s.name, s.labels.get("le")): s.value for f in families for s in f.samples if not s.name.endswith("_created")
    }


def test_it_says_what_the_librarys_own_histogram_says():
    own, library = CollectorRegistry(), CollectorRegistry()
    batch = BatchHistogram("h_seconds", "help", ("replica", "0"), EDGES, own)
    plain = Histogram("h_seconds", "help", ["replica"], buckets=EDGES, registry=library).labels("0")
    assert samples(own) == samples(library)  # empty ones too
    for part in (VALUES[:3], VALUES[3:], VALUES[:0]):
        batch.observe_many(part, {"trace_id": "a"})
    for value in VALUES:
        plain.observe(value)
    assert samples(own) == samples(library)
    assert samples(own)[("h_seconds_count", None)] == 7


def test_the_largest_value_of_a_call_is_the_exemplar_of_its_bucket():
    registry = CollectorRegistry()
    batch = BatchHistogram("h_seconds", "help", ("replica", "0"), EDGES, registry)
    batch.observe_many(np.array([0.02, 0.3, 0.001]), {"trace_id": "a"})
    batch.observe_many(np.array([9.0]), {"trace_id": "b"})
    (family,) = text_string_to_metric_families(generate_latest(registry).decode())
    found = {s.labels["le"]: (s.exemplar.labels["trace_id"], s.exemplar.value) for s in family.samples if s.exemplar}
    assert found == {"1.0": ("a", 0.3), "+Inf": ("b", 9.0)}
