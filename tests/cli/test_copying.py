"""The folder of a copy of results: whose files it has, and who copies into it. The copy itself is a stand-in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from rljob.cluster import Cluster
from rljob.errors import ResultsError
from rljob.polling import Clock
from rljob.results import copying as module
from rljob.results.copying import NoProgress, copying
from rljob.results.fetching import Fetched
from rljob.results.selection import DEFAULT_SELECTION
from rljob.stored_job import StoredJob, stored_job

CLUSTER = cast(Cluster, SimpleNamespace())
CREATED = "2026-01-31T12:00:00Z"


def job(uid: str) -> StoredJob:
    metadata = {"name": "small", "namespace": "team-a", "uid": uid, "creationTimestamp": CREATED}
    return stored_job({"metadata": metadata, "spec": {"checkpoint": {"storage": {"persistentVolumeClaim": "data"}}}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "copy"


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pod, and a copy of one file."""
    monkeypatch.setattr(module, "ResultsPod", lambda *_: nullcontext(SimpleNamespace(connect=None)))
    monkeypatch.setattr(
        module, "Fetch", lambda *given: SimpleNamespace(run=lambda: write(given[2]), close=lambda: None)
    )


def write(folder: Path) -> Fetched:
    (folder / "metrics.jsonl").touch()
    return Fetched(written=[folder / "metrics.jsonl"])


def copy(uid: str, folder: Path, sleep: Callable[[float], None] = lambda _: None) -> Fetched:
    with copying(CLUSTER, job(uid), folder, DEFAULT_SELECTION, NoProgress(), None, Clock(sleep=sleep)) as run:
        return run()


def test_a_copy_belongs_to_one_job_also_if_another_has_its_name(folder: Path) -> None:
    copy("first", folder)
    copy("first", folder)
    with pytest.raises(ResultsError, match="RLJob team-a/small, such as those of an earlier job of this name"):
        copy("second", folder)


def test_a_second_process_waits_until_the_first_copy_is_complete(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second copy begins while the first one is under way, and goes on after it."""
    order: list[str] = []

    class Waits(Exception):
        pass

    def wait(_: float) -> None:
        order.append("second waits")
        raise Waits

    def run() -> Fetched:
        with pytest.raises(Waits):
            copy("uid", folder, wait)
        order.append("first is complete")
        return write(folder)

    with monkeypatch.context() as patched:
        patched.setattr(module, "Fetch", lambda *_: SimpleNamespace(run=run, close=lambda: None))
        copy("uid", folder)
    assert order == ["second waits", "first is complete"]
    copy("uid", folder, wait)


def test_a_copy_of_nothing_leaves_no_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Fetch", lambda *_: SimpleNamespace(run=Fetched, close=lambda: None))
    with pytest.raises(ResultsError, match="has none of these files yet"):
        copy("uid", folder)
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResultsError, match="file/copy: cannot be written \\(Not a directory\\); choose another folder"):
        copy("uid", tmp_path / "file" / "copy")
