"""What `maskTruncatedResponses` leaves out of an update, compared with a plain loop over responses. The first update of
a step is compared: its old log-probabilities are its own, and its ratios are all 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.kl import Kl, KlPlacement
from rljob_testing import compare
from rljob_testing.training import plain_grpo, recorders, replays, stub_step
from rljob_trainer.controller.step_rows import StepRows
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.token_model import NAME_PREFIX
from rljob_trainer.observability.metrics import ADVANTAGE_MEAN, KL_LOSS, RESPONSE_CLIP_RATIO, TRAINED_FRACTION
from rljob_trainer.workers.columns import IS_TRUNCATED

MASKING = Algorithm(mask_truncated_responses=True)
REPLAY = replays.Replay(MASKING, num_steps=1)
KL_COEFFICIENT, KL_TARGET, KL_HORIZON = 0.5, 0.35, 64
Moved = TypeVar("Moved", bound=nn.Module)


def is_cut_off(tokens_N: Tensor) -> bool:
    return len(tokens_N) == replays.LONGEST_RESPONSE


def test_truncated_responses_are_not_trained_on_and_not_counted(context: WorkerContext) -> None:
    rows = plain_grpo.rows_of_step(REPLAY, 0)
    advantages = plain_grpo.group_advantages(rows, REPLAY.group_size)
    model = plain_grpo.initial_policy()
    trained = [
        (row.logprobs_N(model, 1.0), advantage)
        for row, advantage in zip(rows, advantages, strict=True)
        if not is_cut_off(row.tokens_T[row.is_response_T])
    ]
    assert 0 < len(trained) < len(rows)
    num_tokens = sum(len(new_N) for new_N, _ in trained)
    loss = torch.stack(
        [plain_grpo.clipped_losses(new_N, new_N.detach(), advantage).sum() for new_N, advantage in trained]
    ).sum()
    (loss / num_tokens).backward()  # type: ignore[no-untyped-call]
    expected = {NAME_PREFIX + name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    _, found = plain_grpo.first_update(REPLAY, context)
    assert compare.relative_difference(found, expected) < compare.RELATIVE
    _, unmasked = plain_grpo.first_update(replace(REPLAY, algorithm=Algorithm()), context)
    assert compare.relative_difference(unmasked, expected) > 0.01
    metrics = replays.replayed_run(REPLAY, context).step(0)
    assert metrics[TRAINED_FRACTION] == len(trained) / len(rows)
    assert metrics[RESPONSE_CLIP_RATIO] == pytest.approx(1 - len(trained) / len(rows))
    assert metrics[ADVANTAGE_MEAN] == pytest.approx(sum(advantage for _, advantage in trained) / len(trained), abs=1e-6)
    assert replays.replayed_run(replace(REPLAY, algorithm=Algorithm()), context).step(0)[TRAINED_FRACTION] == 1.0


@pytest.mark.parametrize("placement", list(KlPlacement))
def test_masked_responses_cost_a_pass_only_if_their_kl_counts(context: WorkerContext, placement: KlPlacement) -> None:
    algorithm = MASKING.model_copy(update={"kl": Kl(coefficient=0.1, placement=placement)})
    run = replays.replayed_run(replace(REPLAY, algorithm=algorithm), context)
    assert run.reference is not None
    with (
        recorders.recorded_passes(run.reference.engine) as referred,
        recorders.recorded_passes(run.actor.engine) as passes,
    ):
        run.step(0)
    rows = plain_grpo.rows_of_step(REPLAY, 0)
    lengths = [len(row.tokens_T) - 1 for row in rows]
    trained = [
        length for length, row in zip(lengths, rows, strict=True) if not is_cut_off(row.tokens_T[row.is_response_T])
    ]
    update = recorders.Pass(sum(trained), len(trained))
    if placement is KlPlacement.LOSS:
        assert (referred, passes) == ([update], [update])
    else:
        all_rows = recorders.Pass(sum(lengths), len(rows))
        assert (referred, passes) == ([all_rows], [all_rows, update])


def test_masked_responses_have_no_part_in_whitening_and_kl(context: WorkerContext) -> None:
    """REINFORCE++ with the KL in its rewards, against a reference that is another model. Only responses that are
    trained on are whitened, averaged in the KL and counted for the coefficient."""
    controller = {"type": "Adaptive", "adaptive": {"target": KL_TARGET, "horizon": KL_HORIZON}}
    setting = {"coefficient": KL_COEFFICIENT, "estimator": "K2", "placement": "Reward", "controller": controller}
    wire = {"type": "ReinforcePlusPlus", "maskTruncatedResponses": True, "kl": setting}
    replay = replace(REPLAY, algorithm=Algorithm.from_wire(wire))
    model, other = plain_grpo.initial_policy(), moved(plain_grpo.initial_policy())
    rows = plain_grpo.rows_of_step(replay, 0)
    trained = [row for row in rows if not is_cut_off(row.tokens_T[row.is_response_T])]
    new = [row.logprobs_N(model, 1.0) for row in trained]
    with torch.no_grad():
        kl = [(new_N - row.logprobs_N(other, 1.0)).square() / 2 for new_N, row in zip(new, trained, strict=True)]
    returns = []
    for row, kl_N in zip(trained, kl, strict=True):
        rewards_N = -KL_COEFFICIENT * kl_N
        rewards_N[-1] += row.score
        returns.append(rewards_N.flip(0).cumsum(0).flip(0))
    returns_N = torch.cat(returns)
    advantages_N = (returns_N - returns_N.mean()) / returns_N.std()
    # The derivative of a ratio of 1 is that of its logarithm.
    (-advantages_N * torch.cat(new)).mean().backward()  # type: ignore[no-untyped-call]
    expected = {NAME_PREFIX + name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    run = replays.replayed_run(replay, context)
    assert run.reference is not None
    moved(run.reference.engine.model)
    with recorders.recorded_gradients(run.actor.engine) as gradients:
        metrics = run.step(0)
    assert compare.relative_difference(gradients[0], expected) < compare.RELATIVE
    measured = float(torch.cat(kl).mean())
    assert metrics[KL_LOSS] == pytest.approx(measured, rel=compare.RELATIVE)
    error = measured / KL_TARGET - 1
    assert 0.05 < abs(error) < 0.2
    factor = 1 + error * len(trained) / KL_HORIZON
    assert run.training_step.kl_coefficient.value == pytest.approx(KL_COEFFICIENT * factor, rel=1e-6)


def moved(model: Moved) -> Moved:
    """The model with other weights, which follow from its own."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    return model


def all_cut_off(generate: Callable[..., StepRows], *given: object) -> StepRows:
    generated = generate(*given)
    is_truncated_B = torch.ones_like(generated.rollout.batch[IS_TRUNCATED])
    batch = generated.rollout.batch.with_columns({IS_TRUNCATED: is_truncated_B})
    return StepRows.of(generated.plan, replace(generated.rollout, batch=batch), generated.is_kept_B)


def test_a_step_whose_responses_were_all_truncated_changes_nothing(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replays.replayed_run(REPLAY, context)
    monkeypatch.setattr(run.training_step, "_generated", partial(all_cut_off, run.training_step._generated))
    before = run.weights()
    metrics = run.training_step.run(stub_step.drawn(replays.prompts_of(0, REPLAY.batch_size)), 0)[1]
    assert metrics[TRAINED_FRACTION] == 0.0
    assert ADVANTAGE_MEAN not in metrics
    after = run.weights()
    # Adam's moments are 0 after gradients of 0.
    assert all(torch.equal(before[name], after[name]) for name in before)
