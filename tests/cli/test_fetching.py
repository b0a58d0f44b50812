"""Results are copied through connections that break, and files change meanwhile. The pod's program runs as a local
process."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from rljob.errors import ResultsError
from rljob.results import fetching, pod_program
from rljob.results.connection import BrokenConnectionError
from rljob.results.fetching import Fetch, Fetched
from rljob.results.selection import Part, Selection

PROGRAM = Path(pod_program.__file__)
EVERYTHING = Selection(without=frozenset())


class LocalConnection:
    """The pod's program as a process of this machine."""

    def __init__(self, claim: Path, break_after: int | None = None) -> None:
        command = [sys.executable, "-I", "-B", "-c", PROGRAM.read_text(), "serve", str(claim)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._break_after = break_after
        self.num_bytes = 0

    def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def receive(self) -> bytes:
        assert self._process.stdout is not None
        left = 1 << 16 if self._break_after is None else min(1 << 16, self._break_after - self.num_bytes)
        piece = os.read(self._process.stdout.fileno(), left) if left > 0 else b""
        if not piece:
            raise BrokenConnectionError("the test has closed it")
        self.num_bytes += len(piece)
        return piece

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass
class Pod:
    """Opens connections that break after these numbers of bytes, and then some that do not."""

    claim: Path
    folder: Path
    break_after: list[int] = field(default_factory=list)
    before_connection: Callable[[int], None] | None = None
    """Called with the number of the connection, from 0."""
    connections: list[LocalConnection] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    shown: int = 0
    """Bytes that the progress bar shows."""
    planned: int = 0

    def connect(self) -> LocalConnection:
        number = len(self.connections)
        if self.before_connection is not None:
            self.before_connection(number)
        limit = self.break_after[number] if number < len(self.break_after) else None
        self.connections.append(LocalConnection(self.claim, limit))
        return self.connections[-1]

    def plan(self, _num_files: int, num_bytes: int) -> None:
        self.planned = num_bytes

    def advance(self, num_bytes: int) -> None:
        self.shown += num_bytes

    def note(self, text: str) -> None:
        self.notes.append(text)

    def fetch(self, selection: Selection = EVERYTHING) -> Fetched:
        self.shown = 0
        copy = Fetch(self.connect, selection, self.folder, self, lambda _: None)
        try:
            return copy.run()
        finally:
            copy.close()

    @property
    def received(self) -> int:
        return sum(connection.num_bytes for connection in self.connections)


@pytest.fixture
def claim(tmp_path: Path) -> Path:
    """The folder of a job in its claim, with a model of 3 MB, metrics, logs and two checkpoints."""
    folder = tmp_path / "claim"
    files = {
        "run/export/model.safetensors": os.urandom(3_000_000),
        "run/export/config.json": b"{}",
        "run/metrics.jsonl": b'{"step": 1}\n',
        "run/samples.jsonl": b'{"step": 1, "response": "x"}\n',
        "run/resolved.yaml": b"kind: RLJob\n",
        "run/logs/attempt-1/driver.log": b"step 1\n",
        "run/wandb/run-1.wandb": b"history",
        # The command writes these itself; the job's own code may have written others.
        "run/view.html": b"<script>alert(1)</script>",
        "run/.lock": b"7",
        "run/rljob-run-state.json/x": b"{}",
        "checkpoints/step-1/weights.safetensors": b"w" * 1000,
        "checkpoints/step-1/manifest.json": b"{}",
        "checkpoints/step-2/weights.safetensors": b"not complete",
        "checkpoints/starts/list.json": b"[]",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def pod(claim: Path, tmp_path: Path) -> Iterator[Pod]:
    pod = Pod(claim, tmp_path / "results")
    yield pod
    for connection in pod.connections:
        connection.close()


def names(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir())


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_the_copy_looks_like_the_folder_of_a_local_run(pod: Pod, claim: Path) -> None:
    result = pod.fetch()
    assert names(pod.folder) == [
        "checkpoints/starts/list.json",
        "checkpoints/step-1/manifest.json",
        "checkpoints/step-1/weights.safetensors",
        "export/config.json",
        "export/model.safetensors",
        "logs/attempt-1/driver.log",
        "metrics.jsonl",
        "resolved.yaml",
        "samples.jsonl",
        "wandb/run-1.wandb",
    ]
    assert digest(pod.folder / "export/model.safetensors") == digest(claim / "run/export/model.safetensors")
    assert result.problems == []
    assert pod.shown == pod.planned == sum(file.stat().st_size for file in pod.folder.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(), ["export", "metrics.jsonl", "resolved.yaml", "samples.jsonl", "wandb"]),
        (Selection(only=frozenset({Part.MODEL})), ["export"]),
        (Selection(only=frozenset({Part.PAGE})), ["metrics.jsonl", "resolved.yaml", "samples.jsonl"]),
        (Selection(only=frozenset({Part.LOGS, Part.METRICS})), ["logs", "metrics.jsonl"]),
        (Selection(only=frozenset({Part.CHECKPOINTS})), ["checkpoints"]),
    ],
)
def test_only_the_selected_parts_are_copied(pod: Pod, selection: Selection, expected: list[str]) -> None:
    pod.fetch(selection)
    assert sorted(entry.name for entry in pod.folder.iterdir()) == expected


