"""The checkpoints with the best values of a metric are kept, also after stops and crashes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import JsonValue

from rljob_api.run_state import BestCheckpoint
from rljob_api.v1alpha1.checkpoint import Checkpoint, KeepBest, KeepBestMode
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_testing.messages import Mentions
from rljob_testing.training import small_checkpoints, training_runs
from rljob_trainer.checkpoints.errors import DamagedError
from rljob_trainer.checkpoints.layout import list_checkpoint_folders
from rljob_trainer.controller.checkpointing import Checkpointing
from rljob_trainer.controller.evaluations.best_checkpoints import BestCheckpoints, BestState, evaluation_digest
from rljob_trainer.controller.run_output import RunOutput
from rljob_trainer.controller.run_reporter import RunReporter
from rljob_trainer.controller.saves import Saves
from rljob_trainer.early_checks import refuse_training_mistakes
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.trackers.trackers import Trackers

SCORE = "eval/heldout/greedy"
NUM_STEPS = 8


class Attempt:
    """An attempt of a run of eight steps, with a save after every fourth one and an evaluation after every step. Only
    the newest checkpoint is kept, and the best ones."""

    def __init__(self, folder: Path, start_number: int = 1, digest: str | None = None, **settings: object) -> None:
        self.folder = folder
        best = BestCheckpoints(KeepBest.model_validate({"metric": SCORE, **settings}), evaluation_digest=digest)
        spec = Checkpoint(every_steps=4, keep=1, keep_best=best.spec)
        self.checkpointing = Checkpointing(spec, folder / "checkpoints", start_number, "job", best)
        self.checkpointing.choices = small_checkpoints.CHOICES
        actor = small_checkpoints.LocalActor(torch.ones(4, 4))
        point = self.checkpointing.find()
        self.first_step = point.state.step if point else 0
        if point:
            self.checkpointing.load(point, [actor], 1)
        output = RunOutput(folder, [], self.first_step if point else None, NUM_STEPS, 1, Trackers())
        self.reporter = RunReporter(folder / "state.json", "job", 1, NUM_STEPS, 1, lambda: 0.0)
        parts = small_checkpoints.parts_at(0)
        self.saves = Saves(self.checkpointing, lambda: parts, [actor], output, self.reporter, NUM_STEPS, lambda: 0.0)

    def run(self, *scores: float) -> None:
        """Steps from the first one on, with the scores of their evaluations. Does what the controller does."""
        for step, score in enumerate(scores, start=self.first_step + 1):
            self.saves.begin_if_due(step)
            self.reporter.step_done(step, {}, [])
            self.saves.begin_if_best(step, {SCORE: score})

    def kept(self) -> list[int]:
        return sorted(folder.step for folder in list_checkpoint_folders(self.folder / "checkpoints"))

    def best(self) -> tuple[int, float] | None:
        best = self.reporter.state.best
        return None if best is None else (best.step, best.value)


def test_the_best_checkpoint_is_saved_at_its_step_and_kept(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    attempt.run(0.1, 0.5, 0.4, 0.4, 0.5, 0.3, 0.2, 0.1)
    attempt.saves.end()
    # Step 5 has the same score as step 2, so it is not better.
    assert attempt.kept() == [2, 8]
    assert attempt.best() == (2, 0.5)
    folder = attempt.checkpointing.best_checkpoint()
    assert folder is not None
    assert folder.step == 2


def test_the_smallest_value_and_several_best_checkpoints(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, mode="Min", count=2)
    attempt.run(0.3, 0.5, 0.2, 0.6, 0.4, 0.9, float("nan"), 0.7)
    attempt.saves.end()
    assert attempt.kept() == [1, 3, 8]
    assert attempt.best() == (3, 0.2)


def test_a_resumed_run_knows_the_best_checkpoint_of_earlier_attempts(tmp_path: Path) -> None:
    first = Attempt(tmp_path)
    first.run(0.2, 0.6, 0.3, 0.1, 0.1)
    first.saves.save_on_request()
    assert first.kept() == [2, 5]
    second = Attempt(tmp_path, start_number=2)
    assert second.first_step == 5
    second.run(0.5, 0.4, 0.3)
    second.saves.end()
    assert second.kept() == [2, 8]
    assert second.best() == (2, 0.6)


def test_a_crash_between_an_evaluation_and_its_checkpoint_loses_no_best_checkpoint(tmp_path: Path) -> None:
    first = Attempt(tmp_path)
    first.run(0.2, 0.6, 0.3, 0.1, 0.9)
    # The evaluation after step 5 is the best one. Its save has begun, which has committed that of step 4, but the
    # process is killed before it is complete.
    assert first.kept() == [2, 4, 5]
    second = Attempt(tmp_path, start_number=2)
    assert second.first_step == 4
    # The repeated evaluation may give another score, for example on other hardware.
    second.run(0.5, 0.4, 0.3, 0.2)
    second.saves.end()
    assert second.kept() == [2, 8]
    assert second.best() == (2, 0.6)


def test_an_evaluation_that_a_stop_has_interrupted_is_repeated_and_counts(tmp_path: Path) -> None:
    first = Attempt(tmp_path)
    first.run(0.2, 0.1, 0.1)
    first.saves.begin_if_due(4)
    first.reporter.step_done(4, {}, [])
    first.saves.unevaluated_step = 4
    first.saves.save_on_request()
    second = Attempt(tmp_path, start_number=2)
    second.saves.begin_if_best(4, {SCORE: 0.7})
    second.run(0.5, 0.4, 0.3, 0.2)
    second.saves.end()
    assert second.kept() == [4, 8]
    assert second.best() == (4, 0.7)


def test_another_metric_starts_anew_and_a_step_that_trained_nothing_does_not_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Attempt(tmp_path)
    first.run(0.9, 0.1, 0.1, 0.1)
    first.saves.end()
    second = Attempt(tmp_path, start_number=2, mode="Min")
    assert "chosen only among later steps" in caplog.text
    second.saves.begin_if_due(5, postpones=True)
    second.saves.begin_if_best(5, {SCORE: 0.0})
    second.saves.begin_if_best(0, {SCORE: 0.0})
    second.first_step = 5
    second.run(0.5, 0.4, 0.6)
    second.saves.end()
    assert second.kept() == [7, 8]
    assert second.best() == (7, 0.4)


def test_a_metric_that_is_missing_or_not_finite_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    best = BestCheckpoints(KeepBest(metric="eval/heldout/maj_at_4"))
    assert not best.record(1, {"eval/other/maj_at_4": 1.0})
    assert not caplog.records
    assert not best.record(2, {SCORE: 1.0})
    assert not best.record(3, {"eval/heldout/maj_at_4": float("nan")})
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "step 2: eval/heldout/maj_at_4 was not reported",
        "step 3: eval/heldout/maj_at_4 is not finite",
    ]


def test_a_mean_of_few_responses_is_not_the_best(caplog: pytest.LogCaptureFixture) -> None:
    best = BestCheckpoints(KeepBest(metric=SCORE), max_failure_rate=0.2)
    excluded = "eval/heldout/excluded_fraction"
    assert best.record(1, {SCORE: 0.5, excluded: 0.2})
    assert not best.record(2, {SCORE: 0.9, excluded: 0.99})
    assert "step 2: 99.0 % of the responses of the evaluation have no score" in caplog.text
    assert [each.step for each in best.up_to(2)] == [1]


def test_values_of_a_changed_evaluation_are_not_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Attempt(tmp_path, digest="a")
    first.run(0.9, 0.1, 0.1, 0.1)
    first.saves.end()
    Attempt(tmp_path, start_number=2, digest="a")
    assert not caplog.records
    third = Attempt(tmp_path, start_number=3, digest="b")
    assert "chosen only among later steps" in caplog.text
    third.run(0.2, 0.3, 0.1, 0.1)
    third.saves.end()
    assert third.best() == (6, 0.3)


def test_what_changes_the_values_of_an_evaluation() -> None:
    def digest(of_reward: training_runs.Document, **of_evaluation: JsonValue) -> str:
        reward = training_runs.function_reward("my_rewards:score") | of_reward
        other = training_runs.function_reward("my_rewards:other", name="other", weight=of_reward.get("weight", 1))
        evaluation = training_runs.held_out(4, 1) | {"rewards": ["score"], **of_evaluation}
        job = training_runs.small_job(evaluations=[evaluation], rewards=[reward, other])
        return evaluation_digest(SCORE, RLJob.from_wire(job).spec.training)

    before = digest({})
    assert digest({"numProcesses": 5, "timeoutSeconds": 60}, everySteps=7, atStart=False) == before
    changes: list[tuple[training_runs.Document, training_runs.Document]] = [
        ({"weight": 2}, {}),
        ({"function": {"path": "my_rewards:other"}}, {}),
        ({}, {"numSamples": 4}),
        ({}, {"maxNewTokens": 3}),
        ({}, {"rewards": ["score", "other"]}),
    ]
    for of_reward, of_evaluation in changes:
        assert digest(of_reward, **of_evaluation) != before


def test_a_best_checkpoint_that_was_removed_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    # A run fell back to step 4, because step 6 was damaged. When step 6 became the best one, step 2 was removed.
    state = BestState(metric=SCORE, mode=KeepBestMode.MAX, checkpoints=(BestCheckpoint(step=2, value=0.5),))
    best = BestCheckpoints(KeepBest(metric=SCORE))
    best.restore(state, {4})
    assert "the best checkpoint of step 2 no longer exists" in caplog.text
    assert best.record(5, {SCORE: 0.3})


def test_a_best_checkpoint_of_an_earlier_attempt_is_verified(tmp_path: Path) -> None:
    first = Attempt(tmp_path)
    first.run(0.2, 0.6, 0.3, 0.1, 0.1)
    first.saves.save_on_request()
    second = Attempt(tmp_path, start_number=2)
    second.run(0.5, 0.4, 0.3)
    second.saves.end()
    best = second.checkpointing.best_checkpoint()
    assert best is not None
    assert (best.step, best.start_number) == (2, 1)
    second.checkpointing.opened(best).read("weight")
    assert isinstance(best.path, Path)
    [file] = best.path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedError):
        second.checkpointing.opened(best).read("weight")


def test_a_value_counts_only_for_checkpoints_up_to_its_step() -> None:
    best = BestCheckpoints(KeepBest(metric=SCORE, mode=KeepBestMode.MAX, count=1))
    assert best.record(3, {SCORE: 0.5})
    assert not best.record(4, {SCORE: 0.4})
    assert not best.record(5, {"other": 1.0})
    assert best.record(6, {SCORE: 0.6})
    assert [each.step for each in best.up_to(4)] == [3]
    best.saved(4)
    assert [each.step for each in best.up_to(4)] == [3]
    best.saved(6)
    assert [each.step for each in best.up_to(6)] == [6]
    assert not best.up_to(5)


def test_a_metric_that_the_evaluation_does_not_report_is_rejected_before_the_run() -> None:
    evaluation = training_runs.held_out(4, 1) | {"greedy": False, "numSamples": 4}

    def spec(metric: str) -> RLJobSpec:
        job = training_runs.small_job(evaluations=[evaluation], checkpoint={"keepBest": {"metric": metric}})
        return RLJob.from_wire(job).spec

    refuse_training_mistakes(spec("eval/heldout/pass_at_2"))
    for metric in ("eval/heldout/greedy", "eval/heldout/pass_at_3", "eval/heldout/mean_at_8"):
        with pytest.raises(ConfigurationError) as caught:
            refuse_training_mistakes(spec(metric))
        assert str(caught.value) == Mentions(
            "spec.checkpoint.keepBest.metric", f"seen: {metric}", "eval/heldout/maj_at_4"
        )
