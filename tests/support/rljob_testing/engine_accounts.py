"""What a train engine's own accounting (`EngineMemory`) says of a small random model at a few moments, on one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2Config, Qwen3Config, Qwen3MoeConfig

from rljob_api.v1alpha1.model import Lora
from rljob_testing.engine_updates import drawn_batch, engine_settings
from rljob_testing.tiny_models import COMMON, HEAD_SIZE, drawn_model
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.engines.train.lora import AdapterSettings
from rljob_trainer.engines.train.token_batch import MicroBatch
from rljob_trainer.engines.train.token_logprobs import TokenDistribution

UNEVEN = {**COMMON, "vocab_size": 121, "num_hidden_layers": 3}
"""Its embedding cannot be halved."""
CONFIGS = {
    "qwen3": Qwen3Config(**UNEVEN, head_dim=HEAD_SIZE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**UNEVEN, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(
        **UNEVEN, head_dim=HEAD_SIZE, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}
RANK = 6


@dataclass(frozen=True)
class AccountCase:
    """A model and how it is held."""

    model: str
    num_shards: int
    num_replicas: int = 1
    is_trained: bool = True
    has_adapters: bool = False
    defers_reduction: bool = False
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Account:
    """Bytes of this rank."""

    parameters: int
    moments: int
    gradients_between: int
    """After the first of two micro-batches."""
    gradients: int
    """After the last."""
    gathered: int
    """What is whole after a pass without a backward pass, of a trained model."""


def save_configured(name: str, folder: Path) -> Path:
    """`folder`, with a random model of CONFIGS."""
    drawn_model(CONFIGS[name]).save_pretrained(folder)
    return folder


def account(case: AccountCase, folder: Path, context: WorkerContext) -> Account:
    """Collective. `folder` has the model."""
    settings = engine_settings(folder, context.device, case.dtype, max_tokens=128)
    engine = TrainEngine(
        replace(
            settings,
            layout=ParallelLayout(case.num_shards, case.num_replicas),
            optimizer=settings.optimizer if case.is_trained else None,
            adapters=AdapterSettings(Lora(rank=RANK, alpha=RANK), 0) if case.has_adapters else None,
            defers_reduction=case.defers_reduction,
        )
    )
    batch = drawn_batch([100, 100])
    if not case.is_trained:
        engine.forward(batch, 1.0)
        return Account(engine.memory.parameters, 0, 0, 0, engine.memory.gathered)
    between: list[int] = []

    def loss(_: MicroBatch, distribution: TokenDistribution) -> Tensor:
        between.append(engine.memory.gradients)
        return -distribution.logprobs_N.sum()

    engine.forward_backward(batch, loss, 1.0)
    gradients = engine.memory.gradients
    engine.optimizer_step(1e-3)
    engine.forward(batch, 1.0)
    memory = engine.memory
    return Account(memory.parameters, memory.moments, between[-1], gradients, memory.gathered)


def allocated_peak(engine: TrainEngine, lengths: list[int]) -> int:
    """Of an update on rows of these lengths, twice, after a first one: what all allocations of the process add up to at
    most, with parameters and moments, by the events of torch's profiler on CPUs."""
    batch = drawn_batch([*lengths, *lengths])

    def loss(_: MicroBatch, distribution: TokenDistribution) -> Tensor:
        return -distribution.logprobs_N.sum()

    engine.forward_backward(batch, loss, 1.0)
    engine.optimizer_step(1e-3)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine.forward_backward(batch, loss, 1.0)
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return engine.memory.parameters + engine.memory.moments + peak