def test_a_broken_connection_continues_where_it_broke(pod: Pod, claim: Path) -> None:
    pod.break_after = [1_000_000, 1_500_000]
    result = pod.fetch()
    assert len(pod.connections) == 3
    assert len(pod.notes) == 2
    assert digest(pod.folder / "export/model.safetensors") == digest(claim / "run/export/model.safetensors")
    assert result.num_bytes < 3_100_000
    assert pod.received < 3_100_000, "bytes were sent twice"
    assert pod.shown == pod.planned


def test_a_second_command_continues_where_the_first_one_was_stopped(
    pod: Pod, claim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "MAX_FAILURES", 0)
    pod.break_after = [2_000_000]
    with pytest.raises(ResultsError, match="run the command again"):
        pod.fetch()
    assert not (pod.folder / "export/model.safetensors").exists()
    before = pod.received
    pod.fetch()
    assert digest(pod.folder / "export/model.safetensors") == digest(claim / "run/export/model.safetensors")
    assert pod.received - before < 1_100_000
    assert pod.shown == pod.planned


def test_a_file_that_was_replaced_during_the_pause_starts_again(pod: Pod, claim: Path) -> None:
    model = claim / "run/export/model.safetensors"

    def replace(connection: int) -> None:
        if connection == 1:
            model.write_bytes(os.urandom(2_500_000))

    pod.break_after, pod.before_connection = [1_000_000], replace
    pod.fetch()
    assert digest(pod.folder / "export/model.safetensors") == digest(model)
    assert pod.shown == pod.planned


