"""Training steps depend neither on the number of workers, nor on micro-batches, nor on how a pass is computed. Rollouts
are replayed: on one worker with all rows in one pass, and in other ways, whose gradients and metrics must be the same.
Workers have different numbers of tokens, so a mean of means would show.

Legend: B responses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import pytest

from rljob_api.v1alpha1.algorithm import LossAggregation
from rljob_testing import compare
from rljob_testing.training import gloo_ranks, invariance_runs, recorders, replays, step_cases, user_algorithms
from rljob_trainer.controller.prompt_batches import sample_seeds
from rljob_trainer.controller.training_step import TRAINING_STREAM
from rljob_trainer.engines.train.attention_kernels import Kernel
from rljob_trainer.observability.metrics import (
    ADVANTAGE_MEAN,
    CORRECTION_BOUNDED,
    DISTINCT_FRACTION,
    KL_COEFFICIENT,
    KL_LOSS,
    LEARNING_RATE,
    POLICY_LOSS,
    REJECTED_FRACTION,
    TOKEN_IMBALANCE,
    WHOLE_PASS_SECONDS,
)
from rljob_trainer.workers.columns import NUM_TOKENS

WITH_KL_IN_REWARD = 1e-4
"""The KL of a token is a small difference of two log-probabilities of about -4, each rounded by up to 2.4e-7. After one
step it is about 1e-3, and is multiplied by the coefficient 4. So another order of sums changes an advantage by up to
1e-6 per token, and the gradients by more than `compare.RELATIVE`. The KL of another response changes them by more than
0.1."""


@dataclass(frozen=True)
class Results:
    """Results of the ranks, by the number of ranks or by the name of the case."""

    steps: dict[str, list[step_cases.Outcome]]
    long: dict[int, list[invariance_runs.LongRun]]
    resumed: dict[int, list[invariance_runs.Resumed]]
    uneven: dict[int, list[invariance_runs.UnevenUpdate]]
    failures: dict[int, list[str]]
    other_models: dict[int, list[dict[str, step_cases.Outcome]]]
    replicas: list[invariance_runs.Replicas]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("checkpoints")
    invariance_runs.write_other_models(root)
    program = partial(invariance_runs.all_runs_of_rank, root)
    counts = (2, 1, 4)
    found = gloo_ranks.run_on_ranks([gloo_ranks.RankedRun(program, num_ranks) for num_ranks in counts])
    of_ranks = {
        num_ranks: [each for each in ranks if isinstance(each, invariance_runs.RankResults)]
        for num_ranks, ranks in zip(counts, found, strict=True)
    }
    return Results(
        {name: [rank.steps[name] for rank in of_ranks[case.num_ranks]] for name, case in invariance_runs.CASES.items()},
        {num_ranks: [rank.long for rank in ranks if rank.long] for num_ranks, ranks in of_ranks.items()},
        {num_ranks: [rank.resumed for rank in ranks] for num_ranks, ranks in of_ranks.items()},
        {num_ranks: [rank.uneven for rank in ranks if rank.uneven] for num_ranks, ranks in of_ranks.items()},
        {num_ranks: [rank.failure for rank in ranks] for num_ranks, ranks in of_ranks.items()},
        {num_ranks: [rank.other_models for rank in ranks] for num_ranks, ranks in of_ranks.items()},
        [rank.replicas for rank in of_ranks[4] if rank.replicas],
    )


def assert_same(found: step_cases.Outcome, expected: step_cases.Outcome, relative: float = compare.RELATIVE) -> None:
    assert len(found.gradients) == len(expected.gradients)
    assert max(map(compare.relative_difference, found.gradients, expected.gradients)) < relative
    compare.assert_same_metrics(found.metrics, expected.metrics)


@pytest.mark.parametrize("name", invariance_runs.SAME_AS_ONE)
def test_gradients_and_metrics_equal_those_of_one_worker_and_one_pass(seen: Results, name: str) -> None:
    [one] = seen.steps["one"]
    assert len(one.gradients) == 2
    assert len(seen.steps[name]) == invariance_runs.CASES[name].num_ranks
    for outcome in seen.steps[name]:
        assert_same(outcome, one)


def test_the_tested_layouts_are_in_effect(seen: Results) -> None:
    kernels = {name: set[Kernel]().union(*(rank.kernels for rank in ranks)) for name, ranks in seen.steps.items()}
    assert Kernel.PADDED in kernels["one"]
    assert Kernel.PER_ROW not in kernels["one"]
    for name, case in invariance_runs.CASES.items():
        if case.layout is step_cases.Layout.PADDED:
            assert kernels[name] == set()
        if case.layout is step_cases.Layout.PER_ROW:
            assert Kernel.PER_ROW in kernels[name]
            assert Kernel.PADDED not in kernels[name]


def test_replicas_hold_whole_copies_and_sum_gradients_once_per_update(seen: Results) -> None:
    assert len(seen.replicas) == 4
    for rank in seen.replicas:
        assert rank.placements == {("R", "S(0)")}
        assert rank.share == pytest.approx(0.5, abs=0.01)
        assert rank.num_units == 3
        # One update, of several passes.
        assert rank.num_reduces == rank.num_units
        assert rank.num_passes > 1


@pytest.mark.parametrize(
    ("model", "num_ranks"),
    [(invariance_runs.MORE_HEADS, 4), (invariance_runs.EXPERTS, 2), (invariance_runs.EXPERTS, 4)],
)
def test_repeated_heads_and_experts_work_in_any_layout(seen: Results, model: str, num_ranks: int) -> None:
    [one] = seen.other_models[1]
    assert len(seen.other_models[num_ranks]) == num_ranks
    for outcomes in seen.other_models[num_ranks]:
        assert_same(outcomes[model], one[model])


@pytest.mark.parametrize("aggregation", invariance_runs.OTHER_AGGREGATIONS)
@pytest.mark.parametrize("other", ["micro", "two"])
def test_every_aggregation_equals_that_of_one_worker(seen: Results, aggregation: LossAggregation, other: str) -> None:
    for outcome in seen.steps[f"{aggregation} {other}"]:
        assert_same(outcome, seen.steps[f"{aggregation} one"][0])


def test_aggregations_differ(seen: Results) -> None:
    cases = ["one", *(f"{each} one" for each in invariance_runs.OTHER_AGGREGATIONS)]
    losses = {seen.steps[each][0].metrics[POLICY_LOSS] for each in cases}
    assert len(losses) == len(LossAggregation)


@pytest.mark.parametrize("other", ["micro-batches", "two workers"])
def test_a_loss_over_the_whole_mini_batch_equals_that_of_one_worker(seen: Results, other: str) -> None:
    [one] = seen.steps["covariance"]
    assert compare.relative_difference(one.gradients[0], seen.steps["one"][0].gradients[0]) > 0.1
    for outcome in seen.steps[f"covariance, {other}"]:
        assert_same(outcome, one)
        # The time of the pass is shown, and named as a span once for each of the two updates.
        assert outcome.spans.count("whole_pass") == 2
        assert outcome.metrics[WHOLE_PASS_SECONDS] > 1e-4
    assert WHOLE_PASS_SECONDS not in seen.steps["one"][0].metrics
    assert "whole_pass" not in seen.steps["one"][0].spans


@pytest.mark.parametrize("name", invariance_runs.LOSSES)
def test_every_loss_equals_that_of_one_worker(seen: Results, name: str) -> None:
    """In micro-batches, too, and with the rows in another order. In the first update of the step the policies are the
    same, in the second they differ."""
    [one] = seen.steps[name]
    assert compare.relative_difference(one.gradients[1], seen.steps["one"][0].gradients[1]) > 0.1
    for outcome in seen.steps[f"{name}, two workers"]:
        assert_same(outcome, one)
    if name.endswith("Cov"):
        assert 0.05 < one.metrics["actor/pg_cov_frac"] <= 0.1


@pytest.mark.parametrize("other", ["two workers", "two sequence ranks"])
@pytest.mark.parametrize("name", invariance_runs.TOKEN_ADVANTAGES)
def test_every_advantage_on_tokens_equals_that_of_one_worker(seen: Results, name: str, other: str) -> None:
    [one] = seen.steps[name]
    # K1 has a sign.
    assert abs(one.metrics[KL_LOSS]) > 1e-4
    for outcome in seen.steps[f"{name}, {other}"]:
        assert_same(outcome, one)


@pytest.mark.parametrize("name", invariance_runs.FILTERED)
def test_two_workers_train_on_the_responses_that_one_has_drawn(seen: Results, name: str) -> None:
    [one] = seen.steps[name]
    assert 0.4 < one.metrics[DISTINCT_FRACTION] < 1
    for outcome in seen.steps[f"{name}, two workers"]:
        assert_same(outcome, one)


def test_corrected_losses_equal_those_of_one_worker(seen: Results) -> None:
    """Weights are of whole responses; in the second case half of the responses are rejected."""
    [one], [rejected] = seen.steps["corrected"], seen.steps["corrected, rejected"]
    assert 0.2 < rejected.metrics[REJECTED_FRACTION] < 0.8
    assert one.metrics[CORRECTION_BOUNDED] > 0.1
    assert compare.relative_difference(one.gradients[0], rejected.gradients[0]) > 0.1
    for outcome in seen.steps["corrected, two sequence ranks"]:
        assert_same(outcome, one)
    for outcome in seen.steps["corrected, rejected, two workers"]:
        assert_same(outcome, rejected)


def test_kl_in_the_reward_belongs_to_its_response(seen: Results) -> None:
    """Two workers have the responses in another order than the rollout."""
    [one], [without] = seen.steps["advantage"], seen.steps["advantage, no KL"]
    assert compare.relative_difference(one.gradients[0], without.gradients[0]) > 0.1
    assert one.metrics[KL_LOSS] > 0
    for outcome in seen.steps["advantage, two workers"]:
        assert_same(outcome, one, WITH_KL_IN_REWARD)


@pytest.mark.parametrize("name", ["advantage on tokens", "advantage on tokens, two workers"])
def test_a_token_advantage_sees_groups_and_kl_of_trained_responses(seen: Results, name: str) -> None:
    [one] = seen.steps["advantage"]
    on_controller = {ADVANTAGE_MEAN: one.metrics[ADVANTAGE_MEAN]}
    for outcome in seen.steps[name]:
        assert_same(replace(outcome, metrics=outcome.metrics | on_controller), one, WITH_KL_IN_REWARD)


@pytest.mark.parametrize("name", ["bfloat16", "bfloat16, in tiles"])
def test_half_precision_on_two_workers_is_close(seen: Results, name: str) -> None:
    [one] = seen.steps["one"]
    for outcome in seen.steps[name]:
        assert 1e-4 < compare.relative_difference(outcome.gradients[0], one.gradients[0]) < 0.1


def test_ten_steps_on_two_workers_equal_those_of_one(seen: Results) -> None:
    [one] = seen.long[1]
    assert len({step[LEARNING_RATE] for step in one.metrics}) > invariance_runs.NUM_STEPS // 2
    # The KL coefficient follows the measured KL.
    assert len({step[KL_COEFFICIENT] for step in one.metrics}) == invariance_runs.NUM_STEPS
    for rank in seen.long[2]:
        assert len(rank.metrics) == invariance_runs.NUM_STEPS
        for found, expected in zip(rank.metrics, one.metrics, strict=True):
            compare.assert_same_metrics(found, expected)


@pytest.mark.parametrize("name", ["long, four workers", "long, padded", "long, row by row"])
def test_ten_steps_in_another_layout_equal_those_of_one_worker(seen: Results, name: str) -> None:
    """The second case uses small micro-batches and recomputed activations."""
    [one] = seen.long[1]
    assert len(seen.steps[name]) == invariance_runs.CASES[name].num_ranks
    for rank in seen.steps[name]:
        for found, expected in zip([*rank.earlier, rank.metrics], one.metrics, strict=True):
            compare.assert_same_metrics(found, expected)


def test_a_repeated_and_a_resumed_run_are_bitwise_equal(seen: Results) -> None:
    for rank, resumed in zip(seen.long[2], seen.resumed[2], strict=True):
        compare.assert_bitwise_equal(resumed.loaded, rank.saved)
        compare.assert_bitwise_equal(resumed.later, rank.later)
        assert (
            resumed.metrics
            == rank.metrics[invariance_runs.SAVED_STEP : invariance_runs.SAVED_STEP + invariance_runs.RESUMED_STEPS]
        )
        assert compare.relative_difference(rank.later, rank.saved) > compare.RELATIVE


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_another_number_of_workers_continues_from_the_same_state(seen: Results, num_ranks: int) -> None:
    uninterrupted = seen.long[2][0]
    for resumed in seen.resumed[num_ranks]:
        compare.assert_bitwise_equal(resumed.loaded, uninterrupted.saved)
        for found, expected in zip(resumed.metrics, uninterrupted.metrics[invariance_runs.SAVED_STEP :], strict=False):
            compare.assert_same_metrics(found, expected)


def test_a_worker_without_trained_responses_takes_part(seen: Results) -> None:
    [one] = seen.uneven[1]
    first, second = seen.uneven[2]
    for rank in (first, second):
        assert_same(rank.outcome, one.outcome)
    assert first.passes == one.passes
    assert len(first.passes) > 2
    # It computes a pass over one token for every pass of its peer, because of the collectives.
    assert second.passes == [recorders.Pass(1, 1)] * len(first.passes)


def test_untrained_responses_are_not_read(seen: Results) -> None:
    """For every other prompt all responses have the same score, and are left out."""
    rows = invariance_runs.REPLAY.batch_size * invariance_runs.REPLAY.group_size
    seeds = sample_seeds(replays.SEED, TRAINING_STREAM, 0, rows)
    rollout = replays.ReplayedRollouts().run(
        replays.prompts_of(0, 4), 4, invariance_runs.REPLAY.plan(2).sampling, seeds
    )
    lengths = rollout.rows[NUM_TOKENS].tolist()
    trained = [length for row, length in enumerate(lengths) if row // 4 % 2 == 0]
    metrics = [rank.metrics[0] for rank in seen.long[2]]
    tokens_of_ranks = []
    for rank in seen.long[2]:
        # Old log-probabilities of all rows, then two updates of a half each; the reference has all rows, too.
        old, *updates = rank.passes
        assert rank.reference_passes == [old]
        assert len(updates) == 2
        assert sum(each.num_tokens for each in updates) == old.num_tokens
        tokens_of_ranks.append(old.num_tokens + old.num_rows)
    # The last token of a row is predicted, and not read.
    assert sum(tokens_of_ranks) == sum(trained)
    imbalance = max(tokens_of_ranks) / (sum(trained) / 2)
    # Distributed by the lengths of all rows it would be 1.08.
    assert imbalance < 1.05
    assert [each[TOKEN_IMBALANCE] for each in metrics] == [pytest.approx(imbalance)] * 2


def test_a_loss_that_fails_on_one_rank_is_reported_by_all(seen: Results) -> None:
    assert seen.failures[1] == [""]
    [message] = set(seen.failures[2] + seen.failures[4])
    assert user_algorithms.FAILING_PATH in message
    assert user_algorithms.MESSAGE in message
