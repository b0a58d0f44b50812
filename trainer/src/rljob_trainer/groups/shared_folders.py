"""Checks that every worker process sees the run's folders, before models are loaded. Without this check, the first
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
"""How long a new file may take until another node sees it, for example on NFS."""
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class UnseenFiles:
    """The files that a process does not see; none if it sees all of them."""

    address: str
    """The address of the process's node."""
    files: list[Path]


class NodeProcesses(Protocol):
    """Processes on the nodes of a run, such as the WorkerProcesses of a pool."""

    def unseen(self, files: Sequence[Path]) -> list[UnseenFiles]:
        """Returns for each process the files that it does not see."""
        ...


def check_shared(folders: Mapping[str, Path], pools: Sequence[NodeProcesses]) -> None:
    """Writes a marker file into each folder, asks all processes of all pools whether they see it, and removes it.
    `folders`: name of the folder in messages -> its path. Missing folders are created.

    Raises ConfigurationError that names a folder and a node that does not see its marker file."""
    marker = f".seen-by-all-{uuid.uuid4().hex}"
    name_of = {folder / marker: name for name, folder in folders.items()}
    try:
        for file in name_of:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        for processes in pools:
            for unseen in processes.unseen(list(name_of)):
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
