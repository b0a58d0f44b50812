"""Resolves the value of a `source` or `path` field to a path on this machine."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path, PurePosixPath

from rljob_trainer.errors import ConfigurationError

PACKAGE_SCHEME = "package://"
RUN_SCHEME = "run://"
"""A checkpoint of an earlier run; see `checkpoints.run_source`. Only for models."""


def local_path(text: str, base_folder: Path, where: str) -> Path:
    """Returns the path that `text` names: `package://<package>/<path>` is a path inside an installed Python package,
    any other relative path starts at `base_folder`, and a leading `~` is the home folder.

    Raises ConfigurationError, starting with `where`, if the package is not installed or the path does not exist.
    """
    if text.startswith(PACKAGE_SCHEME):
        return _package_path(text, where)
    # Unlike pathlib, os.path raises no error for an unknown user (`~name`) and for a name that is too long.
    path = base_folder / os.path.expanduser(text)
    if not os.path.exists(path):
        raise ConfigurationError(f"{where}: {text!r} not found (looked for {path}); check the path")
    return path


def looks_local(text: str, base_folder: Path) -> bool:
    """Whether `text` names a path rather than a Hugging Face repository.

    `name` and `owner/name` can be either; they count as a path if that path exists. A text with more parts, such as
    `a/b/c`, is always a path.
    """
    if text.startswith((PACKAGE_SCHEME, RUN_SCHEME, "/", "./", "../", "~")):
        return True
    return os.path.exists(base_folder / text) or len(PurePosixPath(text).parts) > 2


def _package_path(text: str, where: str) -> Path:
    package, _, inner = text.removeprefix(PACKAGE_SCHEME).partition("/")
    if not package or not inner or ".." in PurePosixPath(inner).parts:
        raise ConfigurationError(
            f"{where}: {text!r} does not have the form package://<python package>/<path>; "
            "write a package and a path inside it"
        )
    top, *nested = package.split(".")
    # find_spec does not import the package: an import may need libraries or a device that this machine lacks.
    found = importlib.util.find_spec(top) if top else None
    if found is None or found.submodule_search_locations is None:
        raise ConfigurationError(f"{where}: no Python package {top!r} is installed ({text!r}); install it")
    candidates = [Path(folder, *nested, inner) for folder in found.submodule_search_locations]
    for candidate in candidates:
        if os.path.exists(candidate):
            return candidate
    present = sorted(path.name for path in candidates[0].parent.glob("*") if not path.name.startswith("_"))[:10]
    raise ConfigurationError(
        f"{where}: the package {package} has no {inner!r} (the folder {candidates[0].parent} contains: "
        f"{', '.join(present) or 'nothing'}); check the path"
    )
