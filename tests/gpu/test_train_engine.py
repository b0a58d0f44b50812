"""The training engine on a device: the numbers of transformers alone, in float32 and bfloat16, the update of the fused
optimizer, and how often the host waits for a GPU."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing import compare
from rljob_testing.gpu.device import DeviceContext
from rljob_testing.models import tiny_models
from rljob_testing.training import engine_updates
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.token_batch import MicroBatch, TokenBatch
from rljob_trainer.engines.train.token_logprobs import TokenDistribution

ARCHITECTURE = "qwen3"
TIED = "qwen3 tied"
EXPERTS = "qwen3_moe"
SYNCHRONISATION = "synchronizing CUDA operation"
LARGEST_DIFFERENCE = 1e-5
"""In float32, relative to the norm."""


def test_float32_gives_the_numbers_of_transformers(case: DeviceContext) -> None:
    for name in (TIED, EXPERTS):
        folder, batch = tiny_models.save(name, case.folder / name), engine_updates.random_batch()
        ours = engine_updates.update(TrainEngine(engine_updates.engine_settings(folder, case.device)), batch)
        expected = engine_updates.plain_update(engine_updates.plain_model(folder), batch)
        assert case.note(f"loss, {name}", abs(ours.loss - expected.loss) / expected.loss) < LARGEST_DIFFERENCE
        difference = compare.relative_difference(ours.gradients, expected.gradients)
        assert case.note(f"gradient, {name}", difference) < LARGEST_DIFFERENCE


def test_micro_batches_change_no_gradient(case: DeviceContext) -> None:
    folder, batch = tiny_models.save(ARCHITECTURE, case.folder / "model"), engine_updates.random_batch()
    one, many = (
        engine_updates.update(TrainEngine(engine_updates.engine_settings(folder, case.device, max_tokens=each)), batch)
        for each in (4096, 70)
    )
    assert case.note("gradient", compare.relative_difference(many.gradients, one.gradients)) < LARGEST_DIFFERENCE


def test_bfloat16_is_as_exact_as_that_of_transformers(case: DeviceContext) -> None:
    folder, batch = tiny_models.save(ARCHITECTURE, case.folder / "model"), engine_updates.random_batch()
    engine = TrainEngine(engine_updates.engine_settings(folder, case.device, torch.bfloat16))
    right_N = engine_updates.plain_logprobs_N(engine_updates.plain_model(folder), batch).detach()
    theirs_N = engine_updates.plain_logprobs_N(
        engine_updates.plain_model(folder, case.device, torch.bfloat16), batch
    ).detach()
    error = case.note("mean error", float((engine.forward(batch, 1.0).logprobs_N - right_N).abs().mean()))
    their_error = case.note("mean error of transformers", float((theirs_N - right_N).abs().mean()))
    assert 1e-4 < error <= 1.1 * their_error
    # A bfloat16 gradient has the same direction as the float32 one.
    ours = engine_updates.update(engine, batch).gradients
    exact = engine_updates.plain_update(engine_updates.plain_model(folder), batch).gradients
    assert case.note("gradient", compare.relative_difference(ours, exact)) < 0.1


def test_fused_adamw_equals_the_formulas(case: DeviceContext) -> None:
    """Against the formulas of arXiv 1711.05101 in float64, for three updates."""
    spec = Optimizer(learning_rate=1e-2, beta1=0.8, beta2=0.9, weight_decay=0.1, max_gradient_norm=1e6)
    folder = tiny_models.save(ARCHITECTURE, case.folder / "model")
    engine = TrainEngine(engine_updates.engine_settings(folder, case.device, optimizer=spec))
    assert engine.optimizer is not None
    assert all(group["fused"] for group in engine.optimizer.param_groups)
    weights = {
        name: tensor.double()
        for name, tensor in engine_updates.state_of(engine).items()
        if not name.startswith("exp_avg")
    }
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith("step.")}
    means = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    squares = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    for number in (1, 2, 3):
        gradients = engine_updates.update(engine, engine_updates.random_batch(seed=number)).gradients
        norm = engine.optimizer_step(spec.learning_rate)
        assert math.isclose(
            norm, math.sqrt(sum(float(each.double().square().sum()) for each in gradients.values())), rel_tol=1e-5
        )
        for name, gradient in gradients.items():
            means[name].lerp_(gradient.double(), 1 - spec.beta1)
            squares[name].lerp_(gradient.double().square(), 1 - spec.beta2)
            root = (squares[name] / (1 - spec.beta2**number)).sqrt() + spec.epsilon
            weights[name] *= 1 - spec.learning_rate * spec.weight_decay
            weights[name] -= spec.learning_rate * means[name] / (1 - spec.beta1**number) / root
    found = {name: tensor.double() for name, tensor in engine_updates.state_of(engine).items() if name in weights}
    assert case.note("weights", compare.relative_difference(found, weights)) < 1e-6


def test_the_host_waits_at_most_once_per_micro_batch(case: DeviceContext) -> None:
    """By torch's own count, minus the waits of an update with any number of micro-batches."""
    case.needs_gpu("a CPU has nothing to wait for")
    folder = tiny_models.save(ARCHITECTURE, case.folder / "model")
    length, few_rows, many_rows = 64, 4, 12
    engine = TrainEngine(engine_updates.engine_settings(folder, case.device, torch.bfloat16, max_tokens=length))
    few, many = (num_waits(engine, engine_updates.random_batch([length] * rows)) for rows in (few_rows, many_rows))
    num_more = many_rows - few_rows
    case.note("waits per micro-batch", (many - few) / num_more)
    assert many - few <= num_more, f"{few} waits, and {many} with {num_more} micro-batches more"


def num_waits(engine: TrainEngine, batch: TokenBatch) -> int:
    """The waits of one update, after a warm-up update."""

    def loss(_: MicroBatch, distribution: TokenDistribution) -> Tensor:
        return -distribution.logprobs_N.mean()

    engine.forward_backward(batch, loss, 1.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.forward_backward(batch, loss, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum(SYNCHRONISATION in str(each.message) for each in caught)
