"""What an algorithm's functions need from the job, and which jobs are rejected before a device is used."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from torch import Tensor

from rljob_api.v1alpha1.advantage import GroupRelative
from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.policy_loss import Clipped
from rljob_api.v1alpha1.recipes import resolve_algorithm, resolved_value
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_testing.jobs.valid_job import valid_job
from rljob_testing.training import training_runs
from rljob_trainer.algorithms.advantage_registry import _on_responses as on_responses
from rljob_trainer.algorithms.interfaces import (
    GREEDY_REWARDS,
    ROLLOUT_LOGPROBS,
    HeadOutputs,
    LossInputs,
    ResponseInputs,
    TokenLosses,
)
from rljob_trainer.algorithms.loss_registry import _with_settings as with_settings
from rljob_trainer.controller.checks.fit import check_algorithm, needs_reference
from rljob_trainer.errors import ConfigurationError

APART: training_runs.Document = {
    "spec": {
        "pools": [{"name": name, "nodes": 1, "gpusPerNode": 1} for name in ("main", "second")],
        "roles": {"ref": {"pool": "second"}},
    }
}
CORRECTION = "spec.training.algorithm.rolloutCorrection"
OLDER_WEIGHTS: dict[str, object] = {"spec.training.rollout.syncEverySteps": 4, "spec.checkpoint.everySteps": 4}
FUNCTIONS = """
from rljob_trainer.algorithms import policy_loss_function, token_advantage

@policy_loss_function(needs=["ref_logprobs"])
def near(inputs):
    return inputs.logprobs_N - inputs.columns["ref_logprobs"]

@policy_loss_function(needs=["rollout_logprobs"])
def corrected(inputs):
    return -inputs.logprobs_N * inputs.advantages_N

@token_advantage()
def returns(inputs, reduce):
    return inputs.segments.spread(inputs.rewards_B)

@token_advantage(needs=["kl_penalties"])
def rewards(inputs, reduce):
    return inputs.segments.spread(inputs.rewards_B) - inputs.columns["kl_penalties"]

def plain(inputs):
    return -inputs.logprobs_N * inputs.advantages_N
