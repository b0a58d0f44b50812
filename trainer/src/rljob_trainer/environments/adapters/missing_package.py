"""The error of an adapter whose library is not installed."""

from __future__ import annotations


class MissingPackageError(ImportError):
    """The message names the extra to install."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"the package {package} is not installed; install the trainer's extra `{extra}` where the job runs "
            "(docs/environments.md, section Adapters for other libraries)"
        )
