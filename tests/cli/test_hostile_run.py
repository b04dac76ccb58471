"""A run from elsewhere, every string of which tries to take over the terminal."""

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from inferdbg.engine.serving.events import EndKind

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e[red]\n\r"
MS = 1_000_000


def poisoned(value: Any) -> Any:
    """Every string and every key of a JSON document, with the sequences after it; the keys also as they were."""
    match value:
        case str():
            return value + HOSTILE
        case list():
            return [poisoned(item) for item in value]
        case dict():
            made = {key: poisoned(item) for key, item in value.items()}
            return made | {f"{key}{HOSTILE}": item for key, item in made.items() if not isinstance(item, dict | list)}
        case _:
            return value


def poison_table(file: Path) -> None:
    table = pq.read_table(file)
    for position, field in enumerate(table.schema):
        if pa.types.is_string(field.type):
            tainted = pc.binary_join_element_wise(table.column(position), HOSTILE, "")  # type: ignore[call-overload]
            table = table.set_column(position, field, tainted)
    file.unlink()
    replica, rest = file.name.split(".", 1)
    pq.write_table(table, file.with_name(f"{replica}{HOSTILE}.{rest}"))


@pytest.fixture
def hostile_run(record: Callable[..., Path], events: Any) -> Callable[..., Path]:
    """Finished, failed, rejected and unfinished requests; then every string, file name and key is made hostile."""

    def make(name: str, output: tuple[int, ...]) -> Path:
        happened = events.Script(num_requests=2, num_tokens=3).run()
        broke, going = events.arrived("broke", seq_ids=(10,)), events.arrived("going", seq_ids=(11,))
        told = events.arrived("told", seq_ids=(12,), time_ns=events.START_NS + 9 * MS)
        happened += [broke, going, told, events.step(4, (10, 11, 12))]
        happened += [
            events.closed(broke, end=EndKind.FAILED, error="core died", error_type="engine_lost"),
            events.closed(told, choices=(events.choice(output, seq_id=12, stop_matched="END"),)),
            events.rejected("no"),
        ]
        run = record(name, happened)
        manifest = json.loads((run / "run.json").read_text())
        manifest["ended"] |= {"reason": "stopped"}
        (run / "run.json").write_text(json.dumps(manifest))
        for file in (run / "run.json", *(run / "replicas").glob("*.json")):
            file.write_text(json.dumps(poisoned(json.loads(file.read_text()))))
        for file in (run / "replicas").glob("*.json"):
            file.rename(file.with_name(f"{HOSTILE}{file.name}"))
            file.with_name(f"torn{HOSTILE}.json").write_text("{")
        for table in ("arrivals", "requests", "steps"):
            for file in (run / table).glob("*.parquet"):
                poison_table(file)
            (run / table / f"9{HOSTILE}.1.000000.parquet").write_text("no table")
        target = run.with_name(f"{name}{HOSTILE}")
        return run.rename(target)

    return make


def assert_harmless(outcome: Any, *codes: int) -> None:
    assert outcome.code in codes, outcome.err
    printed = outcome.out + outcome.err
    obeyed = {c for c in printed if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}} - {"\n"}
    assert not obeyed


def test_no_string_of_a_run_is_obeyed_by_the_terminal(
    hostile_run: Callable[..., Path], inferdbg: Callable[..., Any]
) -> None:
    a, b = hostile_run("a", (1, 2, 3)), hostile_run("b", (1, 2))
    shown = inferdbg("show", a)
    assert_harmless(shown, 0)
    assert_harmless(inferdbg("show", a, "--requests"), 0)
    assert_harmless(inferdbg("show", a, "--requests", "--json"), 0)
    for told in ("finished\\x1b", "failed\\x1b", "(stopped\\x1b", "warning: ", "going\\x1b", "tiny\\x1b"):
        assert told in shown.out
    for request in ("req-0001", "broke", "going", "told", "no"):
        assert_harmless(inferdbg("show", a, request), 0)
        assert_harmless(inferdbg("show", a, request, "--json"), 0)
    compared = inferdbg("diff-tokens", a, b)
    assert_harmless(compared, 1)
    assert "ended here (stop\\x1b" in compared.out
    assert "requests/9\\x1b" in compared.err or "9\\x1b" in compared.err
    for arguments in (("show", a, "--json"), ("diff-tokens", a, b, "--json")):
        assert_harmless(inferdbg(*arguments), 0, 1)


def test_no_error_repeats_what_a_terminal_obeys(
    hostile_run: Callable[..., Path], inferdbg: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = hostile_run("a", (1,))
    assert_harmless(inferdbg("show", run, f"nobody{HOSTILE}"), 2)
    assert_harmless(inferdbg("show", run, ""), 2)  # fits many: they are listed
    assert_harmless(inferdbg("show", tmp_path / f"nowhere{HOSTILE}"), 2)
    assert_harmless(inferdbg("show", f"--flag{HOSTILE}"), 2)
    assert_harmless(inferdbg("pull", f"model{HOSTILE}"), 2, 4)
    manifest = run / "run.json"
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(document | {"schema": f"9.0{HOSTILE}"}))
    refused = inferdbg("diff-tokens", run, run)
    assert_harmless(refused, 2)
    assert "9.0\\x1b" in refused.err
    manifest.write_text(json.dumps(document | {"schema": HOSTILE}))
    assert_harmless(inferdbg("show", run), 2)
    monkeypatch.setenv("INFERDBG_TRACEBACK", "1")
    manifest.write_text(json.dumps(document | {"ended": HOSTILE}))
    assert_harmless(inferdbg("show", run), 0, 2, 70)
