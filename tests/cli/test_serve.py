import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferdbg.cli.museum.server import running_server

ADMIN = "sk-admin-0123456789"
SMALL = ("--dtype", "float32", "--threads", "1", "--kv-memory", "16MiB", "--served-model-name", "tiny")


def ask(url: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body | changes, headers={"x-request-id": "mine"}, timeout=60)
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


@pytest.fixture(scope="module")
def served(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server with every part of a recording on, and where it records."""
    base = tmp_path_factory.mktemp("served")
    key = base / "admin.key"
    key.write_text(ADMIN)
    key.chmod(0o600)
    arguments = ("--model", str(tiny_model_dir), "--run-dir", str(base / "run"), "--admin-key-file", str(key))
    with running_server((*arguments, "--slo", "ttft=0.5", "--replica", "r7", "--token-log", "hashed",
                         "--token-log-key", str(base / "log.key"), *SMALL)) as url:  # fmt: skip
        yield url, base / "run"
    assert json.loads((base / "run" / "run.json").read_text())["ended"]["reason"] == "stopped"


def test_a_served_request_is_in_the_run_while_the_server_runs(
    served: tuple[str, Path], inferdbg: Callable[..., Any]
) -> None:
    url, run = served
    assert ask(url)["usage"]["completion_tokens"] == 4
    document = wait_for(lambda: inferdbg("show", run, "--json").document, lambda d: d["ends"]["finished"] == 1)
    assert (document["status"], document["in_flight"]) == ("open", 0)
    request = inferdbg("show", run, "mine", "--json").document
    assert (request["client_request_id"], request["replica"], len(request["tokens"])) == ("mine", "r7", 4)


def wait_for(look: Callable[[], Any], is_there: Callable[[Any], bool]) -> Any:
    """A row is readable 100 ms after its request ended: looks until it is."""
    deadline = time.monotonic() + 10
    while not is_there(found := look()):
        assert time.monotonic() < deadline, f"never seen: {found}"
    return found


def test_metrics_have_the_replica_and_the_objective(served: tuple[str, Path]) -> None:
    text = httpx.get(f"{served[0]}/metrics").text
    assert 'inferdbg_slo_ttft_seconds{replica="r7"} 0.5' in text
    assert 'le="0.5"' in text


def test_the_step_window_is_opened_by_the_administrator_alone(served: tuple[str, Path]) -> None:
    url = f"{served[0]}/trace/steps"
    admin = {"authorization": f"Bearer {ADMIN}"}
    assert httpx.post(url).status_code == 401
    assert httpx.post(url, headers={**admin, "origin": "https://example.org"}).status_code == 403
    assert httpx.get(url, headers=admin).status_code == 405
    assert httpx.post(f"{url}?seconds=2", headers=admin).json() == {"seconds": 2.0}
    for wrong in ("x", "-1", "1e9", "nan"):
        answer = httpx.post(f"{url}?seconds={wrong}", headers=admin)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "seconds")


def test_no_key_and_no_id_is_in_what_the_run_says_of_itself(served: tuple[str, Path]) -> None:
    text = (served[1] / "run.json").read_text()
    assert ADMIN not in text
    assert "admin.key" not in text
    assert served[1].stat().st_mode & 0o077 == 0
    key = served[1].parent / "log.key"
    assert key.stat().st_mode & 0o077 == 0
    assert key.read_text().strip() not in text


def test_a_killed_server_leaves_a_run_that_tells_what_was_in_flight(
    tiny_model_dir: Path, tmp_path: Path, inferdbg: Callable[..., Any]
) -> None:
    command = [sys.executable, "-m", "inferdbg.cli.main", "serve", "--port", "0", "--model", str(tiny_model_dir)]
    with subprocess.Popen(
        [*command, "--run-dir", str(tmp_path / "run"), *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        long = {"stream": True, "max_tokens": 4000, "ignore_eos": True}
        body = {"model": "tiny", "messages": [{"role": "user", "content": "go on"}], "temperature": 0} | long
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            for _ in range(40):
                next(lines)
            server.send_signal(signal.SIGKILL)
            server.wait()
    document = inferdbg("show", tmp_path / "run", "--json").document
    assert (document["status"], document["in_flight"]) == ("lost", 1)
    (flight,) = document["in_flight_requests"]
    assert flight["output_tokens"] > 0
    shown = inferdbg("show", tmp_path / "run", flight["request_id"])
    assert shown.code == 0, shown.err
    assert f"in flight when the run ended, {flight['output_tokens']:,} output tokens recovered" in shown.out


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("--model", "no-such-model"), 2, "no-such-model"),
        (("--model", "MODEL", "--host", "0.0.0.0"), 2, "--api-key-file"),
        (("--model", "MODEL", "--slo", "fast"), 2, "--slo takes"),
        (("--model", "MODEL", "--retain", "soon"), 2, "--retain takes"),
        (("--model", "MODEL", "--otlp-sample", "some"), 2, "--otlp-sample takes"),
        (("--model", "MODEL", "--kv-memory", "much"), 2, "--kv-memory takes"),
        (("--model", "MODEL", "--token-budget", "4", "--max-num-seqs", "8"), 2, "token_budget"),
        (("--model", "MODEL", "--dtype", "int4"), 2, "--dtype"),
        (("--model", "MODEL", "--port", "70000"), 2, "--port"),
        (("--model", "MODEL", "--api-key-file", "absent.key"), 2, "absent.key"),
    ],
)
def test_mistakes_are_told_in_one_line(
    inferdbg: Callable[..., Any],
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    code: int,
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = inferdbg("serve", *(str(tiny_model_dir) if a == "MODEL" else a for a in arguments))
    assert outcome.code == code
    assert told in outcome.err
    assert outcome.out == ""
    assert "Traceback" not in outcome.err


def test_a_port_in_use_is_the_environments_lack(inferdbg: Callable[..., Any], tiny_model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        outcome = inferdbg("serve", "--model", tiny_model_dir, "--port", taken.getsockname()[1])
    assert outcome.code == 4
    assert "cannot be bound" in outcome.err


def test_a_run_directory_that_holds_a_run_is_not_written_over(
    inferdbg: Callable[..., Any], record: Callable[..., Path], tiny_model_dir: Path
) -> None:
    run = record("old", [])
    before = (run / "run.json").read_bytes()
    outcome = inferdbg("serve", "--model", tiny_model_dir, "--run-dir", run)
    assert outcome.code == 2
    assert "already holds a run" in outcome.err
    assert (run / "run.json").read_bytes() == before


def test_the_server_of_a_killed_demo_stops(tiny_model_dir: Path, tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom inferdbg.cli.museum.server import running_server\n"
        f"with running_server({('--model', str(tiny_model_dir), *SMALL)!r}) as url:\n"
        "    print(url, flush=True)\n    sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as parent:
        assert parent.stdout is not None
        port = int(parent.stdout.readline().strip().rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            os.kill(parent.pid, signal.SIGKILL)
            parent.wait()
            while connection.recv(65536):
                pass  # the rest of the answer, then the end: the server closed its connections
