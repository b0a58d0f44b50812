"""User-defined advantages and losses: how they are found, which arguments they get, and the errors for invalid ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rljob_api.v1alpha1.advantage import Advantage, AdvantageType, Function
from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.policy_loss import Loss, LossType
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_testing.training import token_rows
from rljob_testing.training.user_algorithms import ALGORITHM_MODULE
from rljob_trainer.algorithms.advantage_registry import advantage_estimator
from rljob_trainer.algorithms.functions import in_step, refuse_not_finite
from rljob_trainer.algorithms.interfaces import (
    ADVANTAGE_COLUMNS,
    KL_PENALTIES,
    LOSS_COLUMNS,
    AdvantageEstimator,
    HeadOutputs,
    Level,
    LossInputs,
    OneWorker,
    PolicyLoss,
    Reduce,
    ResponseInputs,
    TokenInputs,
    WholeInputs,
)
from rljob_trainer.algorithms.loss_registry import policy_loss
from rljob_trainer.algorithms.several_workers import on_workers
from rljob_trainer.errors import AlgorithmFunctionError, ConfigurationError
from rljob_trainer.workers import columns


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An importable module of this test."""
    name = f"algorithms_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(ALGORITHM_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def estimator_of(path: str, group_size: int = 4) -> AdvantageEstimator:
    advantage = Advantage(type=AdvantageType.FUNCTION, function=Function(path=path))
    return advantage_estimator(resolve_algorithm(Algorithm(advantage=advantage)), group_size)


def loss_of(path: str) -> PolicyLoss:
    loss = Loss(type=LossType.FUNCTION, function=Function(path=path))
    return policy_loss(resolve_algorithm(Algorithm(loss=loss)))


def responses(*rewards: float) -> ResponseInputs:
    count = len(rewards)
    return ResponseInputs(torch.tensor(rewards), torch.zeros(count, dtype=torch.int64), torch.arange(count) + 1)


def token_inputs(rewards: list[float], lengths: list[int], **columns_N: Tensor) -> TokenInputs:
    return TokenInputs(torch.tensor(rewards), torch.arange(len(rewards)), token_rows.segments_of(*lengths), columns_N)


def loss_inputs(logprobs: list[float], **columns_N: Tensor) -> LossInputs:
    logprobs_N = torch.tensor(logprobs, requires_grad=True)
    return LossInputs(
        token_rows.segments_of(len(logprobs)),
        logprobs_N,
        logprobs_N.detach() + 0.5,
        torch.ones(len(logprobs)),
        columns_N,
    )


def test_a_plain_advantage_is_called_with_all_responses(module: str) -> None:
    estimator = estimator_of(f"{module}:centered")
    assert estimator.level is Level.RESPONSE
    assert estimator.name == f"{module}:centered"
    assert estimator.for_responses is not None
    assert estimator.for_responses(responses(1.0, 0.0, 0.5)).tolist() == [0.5, -0.5, 0.0]


def test_an_advantage_on_tokens_knows_the_tokens_of_other_workers(module: str) -> None:
    estimator = estimator_of(f"{module}:largest")
    assert estimator.level is Level.TOKEN
    parts = [token_inputs([1.0, 3.0], [1, 2]), token_inputs([], []), token_inputs([2.0], [1])]

    def advantages(part: TokenInputs, reduce: Reduce) -> list[float]:
        assert estimator.for_tokens is not None
        return estimator.for_tokens(part, reduce).advantages_N.tolist()

    assert on_workers(parts, advantages) == [[-2.0, 0.0, 0.0], [], [-1.0]]


def test_functions_get_the_declared_columns(module: str) -> None:
    estimator = estimator_of(f"{module}:distance")
    assert estimator.needs == {"ref_logprobs", "old_logprobs"}
    assert estimator.for_tokens is not None
    inputs = token_inputs([1.0], [2], old_logprobs=torch.tensor([-1.0, -2.0]), ref_logprobs=torch.tensor([-2.0, -2.0]))
    assert estimator.for_tokens(inputs, OneWorker()).advantages_N.tolist() == [1.0, 0.0]


