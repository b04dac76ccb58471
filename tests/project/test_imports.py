import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDERS = {"engine", "tracing", "probes", "dashboards", "cli"}
HEAVY = ("torch", "transformers", "tokenizers", "pyarrow", "numpy", "starlette", "uvicorn", "opentelemetry", "jinja2")


def loaded_by(statement: str) -> set[str]:
    """Top-level modules loaded once a statement has run in a fresh interpreter."""
    code = f"import sys\n{statement}\nprint('\\n'.join({{name.split('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_the_folders_form_layers(root: Path) -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    command = str(tool) if tool.exists() else shutil.which("lint-imports")
    assert command, "import-linter is not installed"
    environment = {**os.environ, "PYTHONPATH": str(root / ".typing")}
    result = subprocess.run(
        [command, "--no-cache"], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_module_is_imported_by_its_bare_name(modules: dict[str, Path], root: Path) -> None:
    bare = []
    for path in [*modules.values(), *sorted((root / "tests").rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""] if node.level == 0 else []
            bare += [f"{path.relative_to(root)}:{node.lineno}" for name in names if name.split(".")[0] in FOLDERS]
    assert not bare


def loaded_by_command(*arguments: str) -> set[str]:
    quiet = "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):"
    return loaded_by(f"from inferdbg.cli.main import run\n{quiet} assert run({list(arguments)!r}) == 0")


@pytest.mark.parametrize("verb", [None, "serve", "show", "diff-tokens", "demo", "pull"])
def test_help_loads_nothing_heavy(verb: str | None) -> None:
    assert not loaded_by_command(*([verb] if verb else []), "--help") & set(HEAVY)


@pytest.mark.parametrize("folder", ["tracing", "probes", "dashboards", "engine.serving"])
def test_readers_and_fronts_never_load_torch(folder: str, modules: dict[str, Path]) -> None:
    names = [name for name in modules if name.startswith(f"inferdbg.{folder}")]
    assert "torch" not in loaded_by("\n".join(f"import {name}" for name in names))
