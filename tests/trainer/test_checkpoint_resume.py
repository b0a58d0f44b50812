"""Where a start resumes when the newest checkpoint turns out to be damaged while it is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from rljob_api.v1alpha1.checkpoint import Checkpoint
from rljob_api.v1alpha1.job import RLJob
from rljob_testing.jobs.valid_job import valid_job
from rljob_testing.messages import Mentions
from rljob_testing.training import small_checkpoints
from rljob_trainer.checkpoints.errors import CheckpointError
from rljob_trainer.checkpoints.layout import MANIFEST_FILE
from rljob_trainer.checkpoints.load import find_newest_complete
from rljob_trainer.controller.checkpointing import Checkpointing, ResumePoint
from rljob_trainer.controller.run import refuse_other_job
from rljob_trainer.errors import ConfigurationError

SHARD = "rank-00001.safetensors"
ROWS = 6


def value_of(step: int) -> torch.Tensor:
    return torch.arange(ROWS * 2, dtype=torch.float32).reshape(ROWS, 2) + step


def start_of(root: Path, number: int, job_name: str = "job") -> Checkpointing:
    start = Checkpointing(Checkpoint(keep=3), root, number, job_name)
    start.choices = small_checkpoints.CHOICES
    return start


def save(start: Checkpointing, step: int, num_ranks: int = 2) -> None:
    actor = small_checkpoints.LocalActor(value_of(step), num_ranks)
    start.begin(step, small_checkpoints.parts_at(step), [actor])
    start.finish([actor], wait=True, is_evaluated=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints of start 1 after steps 10, 20 and 30, each by two ranks."""
    folder = tmp_path / "checkpoints"
    start = start_of(folder, 1)
    assert start.find() is None
    for step in (10, 20, 30):
        save(start, step)
    return folder


def path_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}.start-0001"


