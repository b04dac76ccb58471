"""What a run happened on: processor, memory, accelerator, versions, commit. Reads /proc; imports none of what it
asks about (torch's version is its package's metadata)."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["VERSIONED", "describe_machine", "git_commit", "own_process", "versions"]

VERSIONED = (
    "inferdbg", "torch", "transformers", "tokenizers", "safetensors", "numpy", "numba", "pyarrow", "msgspec",
    "starlette", "uvicorn", "opentelemetry-sdk", "prometheus-client",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Versions of what matters to a run's numbers; an absent package is absent here."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def describe_machine() -> dict[str, Any]:
    """CPU model and count, memory, kernel, NVIDIA devices if any."""
    fields = _proc_fields("/proc/cpuinfo")
    memory = _proc_fields("/proc/meminfo").get("MemTotal", "")
    return {
        "hostname": socket.gethostname(),
        "platform": platform.platform(),
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "num_cpus": os.cpu_count(),
        "num_usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": int(memory.split()[0]) * 1024 if memory else None,
        "gpus": _gpus(),
    }


def own_process() -> dict[str, Any]:
    """Tells this process from another that is given its number later, or that has it in another namespace."""
    pid = os.getpid()
    return {
        "pid": pid,
        "start_ticks": start_ticks(pid),
        "boot_id": _read("/proc/sys/kernel/random/boot_id"),
        "pid_namespace": _readlink("/proc/self/ns/pid"),
    }


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None where there is none, or it is a zombie, or no /proc."""
    stat = _read(f"/proc/{pid}/stat")
    fields = stat.rpartition(")")[2].split() if stat else []
    return int(fields[19]) if len(fields) > 19 and fields[0] not in ("Z", "X") else None


def git_commit(directory: Path) -> dict[str, Any] | None:
    """Commit and whether the tree has changes; None outside a repository or without git."""
    command = ["git", "-C", str(directory), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    commit, _, dirty = done.stdout.strip().partition("-")
    return {"commit": commit, "dirty": dirty == "dirty"} if done.returncode == 0 and commit else None


def _gpus() -> list[str]:
    """Models of NVIDIA devices, as their driver says; empty without one."""
    found = []
    for information in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        fields = _proc_fields(str(information))
        found.append(fields.get("Model", "NVIDIA"))
    return found


def _proc_fields(path: str) -> dict[str, str]:
    """`name : value` lines; the first of each name."""
    fields: dict[str, str] = {}
    for line in (_read(path) or "").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _readlink(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None
