"""Runs a program in this process as if only some libraries were installed: importing any other one fails.

    python -m rljob_testing.gpu.few_libraries LIBRARY,... PROGRAM [ARGUMENT ...]

The dependencies of these libraries can be imported, too. PROGRAM is a file, or a module with a dot in its name.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Protocol

OURS = ("rljob", "rljob-api", "rljob-operator", "rljob-trainer")


class Finder(Protocol):
    """The method that objects in `sys.meta_path` have."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = ..., /
    ) -> ModuleSpec | None: ...


class FewLibraries(MetaPathFinder):
    """Replaces all import finders and hides some top-level modules."""

    def __init__(self, finders: Sequence[Finder], refused: frozenset[str]) -> None:
        self.finders = finders
        self.refused = refused

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns None for a hidden library, which the import system reports as `No module named ...`."""
        if fullname.partition(".")[0] in self.refused:
            return None
        found = (each.find_spec(fullname, path, target) for each in self.finders)
        return next((spec for spec in found if spec is not None), None)

    def find_distributions(
        self, context: metadata.DistributionFinder.Context | None = None
    ) -> Iterable[metadata.Distribution]:
        """Serves `importlib.metadata`, which also queries the finders."""
        chosen = metadata.DistributionFinder.Context() if context is None else context
        return metadata.MetadataPathFinder.find_distributions(chosen)


def with_requirements(names: Sequence[str]) -> set[str]:
    """These distributions and all that they require in this environment, without extras."""
    found: set[str] = set()
    waiting = [_normal(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        waiting += [_normal(re.split(r"[^\w.-]", each)[0]) for each in requirements if "extra ==" not in each]
    return found


def main() -> None:
    """Runs the program from the command line."""
    allowed = with_requirements(sys.argv[1].split(",")) | {_normal(name) for name in OURS}
    refused = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not {_normal(owner) for owner in owners} & allowed
    }
    assert {"ray", "vllm", "tensorboard", "matplotlib", "kubernetes", "pytest"} <= refused
    sys.meta_path[:] = [FewLibraries([*sys.meta_path], frozenset(refused))]
    program, sys.argv = sys.argv[2], sys.argv[2:]
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
