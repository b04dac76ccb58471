import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from inferdbg.cli import main as cli
from inferdbg.engine.errors import EnvironmentLacks, InferdbgError, InvalidRequest, ModelError, RunError

SECRET = "the prompt that must not be quoted"


def raising(error: BaseException) -> Callable[[], None]:
    def verb() -> None:
        raise error

    return verb


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., object]], None]:
    """Puts a verb called `try` into the command line."""

    def install(function: Callable[..., object]) -> None:
        app = typer.Typer(context_settings={"auto_envvar_prefix": "INFERDBG"})
        app.callback()(lambda: None)
        app.command("try")(function)
        monkeypatch.setattr(cli, "build_app", lambda: app)

    return install


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (RunError("runs/x is not a run"), 2, "runs/x is not a run"),
        (ModelError("no such model"), 2, "no such model"),
        (InvalidRequest("n must be at least 1, 0 given", "n"), 2, "n must be"),
        (EnvironmentLacks("no port is free"), 4, "no port is free"),
        (InferdbgError("impossible"), 70, "impossible"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/x"), 4, "No space left on device: runs/x"),
        (PermissionError(errno.EACCES, "Permission denied", "runs"), 4, "Permission denied: runs"),
        (OSError(errno.ECHILD, "No child processes"), 70, "internal error"),
        (ValueError(SECRET), 70, "internal error: ValueError at test_main.py"),
        (KeyError(SECRET), 70, "internal error: KeyError"),
        (RecursionError(), 70, "internal error"),
        (KeyboardInterrupt(), 130, ""),
        (typer.Abort(), 130, ""),
        (typer.Exit(3), 3, ""),
    ],
)
def test_every_error_has_its_exit_code_and_no_traceback(
    verb: Callable[..., None], capsys: pytest.CaptureFixture[str], error: BaseException, code: int, told: str
) -> None:
    verb(raising(error))
    assert cli.run(["try"]) == code
    out, err = capsys.readouterr()
    assert told in err
    assert "Traceback" not in err
    assert SECRET not in out + err


def test_the_traceback_is_there_for_who_asks(
    verb: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERDBG_TRACEBACK", "1")
    verb(raising(ValueError("what went wrong")))
    assert cli.run(["try"]) == 70
    assert "what went wrong" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 1, 3])
def test_what_a_verb_returns_is_the_exit_code(verb: Callable[..., None], code: int) -> None:
    verb(lambda: code)
    assert cli.run(["try"]) == code


@pytest.mark.parametrize(
    "arguments", [["--nonsense"], ["shwo"], ["show"], ["show", "x", "--nope"], ["serve", "--port", "x"]]
)
def test_bad_usage_is_2_and_points_to_the_help(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert cli.run(arguments) == 2
    assert "--help" in capsys.readouterr().err


def test_no_verb_prints_the_help_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "diff-tokens" in err


def test_flag_over_variable_over_file_over_default(
    verb: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[int] = []

    def try_(port: int = 1) -> None:
        seen.append(port)

    verb(try_)
    monkeypatch.chdir(tmp_path)
    assert cli.run(["try"]) == 0
    (tmp_path / "inferdbg.toml").write_text("[try]\nport = 2\n")
    assert cli.run(["try"]) == 0
    monkeypatch.setenv("INFERDBG_TRY_PORT", "3")
    assert cli.run(["try"]) == 0
    assert cli.run(["try", "--port", "4"]) == 0
    assert seen == [1, 2, 3, 4]


def test_a_broken_settings_file_is_bad_usage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "inferdbg.toml").write_text("[serve]\nprot = 1\n")
    monkeypatch.chdir(tmp_path)
    assert cli.run(["show", "x"]) == 2
    assert "no flag prot" in capsys.readouterr().err


def command(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "inferdbg.cli.main", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_reader_that_goes_away_is_quiet() -> None:
    shell = f"{sys.executable} -m inferdbg.cli.main serve --help | true; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert result.stderr == ""
    assert result.stdout.strip() in ("0", "141")  # 0 where all of it fitted the pipe before the reader went


def test_plain_without_a_terminal_and_with_no_color() -> None:
    assert "\x1b" not in command("--help").stdout
    assert "\x1b" not in command("show", "--help", NO_COLOR="1", FORCE_COLOR="").stdout


def test_a_terminal_without_utf8_still_gets_an_answer() -> None:
    result = command("show", "--help", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert result.returncode == 0, result.stderr
