"""The `inferdbg` command: puts the verbs together and turns every error into an exit code, here and nowhere else.

A verb's module imports what it needs when it runs, so that `--help` is quick and readers of runs never load torch.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from inferdbg.cli.settings import ENV_PREFIX, load_settings
from inferdbg.engine.errors import InferdbgError
from inferdbg.probes.text import message_text

__all__ = ["build_app", "command_line", "main", "run", "verbs_of"]

VERBS = ("serve", "show", "diff-tokens", "demo", "pull")  # each is a function in the module of its name
USAGE_ERROR = 2
INTERNAL_ERROR = 70
ENVIRONMENT_LACKS = 4
INTERRUPTED = 130
BROKEN_PIPE = 141  # what a shell reports for a reader that went away; never 1, which would mean "found"
# What the machine refuses, whatever the command: its message is enough.
_ENVIRONMENT_ERRNOS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EADDRINUSE, errno.EADDRNOTAVAIL}
    | {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO}
)


def build_app() -> typer.Typer:
    """The whole command line, without defaults from files."""
    app = typer.Typer(
        name="inferdbg",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"auto_envvar_prefix": ENV_PREFIX, "help_option_names": ["-h", "--help"]},
        epilog="Example: inferdbg serve --model smollm2 --trace, then inferdbg show latest",
    )

    @app.callback(invoke_without_command=True)
    def root(
        context: typer.Context,
        version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    ) -> None:
        """A flight recorder and debugger for LLM inference: record runs, show them, compare them."""
        if version:
            typer.echo(f"inferdbg {_version()}")
            raise typer.Exit
        if context.invoked_subcommand is None:
            with contextlib.redirect_stdout(sys.stderr):  # where help goes that nobody asked for
                typer.echo(context.get_help())
            raise typer.Exit(USAGE_ERROR)

    for verb in VERBS:
        module = importlib.import_module(f"inferdbg.cli.{verb.replace('-', '_')}")
        app.command(verb, epilog=module.EXAMPLE)(getattr(module, verb.replace("-", "_")))
    return app


def command_line() -> typer.core.TyperGroup:
    """The command as it is run. Every flag of a verb has a variable, which the help does not repeat for each."""
    command = typer.main.get_command(build_app())
    assert isinstance(command, typer.core.TyperGroup)
    for parameter in command.params:
        if isinstance(parameter, typer.core.TyperOption):
            parameter.allow_from_autoenv = False  # INFERDBG_VERSION in an environment is not a wish to print it
    for verb in verbs_of(command).values():
        for parameter in verb.params:
            if isinstance(parameter, typer.core.TyperOption):
                parameter.show_envvar = False
    return command


def run(argv: Sequence[str]) -> int:
    """Runs one command line and returns its exit code. Never raises."""
    try:
        command = command_line()
        defaults = load_settings(Path.cwd(), {name: _flags(verb) for name, verb in verbs_of(command).items()})
        # Not command.main(): it turns a broken pipe into exit code 1.
        with command.make_context("inferdbg", list(argv), default_map=defaults) as context:
            result = command.invoke(context)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except typer.Exit as stop:
        return stop.exit_code
    except TyperException as error:
        usage: typer.Context | None = getattr(error, "ctx", None)
        _complain(error.format_message())
        _complain(f"try `{usage.command_path if usage else 'inferdbg'} --help`")
        return USAGE_ERROR
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (BrokenPipeError, SystemExit):  # rich ends the process by itself when its reader went away
        # The interpreter flushes stdout when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except InferdbgError as error:
        _complain(str(error))
        return error.exit_code
    except OSError as error:
        if error.errno not in _ENVIRONMENT_ERRNOS:
            return _internal_error(error)
        _complain(f"{error.strerror}: {error.filename}" if error.filename else str(error))
        return ENVIRONMENT_LACKS
    except Exception as error:
        return _internal_error(error)


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 still gets every character
    sys.exit(run(sys.argv[1:]))


def verbs_of(command: typer.core.TyperGroup) -> dict[str, typer.core.TyperCommand]:
    """The verbs of the whole command by name."""
    return {n: verb for n, verb in command.commands.items() if isinstance(verb, typer.core.TyperCommand)}


def _flags(verb: typer.core.TyperCommand) -> dict[str, str]:
    """Parameter name by flag: ``{"json": "as_json"}``."""
    return {option.lstrip("-"): p.name for p in verb.params if p.name for option in p.opts if option.startswith("--")}


def _internal_error(error: BaseException) -> int:
    """Says where, not what: an exception's own text may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    if os.environ.get(f"{ENV_PREFIX}_TRACEBACK"):
        _print("".join(traceback.format_exception(error)).rstrip())
    _complain(
        f"internal error: {type(error).__name__}{place}. This is a fault of inferdbg, not yours. Please report it with "
        f"`inferdbg --version` and the traceback that {ENV_PREFIX}_TRACEBACK=1 prints (it may quote prompts)."
    )
    return INTERNAL_ERROR


def _complain(message: str) -> None:
    _print(f"inferdbg: {message}")


def _print(message: str) -> None:
    """On stderr. An error may quote a file name, or what stands in a run: a terminal must not obey it."""
    with contextlib.suppress(OSError):  # nobody reads stderr
        print(message_text(message), file=sys.stderr)  # noqa: T201


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("inferdbg")
    except PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    main()
