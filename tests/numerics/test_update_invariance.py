"""Training steps depend neither on the number of workers, nor on micro-batches, nor on how a pass is computed.

Rollouts are replayed: on one worker with all rows in one pass, and in other ways, whose gradients and metrics must be
the same. Workers have different amounts of tokens, so a mean of means would show. Legend: B responses.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from rljob_api.v1alpha1.algorithm import (
    Advantage,
    AdvantageType,
    Algorithm,
    Function,
    Kl,
    KlPlacement,
    Loss,
    LossAggregation,
    LossType,
)
from rljob_api.v1alpha1.optimizer import Optimizer, Schedule
from rljob_testing import covariance_loss, failing_loss, mixed_baseline
from rljob_testing.one_step import Case, Layout, Outcome, one_step
from rljob_testing.ranks import RankedRun, run_on_ranks
from rljob_testing.replayed_steps import (
    SEED,
    Pass,
    Replay,
    ReplayedRollouts,
    kept_gradients,
    prompts_of,
    replayed_run,
    watched_passes,
)
from rljob_testing.same_numbers import RELATIVE, assert_bitwise, assert_same_metrics, difference
from rljob_trainer.controller.rollout_phase import sample_seeds
from rljob_trainer.controller.training_step import TRAINING_STREAM
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.attention_kernels import Kernel
from rljob_trainer.observability.metrics import (
    ADVANTAGE_MEAN,
    KL_LOSS,
    LEARNING_RATE,
    POLICY_LOSS,
    TOKEN_IMBALANCE,
)
from rljob_trainer.workers.columns import ADVANTAGES, IS_LEARNED

ALGORITHM = Algorithm(
    entropy_coefficient=0.01,
    kl=Kl(coefficient=0.1, placement=KlPlacement.LOSS),
    drop_zero_variance_groups=True,
)
WITHOUT_KL = ALGORITHM.model_copy(update={"kl": Kl()})
COVARIANCE = Algorithm(loss=Loss(type=LossType.FUNCTION, function=Function(path=covariance_loss.PATH)))
OPTIMIZER = Optimizer(learning_rate=3e-4, warmup_steps=3, schedule=Schedule.COSINE)
LONG_REPLAY = Replay(ALGORITHM, OPTIMIZER, mini_batch_size=2)
"""Two updates per step: in the second, policy and old policy differ."""
REPLAY = replace(LONG_REPLAY, algorithm=WITHOUT_KL)
NUM_STEPS, SAVED_STEP, RESUMED_STEPS = 20, 3, 3
"""Of the long run; when it is saved; how many steps follow when it is resumed."""


@dataclass(frozen=True)
class LongRun:
    """NUM_STEPS steps."""

    metrics: list[dict[str, float]]
    passes: list[Pass]
    """What the actor has read in the first step; ..."""
    reference_passes: list[Pass]
    """... what the reference has."""
    saved: dict[str, torch.Tensor]
    """The state after SAVED_STEP steps, ..."""
    later: dict[str, torch.Tensor]
    """... and after RESUMED_STEPS more."""


@dataclass(frozen=True)
class Resumed:
    """A run that went on from a checkpoint."""

    loaded: dict[str, torch.Tensor]
    metrics: list[dict[str, float]]
    later: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Uneven:
    """An update on rows of which one rank has all that are learned from."""

    outcome: Outcome
    passes: list[Pass]


@dataclass(frozen=True)
class OfRank:
    """All that one rank has done. On four ranks there is no long run, and no uneven update."""

    steps: dict[str, Outcome]
    long: LongRun | None
    resumed: Resumed
    uneven: Uneven | None
    failure: str
    """See `failing_loss`."""


def checkpointed(replay: Replay) -> Replay:
    return replace(replay, gradient_checkpointing=True)


def micro(replay: Replay, max_tokens: int) -> Replay:
    """Rows have up to 19 tokens, updates about 45."""
    return replace(replay, max_tokens_per_micro_batch=max_tokens)


def aggregated(aggregation: LossAggregation) -> Replay:
    return replace(REPLAY, algorithm=WITHOUT_KL.model_copy(update={"aggregation": aggregation}))


KL_IN_REWARD = Kl(coefficient=4.0, placement=KlPlacement.REWARD)
"""After one step, so that the KL changes gradients by as much as the scores do."""


def with_advantage(path: str, kl: Kl = KL_IN_REWARD) -> Replay:
    advantage = Advantage(type=AdvantageType.FUNCTION, function=Function(path=path))
    return replace(REPLAY, algorithm=Algorithm(advantage=advantage, drop_zero_variance_groups=True, kl=kl))


OTHER_AGGREGATIONS = [each for each in LossAggregation if each is not REPLAY.resolved.aggregation]
COVARIANCE_REPLAY = replace(REPLAY, algorithm=COVARIANCE)
SAME_AS_ONE = {
    "micro-batches of a row or two": Case(micro(REPLAY, 19)),
    "row by row": Case(micro(REPLAY, 40), layout=Layout.PER_ROW),
    "padded": Case(REPLAY, layout=Layout.PADDED),
    "checkpointing": Case(checkpointed(REPLAY)),
    "in tiles": Case(REPLAY, in_tiles=True),
    "two workers": Case(REPLAY, 2),
    "two workers, in tiles, checkpointing": Case(checkpointed(micro(REPLAY, 40)), 2, in_tiles=True),
    "two workers, row by row": Case(micro(REPLAY, 30), 2, Layout.PER_ROW),
    "two workers, padded, checkpointing": Case(checkpointed(micro(REPLAY, 40)), 2, Layout.PADDED),
    "four workers": Case(REPLAY, 4),
    "four workers, checkpointing, micro-batches": Case(checkpointed(micro(REPLAY, 19)), 4),
}
ONE = {
    "one": Case(REPLAY),
    "covariance": Case(COVARIANCE_REPLAY),
    "advantage": Case(with_advantage(mixed_baseline.RESPONSES_PATH), step=1),
    "advantage, no KL": Case(with_advantage(mixed_baseline.RESPONSES_PATH, Kl()), step=1),
    **{f"{each} one": Case(aggregated(each)) for each in OTHER_AGGREGATIONS},
}
OTHERS = {
    **SAME_AS_ONE,
    "covariance, micro-batches": Case(micro(COVARIANCE_REPLAY, 30)),
    "covariance, two workers": Case(COVARIANCE_REPLAY, 2),
    "advantage, two workers": Case(with_advantage(mixed_baseline.RESPONSES_PATH), 2, step=1),
    "advantage on tokens": Case(with_advantage(mixed_baseline.TOKENS_PATH), step=1),
    "advantage on tokens, two workers": Case(with_advantage(mixed_baseline.TOKENS_PATH), 2, step=1),
    "bfloat16": Case(replace(REPLAY, compute_dtype=torch.bfloat16), 2),
    "bfloat16, in tiles": Case(replace(REPLAY, compute_dtype=torch.bfloat16), 2, in_tiles=True),
    **{f"{each} micro": Case(micro(aggregated(each), 19)) for each in OTHER_AGGREGATIONS},
    **{f"{each} two": Case(aggregated(each), 2) for each in OTHER_AGGREGATIONS},
}
CASES = ONE | OTHERS


def everything(root: Path, context: WorkerContext) -> OfRank:
    """In one process per rank, because each costs seconds. Two ranks save, below `root`, what others load."""
    warnings.filterwarnings("error", "FSDP2-wrapped module")
    num_ranks = context.world_size
    if num_ranks == 2:
        save_after_some_steps(root, context)
    return OfRank(
        {name: one_step(case, context) for name, case in CASES.items() if case.num_ranks == num_ranks},
        long_run(context) if num_ranks <= 2 else None,
        resume(root, context),
        uneven_update(context) if num_ranks <= 2 else None,
        failing_loss.failure_of(REPLAY, context),
    )


def long_run(context: WorkerContext) -> LongRun:
    run = replayed_run(LONG_REPLAY, context)
    assert run.reference is not None
    with watched_passes(run.actor.engine) as passes, watched_passes(run.reference.engine) as reference_passes:
        metrics = run.steps(0, 1)
    metrics += run.steps(1, SAVED_STEP)
    saved = run.state()
    metrics += run.steps(SAVED_STEP, SAVED_STEP + RESUMED_STEPS)
    later = run.state()
    metrics += run.steps(SAVED_STEP + RESUMED_STEPS, NUM_STEPS)
    return LongRun(metrics, passes, reference_passes, saved, later)


def save_after_some_steps(root: Path, context: WorkerContext) -> None:
    run = replayed_run(LONG_REPLAY, context)
    run.steps(0, SAVED_STEP)
    run.save(root, SAVED_STEP)


def resume(root: Path, context: WorkerContext) -> Resumed:
    run = replayed_run(LONG_REPLAY, context)
    [folder] = root.glob("step-*")
    run.group.load_checkpoint(folder, SAVED_STEP)
    loaded = run.state()
    num_steps = RESUMED_STEPS if context.world_size == 2 else 1
    return Resumed(loaded, run.steps(SAVED_STEP, SAVED_STEP + num_steps), run.state())


def uneven_update(context: WorkerContext) -> Uneven:
    """The first eight of sixteen rows are learned from. On two ranks the second has nothing to learn from."""
    run = replayed_run(micro(replace(REPLAY, mini_batch_size=4), 40), context)
    batch = ReplayedRollouts().run(prompts_of(0, 4), 4, run.replay.plan(1).sampling, torch.tensor([3])).batch
    is_learned_B = torch.arange(16) < 8
    columns = {IS_LEARNED: is_learned_B, ADVANTAGES: torch.linspace(-1, 2, 16)}
    share = batch.with_columns(columns).chunk(context.world_size)[context.rank]
    with kept_gradients(run.actor.engine) as gradients, watched_passes(run.actor.engine) as passes:
        share = share.union(run.actor.compute_logprobs(share))
        metrics = dict(run.actor.update_policy(share, 0))
    return Uneven(Outcome(gradients, metrics, set()), passes)


@dataclass(frozen=True)
class Seen:
    """What the ranks have done; by the number of ranks, or by the name of the case."""

    steps: dict[str, list[Outcome]]
    long: dict[int, list[LongRun]]
    resumed: dict[int, list[Resumed]]
    uneven: dict[int, list[Uneven]]
    failures: dict[int, list[str]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    program = partial(everything, tmp_path_factory.mktemp("checkpoints"))
    counts = (2, 1, 4)
    found = run_on_ranks([RankedRun(program, num_ranks) for num_ranks in counts])
    of_ranks = {
        num_ranks: [each for each in ranks if isinstance(each, OfRank)]
        for num_ranks, ranks in zip(counts, found, strict=True)
    }
    return Seen(
        {name: [rank.steps[name] for rank in of_ranks[case.num_ranks]] for name, case in CASES.items()},
        {num_ranks: [rank.long for rank in ranks if rank.long] for num_ranks, ranks in of_ranks.items()},
        {num_ranks: [rank.resumed for rank in ranks] for num_ranks, ranks in of_ranks.items()},
        {num_ranks: [rank.uneven for rank in ranks if rank.uneven] for num_ranks, ranks in of_ranks.items()},
        {num_ranks: [rank.failure for rank in ranks] for num_ranks, ranks in of_ranks.items()},
    )


def assert_same(found: Outcome, right: Outcome) -> None:
    assert len(found.gradients) == len(right.gradients)
    assert max(map(difference, found.gradients, right.gradients)) < RELATIVE
    assert_same_metrics(found.metrics, right.metrics)


@pytest.mark.parametrize("name", SAME_AS_ONE)
def test_gradients_and_metrics_are_those_of_one_worker_and_one_pass(seen: Seen, name: str) -> None:
    [one] = seen.steps["one"]
    assert len(one.gradients) == 2
    assert len(seen.steps[name]) == CASES[name].num_ranks
    for outcome in seen.steps[name]:
        assert_same(outcome, one)


def test_the_layouts_are_those_that_were_meant(seen: Seen) -> None:
    kernels = {name: set[Kernel]().union(*(rank.kernels for rank in ranks)) for name, ranks in seen.steps.items()}
    assert Kernel.PADDED in kernels["one"]
    assert Kernel.PER_ROW not in kernels["one"]
    for name, case in CASES.items():
        if case.layout is Layout.PADDED:
            assert kernels[name] == set()
        if case.layout is Layout.PER_ROW:
            assert Kernel.PER_ROW in kernels[name]
            assert Kernel.PADDED not in kernels[name]


@pytest.mark.parametrize("aggregation", OTHER_AGGREGATIONS)
@pytest.mark.parametrize("other", ["micro", "two"])
def test_every_aggregation_is_that_of_one_worker(seen: Seen, aggregation: LossAggregation, other: str) -> None:
    for outcome in seen.steps[f"{aggregation} {other}"]:
        assert_same(outcome, seen.steps[f"{aggregation} one"][0])


def test_aggregations_differ(seen: Seen) -> None:
    cases = ["one", *(f"{each} one" for each in OTHER_AGGREGATIONS)]
    losses = {seen.steps[each][0].metrics[POLICY_LOSS] for each in cases}
    assert len(losses) == len(LossAggregation)


@pytest.mark.parametrize("other", ["micro-batches", "two workers"])
def test_a_loss_that_looks_at_the_whole_mini_batch_is_that_of_one_worker(seen: Seen, other: str) -> None:
    [one] = seen.steps["covariance"]
    assert difference(one.gradients[0], seen.steps["one"][0].gradients[0]) > 0.1
    for outcome in seen.steps[f"covariance, {other}"]:
        assert_same(outcome, one)


def test_kl_in_the_reward_is_that_of_the_response(seen: Seen) -> None:
    """Two workers have the responses in another order than the rollout."""
    [one], [without] = seen.steps["advantage"], seen.steps["advantage, no KL"]
    assert difference(one.gradients[0], without.gradients[0]) > 0.1
    assert one.metrics[KL_LOSS] > 0
    for outcome in seen.steps["advantage, two workers"]:
        assert_same(outcome, one)


@pytest.mark.parametrize("name", ["advantage on tokens", "advantage on tokens, two workers"])
def test_an_advantage_on_tokens_sees_groups_and_kl_of_what_is_learned_from(seen: Seen, name: str) -> None:
    [one] = seen.steps["advantage"]
    on_controller = {ADVANTAGE_MEAN: one.metrics[ADVANTAGE_MEAN]}
    for outcome in seen.steps[name]:
        assert_same(replace(outcome, metrics=outcome.metrics | on_controller), one)


@pytest.mark.parametrize("name", ["bfloat16", "bfloat16, in tiles"])
def test_half_precision_on_two_workers_is_near(seen: Seen, name: str) -> None:
    [one] = seen.steps["one"]
    for outcome in seen.steps[name]:
        assert 1e-4 < difference(outcome.gradients[0], one.gradients[0]) < 0.1


def test_twenty_steps_on_two_workers_are_those_of_one(seen: Seen) -> None:
    [one] = seen.long[1]
    assert len({step[LEARNING_RATE] for step in one.metrics}) > NUM_STEPS // 2
    for rank in seen.long[2]:
        assert len(rank.metrics) == NUM_STEPS
        for found, right in zip(rank.metrics, one.metrics, strict=True):
            assert_same_metrics(found, right)


def test_the_same_twice_and_a_resumed_run_are_equal_to_the_last_bit(seen: Seen) -> None:
    for rank, resumed in zip(seen.long[2], seen.resumed[2], strict=True):
        assert_bitwise(resumed.loaded, rank.saved)
        assert_bitwise(resumed.later, rank.later)
        assert resumed.metrics == rank.metrics[SAVED_STEP : SAVED_STEP + RESUMED_STEPS]
        assert difference(rank.later, rank.saved) > RELATIVE


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_another_number_of_workers_goes_on_from_the_same_state(seen: Seen, num_ranks: int) -> None:
    right = seen.long[2][0]
    for resumed in seen.resumed[num_ranks]:
        assert_bitwise(resumed.loaded, right.saved)
        for found, expected in zip(resumed.metrics, right.metrics[SAVED_STEP:], strict=False):
            assert_same_metrics(found, expected)


def test_a_worker_without_anything_to_learn_from_takes_part(seen: Seen) -> None:
    [one] = seen.uneven[1]
    first, second = seen.uneven[2]
    for rank in (first, second):
        assert_same(rank.outcome, one.outcome)
    assert first.passes == one.passes
    assert len(first.passes) > 2
    # A pass over one token for every pass of its peer, for the collectives' sake.
    assert second.passes == [Pass(1, 1)] * len(first.passes)


def test_what_is_not_learned_from_is_not_read(seen: Seen) -> None:
    """Of every other prompt all responses are worth the same, and are left out."""
    rows = REPLAY.batch_size * REPLAY.group_size
    seeds = sample_seeds(SEED, TRAINING_STREAM, 0, rows)
    rollout = ReplayedRollouts().run(prompts_of(0, 4), 4, REPLAY.plan(2).sampling, seeds)
    lengths = rollout.lengths_B.tolist()
    learned = [length for row, length in enumerate(lengths) if row // 4 % 2 == 0]
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
    assert sum(tokens_of_ranks) == sum(learned)
    imbalance = max(tokens_of_ranks) / (sum(learned) / 2)
    # Dealt out by the lengths of all rows it would be 1.08.
    assert imbalance < 1.05
    assert [each[TOKEN_IMBALANCE] for each in metrics] == [pytest.approx(imbalance)] * 2


def test_a_loss_that_fails_on_one_rank_is_told_by_all(seen: Seen) -> None:
    assert seen.failures[1] == [""]
    [told] = set(seen.failures[2] + seen.failures[4])
    assert failing_loss.PATH in told
    assert failing_loss.MESSAGE in told
