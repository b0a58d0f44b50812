"""`rljob --version`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from rljob_api.constants import API_GROUP, API_VERSION, CONTRACT_VERSION

_DISTRIBUTION = "rljob-operator"


def version_text() -> str:
    """Of this command, of the resources that it writes, and of the documents between operator and trainer."""
    try:
        package = version(_DISTRIBUTION)
    except PackageNotFoundError:
        package = "of a source tree"
    return f"rljob {package}, {API_GROUP}/{API_VERSION}, contract {CONTRACT_VERSION}"
