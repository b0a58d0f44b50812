"""Weights are handed over when they have changed, and the generator sleeps when the trainer needs the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event

import pytest
import torch

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.kl import Kl, KlPlacement
from rljob_api.v1alpha1.model import Critic, Lora
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing import compare
from rljob_testing.training import hybrid_runs, replays
from rljob_testing.training.sleeping_engine import FORGETS, KEEPS
from rljob_trainer.controller.prompt_batches import sample_seeds
from rljob_trainer.controller.rollout import Rollout
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.rollout.base import GenerationRequest, SamplingSettings
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.offload import HostedStorages
from rljob_trainer.observability.metrics import SAMPLING_ROUNDS, STALENESS_MAX
from rljob_trainer.observability.spans import SPANS, Counts
from rljob_trainer.observability.timeline import MEMORY_TRACK
from rljob_trainer.workers.columns import POLICY_VERSIONS, RESPONSE_MASK

REPLAY = replays.Replay(optimizer=Optimizer(learning_rate=1e-3), num_steps=4, offloads=True)
DAPO = replace(REPLAY, algorithm=Algorithm.from_wire({"type": "DAPO"}))
PPO = replace(REPLAY, algorithm=Algorithm.from_wire({"type": "PPO"}), critic=Critic(warmup_steps=2))
LEVELS = pytest.mark.parametrize("level", [KEEPS, FORGETS])
SAMPLING = SamplingSettings(1.0, 1.0, 0, 6, ())


@dataclass
class Counter:
    """Counts what a generator has done since the last call."""

    run: hybrid_runs.HybridRun
    before: tuple[int, int, int] = (0, 0, 0)

    def __post_init__(self) -> None:
        self.taken()

    def taken(self) -> tuple[int, int, int]:
        """Hand-overs, wake-ups and sleeps."""
        engine = self.run.sleeping
        now = (engine.num_syncs, engine.num_wakes, engine.num_sleeps)
        first, second, third = (each - before for each, before in zip(now, self.before, strict=True))
        self.before = now
        return first, second, third


def generated(run: hybrid_runs.HybridRun, sampling: SamplingSettings = SAMPLING, *, syncs: bool = True) -> Rollout:
    """Responses to two prompts, as an evaluation needs them."""
    seeds_B = sample_seeds(0, 1, 0, 2)
    return run.generated(replays.prompts_of(9, 2), sampling, seeds_B, syncs=syncs)


def versions_of(rollout: Rollout) -> set[int]:
    mask_L = rollout.rows.ragged_column(RESPONSE_MASK).values
    return set(rollout.rows.ragged_column(POLICY_VERSIONS).values[mask_L].tolist())


def test_both_switches_mark_what_they_have_done(context: WorkerContext) -> None:
    run = hybrid_runs.hybrid_run(REPLAY, context, FORGETS)
    SPANS.take()
    run.step(0)
    marks = [each.after for each in SPANS.take() if isinstance(each, Counts) and each.track == MEMORY_TRACK]
    awake = ["step_before", "wake_weights", "sync_weights", "wake_kv_cache", "generate"]
    assert marks == [*awake, "sleep", "forward_backward", "optimizer_step", "update"]


@LEVELS
def test_all_rounds_of_dynamic_sampling_share_one_hand_over(level: int, context: WorkerContext) -> None:
    run = hybrid_runs.hybrid_run(DAPO, context, level)
    count = Counter(run)
    rounds = []
    for step in range(3):
        rounds.append(run.step(step)[SAMPLING_ROUNDS])
        assert count.taken() == (1, 1, 1)
    assert max(rounds) > 1


@LEVELS
def test_a_reward_model_puts_the_generator_to_sleep_in_each_round(
    level: int, context: WorkerContext, tmp_path: Path
) -> None:
    run = hybrid_runs.hybrid_run(DAPO, context, level, hybrid_runs.random_reward_model(tmp_path, context))
    count = Counter(run)
    most = 0
    for step in range(3):
        rounds = int(run.step(step)[SAMPLING_ROUNDS])
        assert count.taken() == (rounds if level == FORGETS else 1, rounds, rounds)
        most = max(most, rounds)
    assert most > 1


@LEVELS
def test_evaluations_and_the_next_rollout_share_one_hand_over(level: int, context: WorkerContext) -> None:
    run = hybrid_runs.hybrid_run(REPLAY, context, level)
    run.step(0)
    count = Counter(run)
    greedy, sampled = generated(run, replace(SAMPLING, temperature=0.0)), generated(run)
    assert count.taken() == (1, 1, 0)
    run.step(1)
    assert count.taken() == (0, 0, 1)
    assert versions_of(greedy) == versions_of(sampled) == {1}
    # What was generated before does not matter.
    alone = hybrid_runs.hybrid_run(REPLAY, context, level)
    alone.steps(0, 2)
    compare.assert_bitwise_equal(run.run.state(), alone.run.state())


@pytest.mark.parametrize(("level", "num_syncs"), [(KEEPS, [1, 0, 0]), (FORGETS, [1, 1, 1])])
def test_weights_that_did_not_change_in_warm_up_are_sent_again_only_if_lost(
    level: int, num_syncs: list[int], context: WorkerContext
) -> None:
    run = hybrid_runs.hybrid_run(PPO, context, level)
    count = Counter(run)
    steps = [(run.step(step), count.taken()) for step in range(3)]
    assert [each for _, each in steps] == [(each, 1, 1) for each in num_syncs]
    # Their version has changed nevertheless.
    assert steps[2][0][STALENESS_MAX] == 0


def test_newer_weights_reach_a_generator_that_is_awake_with_older_ones(context: WorkerContext) -> None:
    run = hybrid_runs.hybrid_run(REPLAY, context, KEEPS)
    run.step(0)
    count = Counter(run)
    assert versions_of(generated(run, syncs=False)) == {0}
    assert count.taken() == (0, 1, 0)
    assert versions_of(generated(run)) == {1}
    assert count.taken() == (1, 1, 1)


@LEVELS
def test_the_reference_puts_the_generator_to_sleep(level: int, context: WorkerContext) -> None:
    """The first pass of these steps is the reference's."""
    kl = Kl(coefficient=0.1, placement=KlPlacement.LOSS)
    run = hybrid_runs.hybrid_run(replace(REPLAY, algorithm=Algorithm(kl=kl)), context, level)
    count = Counter(run)
    run.steps(0, 2)
    assert count.taken() == (2, 2, 2)


