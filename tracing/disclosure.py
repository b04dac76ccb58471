"""What of a command line and an environment may stand in a manifest. An allow-list: what is not named here is left out,
so a key, a token or a prompt cannot get in by being new."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit, urlunsplit

__all__ = ["ENVIRONMENT", "FLAGS", "HIDDEN", "SWITCHES", "disclose_command", "disclose_environment", "disclose_url"]

HIDDEN = "(not recorded)"

FLAGS = frozenset({
    "--model", "--served-model-name", "--host", "--port", "--replica", "--run-dir", "--retain",
    "--token-log", "--otlp-endpoint", "--otlp-sample", "--slo",
    "--replica-label", "--device", "--dtype", "--threads", "--max-model-len", "--max-num-seqs",
    "--token-budget", "--page-size", "--num-pages", "--kv-memory",
    "--fast-path", "--decode-buckets", "--policy", "--top-logprobs", "--max-queued", "--max-body",
    "--max-batch-prompts", "--client-credit", "--tokenizer-threads", "--slow-client-seconds", "--stall-seconds",
    "--drain-seconds", "--requests", "--limit",
})  # fmt: skip
"""Flags whose values may be written."""

SWITCHES = frozenset({
    "--trace", "--log-text", "--trace-steps", "--prefix-cache", "--no-prefix-cache", "--batch-invariant",
})  # fmt: skip
"""Flags without a value: what follows one is not its own."""

_WORD = re.compile(r"[a-z-]{1,40}")

ENVIRONMENT = frozenset({
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "KMP_AFFINITY",
    "GOMP_CPU_AFFINITY", "MALLOC_ARENA_MAX", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTHONDEVMODE",
    "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_NUM_THREADS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE",
    "OTEL_SERVICE_NAME", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "LANG", "LC_ALL", "TZ",
})  # fmt: skip
"""Variables whose values may be written: those that change numbers, speed or encoding."""


def disclose_command(arguments: Sequence[str]) -> list[str]:
    """The command line with every value hidden that does not belong to a listed flag.

    The program's name and a verb (letters and dashes) before the first flag are kept.
    """
    shown: list[str] = []
    flag: str | None = None  # whose value comes next
    for position, argument in enumerate(arguments):
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            shown.append(_flag_name(name) + (f"={_value(name, value)}" if equals else ""))
            flag = None if equals or name in SWITCHES else name
        elif flag is not None:
            shown.append(_value(flag, argument))
            flag = None
        elif position == 0:
            shown.append(argument.rsplit("/", 1)[-1])
        else:
            is_verb = position == 1 and _WORD.fullmatch(argument) is not None
            shown.append(argument if is_verb else HIDDEN)
    return shown


def disclose_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The listed variables that are set."""
    return {name: environ[name] for name in sorted(ENVIRONMENT & environ.keys())}


def disclose_url(url: str) -> str:
    """The URL without user, password, query and fragment, any of which may hold a key."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def _flag_name(name: str) -> str:
    return name if name in FLAGS or name in SWITCHES or _WORD.fullmatch(name) else HIDDEN


def _value(flag: str, value: str) -> str:
    if flag not in FLAGS:
        return HIDDEN
    return disclose_url(value) if "://" in value else value
