"""The settings of an update: mini-batches and epochs, precision, recomputation, temperature, truncated sampling. The
expected values come from transformers and PyTorch alone: one process, one row at a time, eager attention, no sharding.

Legend: T tokens of a row, R response tokens of it, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rljob_api.v1alpha1.advantage import Function
from rljob_api.v1alpha1.algorithm import Algorithm, LossAggregation
from rljob_api.v1alpha1.kl import Kl, KlEstimator, KlPlacement
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_api.v1alpha1.policy_loss import Loss, LossType
from rljob_testing import compare
from rljob_testing.training import plain_grpo, recorders, replays, user_algorithms
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.token_logprobs import Entropy
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.observability.metrics import (
    CLIP_FRACTION,
    LOGPROB_DIFF_MAX,
    LOGPROB_DIFF_MEAN,
    LOGPROB_DIFF_SHARE,
    ROLLOUT_K3_KL,
    ROLLOUT_KL,
)
from rljob_trainer.workers.columns import OLD_LOGPROBS, REF_LOGPROBS, token_batch
from rljob_trainer.workers.reference import ReferenceWorker

SMALL_STEP = 1e-5
OPTIMIZER = Optimizer(learning_rate=1e-3, weight_decay=0.1, max_gradient_norm=0.5, epsilon=1e-6)
TEMPERATURE = 0.7
ALGORITHM = Algorithm(
    aggregation=LossAggregation.TOKEN_MEAN,
    entropy_coefficient=0.1,
    kl=Kl(coefficient=0.5, estimator=KlEstimator.K3, placement=KlPlacement.LOSS),
)
SEVERAL_UPDATES = replays.Replay(
    ALGORITHM, OPTIMIZER, num_steps=2, mini_batch_size=2, num_epochs_per_batch=2, temperature=TEMPERATURE
)
LARGEST_KL = 10.0
"""Bound on a token's KL: it counts for no more, and has no gradient beyond."""


def plain_run(replay: replays.Replay) -> PreTrainedModel:
    """GRPO as in its papers, on the replayed rollouts, with an entropy bonus and the K3 estimate of KL(new || initial
    model); every term is a mean over the tokens of the mini-batch."""
    model, initial_model, spec = plain_grpo.initial_policy(), plain_grpo.initial_policy(), replay.optimizer
    entropy_weight, kl_weight = replay.algorithm.entropy_coefficient, replay.algorithm.kl.coefficient
    adamw = torch.optim.AdamW(
        model.parameters(),
        lr=spec.learning_rate,
        betas=(spec.beta1, spec.beta2),
        eps=spec.epsilon,
        weight_decay=spec.weight_decay,
        foreach=False,
    )
    for step in range(replay.num_steps):
        rows = plain_grpo.rows_of_step(replay, step)
        advantages = plain_grpo.group_advantages(rows, replay.group_size)
        with torch.no_grad():
            old = [row.logprobs_N(model, replay.temperature) for row in rows]
            initial = [row.logprobs_N(initial_model, replay.temperature) for row in rows]
        num_rows = replay.mini_batch_size * replay.group_size
        for _ in range(replay.num_epochs_per_batch):
            for start in range(0, len(rows), num_rows):
                mini_batch = range(start, start + num_rows)
                num_tokens = sum(len(old[row]) for row in mini_batch)
                adamw.zero_grad()
                for row in mini_batch:
                    all_NV = rows[row].all_logprobs_NV(model, replay.temperature)
                    new_N = rows[row].of_targets(all_NV)
                    entropy_N = -(all_NV.exp() * all_NV).sum(dim=1)
                    log_ratio_N = initial[row] - new_N
                    kl_N = (log_ratio_N.exp() - log_ratio_N - 1).clamp(max=LARGEST_KL)
                    losses_N = plain_grpo.clipped_losses(new_N, old[row], advantages[row])
                    losses_N = losses_N - entropy_weight * entropy_N + kl_weight * kl_N
                    torch.autograd.backward(losses_N.sum() / num_tokens)
                nn.utils.clip_grad_norm_(model.parameters(), spec.max_gradient_norm)
                adamw.step()
    return model


def named(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def moved(found: dict[str, Tensor], start: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: found[name] - start[name] for name in start}


def test_several_updates_of_a_batch_equal_those_of_plain_torch(context: WorkerContext) -> None:
    start = named(plain_grpo.initial_policy())
    run = replays.replayed_run(SEVERAL_UPDATES, context)
    metrics = run.steps(0, SEVERAL_UPDATES.num_steps)
    # The old log-probabilities stay those from before the step, so that in later updates tokens are clipped.
    assert all(step[CLIP_FRACTION] > 0.02 for step in metrics)
    found, expected = run.weights(), named(plain_run(SEVERAL_UPDATES))
    assert compare.relative_difference(moved(found, start), moved(expected, start)) < 1e-4
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) < 1e-5


def test_training_in_half_precision_keeps_weights_in_float32(context: WorkerContext) -> None:
    replay = replays.Replay(optimizer=Optimizer(learning_rate=SMALL_STEP))
    _, expected = plain_grpo.first_update(replay, context)
    run = replays.replayed_run(replace(replay, compute_dtype=torch.bfloat16), context)
    before = run.weights()
    seen: set[torch.dtype] = set()
    layer = run.actor.engine.model.language_model.get_submodule("model.layers.1.mlp")
    hook = layer.register_forward_hook(lambda _module, _inputs, output: seen.add(output.dtype))
    with recorders.recorded_gradients(run.actor.engine) as gradients:
        run.step(0)
    hook.remove()
    assert seen == {torch.bfloat16}
    first, second = (torch.cat([each[name].flatten() for name in expected]) for each in (gradients[0], expected))
    assert not torch.equal(first, second)
    assert float(torch.cosine_similarity(first, second, dim=0)) > 0.99
    engine = run.actor.engine
    held = [*engine.named_shards(), *engine.named_optimizer_state()]
    assert {tensor.dtype for _, tensor in held} == {torch.float32}
    # The first step of Adam moves every weight by the learning rate; weights with 8 bits of precision would not move.
    changes = torch.cat([change.flatten().abs() for change in moved(run.weights(), before).values()])
    assert float(changes.median()) == pytest.approx(SMALL_STEP, rel=0.02)