def test_a_plain_loss_is_called(module: str) -> None:
    loss = loss_of(f"{module}:reinforce")
    assert (loss.needs, loss.wanted, loss.whole_pass) == (frozenset(), HeadOutputs(), None)
    inputs = loss_inputs([-1.0, -3.0])
    found = loss.compute(inputs)
    assert found.losses_N.tolist() == [1.0, 3.0]
    assert {name: value.item() for name, value in found.sums.items()} == {"not_finite": 0}
    torch.autograd.backward(found.losses_N.sum())
    assert inputs.logprobs_N.grad is not None
    assert inputs.logprobs_N.grad.tolist() == [-1.0, -1.0]


def test_a_worker_without_tokens_takes_part_in_the_graph(module: str) -> None:
    inputs = LossInputs(token_rows.segments_of(), torch.zeros(0, requires_grad=True), torch.zeros(0), torch.zeros(0))
    found = loss_of(f"{module}:reinforce").compute(inputs)
    assert found.losses_N.requires_grad
    assert found.losses_N.shape == (0,)


def test_a_loss_declares_its_needs(module: str) -> None:
    loss = loss_of(f"{module}:informed")
    assert loss.needs == {"rollout_logprobs"}
    assert loss.wanted == HeadOutputs(entropy=True, squares=True)
    base = loss_inputs([-1.0, -3.0], rollout_logprobs=torch.tensor([-0.5, -2.5]))
    inputs = LossInputs(
        base.segments,
        base.logprobs_N,
        base.old_logprobs_N,
        base.advantages_N,
        base.columns,
        entropy_N=torch.tensor([2.0, 2.0]),
        squares_N=torch.tensor([1.0, 0.5]),
    )
    found = loss.compute(inputs)
    assert found.losses_N.tolist() == [2.0, 12.0]
    assert found.sums["weight"].item() == 2.0
    assert not found.sums["weight"].requires_grad


def test_a_loss_may_have_a_pass_over_the_whole_mini_batch(module: str) -> None:
    loss = loss_of(f"{module}:of_the_chosen")
    assert loss.whole_pass is not None
    base = loss_inputs([-1.0, -3.0, -2.0])
    whole = loss.whole_pass(
        WholeInputs(base.segments, base.logprobs_N, base.old_logprobs_N, base.advantages_N, {}), OneWorker()
    )
    assert whole["chosen"].tolist() == [False, True, True]
    assert whole["count"].item() == 2


BAD_ADVANTAGES = [
    ("no_such_module:f", r"no module 'no_such_module' .* PYTHONPATH"),
    ("{m}:centred", r"has no 'centred'; did you mean centered\?"),
    ("{m}:NUMBER", r"{m}:NUMBER is a int; name a plain function"),
    ("{m}:reinforce", r"raised AttributeError;(?s:.)*no attribute 'advantages_N'"),
    ("{m}:informed", r"{m}:informed is a policy loss; name it in algorithm\.loss\.function"),
    ("{m}:of_tokens", r"{m}:of_tokens\(inputs, reduce\) cannot be called as function\(inputs\).*@token_advantage\(\)"),
    ("{m}:by_length", r"\[12\] of int32.*advantage per response.*floating-point"),
    ("{m}:normalized", r"NaN.* 4 of 12 responses.*index 4, where the reward is 1"),
    ("{m}:exits", r"{m}:exits raised SystemExit"),
    ("{m}:draws", r"equal inputs.*no random numbers"),
    ("{m}:huge", r"NaN.* 12 of 12 responses"),
    ("{m}:sparse", r"torch\.sparse_coo.*dense tensor"),
    ("random:advantage", r"module of Python's standard library, 'random'.*my_random"),
    ("{m}:largest_of_all", r"{m}:largest_of_all has no signature that Python can read \(no signature"),
    ("{m}:Estimator", r"{m}:Estimator is a class; name a plain function"),
    ("{m}:piecewise", r"{m}:piecewise is a generator \(it has `yield`\); name a plain function"),
    ("{m}:awaited", r"{m}:awaited is an async function; name a plain function"),
    ("{m}:Unsigned", r"{m}:Unsigned .*(has no signature that Python can read|raised)"),
    ("{m}:unfitted", r"{m}:unfitted .*needs 'values'.*critic.*TokenAdvantages\(advantages_N, returns_N\)"),
    ("{m}:valued", r"{m}:valued needs 'worth'.*old_logprobs, rollout_logprobs, ref"),
    ("{m}:needs_rows", r"raised IndexError(?s:.)*\n\(.*worker without any token.*`reduce`"),
]


