"""Steps with dynamic sampling train on the accepted groups only; a resumed run trains on the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_testing.training import replays, stub_step
from rljob_trainer.controller.dynamic_sampling import DynamicSampling
from rljob_trainer.controller.prompt_batches import sample_seeds
from rljob_trainer.controller.rollout import Rollout
from rljob_trainer.controller.sampler import Ticket
from rljob_trainer.controller.step_rows import StepRows
from rljob_trainer.controller.training_step import TRAINING_STREAM
from rljob_trainer.datasets.cursor import DrawnRow, PromptCursor
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.observability.metrics import (
    EQUAL_SCORES_FRACTION,
    REWARD_MEAN,
    SAMPLING_PROMPTS,
    SAMPLING_REWARD_PREFIX,
    SAMPLING_ROUNDS,
    TRAINED_FRACTION,
)

DAPO = Algorithm.from_wire({"type": "DAPO"})
PLAIN = Algorithm.from_wire({"type": "DAPO", "dynamicSampling": {"enabled": False}})
REPLAY = replays.Replay(DAPO, num_steps=3, mini_batch_size=2)
PROMPTS = replays.prompts_of(0, 18)


class RecordedRollouts(replays.ReplayedRollouts):
    """Returns what another run has accepted, whatever is requested."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout

    def begin(
        self,
        prompts: Sequence[PromptRow],
        num_responses: int,
        sampling: SamplingSettings,
        seeds: torch.Tensor,
        *,
        syncs: bool = True,
        environment_seeds: torch.Tensor | None = None,
        with_greedy: bool = False,
        tickets: Sequence[Ticket] = (),
    ) -> Rollout:
        del environment_seeds
        begun = super().begin(
            prompts, num_responses, sampling, seeds, syncs=syncs, with_greedy=with_greedy, tickets=tickets
        )
        fixed = self.rollout
        return replace(begun, prompts=fixed.prompts, groups_B=fixed.groups_B, batch=fixed.batch, rows=fixed.rows)

    def scored(self, rollout: Rollout) -> Rollout:
        del rollout
        return self.rollout


def cursor() -> PromptCursor[PromptRow]:
    return PromptCursor(PROMPTS, seed=0, shuffle=False, digest="any")


def step_of(run: replays.ReplayedRun, stream: PromptCursor[PromptRow], number: int) -> dict[str, float]:
    """Does what the controller does."""
    return run.training_step.run(stream.next_batch(run.replay.batch_size), number)[1]


def same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_step_trains_on_the_accepted_groups(context: WorkerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[StepRows] = []
    fill = DynamicSampling.filled
    monkeypatch.setattr(DynamicSampling, "filled", lambda *arguments: taken.append(fill(*arguments)) or taken[-1])
    stream = cursor()
    run = replays.replayed_run(REPLAY, context, stream)
    metrics = step_of(run, stream, 0)
    [found] = taken
    # Of the generator's rows, those of every other prompt have equal scores of 1, the others a mean of a half.
    assert found.rollout.prompts[::4] == (PROMPTS[0], PROMPTS[2], PROMPTS[4], PROMPTS[6])
    assert stream.next_batch(1) == [DrawnRow(7, PROMPTS[7])]
    assert (metrics[SAMPLING_ROUNDS], metrics[SAMPLING_PROMPTS], metrics[TRAINED_FRACTION]) == (2.0, 8.0, 1.0)
    assert (metrics[REWARD_MEAN], metrics[f"{SAMPLING_REWARD_PREFIX}/mean"]) == (0.75, 0.5)
    plain = replays.replayed_run(replace(REPLAY, algorithm=PLAIN), context, rollout=RecordedRollouts(found.rollout))
    plain.training_step.run(stub_step.drawn(PROMPTS[:4]), 0)
    assert same(run.weights(), plain.weights())
    untrained = replays.replayed_run(REPLAY, context, cursor())
    assert not same(run.weights(), untrained.weights())


def test_the_seeds_of_all_rounds_are_those_of_one(context: WorkerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses of a later round are drawn anew, and as if all prompts had been requested at once."""
    rounds: list[list[int]] = []
    begin = replays.ReplayedRollouts.begin

    def recorded(*arguments: object, **options: bool) -> Rollout:
        *_, seeds = arguments
        rounds.append(seeds.tolist())
        return begin(*arguments, **options)

    monkeypatch.setattr(replays.ReplayedRollouts, "begin", recorded)
    run = replays.replayed_run(REPLAY, context, cursor())
    run.training_step.run(stub_step.drawn(PROMPTS[:4]), 1)
    assert [len(seeds) for seeds in rounds] == [16, 16]
    found = [seed for seeds in rounds for seed in seeds]
    assert found == sample_seeds(replays.SEED, TRAINING_STREAM, 1, 32).tolist()
    assert len(set(found)) == 32


def test_padding_groups_are_not_trained_on(context: WorkerContext) -> None:
    """One round, and what it leaves out: the same as leaving groups out without dynamic sampling."""
    fewer = {"maxRounds": 1, "onMaxRounds": "TrainOnFewer"}
    algorithm = Algorithm.from_wire({"type": "DAPO", "dynamicSampling": fewer})
    dropping = PLAIN.model_copy(update={"drop_zero_variance_groups": True})
    runs = []
    for each in (algorithm, dropping):
        stream = cursor()
        run = replays.replayed_run(replays.Replay(each, num_steps=3), context, stream)
        runs.append((step_of(run, stream, 0), run.weights(), stream.state()))
    (metrics, weights, state), (dropped_metrics, dropped, dropped_state) = runs
    assert metrics[TRAINED_FRACTION] == dropped_metrics[TRAINED_FRACTION] == 0.5
    assert metrics[EQUAL_SCORES_FRACTION] == dropped_metrics[EQUAL_SCORES_FRACTION] == 0.5
    assert state == dropped_state
    assert all(torch.allclose(weights[name], dropped[name], rtol=0, atol=1e-6) for name in weights)


def test_a_resumed_run_trains_on_the_same_prompts(context: WorkerContext, tmp_path: Path) -> None:
    stream = cursor()
    whole = replays.replayed_run(REPLAY, context, stream)
    expected = [step_of(whole, stream, number) for number in range(3)]
    before = cursor()
    first = replays.replayed_run(REPLAY, context, before)
    step_of(first, before, 0)
    folder, state = first.save(tmp_path, 1), before.state()
    # 7 of 18 prompts are used: 8 were drawn.
    assert state.ordinal == 7
    after = cursor()
    after.restore(state)
    resumed = replays.replayed_run(REPLAY, context, after)
    resumed.load(folder, 1)
    assert [step_of(resumed, after, number) for number in (1, 2)] == expected[1:]
    assert same(resumed.state(), whole.state())
    assert after.state() == stream.state()
