"""The time that saves take is reported with the step after which they were made, also for the last step and for a
stop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rljob_api.v1alpha1.checkpoint import Checkpoint
from rljob_testing.training import small_checkpoints
from rljob_trainer.checkpoints.errors import CheckpointError
from rljob_trainer.checkpoints.layout import list_checkpoint_folders, read_manifest
from rljob_trainer.controller.checkpointing import Checkpointing, state_of
from rljob_trainer.controller.run_output import RunOutput
from rljob_trainer.controller.run_reporter import RunReporter
from rljob_trainer.controller.saves import Saves
from rljob_trainer.trackers.trackers import Trackers

COPY_SECONDS, WRITE_SECONDS = 2.0, 5.0


class Run:
    """Four steps that do nothing, with a save after every second one; a copy takes 2 s and waiting 5 s."""

    def __init__(self, folder: Path, start_number: int = 1, resumed_from_step: int | None = None) -> None:
        self.now = 0.0
        self.num_drawn = 0
        self.folder = folder
        self.actor = small_checkpoints.LocalActor(torch.ones(4, 4), on_copy=self._copy, on_finish=self._wait)
        self.output = RunOutput(folder, [], resumed_from_step, 4, 1, Trackers())
        self.reporter = RunReporter(folder / "state.json", "job", 1, 4, 1, lambda: self.now)
        checkpointing = Checkpointing(Checkpoint(every_steps=2), folder / "checkpoints", start_number, "job")
        checkpointing.choices = small_checkpoints.CHOICES
        point = checkpointing.find()
        if point:
            checkpointing.load(point, [self.actor], 1)
        self.saves = Saves(
            checkpointing,
            lambda: small_checkpoints.parts_at(self.num_drawn),
            [self.actor],
            self.output,
            self.reporter,
            4,
            lambda: self.now,
        )

    def step(self, step: int, *, postpones: bool = False) -> None:
        """Does what the controller does. Each step draws ten rows."""
        self.num_drawn += 10
        try:
            self.saves.begin_if_due(step, postpones=postpones)
        finally:
            self.output.step_done(step, {"actor/lr": 0.5, **self.saves.take_seconds()}, [])
            self.reporter.step_done(step, {}, [])

    def rows(self) -> list[dict[str, float]]:
        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [{name: value for name, value in row.items() if name != "wall_time"} for row in rows]

    def are_evaluated(self) -> dict[int, bool]:
        """By step, the content of the manifests."""
        folders = list_checkpoint_folders(self.folder / "checkpoints")
        states = [read_manifest(folder.path)[0].extra for folder in folders]
        return {folder.step: state["isEvaluated"] is True for folder, state in zip(folders, states, strict=True)}

    def _copy(self) -> None:
        self.now += COPY_SECONDS

    def _wait(self) -> None:
        """A process that is killed from here on may leave the checkpoint behind: the row of its step has to exist
        already."""
        pending = list_checkpoint_folders(self.folder / "checkpoints")[0].step
        assert [row["step"] for row in self.rows() if "actor/lr" in row][:pending] == list(range(1, pending + 1))
        self.now += WRITE_SECONDS


def test_each_step_has_one_row_with_the_time_of_saves_after_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in (1, 2, 3, 4):
        run.step(step)
    run.saves.end()
    assert run.rows() == [
        {"step": 1, "actor/lr": 0.5},
        {"step": 2, "actor/lr": 0.5, "timing_s/save": 2.0},
        {"step": 3, "actor/lr": 0.5, "timing_s/save_wait": 5.0},
        {"step": 4, "actor/lr": 0.5, "timing_s/save": 2.0},
        {"step": 4, "timing_s/save_wait": 5.0},
    ]


def test_waiting_for_slow_storage_belongs_to_the_step_that_waits(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.actor.is_written = False
    for step in (1, 2, 3, 4):
        run.step(step)
    run.saves.end()
    assert run.rows()[2:] == [
        {"step": 3, "actor/lr": 0.5, "timing_s/save_wait": 0.0},
        {"step": 4, "actor/lr": 0.5, "timing_s/save": 2.0, "timing_s/save_wait": 5.0},
        # Two rows for one step, for the save of step 2 and that of step 4; a reader takes the last value of each step.
        {"step": 4, "timing_s/save_wait": 10.0},
    ]


def test_a_save_that_is_due_after_a_step_that_must_not_be_saved_starts_after_the_next_one(tmp_path: Path) -> None:
    """Otherwise a single step without scores would double the work that a crash loses."""
    run = Run(tmp_path)
    run.step(1)
    run.step(2, postpones=True)
    run.step(3)
    run.saves.end()
    assert list(run.are_evaluated()) == [3]


def test_a_save_on_request_is_reported_with_the_step_before_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in (1, 2, 3):
        run.step(step)
    assert run.saves.save_on_request() == 3
    assert run.rows()[3:] == [{"step": 3, "timing_s/save": 2.0, "timing_s/save_wait": 10.0}]
    # The resumed run keeps the existing rows, and adds the fourth step.
    resumed = Run(tmp_path, start_number=2, resumed_from_step=3)
    resumed.step(4)
    resumed.saves.end()
    assert [row["step"] for row in resumed.rows() if "actor/lr" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in resumed.rows() if "timing_s/save" in row] == [2, 3, 4]


def test_a_checkpoint_has_the_controllers_state_of_the_time_when_its_save_began(tmp_path: Path) -> None:
    """The save of step 2 is committed when the save after step 3 begins."""
    run = Run(tmp_path)
    run.actor.is_written = False
    for step in (1, 2, 3):
        run.step(step)
    run.saves.save_on_request()
    folders = list_checkpoint_folders(tmp_path / "checkpoints")
    states = [state_of(read_manifest(folder.path)[0]) for folder in folders]
    assert {state.step: state.parts for state in states} == {
        2: small_checkpoints.parts_at(20),
        3: small_checkpoints.parts_at(30),
    }


def test_a_step_whose_save_fails_still_has_its_row(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(1)

    def fail() -> None:
        raise CheckpointError("no memory for the copy")

    run.actor.on_copy = fail
    with pytest.raises(CheckpointError):
        run.step(2)
    assert [row["step"] for row in run.rows()] == [1, 2]
    assert run.reporter.state.progress.step == 2


def test_an_interrupted_evaluation_is_noted_only_in_its_own_step(tmp_path: Path) -> None:
    """The save of step 2 is still being written when the evaluation after step 3 is interrupted."""
    run = Run(tmp_path)
    run.actor.is_written = False
    for step in (1, 2, 3):
        run.saves.unevaluated_step = None
        run.step(step)
        run.saves.unevaluated_step = step
    run.saves.save_on_request()
    assert run.are_evaluated() == {2: True, 3: False}