def test_a_second_copy_fetches_only_what_is_new(pod: Pod, claim: Path) -> None:
    pod.fetch()
    with (claim / "run/metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2}\n')
    before = pod.received
    result = pod.fetch()
    assert result.written == [pod.folder / "metrics.jsonl"]
    assert result.num_unchanged == 9
    assert (pod.folder / "metrics.jsonl").read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert pod.received - before < 4_000


def test_a_file_that_was_truncated_and_grew_again_is_copied_as_it_is_now(pod: Pod, claim: Path) -> None:
    """A resumed run truncates its metrics to the step from which it continues."""
    pod.fetch()
    (claim / "run/metrics.jsonl").write_bytes(b'{"step": 9, "reward": 1.0}\n')
    pod.fetch()
    assert (pod.folder / "metrics.jsonl").read_bytes() == b'{"step": 9, "reward": 1.0}\n'


def test_odd_names_are_copied_and_links_and_pipes_are_not(pod: Pod, claim: Path) -> None:
    odd = ["a b", "line\nbreak", "ünï", "\udcff\udcfe", "-rf", "a\\b", "x.partial", 'quote"', "c:d", "*"]
    for name in odd:
        (claim / "run" / "odd" / name).parent.mkdir(exist_ok=True)
        (claim / "run" / "odd" / name).write_bytes(os.fsencode(name))
    (claim / "run/odd/link").symlink_to("/etc/passwd")
    (claim / "run/odd/folder").symlink_to(claim / "run" / "logs")
    os.mkfifo(claim / "run/odd/pipe")
    result = pod.fetch()
    assert sorted(os.listdir(pod.folder / "odd")) == sorted(odd)
    assert all((pod.folder / "odd" / name).read_bytes() == os.fsencode(name) for name in odd)
    (ignored,) = result.ignored
    assert result.problems == []
    assert all(f"run/odd/{name}" in ignored for name in ("link", "folder", "pipe"))


def test_a_folder_that_becomes_a_link_is_not_followed(pod: Pod, claim: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.json").write_text("secret")

    def replace(connection: int) -> None:
        if connection == 1:
            (claim / "run/export").rename(claim / "moved")
            (claim / "run/export").symlink_to(tmp_path / "secret")

    # The first connection breaks after the listing.
    pod.break_after, pod.before_connection = [1_200], replace
    result = pod.fetch()
    assert not (pod.folder / "export/config.json").exists()
    assert any("run/export/config.json" in problem for problem in result.problems)


def test_of_a_checkpoint_that_is_deleted_meanwhile_no_manifest_is_left(pod: Pod, claim: Path) -> None:
    def delete(connection: int) -> None:
        if connection == 1:
            (claim / "checkpoints/step-1/weights.safetensors").unlink()

    pod.break_after, pod.before_connection = [1_200], delete
    result = pod.fetch()
    assert not (pod.folder / "checkpoints/step-1/manifest.json").exists()
    assert [problem for problem in result.problems if "weights" in problem]


def test_a_disk_that_is_too_small_is_reported_before_anything_is_copied(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(ResultsError, match=r"need 2\.86.* MiB, and the disk has 976\.6 KiB free"):
        pod.fetch()
    assert not pod.folder.exists()


class ScriptedConnection:
    """Answers every request with these lines."""

    def __init__(self, *lines: dict[str, object]) -> None:
        self._answer = "".join(json.dumps(line) + "\n" for line in lines).encode()

    def send(self, data: bytes) -> None:
        pass

    def receive(self) -> bytes:
        if not self._answer:
            raise BrokenConnectionError("nothing more")
        answer, self._answer = self._answer, b""
        return answer

    def close(self) -> None:
        pass


BAD_PATHS = [
    *("../outside", "run/../../outside", "/etc/passwd", "run//x", "run/./x", "run", "checkpoints", "other/x"),
    *("run/nul\0", "run/.rljob-results.json", "run/.partial/x", "run/.lock", "checkpoints/x/../../../outside"),
]


def test_a_pod_that_sends_paths_outside_of_the_folder_is_not_followed(pod: Pod) -> None:
    lines = [{"path": path, "size": 1, "mtime_ns": 0} for path in BAD_PATHS]
    connection = ScriptedConnection(*lines, {"end": True, "ignored": [], "num_ignored": 0})
    copy = Fetch(lambda: connection, EVERYTHING, pod.folder, pod, lambda _: None)
    result = copy.run()
    assert (result.written, names(pod.folder)) == ([], [])


@pytest.mark.parametrize(
    "line",
    [
        {"path": "run/x", "size": -1, "mtime_ns": 0},
        {"path": "run/x", "size": "1", "mtime_ns": 0},
        {"path": ["run/x"], "size": 1, "mtime_ns": 0},
        {"end": True},
        {"data": 1},
    ],
)
def test_an_answer_that_cannot_be_parsed_is_an_error_after_some_attempts(pod: Pod, line: dict[str, object]) -> None:
    connections: list[ScriptedConnection] = []

    def connect() -> ScriptedConnection:
        connections.append(ScriptedConnection(line))
        return connections[-1]

    with pytest.raises(ResultsError, match=r"broke 9 times in a row \(the pod sent"):
        Fetch(connect, EVERYTHING, pod.folder, pod, lambda _: None).run()
    assert len(connections) == 9


def test_a_pod_cannot_send_more_bytes_than_it_announced(pod: Pod) -> None:
    listing = [{"path": "run/x", "size": 1, "mtime_ns": 0}, {"end": True, "ignored": [], "num_ignored": 0}]
    begin = {"begin": 1, "offset": 0, "mtime_ns": 0}

    class Answers(ScriptedConnection):
        def send(self, data: bytes) -> None:
            lines = [begin, {"data": 2}] if b"read" in data else listing
            self._answer += "".join(json.dumps(line) + "\n" for line in lines).encode() + b"xy"

    with pytest.raises(ResultsError, match="more bytes than it announced"):
        Fetch(Answers, EVERYTHING, pod.folder, pod, lambda _: None).run()


def test_a_file_with_other_bytes_than_its_digest_is_copied_again_and_then_left_out(pod: Pod) -> None:
    """The content differs from the digest each time, as if the file changed in every copy."""
    listing = [{"path": "run/x", "size": 1, "mtime_ns": 0}, {"end": True, "ignored": [], "num_ignored": 0}]
    begin = {"begin": 1, "offset": 0, "mtime_ns": 0}

    class Answers(ScriptedConnection):
        def send(self, data: bytes) -> None:
            text = "".join(json.dumps(line) + "\n" for line in ([begin, {"data": 1}] if b"read" in data else listing))
            end = b'x{"end": "other"}\n' if b"read" in data else b""
            self._answer += text.encode() + end

    result = Fetch(Answers, EVERYTHING, pod.folder, pod, lambda _: None).run()
    assert names(pod.folder) == []
    assert result.problems == ["run/x: its SHA-256 differs after the copy"]
    assert pod.shown == 0