@pytest.mark.usefixtures("context")
@torch.no_grad()
def test_a_frozen_model_in_half_precision_takes_half_the_memory() -> None:
    replay = replays.Replay(compute_dtype=torch.bfloat16)
    engine = TrainEngine(replay.engine_settings(1, is_trained=False))
    assert {tensor.dtype for _, tensor in engine.named_shards()} == {torch.bfloat16}
    rows, model = plain_grpo.rows_of_step(replay, 0), plain_grpo.initial_policy()
    found_N = engine.forward(token_batch(plain_grpo.rollout_of(replay, 0)), 1.0).logprobs_N
    right_N = torch.cat([row.logprobs_N(model, 1.0) for row in rows])
    assert 1e-3 < float((found_N - right_N).abs().mean()) < 0.1


def test_checkpointing_keeps_less_for_the_backward_pass(context: WorkerContext) -> None:
    kept: dict[bool, int] = {}
    for is_checkpointed in (False, True):
        run = replays.replayed_run(replays.Replay(optimizer=OPTIMIZER, gradient_checkpointing=is_checkpointed), context)
        sizes: dict[int, int] = {}

        def note(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            run.step(0)
        kept[is_checkpointed] = sum(sizes.values())
    assert kept[True] < 0.1 * kept[False]


@torch.no_grad()
def test_logprobs_use_the_temperature(context: WorkerContext) -> None:
    replay = replace(SEVERAL_UPDATES, temperature=TEMPERATURE)
    rows, model = plain_grpo.rows_of_step(replay, 0), plain_grpo.initial_policy()
    run, batch = replays.replayed_run(replay, context), plain_grpo.rollout_of(replay, 0)
    tokens = token_batch(batch)
    found = run.actor.engine.forward(tokens, TEMPERATURE, Entropy.VALUE, with_squares=True)
    all_NV = torch.cat([row.all_logprobs_NV(model, TEMPERATURE) for row in rows])
    right_N = torch.cat([row.logprobs_N(model, TEMPERATURE) for row in rows])
    assert found.entropy_N is not None
    assert found.squares_N is not None
    torch.testing.assert_close(found.logprobs_N, right_N, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.entropy_N, -(all_NV.exp() * all_NV).sum(dim=1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.squares_N, all_NV.exp().square().sum(dim=1), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(right_N, torch.cat([row.logprobs_N(model, 1.0) for row in rows]), atol=0.1)
    reference = ReferenceWorker(context, TrainEngine(replay.engine_settings(1, is_trained=False)), TEMPERATURE)
    for column in (
        run.actor.compute_logprobs(batch).ragged_column(OLD_LOGPROBS),
        reference.compute_ref_logprobs(batch).ragged_column(REF_LOGPROBS),
    ):
        torch.testing.assert_close(column.values[tokens.response_mask.values], found.logprobs_N, rtol=0, atol=1e-6)


def test_engines_are_not_compared_with_truncated_sampling(context: WorkerContext) -> None:
    """The generator's log-probabilities are of the truncated distribution, the trainer's of all tokens."""
    whole, cut = (replays.replayed_run(replays.Replay(top_k=top_k), context).step(0) for top_k in (0, 5))
    assert whole[LOGPROB_DIFF_MAX] > whole[LOGPROB_DIFF_MEAN] > 0
    assert whole.keys() - cut.keys() == {
        LOGPROB_DIFF_MAX,
        LOGPROB_DIFF_MEAN,
        LOGPROB_DIFF_SHARE,
        ROLLOUT_KL,
        ROLLOUT_K3_KL,
    }
    assert cut == {name: whole[name] for name in cut}


def test_a_loss_gets_entropy_without_a_gradient(context: WorkerContext) -> None:
    """Its gradient must not change with a tiny bonus, which needs the entropy's own gradient."""
    loss = Loss(type=LossType.FUNCTION, function=Function(path=user_algorithms.COVARIANCE_PATH))
    without, with_bonus = (
        plain_grpo.first_update(replays.Replay(Algorithm(loss=loss, entropy_coefficient=each), OPTIMIZER), context)[1]
        for each in (0.0, 1e-9)
    )
    assert compare.relative_difference(with_bonus, without) < compare.RELATIVE


def test_rows_beyond_a_rotary_limit_are_rejected(context: WorkerContext) -> None:
    run = replays.replayed_run(SEVERAL_UPDATES, context)
    model = run.actor.engine.model
    longest = max(token_batch(plain_grpo.rollout_of(SEVERAL_UPDATES, 0)).read_lengths)
    model.attention = replace(model.attention, max_row_tokens=longest)
    run.actor.engine.forward(token_batch(plain_grpo.rollout_of(SEVERAL_UPDATES, 0)), TEMPERATURE)
    model.attention = replace(model.attention, max_row_tokens=longest - 1)
    with pytest.raises(ConfigurationError, match=rf"maxNewTokens: .*{longest} tokens .*limit {longest - 1}\b"):
        run.actor.engine.forward(token_batch(plain_grpo.rollout_of(SEVERAL_UPDATES, 0)), TEMPERATURE)
