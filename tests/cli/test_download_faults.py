"""Results are copied from claims with odd names and from pods that are not trusted, and some files cannot be copied."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rljob.errors import ResultsError
from rljob.results import pod_client, pod_file_server
from rljob.results.download import Download
from rljob.results.pod_client import PodClient
from rljob.results.selection import Part, Selection
from rljob_testing.cli.results_pods import EVERYTHING, PROGRAM, Pod, ScriptedConnection, json_lines, names, write_claim


@pytest.fixture
def claim(tmp_path: Path) -> Path:
    return write_claim(tmp_path / "claim")


@pytest.fixture
def pod(claim: Path, tmp_path: Path) -> Iterator[Pod]:
    pod = Pod(claim, tmp_path / "results")
    yield pod
    for connection in pod.connections:
        connection.close()


def test_a_disk_that_is_too_small_is_reported_before_anything_is_copied(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(ResultsError, match=r"need 2\.86.* MiB, and the disk has 976\.6 KiB free"):
        pod.download()
    assert not pod.folder.exists()


def test_a_name_that_the_disk_does_not_accept_is_a_problem_of_its_file(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdir(path: Path, *given: object, **more: object) -> None:
        if path.name == "export":
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        make(path, *given, **more)  # type: ignore[arg-type]

    make = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", mkdir)
    result = pod.download()
    assert result.problems == [
        "run/export/config.json: cannot be written here (Invalid argument)",
        "run/export/model.safetensors: cannot be written here (Invalid argument)",
    ]
    assert "metrics.jsonl" in names(pod.folder)
    assert [*(pod.folder / ".partial").glob("*")] == []


def test_what_is_here_with_the_name_of_a_folder_or_file_of_the_job_is_kept(pod: Pod, claim: Path) -> None:
    """It may be the user's; and what the job's own code writes into the claim must not delete anything here."""
    mine = [pod.folder / "plots.old/mine.txt", pod.folder / "notes", pod.folder / "deep"]
    for file in mine:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    for name in ("plots.old", "notes/theirs.txt", "deep/er/theirs.txt"):
        (claim / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (claim / "run" / name).write_text("theirs")
    result = pod.download()
    assert [file.read_text() for file in mine] == ["mine"] * 3
    assert [problem.partition(": ")[0] for problem in result.problems] == [
        "run/deep/er/theirs.txt",
        "run/notes/theirs.txt",
        "run/plots.old",
    ]
    assert all(problem.endswith("; delete what has its name") for problem in result.problems), result.problems
    assert "metrics.jsonl" in names(pod.folder)


def test_what_the_pod_cannot_read_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """The tests may run as root, which can read everything."""
    for name in ("a/secret/x", "a/x", "b/x", "b/y", "c/z"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    scan = os.scandir

    def scandir(path: str) -> Iterator[os.DirEntry[str]]:
        if path.endswith("secret"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(signal, "alarm", lambda _: None)
    monkeypatch.setattr(pod_file_server, "MAX_FILES", 2)
    pod_file_server.list_files(str(tmp_path), ["c", "b", "a"], set(), pod_file_server.Output())
    lines = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert [line["path"] for line in lines if "path" in line] == ["a/x", "b/x"]
    assert {line["failed"]: line["reason"] for line in lines if "failed" in line} == {
        "a/secret": "Permission denied",
        "b": "there are more than 2 files",
        "c": "there are more than 2 files",
    }


def test_what_the_pod_cannot_read_makes_the_copy_incomplete(pod: Pod) -> None:
    """The model may be missing in such a copy, so it is not complete."""
    lines: list[dict[str, object]] = [
        {"failed": "run/export", "reason": "Permission denied"},
        {"failed": "run/logs", "reason": "Permission denied"},
        {"failed": "checkpoints/step-1/optimizer", "reason": "there are more than 7 files"},
        {"path": "checkpoints/step-1/manifest.json", "size": 1, "mtime_ns": 0},
        {"end": True, "ignored": [], "num_ignored": 0},
    ]
    selection = Selection(only=frozenset({Part.MODEL, Part.CHECKPOINTS}))
    result = Download(lambda: PodClient(ScriptedConnection(*lines)), selection, pod.folder, pod, lambda _: None).run()
    assert result.problems == [
        "run/export: Permission denied",
        "checkpoints/step-1/optimizer: there are more than 7 files",
        "checkpoints/step-1/manifest.json: left out, because other files of the checkpoints are missing",
    ]


@pytest.mark.parametrize("failed", ["checkpoints", "checkpoints/starts", "checkpoints/starts/0001.json"])
def test_without_the_lists_of_the_starts_no_checkpoint_looks_complete(pod: Pod, failed: str) -> None:
    """With such a copy, the trainer would also accept the checkpoints that a later start has rejected."""
    lines: list[dict[str, object]] = [
        {"failed": failed, "reason": "Permission denied"},
        {"path": "checkpoints/step-1/manifest.json", "size": 1, "mtime_ns": 0},
        {"end": True, "ignored": [], "num_ignored": 0},
    ]
    selection = Selection(only=frozenset({Part.CHECKPOINTS}))
    result = Download(lambda: PodClient(ScriptedConnection(*lines)), selection, pod.folder, pod, lambda _: None).run()
    assert names(pod.folder) == []
    assert result.problems == [
        f"{failed}: Permission denied",
        "checkpoints/step-1/manifest.json: left out, because other files of the checkpoints are missing",
    ]


def test_an_unfinished_list_of_the_starts_is_not_copied(pod: Pod, claim: Path) -> None:
    """It may disappear at any moment, and nothing is missing then."""
    (claim / "checkpoints/starts/0002.json.tmp").write_text("[")
    assert pod.download(Selection(only=frozenset({Part.CHECKPOINTS}))).problems == []
    assert names(pod.folder) == [
        "checkpoints/starts/list.json",
        "checkpoints/step-1/manifest.json",
        "checkpoints/step-1/weights.safetensors",
    ]


def test_a_list_of_the_starts_that_becomes_a_link_is_not_copied_and_no_checkpoint_looks_complete(
    pod: Pod, claim: Path
) -> None:
    def replace(connection: int) -> None:
        if connection == 1:
            (claim / "checkpoints/starts/list.json").unlink()
            (claim / "checkpoints/starts/list.json").symlink_to("/etc/passwd")

    # The first connection breaks after the listing.
    pod.break_after, pod.before_connection = [800], replace
    result = pod.download(Selection(only=frozenset({Part.CHECKPOINTS})))
    assert names(pod.folder) == ["checkpoints/step-1/weights.safetensors"]
    assert len(result.problems) == 1


def test_a_folder_that_becomes_a_link_is_not_followed(pod: Pod, claim: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.json").write_text("secret")

    def replace(connection: int) -> None:
        if connection == 1:
            (claim / "run/export").rename(claim / "moved")
            (claim / "run/export").symlink_to(tmp_path / "secret")

    # The first connection breaks after the listing.
    pod.break_after, pod.before_connection = [1_200], replace
    result = pod.download()
    assert not (pod.folder / "export/config.json").exists()
    assert any("run/export/config.json" in problem for problem in result.problems)


def test_odd_names_are_copied_and_links_and_pipes_are_not(pod: Pod, claim: Path) -> None:
    odd = ["a b", "line\nbreak", "ünï", "\udcff\udcfe", "-rf", "a\\b", "x.partial", 'quote"', "c:d", "*"]
    for name in odd:
        (claim / "run" / "odd" / name).parent.mkdir(exist_ok=True)
        (claim / "run" / "odd" / name).write_bytes(os.fsencode(name))
    (claim / "run/odd/link").symlink_to("/etc/passwd")
    (claim / "run/odd/folder").symlink_to(claim / "run" / "logs")
    os.mkfifo(claim / "run/odd/pipe")
    result = pod.download()
    assert sorted(os.listdir(pod.folder / "odd")) == sorted(odd)
    assert all((pod.folder / "odd" / name).read_bytes() == os.fsencode(name) for name in odd)
    (ignored,) = result.ignored
    assert result.problems == []
    assert all(f"run/odd/{name}" in ignored for name in ("link", "folder", "pipe"))


def test_the_program_ends_if_nobody_sends_a_request_any_more(tmp_path: Path) -> None:
    """The machine of the user may have disappeared without closing the connection."""
    text = PROGRAM.read_text()
    program = text.replace("\nREQUEST_TIMEOUT_SECONDS = 300\n", "\nREQUEST_TIMEOUT_SECONDS = 1\n")
    assert program != text
    command = [sys.executable, "-I", "-B", "-c", program, "serve", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.wait(60) == -signal.SIGALRM


BAD_PATHS = [
    *("../outside", "run/../../outside", "/etc/passwd", "run//x", "run/./x", "run", "checkpoints", "other/x"),
    *("run/checkpoints/x/manifest.json", "run/Checkpoints/x", "run/VIEW.html", "run/.Partial/x"),
    *("run/nul\0", "run/.rljob-results.json", "run/.partial/x", "run/.lock", "checkpoints/x/../../../outside"),
]


def test_a_pod_that_sends_paths_outside_of_the_folder_is_not_followed(pod: Pod) -> None:
    lines = [{"path": path, "size": 1, "mtime_ns": 0} for path in BAD_PATHS]
    connection = ScriptedConnection(*lines, {"end": True, "ignored": [], "num_ignored": 0})
    copy = Download(lambda: PodClient(connection), EVERYTHING, pod.folder, pod, lambda _: None)
    result = copy.run()
    assert (result.written, names(pod.folder)) == ([], [])


@pytest.mark.parametrize(
    "line",
    [
        {"path": "run/x", "size": -1, "mtime_ns": 0},
        {"path": "run/x", "size": "1", "mtime_ns": 0},
        {"path": "run/x", "size": 2**63, "mtime_ns": 0},
        {"path": ["run/x"], "size": 1, "mtime_ns": 0},
        {"end": True},
        {"data": 1},
    ],
)
def test_a_response_that_cannot_be_parsed_is_an_error_after_some_attempts(pod: Pod, line: dict[str, object]) -> None:
    connections: list[ScriptedConnection] = []

    def connect() -> ScriptedConnection:
        connections.append(ScriptedConnection(line))
        return connections[-1]

    with pytest.raises(ResultsError, match=r"broke 9 times in a row \(the pod sent"):
        Download(lambda: PodClient(connect()), EVERYTHING, pod.folder, pod, lambda _: None).run()
    assert len(connections) == 9


def listing(size: int, mtime_ns: int = 0) -> list[dict[str, object]]:
    """The pod lists one file."""
    return [{"path": "run/x", "size": size, "mtime_ns": mtime_ns}, {"end": True, "ignored": [], "num_ignored": 0}]


def scripted(pod: Pod, lines: list[dict[str, object]], read: bytes) -> Download:
    return Download(
        lambda: PodClient(ScriptedConnection(*lines, read=read)), EVERYTHING, pod.folder, pod, lambda _: None
    )


@pytest.mark.parametrize("mtime_ns", [-(10**40), -10_000_000_000, 10**40])
def test_a_file_with_an_odd_time_is_copied_like_others(pod: Pod, mtime_ns: int) -> None:
    """Such as one before 1970, or one that cannot be represented here."""
    read = json_lines({"begin": 0, "offset": 0, "mtime_ns": mtime_ns}, {"end": hashlib.sha256().hexdigest()})
    assert scripted(pod, listing(0, mtime_ns), read).run().problems == []
    assert names(pod.folder) == ["x"]


def test_a_pod_cannot_send_more_bytes_than_it_announced(pod: Pod) -> None:
    read = json_lines({"begin": 1, "offset": 0, "mtime_ns": 0}, {"data": 2}) + b"xy"
    with pytest.raises(ResultsError, match="more bytes than it announced"):
        scripted(pod, listing(1), read).run()


def test_a_pod_cannot_announce_more_bytes_than_the_disk_has(pod: Pod) -> None:
    read = json_lines({"begin": 2**60, "offset": 0, "mtime_ns": 0}, {"data": 1}) + b"x"
    with pytest.raises(ResultsError, match=r"the files need .* free space"):
        scripted(pod, listing(1), read).run()


def test_a_pod_cannot_list_more_than_fits_into_memory(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_client, "_MAX_LISTING_CHARACTERS", 4)
    with pytest.raises(ResultsError, match="lists too many files"):
        scripted(pod, listing(1), b"").run()


def test_a_file_with_other_bytes_than_its_digest_is_copied_again_and_then_left_out(pod: Pod) -> None:
    """The content differs from the digest each time, as if the file changed in every copy."""
    read = json_lines({"begin": 1, "offset": 0, "mtime_ns": 0}, {"data": 1}) + b"x" + json_lines({"end": "other"})
    result = scripted(pod, listing(1), read).run()
    assert names(pod.folder) == []
    assert result.problems == ["run/x: its SHA-256 differs after the copy"]
    assert pod.shown == 0
