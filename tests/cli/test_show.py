import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inferdbg.engine.core.events import FinishReason
from inferdbg.engine.serving.events import EndKind

MS = 1_000_000
STAGES = ["io.receive", "tokenize", "schedule", "prefill", "decode", "detokenize", "io.send"]


def some_of_everything(events: Any) -> list[Any]:
    """Four finished requests, and one each aborted, failed, rejected and in flight."""
    happened = events.Script(num_requests=4, num_tokens=5).run()
    gone = events.arrived("gone", time_ns=events.START_NS + 5 * MS, seq_ids=(10,))
    broke = events.arrived("broke", time_ns=events.START_NS + 6 * MS, seq_ids=(11,))
    open_ = events.arrived("open", time_ns=events.START_NS + 7 * MS, seq_ids=(12,), client_request_id="mine")
    cut = events.boundaries(gone.time_ns, last_token_ns=None, text_ready_ns=None, sent_ns=None)
    happened += [gone, broke, open_, events.step(6, (10, 11, 12))]
    happened += [
        events.closed(gone, end=EndKind.ABORTED, boundaries=cut, error_type="client_gone"),
        events.closed(broke, end=EndKind.FAILED, boundaries=cut, error="core died", error_type="engine_lost"),
        events.rejected("no"),
    ]
    return happened


def test_the_document_of_a_run(record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any) -> None:
    run = record("run", some_of_everything(events))
    outcome = inferdbg("show", run, "--json")
    document = outcome.document
    assert outcome.code == 0
    assert (document["schema"], document["status"], document["num_requests"]) == ("inferdbg.show/1", "closed", 8)
    assert document["ends"] == {"finished": 4, "aborted": 1, "rejected": 1, "failed": 1}
    assert (document["in_flight"], document["in_flight_requests"][0]["request_id"]) == (1, "open")
    assert document["tokens"]["output"] == 4 * 5 + 2 * 3
    assert list(document["stages_seconds"]) == STAGES
    assert sum(document["stages_seconds"].values()) == pytest.approx(document["e2e_sum_seconds"])
    assert document["ttft_seconds"]["p50"] == pytest.approx(0.016)
    assert set(document["itl_seconds"]) == set(document["e2e_seconds"]) == {"p50", "p95", "p99"}
    assert not any(document["dropped"].values())
    assert document["causes"] == {"aborted: client_gone": 1, "failed: engine_lost": 1, "rejected: queue_full": 1}


def test_a_run_at_a_glance(record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any) -> None:
    text = inferdbg("show", record("run", some_of_everything(events))).out
    for told in ("closed", "4 finished", "1 aborted", "1 rejected", "1 failed", "1 in flight", "TTFT", "ITL", "E2E"):
        assert told in text
    assert all(stage in text for stage in STAGES)
    assert "nothing was dropped" in text
    assert "tiny float32 cpu" in text
    assert max(map(len, text.splitlines())) <= 120


def test_an_open_run_can_be_shown(record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any) -> None:
    run = record("run", some_of_everything(events), close=False)
    document = inferdbg("show", run, "--json").document
    assert (document["status"], document["in_flight"]) == ("open", 1)


def test_an_empty_run_can_be_shown(record: Callable[..., Path], inferdbg: Callable[..., Any]) -> None:
    outcome = inferdbg("show", record("run", []))
    assert outcome.code == 0
    assert "0 requests" in outcome.out
    assert inferdbg("show", record("other", []), "--json").document["ttft_seconds"] == {
        "p50": None,
        "p95": None,
        "p99": None,
    }


KILLED = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import factories as events
from inferdbg.tracing.recording_config import RecordingConfig
from inferdbg.tracing.session import start_recording
recording = start_recording(RecordingConfig(run_dir=Path({run!r})))
for event in [events.core_started(), events.arrived("victim", seq_ids=(0,)), events.step(1), events.step(2)]:
    recording.observer(event)
