"""Each distribution declares the packages that it imports, and the command line installs none of the operator's."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from rljob_testing.gpu.few_libraries import with_requirements

REPOSITORY = Path(__file__).parents[2]


def declared(folder: str) -> set[str]:
    """Names of the distributions in `dependencies` of the folder's pyproject.toml."""
    return names_of(project(folder)["dependencies"])


def optional(folder: str) -> set[str]:
    """Names of the distributions in the extras of the folder's pyproject.toml."""
    return {name for extra in project(folder).get("optional-dependencies", {}).values() for name in names_of(extra)}


def project(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((REPOSITORY / folder / "pyproject.toml").read_text())["project"]
    return found


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", each)[0].lower() for each in requirements}


def distributions_of(name: str) -> set[str]:
    """Names of the installed distributions that have this import package."""
    return {owner.lower().replace("_", "-") for owner in metadata.packages_distributions()[name]}


def imported(folder: str) -> set[str]:
    """Top-level names that the folder's packages import, without those of the standard library."""
    sources = (REPOSITORY / folder / "src").rglob("*.py")
    nodes = [node for source in sources for node in ast.walk(ast.parse(source.read_bytes()))]
    names = {each.name for node in nodes if isinstance(node, ast.Import) for each in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)


@pytest.mark.parametrize("folder", ["crds", "cli", "operator"])
def test_every_imported_package_is_declared(folder: str) -> None:
    foreign = {name for name in imported(folder) if not re.match("rljob(_|$)", name)}
    assert foreign
    # What the contract declares is there wherever the contract is. pydantic requires one exact version of its core.
    allowed = declared(folder) | declared("crds") | {"pydantic-core"}
    undeclared = {name for name in foreign if not distributions_of(name) & allowed}
    assert {name for name in undeclared if not distributions_of(name) & optional(folder)} == set()


def test_only_the_module_for_requests_imports_the_library_for_buckets() -> None:
    """So that the command works without this library, which is an extra."""
    sources = [
        path for folder in ("crds", "cli", "operator", "trainer") for path in (REPOSITORY / folder).rglob("*.py")
    ]
    users = [path.name for path in sources if re.search(r"^\s*(from|import) obstore", path.read_text(), re.MULTILINE)]
    assert users == ["bucket.py"]


def test_the_command_line_is_installed_without_the_libraries_of_operator_and_trainer() -> None:
    installed = with_requirements(["rljob"])
    assert {"rljob-api", "typer", "kubernetes", "jinja2", "pydantic"} <= installed
    assert not {"kopf", "prometheus-client", "ray", "torch", "numpy", "matplotlib", "rljob-operator"} & installed
