"""Checks that every worker can see the run's folders. This is checked before models are loaded; otherwise the first
checkpoint would fail."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rljob_trainer.errors import ConfigurationError

WAIT_SECONDS = 10.0
"""How long a new file may take to become visible on another node, for example on NFS."""
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class UnseenFiles:
    """Files that a process does not see, and the address of its node."""

    address: str
    files: list[Path]


class NodeProcesses(Protocol):
    """Processes on the nodes of a run."""

    def unseen(self, files: Sequence[Path]) -> list[UnseenFiles]:
        """Returns for each process the files that it does not see."""
        ...


def check_shared(folders: Mapping[str, Path], onlookers: Sequence[NodeProcesses]) -> None:
    """Writes a marker file into each folder, and asks all processes whether they see it. `folders`: paths by the names
    for messages. Missing folders are created.

    Raises ConfigurationError that names the folder and a node that does not see the file."""
    marker = f".seen-by-all-{uuid.uuid4().hex}"
    name_of = {folder / marker: name for name, folder in folders.items()}
    try:
        for file in name_of:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        for onlooker in onlookers:
            for unseen in onlooker.unseen(list(name_of)):
                for file in unseen.files:
                    raise ConfigurationError(
                        f"{name_of[file]} {file.parent}: node {unseen.address} does not see files that the controller "
                        "writes there; use a folder on storage that all nodes of the job share"
                    )
    finally:
        for file in name_of:
            file.unlink(missing_ok=True)


def unseen_here(files: Sequence[Path]) -> list[Path]:
    """Returns the files that do not appear in this process's file system within `WAIT_SECONDS`."""
    deadline = time.monotonic() + WAIT_SECONDS
    missing = [file for file in files if not file.exists()]
    while missing and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        missing = [file for file in missing if not file.exists()]
    return missing
