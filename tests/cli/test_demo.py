import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from inferdbg.cli.museum.burst import MAX_TOKENS, Progress
from inferdbg.cli.museum.placards import ARTWORKS, SYSTEM_PROMPT
from inferdbg.cli.museum.server import running_server
from inferdbg.cli.render.burst import BurstView
from inferdbg.cli.render.terminal import diagnostics
from inferdbg.engine.errors import EnvironmentLacks


def test_the_requests_share_one_long_prompt_and_have_ids_of_their_own() -> None:
    assert len(ARTWORKS) == len({artwork.slug for artwork in ARTWORKS}) == 24
    assert len(SYSTEM_PROMPT) > 4 * max(len(artwork.facts) for artwork in ARTWORKS)
    assert all(100 < len(artwork.facts) < 260 for artwork in ARTWORKS)


def test_the_demo_records_shows_and_compares_and_says_what_next(
    inferdbg: Callable[..., Any], tiny_model_dir: Path, tmp_path: Path
) -> None:
    outcome = inferdbg("demo", "--model", tiny_model_dir, "--out", tmp_path / "runs", "--requests", 3)
    assert outcome.code == 0, outcome.err
    runs = sorted((tmp_path / "runs").iterdir())
    assert [run.name.rpartition("demo-")[2] for run in runs] == ["fast", "plain"]
    assert "3 finished" in outcome.out
    assert "config.core.fast_path" in outcome.out
    assert f"inferdbg show {runs[0]} placard-night-watch" in outcome.err
    for run in runs:
        document = inferdbg("show", run, "--json").document
        assert (document["status"], document["ends"]["finished"]) == ("closed", 3)
    document = inferdbg("diff-tokens", *runs, "--json").document
    assert document["num_pairs"] == 3
    assert {pair["evidence"]["matched_by"] for pair in document["pairs"]} == {"client_request_id"}
    assert "input_differs" not in {pair["verdict"] for pair in document["pairs"]}


def test_a_server_that_does_not_start_is_told_with_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentLacks, match=r"there is no model .nonsense"), running_server(("--model", "nonsense")):
        pass


def test_without_the_openai_package_the_remedy_is_named(
    inferdbg: Callable[..., Any], tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    outcome = inferdbg("demo", "--model", tiny_model_dir, "--out", tmp_path, "--requests", 1)
    assert outcome.code == 4
    assert "inferdbg[demo]" in outcome.err


def test_progress_is_plain_text_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    done = Progress("kiss", first_text_seconds=0.25, done_seconds=2.0, num_chunks=MAX_TOKENS, text="gold")
    failed = Progress("scream", error="APIConnectionError")
    with BurstView(diagnostics()) as view:
        view.update([done, failed])
    told = capsys.readouterr().err
    assert "1 of 2 answered, first words after 250 ms" in told
    assert "1 failed (APIConnectionError)" in told
    assert "\x1b" not in told


def test_a_line_of_progress_says_something_new_and_not_too_often(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = [0.0]
    states = [Progress(str(i)) for i in range(4)]
    with BurstView(diagnostics(), clock=lambda: seconds[0]) as view:
        for now, num_done in ((4, 0), (10, 0), (20, 1), (21, 2), (30, 2), (33, 3), (34, 4), (50, 4)):
            seconds[0] = now
            for state in states[:num_done]:
                state.done_seconds = float(now)
            view.update(states)
    told = [line.split(",")[0].strip() for line in capsys.readouterr().err.splitlines()]
    assert told == ["1 of 4 answered", "2 of 4 answered", "4 of 4 answered"]


def test_the_live_table_shows_every_request_and_obeys_no_control_sequence() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, height=40, color_system=None)
    with BurstView(console) as view:
        view.update(
            [Progress("kiss", num_chunks=10, text="gold \x1b]0;owned\x07 leaf"), Progress("scream", error="Oops")]
        )
    shown = stream.getvalue()
    assert "kiss" in shown
    assert "scream" in shown
    assert "\x1b]0;" not in shown
    assert "\\x1b]0;owned" in shown
