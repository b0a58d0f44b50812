"""Responses that are cut into several rows train the policy as if each was one row: with the same loss, gradient and
metrics, whatever the number of workers and the size of micro-batches."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from rljob_api.v1alpha1.algorithm import Algorithm, LossAggregation
from rljob_api.v1alpha1.model import Critic
from rljob_testing import compare
from rljob_testing.training import cut_rollouts, gloo_ranks, plain_grpo, recorders, replays
from rljob_testing.training.joined_workers import FinishedCall
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller.prompt_batches import sample_seeds
from rljob_trainer.controller.training_step import TRAINING_STREAM
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.token_model import NAME_PREFIX
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.observability.metrics import (
    GRADIENT_NORM,
    POLICY_LOSS,
    RESPONSE_LENGTH_MEAN,
    ROWS_PER_RESPONSE_MAX,
    ROWS_PER_RESPONSE_MEAN,
    SAMPLING_KEPT,
    Metrics,
)
from rljob_trainer.workers.columns import (
    RESPONSE_LENGTHS,
    RESPONSE_MASK,
    RETURNS,
    ROLLOUT_LOGPROBS,
    SCORES,
    TOKENS,
    VALUES,
)

NUM_RESPONSES = 16
NUM_ROWS = sum(number % 3 + 1 for number in range(NUM_RESPONSES))


def assert_same(found: cut_rollouts.Outcome, expected: cut_rollouts.Outcome) -> None:
    assert len(found.gradients) == len(expected.gradients)
    assert max(map(compare.relative_difference, found.gradients, expected.gradients)) < compare.RELATIVE
    of_rows = {ROWS_PER_RESPONSE_MEAN, ROWS_PER_RESPONSE_MAX}
    assert not of_rows & expected.metrics.keys()
    metrics = {name: value for name, value in found.metrics.items() if name not in of_rows}
    compare.assert_same_metrics(metrics, expected.metrics)


@pytest.fixture(scope="module")
def on_ranks() -> Mapping[int, list[dict[str, cut_rollouts.Outcome]]]:
    """The steps on cut responses by each rank of two and of four."""
    runs = [gloo_ranks.RankedRun(cut_rollouts.steps_of_rank, num_ranks) for num_ranks in (2, 4)]
    two, four = gloo_ranks.run_on_ranks(runs)
    return {2: two, 4: four}  # type: ignore[dict-item]


@pytest.mark.parametrize("name", cut_rollouts.CASES)
def test_cut_responses_are_trained_on_like_whole_ones(
    name: str, context: WorkerContext, on_ranks: Mapping[int, list[dict[str, cut_rollouts.Outcome]]]
) -> None:
    expected = cut_rollouts.one_step(name, cut_rollouts.Turns(), context)
    cut = cut_rollouts.one_step(name, cut_rollouts.CutTurns(), context)
    assert cut.metrics[ROWS_PER_RESPONSE_MEAN] == NUM_ROWS / NUM_RESPONSES
    assert cut.metrics[ROWS_PER_RESPONSE_MAX] == 3
    assert_same(cut, expected)
    for num_ranks, ranks in on_ranks.items():
        assert len(ranks) == num_ranks
        for rank in ranks:
            if num_ranks == 2 or name in cut_rollouts.FEW:
                assert_same(rank[name], expected)
            if num_ranks == 2 and name == cut_rollouts.FEW[0]:
                assert_same(rank[cut_rollouts.SHARED], expected)


@pytest.mark.parametrize("aggregation", LossAggregation)
def test_turns_without_messages_between_are_trained_on_like_a_single_turn(
    aggregation: LossAggregation, context: WorkerContext
) -> None:
    """The columns of a conversation are equal to those of a response, so that nothing is rounded differently."""
    single, turns = (
        cut_rollouts.one_step(f"GRPO, {aggregation}", rollouts, context)
        for rollouts in (replays.ReplayedRollouts(), cut_rollouts.AdjacentTurns())
    )
    assert turns.metrics[POLICY_LOSS] == single.metrics[POLICY_LOSS]
    assert turns.metrics[GRADIENT_NORM] == single.metrics[GRADIENT_NORM]
    assert len(turns.gradients) == len(single.gradients)
    for found, expected in zip(turns.gradients, single.gradients, strict=True):
        compare.assert_bitwise_equal(found, expected)


def test_dynamic_sampling_takes_all_rows_of_a_group(context: WorkerContext) -> None:
    expected, cut = (
        cut_rollouts.sampled_step(rollouts, context) for rollouts in (cut_rollouts.Turns(), cut_rollouts.CutTurns())
    )
    assert 0 < expected.metrics[SAMPLING_KEPT] < 1
    assert_same(cut, expected)


def test_a_row_of_several_turns_has_the_loss_of_its_sampled_tokens(context: WorkerContext) -> None:
    """Compared with a plain loop over responses. The mean over a response's tokens runs over all of its turns."""
    replay = replays.Replay(Algorithm.from_wire({"aggregation": "SequenceMeanTokenMean"}), num_steps=1)
    seeds = sample_seeds(replays.SEED, TRAINING_STREAM, 0, NUM_RESPONSES)
    turns = cut_rollouts.Turns().run(replays.prompts_of(0, 4), 4, replay.plan(1).sampling, seeds)
    tokens, masks, logprobs = (
        turns.rows.ragged_column(name).row_tensors() for name in (TOKENS, RESPONSE_MASK, ROLLOUT_LOGPROBS)
    )
    rows = [
        plain_grpo.Row(row, mask, score, before[mask])
        for row, mask, score, before in zip(tokens, masks, turns.batch[SCORES].tolist(), logprobs, strict=True)
    ]
    # Some have a message between two turns.
    assert any((~row.is_response_T[row.is_response_T.long().argmax() :]).any() for row in rows)
    model = plain_grpo.initial_policy()
    losses = [
        plain_grpo.clipped_losses(new_N, new_N.detach(), advantage).mean()
        for row, advantage in zip(rows, plain_grpo.group_advantages(rows, 4), strict=True)
        for new_N in [row.logprobs_N(model, 1.0)]
    ]
    torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
    expected = {NAME_PREFIX + name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    run = replays.replayed_run(replay, context, rollout=cut_rollouts.Turns())
    with recorders.recorded_gradients(run.actor.engine) as gradients:
        metrics = run.step(0)
    assert compare.relative_difference(gradients[0], expected) < compare.RELATIVE
    lengths = [int(mask.sum()) for mask in masks]
    assert turns.batch[RESPONSE_LENGTHS].tolist() == lengths
    assert metrics[RESPONSE_LENGTH_MEAN] == pytest.approx(sum(lengths) / NUM_RESPONSES)


def test_gae_goes_from_the_last_token_of_a_turn_to_the_first_of_the_next(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with a plain loop over the sampled tokens; the tokens of messages between turns have no part."""
    gamma, decay = 0.9, 0.8
    algorithm = Algorithm.from_wire({"type": "PPO", "advantage": {"gae": {"gamma": gamma, "lambda": decay}}})
    run = replays.replayed_run(replays.Replay(algorithm, critic=Critic()), context, rollout=cut_rollouts.Turns())
    batches: list[DataProto] = []

    def recorded(batch: DataProto, step: int) -> FinishedCall[Metrics]:
        del step
        batches.append(batch)
        return FinishedCall({})

    monkeypatch.setattr(run.training_step.critic, "update_critic", recorded)
    run.step(0)
    columns = [batches[0].ragged_column(name).row_tensors() for name in (RESPONSE_MASK, VALUES, RETURNS)]
    num_with_messages = 0
    for mask, values, returns in zip(*columns, strict=True):
        num_with_messages += not mask[mask.long().argmax() :].all()
        found, seen = returns[mask].tolist(), values[mask].tolist()
        assert found[-1] in (0, 1)
        advantage = found[-1] - seen[-1]
        for number in reversed(range(len(seen) - 1)):
            advantage = gamma * seen[number + 1] - seen[number] + gamma * decay * advantage
            assert found[number] == pytest.approx(advantage + seen[number], abs=1e-5)
    assert num_with_messages > NUM_RESPONSES // 2


def test_values_of_tokens_are_refused_if_a_response_has_several_rows(context: WorkerContext) -> None:
    algorithm = Algorithm.from_wire({"type": "PPO"})
    replay = replays.Replay(algorithm, critic=Critic())
    run = replays.replayed_run(replay, context, rollout=cut_rollouts.CutTurns())
    with pytest.raises(ConfigurationError, match=rf"step 1 have several rows of tokens \({NUM_ROWS} rows, 16 "):
        run.step(0)