def flip(path: Path) -> None:
    """Flips a bit of the last byte: size and header stay the same. Flipping twice restores the file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def resumed(start: Checkpointing, actor: small_checkpoints.LocalActor) -> ResumePoint:
    point = start.find()
    assert point is not None
    return start.load(point, [actor], actor.num_ranks)


def test_a_run_that_loses_its_manifests_says_that_it_begins_at_step_0(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20, 30):
        (path_of(root, step) / MANIFEST_FILE).unlink()
    assert start_of(root, 2).find() is None
    assert "the run begins at step 0, because none of the 3 checkpoints in" in caplog.text
    assert "(newest: step-00000030.start-0001, it has no manifest; 3 without a manifest are incomplete)" in caplog.text
    caplog.clear()
    assert start_of(tmp_path / "empty", 1).find() is None
    assert caplog.text == ""


# One rank reads everything; two read what they wrote; of three ranks, two need a part of the damaged piece.
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_damage_found_only_by_reading_falls_back_to_the_previous_checkpoint(root: Path, num_ranks: int) -> None:
    flip(path_of(root, 30) / SHARD)
    actor, start = small_checkpoints.LocalActor(torch.zeros(ROWS, 2), num_ranks), start_of(root, 2)
    point = resumed(start, actor)
    assert actor.loaded == ["step-00000030.start-0001, version 30", "step-00000020.start-0001, version 20"]
    assert torch.equal(actor.weight, value_of(20))
    assert (point.state.step, point.state.parts.cursor.ordinal, point.status.step) == (20, 20, 20)
    [note] = point.notes
    assert note.startswith(f"skipped damaged checkpoint step-00000030.start-0001: {SHARD}: digest of tensor weight")
    assert (start.last_begun_step, start.newest) == (20, path_of(root, 20))


def test_a_skipped_checkpoint_never_comes_back_and_is_removed_with_the_next_save(root: Path) -> None:
    flip(path_of(root, 30) / SHARD)
    second = start_of(root, 2)
    resumed(second, small_checkpoints.LocalActor(torch.zeros(ROWS, 2)))
    flip(path_of(root, 30) / SHARD)
    third = start_of(root, 3)
    assert resumed(third, small_checkpoints.LocalActor(torch.zeros(ROWS, 2))).state.step == 20
    save(third, 25)
    assert sorted(path.name for path in root.glob("step-*")) == [
        "step-00000010.start-0001",
        "step-00000020.start-0001",
        "step-00000025.start-0003",
    ]


def test_a_start_that_ends_before_loading_abandons_no_checkpoint(root: Path) -> None:
    """Step 30 lacks a file while start 2 looks, and start 2 ends before it has loaded anything."""
    shard = path_of(root, 30) / SHARD
    shard.rename(root / "elsewhere")
    point = start_of(root, 2).find()
    assert point is not None
    assert point.state.step == 20
    (root / "elsewhere").rename(shard)
    assert resumed(start_of(root, 3), small_checkpoints.LocalActor(torch.zeros(ROWS, 2))).state.step == 30


def test_if_all_are_damaged_the_error_names_them_and_a_restored_one_is_used(root: Path) -> None:
    for step in (10, 20, 30):
        flip(path_of(root, step) / SHARD)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint is usable, 3 are damaged:\n  step-00000030.start-0001: ra"
    ):
        resumed(start_of(root, 2), small_checkpoints.LocalActor(torch.zeros(ROWS, 2)))
    flip(path_of(root, 30) / SHARD)
    assert resumed(start_of(root, 3), small_checkpoints.LocalActor(torch.zeros(ROWS, 2))).state.step == 30


def test_damage_that_only_a_worker_sees_abandons_no_checkpoint(root: Path, tmp_path: Path) -> None:
    view = tmp_path / "view of another node"
    shutil.copytree(root, view)
    flip(path_of(view, 30) / SHARD)
    actor = small_checkpoints.LocalActor(torch.zeros(ROWS, 2), seen=lambda folder: view / folder.name)
    with pytest.raises(CheckpointError, match=r"start-0001: a worker .*damaged \(rank-00001.* the contr"):
        resumed(start_of(root, 2), actor)
    assert resumed(start_of(root, 3), small_checkpoints.LocalActor(torch.zeros(ROWS, 2))).state.step == 30


def test_the_folder_of_another_job_stays_unchanged(root: Path) -> None:
    before = sorted(root.rglob("*"))
    with pytest.raises(ConfigurationError, match=r"checkpoints of job 'job', .* 'other'"):
        start_of(root, 2, "other").find()
    assert sorted(root.rglob("*")) == before
    assert find_newest_complete(root, 1) is not None


def test_the_resolved_dtype_is_recorded(tmp_path: Path) -> None:
    first = start_of(tmp_path, 1)
    assert first.find() is None
    save(first, 10)
    point = start_of(tmp_path, 2).find()
    assert point is not None
    assert point.state.choices == small_checkpoints.CHOICES


def test_the_kl_coefficient_is_restored_bitwise(tmp_path: Path) -> None:
    first, actor, coefficient = start_of(tmp_path, 1), small_checkpoints.LocalActor(value_of(0)), 0.1 * 1.02**7
    assert first.find() is None
    parts = small_checkpoints.parts_at(1).model_copy(update={"kl_coefficient": coefficient})
    first.begin(1, parts, [actor])
    first.finish([actor], wait=True, is_evaluated=True)
    point = start_of(tmp_path, 2).find()
    assert point is not None
    assert point.state.parts == parts


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"steps": 29}, Mentions("spec.training.steps", "30 steps", "seen: 29", "at least 30", "new run")),
        ({"seed": 7}, Mentions("spec.training.seed", "trained with 0", "seen: 7", "set it to 0", "new run")),
        (
            {"algorithm": {"type": "PPO"}},
            Mentions("spec.training.algorithm", "critic", "step 30", "seen: PPO", "new run"),
        ),
    ],
)
def test_a_job_that_cannot_continue_is_rejected(root: Path, training: dict[str, object], message: Mentions) -> None:
    """Before Ray starts: the checkpoint says it."""
    point = start_of(root, 2).find()
    assert point is not None
    wire = {f"spec.training.{name}": value for name, value in ({"steps": 30, "seed": 0} | training).items()}
    with pytest.raises(ConfigurationError) as caught:
        refuse_other_job(point, RLJob.from_wire(valid_job(wire)).spec)
    assert str(caught.value) == message
    refuse_other_job(point, RLJob.from_wire(valid_job({"spec.training.steps": 30, "spec.training.seed": 0})).spec)