USES: dict[str, Callable[[TrainEngine], object]] = {
    "a sum over ranks": lambda engine: engine.sum_over_ranks(torch.zeros(1)),
    "a maximum over ranks": lambda engine: engine.max_over_ranks(torch.zeros(1)),
    "reading weights": lambda engine: next(engine.named_shards()),
    "reading moments": lambda engine: next(engine.named_optimizer_state()),
}


@pytest.mark.parametrize("use", USES)
def test_each_use_of_a_training_engine_puts_the_generator_to_sleep(use: str, context: WorkerContext) -> None:
    run = hybrid_runs.hybrid_run(REPLAY, context, KEEPS)
    generated(run)
    count = Counter(run)
    USES[use](run.run.actor.engine)
    assert count.taken() == (0, 0, 1)


def test_requests_that_run_are_not_dropped(context: WorkerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    run = hybrid_runs.hybrid_run(REPLAY, context, None)
    generated(run)
    may_run, rollout = Event(), run.hybrid.rollout
    step = rollout.engine.step
    monkeypatch.setattr(rollout.engine, "step", lambda: may_run.wait() and step())
    rollout.loop.submit([GenerationRequest("0", (5, 6, 7), SAMPLING, 0)])
    with pytest.raises(AssertionError, match="requests"):
        run.run.actor.engine.sum_over_ranks(torch.zeros(1))
    may_run.set()
    rollout.loop.wait_until_idle()
    run.run.actor.engine.sum_over_ranks(torch.zeros(1))


@LEVELS
def test_a_checkpoint_is_saved_and_loaded_while_the_generator_sleeps(
    level: int, context: WorkerContext, tmp_path: Path
) -> None:
    run = hybrid_runs.hybrid_run(REPLAY, context, level)
    run.step(0)
    generated(run)
    count = Counter(run)
    saved = run.run.save(tmp_path, 1)
    assert count.taken() == (0, 0, 1)
    generated(run)
    count.taken()
    run.run.load(saved, 1)
    assert count.taken() == (0, 0, 1)
    # Loaded weights are sent in any case.
    generated(run, syncs=False)
    assert count.taken() == (1, 1, 0)
    generated(run)
    assert count.taken() == (0, 0, 0)
    assert run.run.group.is_checkpoint_written() == [True]
    assert count.taken() == (0, 0, 0)


def recorded_copies(monkeypatch: pytest.MonkeyPatch) -> list[HostedStorages]:
    """Gets an entry whenever a storage is copied to the host."""
    copied: list[HostedStorages] = []
    copy = HostedStorages._copied_to_host
    monkeypatch.setattr(
        HostedStorages, "_copied_to_host", lambda hosted, *rest: copied.append(hosted) or copy(hosted, *rest)
    )
    return copied


def test_the_base_of_adapters_is_copied_to_the_host_once(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = hybrid_runs.hybrid_run(replace(REPLAY, lora=Lora(rank=4)), context, FORGETS)
    engine = run.run.actor.engine
    parameters = engine.offloading.parameters
    assert parameters is not None
    # As on GPUs.
    parameters.keeps_hosts = True
    run.step(0)
    copied = recorded_copies(monkeypatch)
    run.step(1)
    adapters = [each for each in engine.model.parameters() if each.requires_grad]
    assert copied.count(parameters) == len(adapters) > 0


def test_offloaded_state_is_copied_to_the_host_when_it_has_changed(
    context: WorkerContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = recorded_copies(monkeypatch)

    def steps(run: hybrid_runs.HybridRun, folder: Path) -> list[int]:
        """The number of copies in each part."""
        saved: list[Path] = []
        found = []
        for part in (
            lambda: run.step(0),
            lambda: generated(run),
            lambda: saved.append(run.run.save(folder, 1)),
            lambda: generated(run),
            lambda: run.step(1),
            lambda: run.run.load(saved[0], 1),
            lambda: run.step(2),
        ):
            copied.clear()
            part()
            found.append(len(copied))
        return found

    plain = hybrid_runs.hybrid_run(replace(REPLAY, offloads=False), context, None)
    assert sum(steps(plain, tmp_path / "plain")) == 0
    run = hybrid_runs.hybrid_run(REPLAY, context, FORGETS)
    offloading = run.run.actor.engine.offloading
    assert offloading.parameters is not None
    assert offloading.moments is not None
    # As on GPUs.
    offloading.parameters.keeps_hosts = offloading.moments.keeps_hosts = True
    first, evaluation, save, again, second, load, third = steps(run, tmp_path / "offloads")
    assert first > evaluation > 0
    assert save == again == 0
    assert second == 2 * evaluation
    assert load == 2 * evaluation
    assert third == second + evaluation
    compare.assert_bitwise_equal(run.run.state(), plain.run.state())