@pytest.mark.parametrize(("path", "message"), BAD_ADVANTAGES)
def test_unusable_advantages_are_rejected_at_once(module: str, path: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message.replace("{m}", module)) as caught:
        estimator_of(path.replace("{m}", module))
    assert str(caught.value).startswith("spec.training.algorithm.advantage.function.path: ")


def test_an_advantage_is_tried_on_groups_of_the_jobs_size(module: str) -> None:
    with pytest.raises(ConfigurationError, match="for 2 of 6 responses, first at index 2"):
        estimator_of(f"{module}:normalized", group_size=2)


BAD_LOSSES = [
    ("types:loss", r"module of Python's standard library, 'types'.*my_types"),
    ("{m}:largest_of_all", r"{m}:largest_of_all has no signature that Python can read \(no signature"),
    ("{m}:Estimator", r"{m}:Estimator is a class; name a plain function"),
    ("{m}:largest", r"{m}:largest is an advantage; name it in algorithm\.advantage\.function"),
    ("{m}:of_tokens", r"cannot be called as function\(inputs\).*@policy_loss_function"),
    ("{m}:asks_for_what_it_has", r"needs 'old_logprobs'.*rollout_logprobs, ref"),
    ("{m}:per_row", r"\[3\] of float32.*one loss per token.*\[9\]"),
    ("{m}:number", r"a float;.*one loss per token, \[9\], or TokenLosses"),
    ("{m}:detached", r"losses without a gradient;.*logprobs_N, without detach\(\)"),
    ("{m}:elsewhere", r"gradient does not reach logprobs_N"),
    ("{m}:infinite", r"NaN.* 9 of 9 tokens; .*finite losses"),
    ("{m}:steep", r"gradient.* NaN.*square roots"),
    ("{m}:of_the_micro_batch", r"micro-batch.*use `whole_pass`"),
    (
        "{m}:raises",
        r"raised AttributeError;(?s:.)*inputs\.no_such_thing(?s:.)*\n\(.*made-up inputs",
    ),
    ("{m}:sums_per_token", r"\[9\] of float32 as the sum 'logprobs'; .*shape \[\]"),
    ("{m}:sum_over_a_metric", r"named a sum 'entropy'; it is reported as actor/entropy, a mean over tokens"),
    ("{m}:sum_that_is_added_up", r"named a sum 'kl_sum'; it is reported as actor/kl_sum, a mean over tokens"),
    ("{m}:sum_with_a_bad_name", r"named a sum 'KL sum'; use lower-case letters"),
    ("{m}:whole_of_wrong_shape", r"\[1\] of float32 as 'mean' from its whole pass; .*per token"),
    ("{m}:whole_over_a_column", r"named a value of its whole pass 'old_logprobs'; use a name that no column has"),
    ("{m}:whole_of_one_worker", r"'mean' from its whole pass.*other workers.*use `reduce`"),
    ("{m}:whole_ranks_of_one_worker", r"'rank' from its whole pass.*other workers.*use `reduce`"),
    ("{m}:whole_squeezed", r"'one' from its whole pass.*dimensions or another dtype"),
    ("{m}:whole_of_other_names", r"names from its whole pass on some workers"),
    ("{m}:whole_no_number", r"NaN.* as 'log' from its whole pass"),
    ("{m}:sums_in_a_list", r"a list as sums; .*mapping of names to tensors"),
    ("{m}:exits", r"{m}:exits raised SystemExit"),
    ("{m}:whole_tensor", r"\[0\] of float32 from its whole pass; .*mapping of names to tensors"),
]


