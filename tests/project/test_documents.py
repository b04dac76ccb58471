import json
import re
import shutil
from pathlib import Path

import pytest

from inferdbg.cli import reference
from inferdbg.cli.main import VERBS, command_line, verbs_of
from inferdbg.cli.reference import stale_pages

LINK = re.compile(r"\[[^\]]*\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")
MADE_LATER = {"docs/gpu-status.json"}  # by `make gpu-check`, on a machine with a GPU
CODE_PATH = re.compile(r"`((?:engine|tracing|probes|dashboards|cli|tests|docs|benchmarks|\.typing)/[\w./-]*)`")


def documents(root: Path) -> list[Path]:
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def test_the_reference_is_what_the_code_says(root: Path) -> None:
    assert stale_pages(root / "docs") == []


def test_the_gpu_page_says_what_the_last_check_left_behind(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(root / "docs", tmp_path / "docs")
    (tmp_path / "docs" / "gpu-status.json").unlink(missing_ok=True)
    monkeypatch.chdir(tmp_path)
    assert reference.main([]) == 0
    assert "Not yet verified on a GPU." in (tmp_path / "docs" / "gpu.md").read_text()
    (tmp_path / "docs" / "gpu-status.json").write_text(json.dumps({"commit": "abc123", "machine": "H200"}))
    assert reference.main(["--check"]) == 1
    assert reference.main([]) == 0
    assert "| commit | abc123 |" in (tmp_path / "docs" / "gpu.md").read_text()
    assert reference.main(["--check"]) == 0


def test_every_verb_and_flag_is_documented_with_an_example(root: Path) -> None:
    text = (root / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    verbs = verbs_of(command_line())
    assert set(verbs) == set(VERBS)
    for verb in verbs.values():
        assert verb.epilog, verb.name
        assert verb.epilog.startswith(f"Example: inferdbg {verb.name}")
        for parameter in verb.params:
            assert getattr(parameter, "help", None), f"{verb.name} {parameter.name} has no help"
            assert all(
                f"`{option}`" in text for option in parameter.opts if option.startswith("--") and option != "--help"
            )


def test_links_between_documents_lead_somewhere(root: Path) -> None:
    broken = [
        f"{path.relative_to(root)}: {target}"
        for path in documents(root)
        for target in LINK.findall(path.read_text(encoding="utf-8"))
        if not (path.parent / target).exists()
    ]
    assert not broken


def test_paths_that_documents_name_exist(root: Path) -> None:
    missing = [
        f"{path.relative_to(root)}: {named}"
        for path in documents(root)
        for named in CODE_PATH.findall(path.read_text(encoding="utf-8"))
        if named not in MADE_LATER and not (root / named).exists()
    ]
    assert not missing


def test_the_structure_page_walks_through_all_folders(root: Path) -> None:
    named = CODE_PATH.findall((root / "docs" / "structure.md").read_text(encoding="utf-8"))
    assert len([path for path in named if path.endswith(".py")]) >= 20
    assert {path.split("/")[0] for path in named} >= {"engine", "tracing", "probes", "cli", "tests"}


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md", "LICENSE"])
def test_what_every_project_has(root: Path, name: str) -> None:
    assert (root / name).stat().st_size > 500


def test_the_readme_opens_with_the_two_commands(root: Path) -> None:
    opening = (root / "README.md").read_text(encoding="utf-8")[:1500]
    assert "make demo" in opening
    assert "make test" in opening
