from __future__ import annotations

import pytest

from inferdbg.cli.main import command_line, verbs_of
from inferdbg.tracing.disclosure import (
    ENVIRONMENT,
    FLAGS,
    HIDDEN,
    SWITCHES,
    disclose_command,
    disclose_environment,
    disclose_url,
)

SECRET = "sk-very-secret"


def test_listed_flags_keep_their_values():
    command = ["/venv/bin/inferdbg", "serve", "--model", "smollm2", "--page-size=32", "--trace", "--port", "0"]
    assert disclose_command(command) == [
        "inferdbg", "serve", "--model", "smollm2", "--page-size=32", "--trace", "--port", "0"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ["--api-key", SECRET],
        [f"--api-key={SECRET}"],
        ["--api-key-file", SECRET],
        ["--trace", SECRET],  # a switch has no value: this is something else
        ["--some-new-flag", SECRET],
        [SECRET],
        [f"--{SECRET}1"],
        ["-k", SECRET],
        [f"-k{SECRET}"],
        ["--model", "smollm2", SECRET],
        ["--otlp-endpoint", f"http://user:{SECRET}@collector:4317/?token={SECRET}"],
        [f"--otlp-endpoint=http://{SECRET}@collector"],
        ["--model", f"https://{SECRET}@host/model"],
    ],
)
def test_no_secret_gets_through(arguments):
    shown = disclose_command(["inferdbg", "serve", *arguments])
    assert SECRET not in " ".join(shown)
    assert len(shown) == len(arguments) + 2


def test_no_listed_name_is_that_of_a_secret():
    for name in (*FLAGS, *SWITCHES, *ENVIRONMENT):
        words = name.strip("-").lower().replace("_", "-").split("-")
        assert not {"key", "token", "secret", "password", "credential", "auth", "header", "headers"} & set(words) or (
            name in ("--token-log", "--token-budget")
        )


def test_every_listed_flag_is_one_of_the_command_line():
    params = [param for verb in verbs_of(command_line()).values() for param in verb.params]
    options = [param for param in params if param.param_type_name == "option"]
    is_switch = {name: option.is_flag for option in options for name in (*option.opts, *option.secondary_opts)}
    assert {name: is_switch.get(name) for name in FLAGS} == dict.fromkeys(FLAGS, False)
    assert {name: is_switch.get(name) for name in SWITCHES} == dict.fromkeys(SWITCHES, True)


def test_only_listed_variables_are_shown():
    environ = {"OMP_NUM_THREADS": "2", "OPENAI_API_KEY": SECRET, "HF_TOKEN": SECRET, "PATH": "/bin"}
    assert disclose_environment(environ) == {"OMP_NUM_THREADS": "2"}


def test_a_url_keeps_scheme_host_and_path():
    assert disclose_url(f"https://u:{SECRET}@host:4318/v1/traces?key={SECRET}#x") == "https://host:4318/v1/traces"
    assert HIDDEN not in disclose_url("http://localhost:4317")
