"""Results are copied through connections that break, and files change meanwhile. The pod's program runs as a local
process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rljob.errors import ResultsError
from rljob.results import download
from rljob.results.selection import FOR_PAGE, Part, Selection
from rljob_page import run_files
from rljob_testing.cli.results_pods import Pod, names, write_claim


@pytest.fixture
def claim(tmp_path: Path) -> Path:
    return write_claim(tmp_path / "claim")


@pytest.fixture
def pod(claim: Path, tmp_path: Path) -> Iterator[Pod]:
    pod = Pod(claim, tmp_path / "results")
    yield pod
    for connection in pod.connections:
        connection.close()


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_the_copy_looks_like_the_folder_of_a_local_run(pod: Pod, claim: Path) -> None:
    result = pod.download()
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
    pod.download(selection)
    assert sorted(entry.name for entry in pod.folder.iterdir()) == expected


def test_a_broken_connection_continues_where_it_broke(pod: Pod, claim: Path) -> None:
    pod.break_after = [1_000_000, 1_500_000]
    result = pod.download()
    assert len(pod.connections) == 3
    assert len(pod.notes) == 2
    assert digest(pod.folder / "export/model.safetensors") == digest(claim / "run/export/model.safetensors")
    assert result.num_bytes < 3_100_000
    assert pod.received < 3_100_000, "bytes were sent twice"
    assert pod.shown == pod.planned


def test_a_second_command_continues_where_the_first_one_was_stopped(
    pod: Pod, claim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "MAX_FAILURES", 0)
    pod.break_after = [2_000_000]
    with pytest.raises(ResultsError, match="run the command again"):
        pod.download()
    assert not (pod.folder / "export/model.safetensors").exists()
    before = pod.received
    pod.download()
    assert digest(pod.folder / "export/model.safetensors") == digest(claim / "run/export/model.safetensors")
    assert pod.received - before < 1_100_000
    assert pod.shown == pod.planned


def test_a_file_that_was_replaced_during_the_pause_starts_again(pod: Pod, claim: Path) -> None:
    model = claim / "run/export/model.safetensors"

    def replace(connection: int) -> None:
        if connection == 1:
            model.write_bytes(os.urandom(2_500_000))

    pod.break_after, pod.before_connection = [1_000_000], replace
    pod.download()
    assert digest(pod.folder / "export/model.safetensors") == digest(model)
    assert pod.shown == pod.planned


def test_a_second_copy_reads_only_what_is_new(pod: Pod, claim: Path) -> None:
    pod.download()
    with (claim / "run/metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2}\n')
    before = pod.received
    result = pod.download()
    assert result.written == [pod.folder / "metrics.jsonl"]
    assert result.num_unchanged == 9
    assert (pod.folder / "metrics.jsonl").read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert pod.received - before < 4_000


def test_a_file_that_was_truncated_and_grew_again_is_copied_as_it_is_now(pod: Pod, claim: Path) -> None:
    """A resumed run truncates its metrics to the step from which it continues."""
    pod.download()
    (claim / "run/metrics.jsonl").write_bytes(b'{"step": 9, "reward": 1.0}\n')
    pod.download()
    assert (pod.folder / "metrics.jsonl").read_bytes() == b'{"step": 9, "reward": 1.0}\n'


def test_a_checkpoint_that_is_deleted_during_the_copy_leaves_no_manifest(pod: Pod, claim: Path) -> None:
    def delete(connection: int) -> None:
        if connection == 1:
            (claim / "checkpoints/step-1/weights.safetensors").unlink()

    pod.break_after, pod.before_connection = [1_200], delete
    result = pod.download()
    assert not (pod.folder / "checkpoints/step-1/manifest.json").exists()
    expected = "checkpoints/step-1/manifest.json: left out, because other files of the checkpoints are missing"
    assert result.problems == [expected]


def test_a_file_that_is_deleted_during_the_copy_is_no_error(pod: Pod, claim: Path) -> None:
    """Such as a temporary file of a running job. A file that is listed again is."""
    (claim / "run/metrics.jsonl.tmp").touch()

    def delete(connection: int) -> None:
        if connection == 1:
            (claim / "run/metrics.jsonl.tmp").unlink()

    pod.break_after, pod.before_connection = [1_300], delete
    result = pod.download()
    assert result.problems == []
    assert "metrics.jsonl" in names(pod.folder)
    assert len(result.written) == len(names(pod.folder))
    assert result.num_unchanged == 0


def test_only_the_end_of_the_samples_is_copied_for_the_page(pod: Pod, claim: Path) -> None:
    """The copy has a hole, so the end is where it is in the claim."""
    assert FOR_PAGE.tail_bytes == run_files._MAX_SAMPLES_BYTES
    selection = replace(FOR_PAGE, tail_bytes=100_000)
    samples, copy = claim / "run/samples.jsonl", pod.folder / "samples.jsonl"
    content = os.urandom(350_000)
    samples.write_bytes(content)
    received = []
    for more in (b"", b"x" * 1000, os.urandom(49_500), os.urandom(100), os.urandom(450_000)):
        content += more
        with samples.open("ab") as file:
            file.write(more)
        before = pod.received
        assert pod.download(selection).problems == []
        assert copy.stat().st_size == len(content)
        assert copy.read_bytes()[-100_000:] == content[-100_000:]
        received.append((pod.received - before) // 1000)
    # The first copy begins at byte 200,000, and the last one at 700,000.
    assert received == [151, 1, 50, 0, 151]
    assert set(copy.read_bytes()[:700_000]) == {0}
    samples.write_bytes(content[:120_000])
    pod.download(selection)
    assert copy.read_bytes() == content[:120_000]
