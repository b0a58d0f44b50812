"""The coefficient of the KL term from step to step: by hand, and in steps of the tiny model, where it is used."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.kl import KlController
from rljob_api.v1alpha1.model import Critic
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing import compare
from rljob_testing.training import recorders, replays
from rljob_trainer.algorithms.kl import next_coefficient
from rljob_trainer.controller.step_rows import StepRows
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.observability.metrics import KL_COEFFICIENT, KL_LOSS, TRAINED_FRACTION

COEFFICIENT, OTHER_COEFFICIENT, TARGET, HORIZON = 0.5, 4.0, 9e-3, 64
ADAPTIVE = {"type": "Adaptive", "adaptive": {"target": TARGET, "horizon": HORIZON}}
NUM_RESPONSES = 16


def replay(
    recipe: str, placement: str, coefficient: float = COEFFICIENT, *, is_adaptive: bool = True
) -> replays.Replay:
    """Two updates per step: in the second the policy differs from the reference."""
    kl = {"coefficient": coefficient, "placement": placement, "controller": ADAPTIVE if is_adaptive else {}}
    algorithm = Algorithm.from_wire({"type": recipe, "kl": kl})
    critic = Critic(warmup_steps=1) if recipe == "PPO" else None
    return replays.Replay(algorithm, Optimizer(learning_rate=1e-4), num_steps=4, mini_batch_size=2, critic=critic)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (0.1, 0.5),
        (0.11, 0.51),
        (0.095, 0.495),
        # 0.2 above and below are the bounds.
        (0.12, 0.52),
        (7.0, 0.52),
        (0.08, 0.48),
        (0.0, 0.48),
        (-3.0, 0.48),
        (math.nan, 0.5),
        (math.inf, 0.5),
    ],
)
def test_a_fifth_of_the_horizon_moves_the_coefficient_by_a_fifth_of_the_error(measured: float, expected: float) -> None:
    controller = KlController.from_wire({"type": "Adaptive", "adaptive": {"target": 0.1, "horizon": 100}})
    assert next_coefficient(controller, 0.5, measured, 20) == pytest.approx(expected, rel=1e-12)
    assert next_coefficient(KlController(), 0.5, measured, 20) == 0.5


@pytest.mark.parametrize("placement", ["Loss", "Reward"])
def test_each_step_uses_the_coefficient_of_the_step_before(context: WorkerContext, placement: str) -> None:
    metrics = replays.replayed_run(replay("GRPO", placement), context).steps(0, 4)
    expected = COEFFICIENT
    errors = []
    for step in metrics:
        assert step[KL_COEFFICIENT] == expected
        errors.append(step[KL_LOSS] / TARGET - 1)
        expected *= 1 + min(max(errors[-1], -0.2), 0.2) * NUM_RESPONSES / HORIZON
    # From the reference itself to beyond the target, through values within the bounds.
    assert errors[0] < -0.2 < errors[1] < 0.2 < errors[2]


@pytest.mark.parametrize(
    ("recipe", "placement"), [("GRPO", "Loss"), ("GRPO", "Reward"), ("ReinforcePlusPlus", "Reward")]
)
def test_loss_and_rewards_use_the_current_coefficient(context: WorkerContext, recipe: str, placement: str) -> None:
    """A run whose controller has reached a coefficient trains like a run that was configured with it."""
    found: list[list[dict[str, torch.Tensor]]] = []
    for case in (
        replay(recipe, placement),
        replay(recipe, placement, OTHER_COEFFICIENT, is_adaptive=False),
        replay(recipe, placement, is_adaptive=False),
    ):
        run = replays.replayed_run(case, context)
        with recorders.recorded_gradients(run.actor.engine) as gradients:
            for step in range(2):
                run.training_step.kl_coefficient.restore(OTHER_COEFFICIENT)
                has_coefficient = (
                    case.algorithm.kl.coefficient == COEFFICIENT and run.training_step.kl_coefficient.state() is None
                )
                assert run.step(step)[KL_COEFFICIENT] == (COEFFICIENT if has_coefficient else OTHER_COEFFICIENT)
        found.append(gradients)
    controlled, configured, of_job = found
    for mine, theirs in zip(controlled, configured, strict=True):
        compare.assert_bitwise_equal(mine, theirs)
    assert compare.relative_difference(controlled[-1], of_job[-1]) > 0.01


def without_rows(generate: Callable[..., StepRows], *given: object) -> StepRows:
    generated = generate(*given)
    return StepRows.of(generated.plan, generated.rollout, torch.zeros_like(generated.is_kept_B))


def test_the_coefficient_does_not_change_in_a_step_without_trained_responses(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    for placement in ("Loss", "Reward"):
        run = replays.replayed_run(replay("GRPO", placement), context)
        generated = run.training_step._generated
        monkeypatch.setattr(run.training_step, "_generated", partial(without_rows, generated))
        metrics = run.step(0)
        assert metrics[TRAINED_FRACTION] == 0
        assert metrics[KL_COEFFICIENT] == run.training_step.kl_coefficient.value == COEFFICIENT


@pytest.mark.parametrize("placement", ["Loss", "Reward"])
def test_the_coefficient_does_not_change_during_the_critic_warm_up(context: WorkerContext, placement: str) -> None:
    """In its steps the policy is the reference, and their KL of 0 would lower the coefficient."""
    run = replays.replayed_run(replay("PPO", placement), context)
    assert run.step(0)[KL_COEFFICIENT] == COEFFICIENT
    # The version of the policy is the number of steps, also if it was not updated in them.
    assert run.actor.policy_version == 1
    assert run.step(1)[KL_COEFFICIENT] == COEFFICIENT
    assert run.step(2)[KL_COEFFICIENT] != COEFFICIENT


def test_a_checkpoint_has_the_coefficient_only_if_it_changes(context: WorkerContext) -> None:
    fixed = replays.replayed_run(replay("GRPO", "Loss", is_adaptive=False), context).training_step
    fixed.kl_coefficient.restore(OTHER_COEFFICIENT)
    assert (fixed.kl_coefficient.state(), fixed.kl_coefficient.value) == (None, COEFFICIENT)
    without = replays.replayed_run(replace(replay("GRPO", "Loss"), algorithm=Algorithm()), context)
    assert without.training_step.kl_coefficient.state() is None
    assert KL_COEFFICIENT not in without.step(0)