"""


def function(name: str) -> training_runs.Document:
    return {"type": "Function", "function": {"path": f"losses_of_a_user:{name}"}}


def spec(loss: str) -> RLJobSpec:
    return RLJob.from_wire(
        training_runs.merged(training_runs.small_job(algorithm={"loss": function(loss)}), APART)
    ).spec


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "losses_of_a_user.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_function_that_needs_the_reference_gets_one_wherever_it_stands() -> None:
    assert needs_reference(spec("near"))
    check_algorithm(spec("near"))


@pytest.mark.parametrize(("role", "column"), [("ref", "ref_logprobs"), ("critic", "values")])
@pytest.mark.parametrize("field", ["shardSize", "sequenceParallel"])
def test_a_layout_of_a_model_that_no_function_needs_is_rejected(role: str, column: str, field: str) -> None:
    algorithm: training_runs.Document = {"loss": function("plain"), "advantage": function("returns")}
    job = training_runs.merged(training_runs.small_job(algorithm=algorithm), {"spec": {"roles": {role: {field: 1}}}})
    with pytest.raises(ConfigurationError, match=rf"spec\.roles\.{role}: nothing needs .* shardSize .*'{column}'"):
        check_algorithm(RLJob.from_wire(job).spec)


def test_gpus_for_an_unneeded_reference_are_rejected() -> None:
    with pytest.raises(ConfigurationError, match=r"spec\.roles\.ref\.pool: nothing needs .* 'second'.*ref_logprobs"):
        check_algorithm(spec("plain"))


@pytest.mark.parametrize("cut", [{"topP": 0.9}, {"topK": 5}])
def test_losses_do_not_get_logprobs_of_a_truncated_distribution(cut: training_runs.Document) -> None:
    algorithm: training_runs.Document = {"loss": function("corrected")}
    check_algorithm(RLJob.from_wire(training_runs.small_job(algorithm=algorithm)).spec)
    with pytest.raises(
        ConfigurationError, match=r"spec\.training\.rollout: .*topP .* remove 'rollout_logprobs' from its `needs`"
    ):
        check_algorithm(RLJob.from_wire(training_runs.small_job(algorithm=algorithm, rollout=cut)).spec)


@pytest.mark.parametrize("loss", ["ClipCov", "KLCov"])
def test_a_loss_that_only_ranks_tokens_by_logprob_may_use_a_truncated_distribution(loss: str) -> None:
    check_algorithm(
        RLJob.from_wire(training_runs.small_job(algorithm={"loss": {"type": loss}}, rollout={"topP": 0.9})).spec
    )


@pytest.mark.parametrize(("is_straight", "warns"), [(False, True), (True, False)])
def test_k1_in_the_loss_is_warned_of_unless_it_has_another_gradient(
    is_straight: bool, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kl = {"coefficient": 0.1, "estimator": "K1", "straightThrough": is_straight}
    check_algorithm(RLJob.from_wire(training_runs.small_job(algorithm={"kl": kl})).spec)
    assert ("only adds noise" in caplog.text) is warns


@pytest.mark.parametrize(
    ("epochs", "old_logprobs", "warns"), [(1, "Trainer", True), (2, "Trainer", False), (1, "Rollout", False)]
)
def test_a_penalty_without_a_gradient_is_warned_of(
    epochs: int, old_logprobs: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = {"loss": {"type": "KLCov"}, "rolloutCorrection": {"oldLogprobs": old_logprobs}}
    job = training_runs.small_job(algorithm=algorithm, numEpochsPerBatch=epochs)
    check_algorithm(RLJob.from_wire(job).spec)
    assert ("the penalty of KLCov has no gradient" in caplog.text) is warns


def test_registry_rows_with_settings_declare_their_needs() -> None:
    chosen = resolve_algorithm(Algorithm())

    def advantages(inputs: ResponseInputs, settings: GroupRelative) -> Tensor:
        return inputs.rewards_B * settings.normalize_by_std

    def losses(inputs: LossInputs, settings: Clipped) -> TokenLosses:
        return TokenLosses(inputs.logprobs_N * resolved_value(settings.clip_ratio_low))

    estimator = on_responses(GroupRelative, advantages, needs=[GREEDY_REWARDS])(chosen.advantage)
    assert estimator.needs == {GREEDY_REWARDS}
    loss = with_settings(Clipped, losses, needs=[ROLLOUT_LOGPROBS], wanted=HeadOutputs(squares=True))(chosen.loss)
    assert (loss.needs, loss.wanted) == ({ROLLOUT_LOGPROBS}, HeadOutputs(squares=True))


def test_an_advantage_on_tokens_has_to_place_the_kl_in_the_reward() -> None:
    for name, placement, is_right in (
        ("returns", "Loss", True),
        ("rewards", "Reward", True),
        ("returns", "Reward", False),
    ):
        algorithm: training_runs.Document = {
            "advantage": function(name),
            "kl": {"coefficient": 0.1, "placement": placement},
        }
        spec = RLJob.from_wire(training_runs.small_job(algorithm=algorithm)).spec
        if is_right:
            check_algorithm(spec)
            continue
        with pytest.raises(
            ConfigurationError, match=r"kl\.placement: .*:returns computes .* per token .* 'kl_penalties'"
        ):
            check_algorithm(spec)


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        (OLDER_WEIGHTS, "training.algorithm.rolloutCorrection: {type"),
        ({**OLDER_WEIGHTS, "spec.training.rollout.topP": 0.9}, "topP: 1 and topK: 0"),
        ({**OLDER_WEIGHTS, CORRECTION + ".type": "TokenMasked"}, None),
        ({**OLDER_WEIGHTS, CORRECTION + ".oldLogprobs": "Rollout"}, None),
        ({**OLDER_WEIGHTS, CORRECTION + ".rejection": {"level": "Token", "max": 2}}, None),
        ({}, None),
    ],
)
def test_old_weights_without_correction_are_logged(
    caplog: pytest.LogCaptureFixture, edits: dict[str, object], expected: str | None
) -> None:
    caplog.set_level(logging.WARNING)
    check_algorithm(RLJob.from_wire(valid_job(edits)).spec)
    found = [record.getMessage() for record in caplog.records if "syncEverySteps" in record.getMessage()]
    assert len(found) == (expected is not None)
    assert all(expected is not None and expected in each for each in found)
