import re
import tomllib
from pathlib import Path

PINNED = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9.!+_-]+)")


def pins(root: Path) -> dict[str, str]:
    found = {}
    for line in (root / "requirements.lock").read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            match = PINNED.fullmatch(line.strip())
            assert match, f"not an exact pin: {line!r}"
            found[normal(match["name"])] = match["version"]
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_torch_is_named_by_version_alone(root: Path) -> None:
    lines = [line for line in (root / "requirements.lock").read_text().splitlines() if line.startswith("torch")]
    assert lines == ["torch==2.13.0"]


def test_the_lock_has_exact_versions_and_no_urls_hashes_or_local_builds(root: Path) -> None:
    assert all("+" not in version for version in pins(root).values())
    text = (root / "requirements.lock").read_text()
    assert not re.search(r"://|--hash|--index|--find-links|@ ", text)


def test_every_dependency_is_locked_at_a_version_it_allows(root: Path) -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((root / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["demo"]]
    wanted += [*project["dependency-groups"]["dev"], *project["build-system"]["requires"]]
    locked = pins(root)
    for requirement in map(Requirement, wanted):
        version = locked.get(normal(requirement.name))
        assert version, f"{requirement.name} is not in the lock"
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} but {version} is locked"


def test_make_help_names_every_target_of_the_project(root: Path) -> None:
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    for target in ("setup", "demo", "test", "check", "bench", "gpu-check"):
        assert re.search(rf"^{target}:.*## \S", makefile, re.M), target
