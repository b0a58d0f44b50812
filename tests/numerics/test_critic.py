"""The training of a critic depends on nothing that it should not depend on.

Legend: B rows, R response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from rljob_api.v1alpha1.advantage import Advantage, Gae
from rljob_api.v1alpha1.algorithm import Algorithm, AlgorithmType
from rljob_api.v1alpha1.kl import Kl, KlEstimator, KlPlacement
from rljob_api.v1alpha1.model import Critic, CriticOptimizer
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing import compare
from rljob_testing.training import gloo_ranks, recorders, replays
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.observability.metrics import EXPLAINED_VARIANCE, VALUE_CLIP_FRACTION, VALUE_LOSS, VALUE_MEAN

PPO = Algorithm(
    type=AlgorithmType.PPO,
    advantage=Advantage(gae=Gae(gamma=0.99, lambda_=0.9)),
    kl=Kl(coefficient=0.05, placement=KlPlacement.REWARD, estimator=KlEstimator.K1),
)
CRITIC = Critic(optimizer=CriticOptimizer(learning_rate=1e-3), value_clip_range=0.05)
REPLAY = replays.Replay(PPO, Optimizer(learning_rate=3e-4), mini_batch_size=2, num_epochs_per_batch=2, critic=CRITIC)
"""Four updates per step, of both models."""
CASES = {
    "one": (1, REPLAY),
    "small micro-batches": (1, replace(REPLAY, max_tokens_per_micro_batch=40)),
    "recomputed": (1, replace(REPLAY, gradient_checkpointing=True)),
    "two ranks": (2, REPLAY),
    "two that share rows": (2, replace(REPLAY, sequence_parallel=2)),
    "two replicas of two": (4, replace(REPLAY, shard_size=2, max_tokens_per_micro_batch=40)),
}
SAVED_STEP = 2


@dataclass(frozen=True)
class Steps:
    """Two steps on one rank."""

    gradients: list[dict[str, torch.Tensor]]
    """Whole gradients of each update of the critic."""
    metrics: list[dict[str, float]]


@dataclass(frozen=True)
class Resumed:
    """The critic's state after a save, after one more step, and after the same step from the checkpoint."""

    saved: dict[str, torch.Tensor]
    loaded: dict[str, torch.Tensor]
    later: dict[str, torch.Tensor]
    later_resumed: dict[str, torch.Tensor]


@dataclass(frozen=True)
class WarmUp:
    """What changed in a step in which only the critic trains, and in the next one."""

    moved: list[tuple[bool, bool]]
    """Whether actor and critic changed in each step."""
    metrics: list[dict[str, float]]
    versions: list[int]
    """The policy's version after each step."""


def state_of(run: replays.ReplayedRun) -> dict[str, torch.Tensor]:
    assert run.critic is not None
    engine = run.critic.engine
    moments = {f"optimizer.{name}": each for name, each in replays.whole_copies(engine.named_optimizer_state()).items()}
    return {**replays.whole_copies(engine.named_shards()), **moments}


def two_steps(replay: replays.Replay, context: WorkerContext) -> Steps:
    run = replays.replayed_run(replay, context)
    assert run.critic is not None
    with recorders.recorded_gradients(run.critic.engine) as gradients:
        return Steps(gradients, run.steps(0, 2))


def resumed(root: Path, context: WorkerContext) -> Resumed:
    run = replays.replayed_run(REPLAY, context)
    run.steps(0, SAVED_STEP)
    folder = run.save(root, SAVED_STEP)
    saved = state_of(run)
    run.steps(SAVED_STEP, SAVED_STEP + 1)
    later = state_of(run)
    again = replays.replayed_run(REPLAY, context)
    again.load(folder, SAVED_STEP)
    loaded = state_of(again)
    again.steps(SAVED_STEP, SAVED_STEP + 1)
    return Resumed(saved, loaded, later, state_of(again))


def warm_up(context: WorkerContext) -> WarmUp:
    optimizer = Optimizer(learning_rate=1e-3, warmup_steps=2)
    critic = CRITIC.model_copy(update={"warmup_steps": 1})
    run = replays.replayed_run(replace(REPLAY, optimizer=optimizer, critic=critic), context)
    found = WarmUp([], [], [])
    for step in range(2):
        before = run.state(), state_of(run)
        found.metrics.append(run.step(step))
        found.versions.append(run.actor.policy_version)
        after = run.state(), state_of(run)
        found.moved.append(
            tuple(any(not torch.equal(a[name], b[name]) for name in a) for a, b in zip(before, after, strict=True))  # type: ignore[arg-type]
        )
    return found


@dataclass(frozen=True)
class Results:
    """Results of the ranks."""

    steps: dict[str, list[Steps]]
    resumed: list[Resumed]
    warm_up: WarmUp


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("checkpoints")
    runs = [gloo_ranks.RankedRun(partial(two_steps, replay), num_ranks) for num_ranks, replay in CASES.values()]
    *steps, found, [warmed] = gloo_ranks.run_on_ranks(
        [*runs, gloo_ranks.RankedRun(partial(resumed, root), 2), gloo_ranks.RankedRun(warm_up, 1)]
    )
    assert isinstance(warmed, WarmUp)
    return Results(
        {name: [each for each in ranks if isinstance(each, Steps)] for name, ranks in zip(CASES, steps, strict=True)},
        [each for each in found if isinstance(each, Resumed)],
        warmed,
    )


@pytest.mark.parametrize("name", list(CASES)[1:])
def test_critic_updates_do_not_depend_on_layout_or_micro_batches(seen: Results, name: str) -> None:
    [one] = seen.steps["one"]
    assert len(one.gradients) == 8
    assert len(seen.steps[name]) == CASES[name][0]
    for found in seen.steps[name]:
        assert max(map(compare.relative_difference, found.gradients, one.gradients)) < compare.RELATIVE
        for mine, expected in zip(found.metrics, one.metrics, strict=True):
            compare.assert_same_metrics(mine, expected)


def test_the_metrics_of_a_step_are_plausible(seen: Results) -> None:
    [one] = seen.steps["one"]
    first, second = one.metrics
    # A critic that begins with zeros predicts nothing, so that its errors are the returns themselves.
    assert first[EXPLAINED_VARIANCE] == pytest.approx(0.0, abs=1e-9)
    assert second[EXPLAINED_VARIANCE] != pytest.approx(0.0, abs=1e-3)
    assert first[VALUE_LOSS] > 0
    assert second[VALUE_MEAN] > 0
    assert 0 < second[VALUE_CLIP_FRACTION] < 1


def test_a_resumed_critic_is_bitwise_the_same(seen: Results) -> None:
    assert len(seen.resumed) == 2
    for rank in seen.resumed:
        compare.assert_bitwise_equal(rank.loaded, rank.saved)
        compare.assert_bitwise_equal(rank.later_resumed, rank.later)
        assert compare.relative_difference(rank.later, rank.saved) > 0


def test_only_the_critic_is_trained_during_its_warm_up(seen: Results) -> None:
    assert seen.warm_up.moved == [(False, True), (True, True)]
    assert "actor/pg_loss" not in seen.warm_up.metrics[0]
    # A run that is resumed after the first step begins with version 1, too.
    assert seen.warm_up.versions == [1, 2]
    assert "actor/pg_loss" in seen.warm_up.metrics[1]
    # The first of two steps of its own warm-up.
    assert seen.warm_up.metrics[1]["actor/lr"] == pytest.approx(5e-4)