@pytest.mark.parametrize(("path", "message"), BAD_LOSSES)
def test_unusable_losses_are_rejected_at_once(module: str, path: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message.replace("{m}", module)) as caught:
        loss_of(path.replace("{m}", module))
    assert str(caught.value).startswith("spec.training.algorithm.loss.function.path: ")


def test_a_later_failure_names_the_function_and_the_step(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    estimator, loss = estimator_of(f"{module}:centered"), loss_of(f"{module}:later")
    assert estimator.for_responses is not None
    with (
        pytest.raises(AlgorithmFunctionError, match=rf"^step 7: spec\..*advantage.*{module}:centered .*NaN"),
        in_step(6),
    ):
        estimator.for_responses(responses(1.0, torch.nan))
    monkeypatch.setattr(f"{module}.later_is", None)
    with pytest.raises(AlgorithmFunctionError, match=rf"{module}:later raised TypeError(?s:.)*/ later_is"):
        loss.compute(loss_inputs([-1.0]))


def test_losses_that_are_not_finite_are_counted_and_rejected_at_the_end_of_the_step(module: str) -> None:
    loss = loss_of(f"{module}:reinforce")
    found = loss.compute(loss_inputs([-1.0, torch.nan, -torch.inf, -2.0]))
    share = found.sums["not_finite"].item() / 4
    with pytest.raises(AlgorithmFunctionError, match=f"{module}:reinforce .*NaN.* 50 % of the tokens"):
        refuse_not_finite(loss, {"actor/not_finite": share})
    refuse_not_finite(loss, {"actor/not_finite": 0.0})
    refuse_not_finite(loss, {})


def test_the_recipes_parts_have_their_settings() -> None:
    for normalize, expected in ((True, 2**-0.5 / (1 + 1e-6 * 2**0.5)), (False, 0.5)):
        algorithm = Algorithm.from_wire({"advantage": {"groupRelative": {"normalizeByStd": normalize}}})
        estimator = advantage_estimator(resolve_algorithm(algorithm))
        assert (estimator.level, estimator.needs) == (Level.RESPONSE, frozenset())
        assert estimator.for_responses is not None
        assert estimator.for_responses(responses(1.0, 0.0)).tolist() == pytest.approx([expected, -expected])
    clipped = Algorithm.from_wire(
        {"loss": {"clipped": {"clipRatioLow": 0.1, "clipRatioHigh": 0.3, "dualClipRatio": 2}}}
    )
    loss = policy_loss(resolve_algorithm(clipped))
    ratios_N, advantages_N = torch.tensor([0.5, 1.5, 9.0]), torch.tensor([-1.0, 1.0, -1.0])
    found = loss.compute(LossInputs(token_rows.segments_of(3), ratios_N.log(), torch.zeros(3), advantages_N))
    assert found.losses_N.tolist() == pytest.approx([0.9, -1.3, 2.0])
    assert set(found.sums) == {"pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"}


def test_a_missing_function_path_is_reported() -> None:
    resolved = resolve_algorithm(Algorithm(loss=Loss(type=LossType.FUNCTION)))
    with pytest.raises(ConfigurationError, match=re.escape("spec.training.algorithm.loss.function.path: missing")):
        policy_loss(resolved)


def test_columns_have_the_workers_names() -> None:
    names = (columns.OLD_LOGPROBS, columns.ROLLOUT_LOGPROBS, columns.REF_LOGPROBS)
    assert (*names, KL_PENALTIES, columns.VALUES) == ADVANTAGE_COLUMNS
    assert (columns.ROLLOUT_LOGPROBS, columns.REF_LOGPROBS) == LOSS_COLUMNS


def test_an_estimator_has_one_function() -> None:
    with pytest.raises(ValueError, match=r"advantage both: .*for_responses or for_tokens"):
        AdvantageEstimator("both")
