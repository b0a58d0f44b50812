"""Folders that not every node of a run sees are named before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rljob_trainer.errors import ConfigurationError
from rljob_trainer.groups import shared_folders
from rljob_trainer.groups.shared_folders import UnseenFiles, check_shared, unseen_here


class Node:
    """A node that sees the real folders under the names of its own mounts."""

    def __init__(self, address: str, mounts: dict[Path, Path]) -> None:
        self.address = address
        self.mounts = mounts

    def unseen(self, files: Sequence[Path]) -> list[UnseenFiles]:
        seen_as = {self.mounts[file.parent] / file.name: file for file in files}
        return [UnseenFiles(self.address, [seen_as[file] for file in unseen_here(list(seen_as))])]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folders, "WAIT_SECONDS", 0.3)


def test_unshared_folders_are_named(tmp_path: Path) -> None:
    run, checkpoints = tmp_path / "run", tmp_path / "checkpoints"
    check_shared(
        {"run folder": run, "checkpoint folder": checkpoints}, [Node("a", {run: run, checkpoints: checkpoints})]
    )
    assert list(run.iterdir()) == list(checkpoints.iterdir()) == []


def test_a_folder_of_the_same_name_is_not_the_same_folder(tmp_path: Path) -> None:
    run, checkpoints = tmp_path / "run", tmp_path / "checkpoints"
    other = tmp_path / "node-b" / "checkpoints"
    other.mkdir(parents=True)
    nodes = [
        Node("10.0.0.1", {run: run, checkpoints: checkpoints}),
        Node("10.0.0.2", {run: run, checkpoints: other}),
    ]
    with pytest.raises(ConfigurationError) as raised:
        check_shared({"run folder": run, "checkpoint folder": checkpoints}, nodes)
    assert str(raised.value).startswith(f"checkpoint folder {checkpoints}: node 10.0.0.2 does not see")
    assert list(run.iterdir()) == list(checkpoints.iterdir()) == []