assert recording.flush()
os.kill(os.getpid(), 9)
"""


def test_a_killed_recording_is_lost_and_says_what_was_in_flight(tmp_path: Path, inferdbg: Callable[..., Any]) -> None:
    tests = str(Path(__file__).parents[1] / "tracing")
    code = KILLED.format(tests=tests, run=str(tmp_path / "run"))
    ended = subprocess.run([sys.executable, "-c", code], check=False)
    assert ended.returncode == -signal.SIGKILL
    outcome = inferdbg("show", tmp_path / "run")
    assert outcome.code == 0
    assert "lost" in outcome.out
    assert "1 in flight when it ended" in outcome.out
    assert "victim" in outcome.out
    request = inferdbg("show", tmp_path / "run", "victim", "--json").document
    assert [token["id"] for token in request["tokens"]] == [1, 2]
    assert request["end"] is None
    shown = inferdbg("show", tmp_path / "run", "victim")
    assert shown.code == 0
    assert "never: in flight when the run ended, 2 output tokens recovered from the engine's steps" in shown.out
    assert "its stages are not known" in shown.out
    assert "-0.500" in shown.out  # the tokens themselves


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("logged", ["ids", "hashed", "off"])
def test_a_request_in_flight_is_drawn_as_far_as_it_is_known(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any, close: bool, num_steps: int, logged: str
) -> None:
    from inferdbg.tracing.token_log import TokenLogMode

    arrival = events.arrived("open", client_request_id="mine", prompts=((10, 11, 12),), seq_ids=(3,))
    admitted = {"admitted_seq_ids": (3,), "admitted_cached": (2,), "admitted_is_resume": (False,)}
    steps = [events.step(n, (3,), **(admitted if n == 1 else {})) for n in range(1, num_steps + 1)]
    key = b"k" * 32 if logged == "hashed" else None
    run = record(
        "run", [events.core_started(), arrival, *steps], close, token_log=TokenLogMode(logged), token_log_key=key
    )
    outcome = inferdbg("show", run, "mine")
    assert outcome.code == 0, outcome.err
    told = f"{num_steps} output tokens"
    assert (f"never: in flight when the run ended, {told} recovered" if close else f"in flight, {told}") in outcome.out
    assert ("3 prompt (2 from the prefix cache)" if num_steps else "3 prompt") in outcome.out
    assert ("w302" in outcome.out) is (logged == "ids" and num_steps > 0)
    assert ("no token was sampled" in outcome.out) is (num_steps == 0)
    document = inferdbg("show", run, "mine", "--json").document
    assert document["run_status"] == ("closed" if close else "open")
    assert {name: document[name] for name in ("end", "status", "finish_reason", "error")} == dict.fromkeys(
        ("end", "status", "finish_reason", "error")
    )


def test_the_printed_command_shows_the_request_wherever_the_run_lies(
    tmp_path: Path,
    record: Callable[..., Path],
    inferdbg: Callable[..., Any],
    events: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "a place" / "latest"
    run.parent.mkdir()
    shutil.move(record("run", events.Script().run()), run)
    for directory, named in ((tmp_path, run), (run, "."), (run.parent, "./latest"), (tmp_path, "a place/latest")):
        monkeypatch.chdir(directory)
        outcome = inferdbg("show", named)
        (command,) = re.findall(r"slowest requests \((inferdbg show .*) REQUEST\)", outcome.out)
        _, *arguments = shlex.split(command)
        assert inferdbg(*arguments, "client-1").code == 0, command
        assert re.search(r"^run +latest ", outcome.out, re.MULTILINE)
        assert inferdbg(*arguments, "--json").document["run"] == "latest"


def test_what_retention_deleted_is_told(record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any) -> None:
    run = record("run", events.Script().run())
    assert "deleted by retention" not in inferdbg("show", run).out
    (file,) = (run / "replicas").glob("*.json")
    tables = {"requests": {"segments": 2, "rows": 1400}, "spans": {"segments": 1, "rows": None}}
    gone = {"segments": 3, "bytes": 5_200_000, "tables": tables}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"deleted": gone}))
    text = inferdbg("show", run).out
    assert "deleted by retention: 3 segments, 5.2 MB (1,400 rows of requests; 1 segment of spans)" in text
    assert inferdbg("show", run, "--json").document["deleted"] == gone


def test_the_document_of_a_request(record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any) -> None:
    run = record("run", some_of_everything(events))
    document = inferdbg("show", run, "client-1", "--json").document
    assert (document["schema"], document["request_id"]) == ("inferdbg.show-request/1", "req-0001")
    assert [stage["name"] for stage in document["stages"]] == STAGES
    starts, ends = [s["start_ns"] for s in document["stages"]], [s["end_ns"] for s in document["stages"]]
    assert starts[1:] == ends[:-1]
    assert document["closed_ns"] == ends[-1]
    token = document["tokens"][2]
    assert {name: token[name] for name in ("index", "id", "piece", "step")} == {
        "index": 2, "id": 103, "piece": "w103 ", "step": 3,
    }  # fmt: skip
    assert token["logprob"] == pytest.approx(-0.75)
    assert token["time_ns"] == document["arrival_ns"] + 36 * MS
    assert token["engine"]["batch"] == 4
    assert document["tokens"][0]["engine"]["cached"] == 2


def test_chunks_and_preemption_are_told_at_the_token_they_delayed(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any
) -> None:
    arrival = events.arrived("r", seq_ids=(0,), prompts=(tuple(range(8)),))
    silent = {
        "sampled_seq_ids": (),
        "sampled_ids": (),
        "sampled_logprobs": (),
        "sampled_top_ids": (),
        "sampled_top_logprobs": (),
    }
    admitted = {"admitted_seq_ids": (0,), "admitted_cached": (0,), "admitted_is_resume": (False,)}
    happened = [
        events.core_started(),
        arrival,
        events.step(1, (0,), prefill=5, chunk_starts=(0,), **silent, **admitted),
        events.step(2, (0,), prefill=3, chunk_starts=(5,)),
        events.step(3, (7,), prefill=4, preempted_seq_ids=(0,), preempted_lost=(9,)),
        events.step(4, (7, 0), prefill=9, chunk_starts=(4, 0), admitted_seq_ids=(0,), admitted_cached=(4,),
                    admitted_is_resume=(True,)),
    ]  # fmt: skip
    one = events.choice((21, 22), token_steps=(2, 4), num_preemptions=1)
    run = record("run", [*happened, events.closed(arrival, choices=(one,))])
    document = inferdbg("show", run, "r", "--json").document
    first, second = (token["engine"] for token in document["tokens"])
    assert [(chunk["start"], chunk["len"]) for chunk in first["chunks"]] == [(0, 5), (5, 3)]
    assert (first["preempted"], second["preempted"], second["lost"], second["cached"]) == (False, True, 9, 4)
    text = inferdbg("show", run, "r").out
    assert "prefill 0:5, prefill 5:8" in text
    assert "preempted before, 9 tokens lost" in text


def test_hostile_text_cannot_garble_the_terminal(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any
) -> None:
    hostile = "\x1b]0;owned\x07\u202e\n[red]"
    arrival = events.arrived("r", seq_ids=(0,), client_request_id=hostile, model=hostile)
    one = events.choice((5, 666, 6), stop_matched=hostile, finish_reason=FinishReason.STOP)
    failed = events.closed(arrival, choices=(one,), error=hostile, error_type=hostile, end=EndKind.FAILED)
    run = record("run", [events.core_started(), arrival, failed])
    for arguments in (("show", run), ("show", run, "r"), ("diff-tokens", run, run)):
        text = inferdbg(*arguments).out
        assert not {unicodedata.category(char) for char in text.replace("\n", "")} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
        assert "[red]" in text or arguments[0] == "diff-tokens"
    assert "\\x1b[2J" in inferdbg("show", run, "r").out


def test_long_outputs_are_cut_in_the_middle_unless_asked(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any
) -> None:
    arrival = events.arrived("r", seq_ids=(0,))
    run = record(
        "run", [events.core_started(), arrival, events.closed(arrival, choices=(events.choice(tuple(range(300))),))]
    )
    assert "290 tokens left out" in inferdbg("show", run, "r", "--limit", 10).out
    assert "left out" not in inferdbg("show", run, "r", "--limit", 0).out


def test_choices_are_chosen_with_flags(record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any) -> None:
    sampling = replace(events.arrived().sampling, n=2)
    arrival = events.arrived("r", sampling=sampling)
    choices = (events.choice((1, 2)), events.choice((3, 4, 5), choice_index=1, seq_id=1))
    run = record("run", [events.core_started(), arrival, events.closed(arrival, choices=choices)])
    assert [t["id"] for t in inferdbg("show", run, "r", "--choice", 1, "--json").document["tokens"]] == [3, 4, 5]
    assert "1 more row" in inferdbg("show", run, "r").out
    missing = inferdbg("show", run, "r", "--choice", 2)
    assert missing.code == 2
    assert "0/0, 0/1" in missing.err


@pytest.mark.parametrize("logged", ["hashed", "off"])
def test_without_ids_nothing_is_decoded_and_the_reason_is_given(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any, logged: str
) -> None:
    from inferdbg.tracing.token_log import TokenLogMode

    key = b"k" * 32 if logged == "hashed" else None
    run = record("run", some_of_everything(events), token_log=TokenLogMode(logged), token_log_key=key)
    document = inferdbg("show", run, "client-1", "--json").document
    assert len(document["tokens"]) == 5
    assert {token["piece"] for token in document["tokens"]} == {None}
    assert any("token" in warning for warning in document["warnings"])


def test_runs_are_found_by_latest_and_by_name(
    record: Callable[..., Path], inferdbg: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("first", "second"):
        shutil.move(record(name, []), tmp_path / "runs" / name)
    assert inferdbg("show", "latest", "--json").document["run"] == "second"
    assert inferdbg("show", "latest~1", "--json").document["run"] == "first"
    assert inferdbg("show", "first", "--json").document["run"] == "first"
    assert "there are 2 runs" in inferdbg("show", "latest~2").err


def test_latest_passes_over_a_server_that_did_not_start_and_a_torn_manifest(
    inferdbg: Callable[..., Any],
    record: Callable[..., Path],
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    shutil.move(record("good", []), tmp_path / "runs" / "good")
    (tmp_path / "runs" / "torn").mkdir()
    (tmp_path / "runs" / "torn" / "run.json").write_text("{")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert inferdbg("serve", "--model", tiny_model_dir, "--trace", "--port", taken.getsockname()[1]).code == 4
    assert len(list((tmp_path / "runs").iterdir())) == 3
    assert inferdbg("show", "latest", "--json").document["run"] == "good"


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir(), lambda p: p.write_text("x")])
def test_what_is_no_run_is_bad_usage(
    tmp_path: Path, inferdbg: Callable[..., Any], make: Callable[[Path], object]
) -> None:
    make(tmp_path / "x")
    outcome = inferdbg("show", tmp_path / "x")
    assert (outcome.code, outcome.out) == (2, "")
    assert str(tmp_path / "x") in outcome.err
    assert "Traceback" not in outcome.err


def test_a_torn_manifest_and_an_unknown_request(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any
) -> None:
    run = record("run", events.Script().run())
    assert inferdbg("show", run, "nobody").code == 2
    (run / "run.json").write_text('{"schema": "1.')
    outcome = inferdbg("show", run)
    assert outcome.code == 2
    assert "run.json" in outcome.err


def test_a_run_of_a_newer_major_version_is_refused(record: Callable[..., Path], inferdbg: Callable[..., Any]) -> None:
    run = record("run", [])
    manifest = (run / "run.json").read_text()
    (run / "run.json").write_text(manifest.replace('"schema": "1.0"', '"schema": "9.0"'))
    outcome = inferdbg("show", run)
    assert outcome.code == 2
    assert "9.0" in outcome.err


def test_showing_a_run_never_loads_torch(record: Callable[..., Path], events: Any) -> None:
    run = record("run", events.Script().run())
    for arguments in (["show", str(run)], ["show", str(run), "client-1"], ["diff-tokens", str(run), str(run)]):
        code = (
            "import sys, os\nfrom inferdbg.cli.main import run\n"
            f"sys.stdout = open(os.devnull, 'w')\nassert run({arguments!r}) == 0\n"
            "assert not {'torch', 'transformers', 'starlette'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", code], check=True)


def test_the_prompt_is_shown_by_id_and_piece(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    prompt = (666, *range(1, 25))
    arrival = events.arrived("r", prompts=(prompt,))
    happened = [events.core_started(), arrival, events.closed(arrival)]
    run = record("run", happened)
    text = inferdbg("show", run, "r").out
    assert "prompt   25 tokens, 2 from the prefix cache\n" in text
    assert '  666 "\\x1b[2J\\u202e[red]\\n"   1 "w1 "   2 "w2 "' in text
    assert '7 "w7 "' in text
    assert "… 9 left out (--limit 0 shows all) …" in text
    assert '17 "w17 "' in text
    assert '24 "w24 "' in text
    assert '8 "w8 "' not in text
    whole = inferdbg("show", run, "r", "--limit", 0).out
    assert all(f'{token} "w{token} "' in whole for token in prompt[1:])
    assert "left out" not in whole
    assert max(map(len, [*text.splitlines(), *whole.splitlines()])) <= 80
    document = inferdbg("show", run, "r", "--json").document
    assert (document["prompt_token_ids"], document["prompt_pieces"][1]) == (list(prompt), "w1 ")


def test_a_prompt_without_ids_says_so(record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any) -> None:
    from inferdbg.tracing.token_log import TokenLogMode

    happened = [events.core_started(), arrival := events.arrived("r"), events.closed(arrival), events.rejected("no")]
    hashed = record("hashed", happened, token_log=TokenLogMode.HASHED, token_log_key=b"k" * 32)
    assert "4 tokens, 2 from the prefix cache, which were logged as keyed hashes" in inferdbg("show", hashed, "r").out
    off = record("off", happened, token_log=TokenLogMode.OFF)
    assert "4 tokens, 2 from the prefix cache, whose ids were not logged" in inferdbg("show", off, "r").out
    rejected = inferdbg("show", off, "no").out
    assert re.search("^prompt", rejected, re.MULTILINE) is None
    assert "None" not in rejected


def test_recorded_text_is_shown(record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any) -> None:
    arrival = events.arrived("r", prompt_text="a question")
    happened = [events.core_started(), arrival, events.closed(arrival)]
    text = inferdbg("show", record("run", happened, log_text=True), "r").out
    assert re.search("^asked +a question$", text, re.MULTILINE)
    assert re.search("^answered +a text$", text, re.MULTILINE)
    assert "a question" not in inferdbg("show", record("other", happened), "r").out


@pytest.mark.parametrize("width", [72, 80, 100, 120])
def test_every_token_is_one_line_at_any_width(
    record: Callable[..., Path],
    inferdbg: Callable[..., Any],
    events: Any,
    monkeypatch: pytest.MonkeyPatch,
    width: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    arrival = events.arrived("r", seq_ids=(0,), prompts=(tuple(range(10)),))
    admitted = {"admitted_seq_ids": (0,), "admitted_cached": (2,), "admitted_is_resume": (False,)}
    happened = [events.core_started(), arrival, events.step(1, (0,), prefill=10, chunk_starts=(0,), **admitted)]
    happened += [events.step(n, (0, 9), prefill=142) for n in range(2, 41)]
    closed = events.closed(arrival, choices=(events.choice(tuple(range(900, 940))),))
    run = record("run", [*happened, closed])
    lines = inferdbg("show", run, "r", "--limit", 4).out.splitlines()
    (head,) = (i for i, line in enumerate(lines) if "logprob" in line)
    table = lines[head + 2 : head + 7]
    assert [line.split()[0] for line in table] == ["0", "1", "…", "38", "39"]
    assert max(map(len, lines)) <= width
    told = ["prefill 0:10", "decode, beside 142 prefill tokens", "36 tokens left out (--limit 0 shows all)"]
    brief = ["prefill 0:10", "decode +142", "36 left out"]
    assert [line.endswith(end) for line, end in zip(table, told if width == 120 else brief, strict=False)] == [True] * 3
    dropped = {72: {"batch", "cached"}, 80: {"cached"}}.get(width, set())
    assert {"gap", "batch", "cached"} - set(lines[head].split()) == dropped


def test_the_requests_of_a_run_are_listed_oldest_first(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any
) -> None:
    run = record("run", some_of_everything(events))
    outcome = inferdbg("show", run, "--requests", "--json")
    document = outcome.document
    assert (document["schema"], document["run"], document["status"]) == ("inferdbg.show-requests/1", "run", "closed")
    listed = {request["request_id"]: request for request in document["requests"]}
    assert list(listed) == ["no", "req-0000", "req-0001", "req-0002", "req-0003", "gone", "broke", "open"]
    assert listed["req-0001"] == {
        "request_id": "req-0001", "client_request_id": "client-1", "end": "finished", "e2e_seconds": 0.059,
        "ttft_seconds": 0.016, "prompt_tokens": 6, "output_tokens": 5, "error_type": None,
        "arrival_ns": events.START_NS + MS,
    }  # fmt: skip
    assert (listed["open"]["end"], listed["open"]["e2e_seconds"], listed["open"]["prompt_tokens"]) == (None, None, 4)
    assert listed["no"]["prompt_tokens"] is None
    text = inferdbg("show", run, "--requests").out
    assert re.search(r"^client-1 +finished +59\.0 ms +16\.0 ms +6 +5$", text, re.MULTILINE)
    assert re.search(r"^no +rejected: queue_full +2\.00 ms +– +– +–$", text, re.MULTILINE)
    assert re.search(r"^mine +in flight +– +– +4 +–$", text, re.MULTILINE)
    assert len(text.splitlines()) == 2 + 8
    assert inferdbg("show", record("empty", []), "--requests").out == "0 requests\n"
    assert inferdbg("show", run, "open", "--requests").code == 2


def test_all_prompts_and_choices_of_a_request_are_counted(
    record: Callable[..., Path], inferdbg: Callable[..., Any], events: Any
) -> None:
    from inferdbg.engine.core.sampling_params import SamplingParams

    arrival = events.arrived("many", prompts=((1, 2), (3, 4, 5)), sampling=SamplingParams(n=2, seed=1))
    choices = tuple(
        events.choice((c, c), prompt_index=p, choice_index=c, seq_id=2 * p + c) for p in (0, 1) for c in (1, 0)
    )
    run = record("run", [events.core_started(), arrival, events.closed(arrival, choices=choices)])
    (slowest,) = inferdbg("show", run, "--json").document["slowest"]
    assert (slowest["prompt_tokens"], slowest["output_tokens"]) == (5, 8)
