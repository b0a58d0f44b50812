"""Updates that fail: gradients that are not finite, and user functions that fail in the middle of a step. Rollouts are
replayed, on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from rljob_api.v1alpha1.advantage import Advantage, AdvantageType, Function
from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing import compare
from rljob_testing.training import replays, user_algorithms
from rljob_trainer.algorithms.interfaces import LossInputs, TokenLosses
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.errors import AlgorithmFunctionError, CollectiveFunctionError, NonFiniteUpdateError
from rljob_trainer.observability.metrics import GRADIENT_NORM, NUM_SKIPPED_UPDATES, STALENESS_MAX, STALENESS_MEAN
from rljob_trainer.workers.actor import ActorWorker

REPLAY = replays.Replay(optimizer=Optimizer(learning_rate=1e-3, weight_decay=0.1))
"""One update per step."""
TWO_UPDATES = replace(REPLAY, mini_batch_size=2)
NAN = float("nan")
ON_TOKENS = Algorithm(
    advantage=Advantage(type=AdvantageType.FUNCTION, function=Function(path=user_algorithms.FAILING_ADVANTAGE_PATH))
)


@contextmanager
def scaled_gradients(actor: ActorWorker, factors: Iterable[float]) -> Iterator[None]:
    """While it is open, each update's gradient is multiplied by the next factor. Losses stay the same."""
    policy_loss, remaining = actor.policy_loss, iter(factors)

    def compute(inputs: LossInputs) -> TokenLosses:
        factor = next(remaining)
        inputs.logprobs_N.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
        return policy_loss.compute(inputs)

    actor.policy_loss = replace(policy_loss, compute=compute)
    try:
        yield
    finally:
        actor.policy_loss = policy_loss


def test_gradients_that_are_not_finite_change_nothing(context: WorkerContext) -> None:
    run, without_them = replays.replayed_run(REPLAY, context), replays.replayed_run(REPLAY, context)
    for each in (run, without_them):
        assert each.step(0)[NUM_SKIPPED_UPDATES] == 0
    before = run.state()
    # In the second case each gradient is finite, but their squares are not.
    for step, factor, norm in ((1, NAN, "nan"), (2, 1e25, "inf")):
        with scaled_gradients(run.actor, [factor]):
            metrics = run.step(step)
        assert (str(metrics[GRADIENT_NORM]), metrics[NUM_SKIPPED_UPDATES]) == (norm, 1)
        compare.assert_bitwise_equal(run.state(), before)
    metrics = run.step(3)
    assert metrics[NUM_SKIPPED_UPDATES] == 0
    expected = without_them.step(3)
    # It knows the version of step 1: the replayed responses are older for a run that has counted the steps between.
    of_age = {STALENESS_MEAN, STALENESS_MAX}
    assert {name: metrics[name] for name in metrics.keys() - of_age} == {
        name: expected[name] for name in expected.keys() - of_age
    }
    compare.assert_bitwise_equal(run.state(), without_them.state())
    assert compare.relative_difference(run.state(), before) > compare.RELATIVE


def test_five_failed_updates_in_a_row_end_the_run(context: WorkerContext) -> None:
    """Counted across steps, and from zero after an update that succeeded."""
    run = replays.replayed_run(TWO_UPDATES, context)
    factors = [NAN, NAN, NAN, NAN, 1.0, NAN, NAN, NAN, NAN, NAN]
    with scaled_gradients(run.actor, factors):
        assert [step[NUM_SKIPPED_UPDATES] for step in run.steps(0, 4)] == [2, 2, 1, 2]
        with pytest.raises(NonFiniteUpdateError, match=r"^actor: 5 consecutive updates .*not finite"):
            run.step(4)


def test_a_loss_that_is_not_finite_is_reported_before_its_gradients(context: WorkerContext) -> None:
    """Also if one step has so many updates that they would end the run."""
    algorithm = user_algorithms.algorithm_with_loss(user_algorithms.NO_NUMBER_PATH)
    run = replays.replayed_run(replace(TWO_UPDATES, algorithm=algorithm, num_epochs_per_batch=3), context)
    with (
        user_algorithms.failing(),
        pytest.raises(AlgorithmFunctionError, match=f"{user_algorithms.NO_NUMBER_PATH} .*NaN.* 100 % of"),
    ):
        run.step(0)


@pytest.mark.parametrize(
    ("algorithm", "path", "kind"),
    [
        (
            user_algorithms.algorithm_with_loss(user_algorithms.FAILING_PATH),
            user_algorithms.FAILING_PATH,
            AlgorithmFunctionError,
        ),
        (
            user_algorithms.algorithm_with_loss(user_algorithms.FAILING_WHOLE_PASS_PATH),
            user_algorithms.FAILING_WHOLE_PASS_PATH,
            CollectiveFunctionError,
        ),
        (ON_TOKENS, user_algorithms.FAILING_ADVANTAGE_PATH, CollectiveFunctionError),
    ],
)
def test_a_failure_says_whether_other_ranks_may_be_blocked(
    context: WorkerContext, algorithm: Algorithm, path: str, kind: type[AlgorithmFunctionError]
) -> None:
    """After a `CollectiveFunctionError` the controller calls the workers no more."""
    run = replays.replayed_run(replace(REPLAY, algorithm=algorithm), context)
    with user_algorithms.failing(), pytest.raises(AlgorithmFunctionError) as caught:
        run.step(0)
    assert type(caught.value) is kind
    assert f"{path} raised ZeroDivisionError" in str(caught.value)
    assert user_algorithms.MESSAGE in str(caught.value)
