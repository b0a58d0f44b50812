"""Commands that write files, where no space is left."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from io import BufferedWriter
from pathlib import Path

import pytest

from rljob_cli.errors import RunFolderError
from rljob_cli.local.run_folder import RunFolder
from rljob_cli.new_file import write_new_file
from rljob_testing.messages import Mentions

Rljob = Callable[..., tuple[int, str, str]]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder in which files can be created, but not written."""

    class Full(BufferedWriter):
        def write(self, _: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    original = Path.open

    def opened(path: Path, mode: str = "r", *arguments: object, **options: object) -> object:
        file = original(path, mode, *arguments, **options)  # type: ignore[call-overload]
        return Full(file.detach()) if mode == "xb" else file

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_starter_file_that_cannot_be_written_leaves_nothing(rljob: Rljob, full_disk: Path) -> None:
    code, output, errors = rljob("init")
    assert (code, output, errors) == (2, "", Mentions("error: job.yaml:", "No space left on device"))
    assert list(full_disk.glob("*.yaml")) == []


def test_an_existing_file_stays(tmp_path: Path) -> None:
    file = tmp_path / "mine"
    file.write_text("mine")
    with pytest.raises(FileExistsError):
        write_new_file(file, "other")
    assert file.read_text() == "mine"


def test_a_run_folder_on_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int, __: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(RunFolderError) as error, RunFolder(tmp_path / "run").locked():
        pass
    assert str(error.value) == Mentions(f"{tmp_path}/run:", "No space left on device", "free disk space")
