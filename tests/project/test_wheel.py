"""The built wheel, installed alone in an empty environment. Its dependencies come from the one the tests run in."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

SOURCES = ("engine", "tracing", "probes", "dashboards", "cli", "pyproject.toml", "setup.py", "README.md", "LICENSE")
IMPORT_ALL = """
import importlib, json, sys
for name in json.load(sys.stdin):
    importlib.import_module(name)
import inferdbg.engine
print(inferdbg.engine.__file__)
"""


@pytest.fixture(scope="module")
def installed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of an environment with the wheel in it."""
    base = tmp_path_factory.mktemp("wheel")
    source = base / "source"  # a copy: building leaves files beside the sources
    for name in SOURCES:
        if (root / name).is_dir():
            shutil.copytree(root / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            source.mkdir(exist_ok=True)
            shutil.copy2(root / name, source / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(base), str(source)]
    subprocess.run(build, check=True, capture_output=True, cwd=base)
    (wheel,) = base.glob("inferdbg-*.whl")
    environment = base / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # A path file in a directory that a path file names is not read: the editable install stays out of sight.
    borrowed = environment / "lib" / version / "site-packages" / "borrowed.pth"
    borrowed.write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin"


def in_wheel(command: list[str], **more: object) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "INFERDBG_"))}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", check=False, **more)  # type: ignore[call-overload, no-any-return]


def test_every_module_is_in_the_wheel_and_imports(installed: Path, modules: dict[str, Path]) -> None:
    result = in_wheel([str(installed / "python"), "-c", IMPORT_ALL], input=json.dumps(sorted(modules)))
    assert result.returncode == 0, result.stderr
    assert str(installed.parent) in result.stdout  # not the tree the tests run in


def test_the_command_works_and_says_its_version(installed: Path) -> None:
    result = in_wheel([str(installed / "inferdbg"), "--help"])
    assert result.returncode == 0, result.stderr
    assert "serve" in result.stdout
    assert in_wheel([str(installed / "inferdbg"), "--version"]).stdout.startswith("inferdbg 0.")


def test_the_licence_and_the_type_markers_are_in_the_wheel(installed: Path) -> None:
    packages = next((installed.parent / "lib").glob("python*/site-packages"))
    assert list(packages.glob("inferdbg-*.dist-info/licenses/LICENSE"))
    for folder in ("engine", "tracing", "probes", "dashboards", "cli"):
        assert (packages / "inferdbg" / folder / "py.typed").is_file()
    assert not [name for name in ("engine", "cli", "tracing", "probes", "dashboards") if (packages / name).exists()]
