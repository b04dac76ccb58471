"""Computes the package list: the five root folders install as ``inferdbg.<folder>``.

Everything else is in ``pyproject.toml``. The list is computed, so a new
subpackage can never be missing from the wheel.
"""

from setuptools import find_packages, setup

FOLDERS = ("engine", "tracing", "probes", "dashboards", "cli")

packages = [
    f"inferdbg.{name}" for folder in FOLDERS for name in (folder, *(f"{folder}.{sub}" for sub in find_packages(folder)))
]

setup(
    packages=packages,
    package_dir={f"inferdbg.{folder}": folder for folder in FOLDERS},
)
