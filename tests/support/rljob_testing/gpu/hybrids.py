"""An actor and generation with transformers in one process, on the quickstart's model, and rollouts for both."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import torch

from rljob_api.v1alpha1.model import Lora
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing.gpu.device import DeviceContext
from rljob_testing.training import engine_updates
from rljob_testing.training.sleeping_engine import SleepingHfEngine
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.engines.device_memory import distinct_storages
from rljob_trainer.engines.rollout.base import RolloutMemory, SamplingSettings
from rljob_trainer.engines.rollout.hf_engine import HfEngine, HfSettings
from rljob_trainer.engines.train.lora import AdapterSettings
from rljob_trainer.engines.train.offload import NO_OFFLOAD, OffloadSettings
from rljob_trainer.workers.columns import (
    ADVANTAGES,
    IS_TRAINED,
    PROMPT_TOKEN_IDS,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    SAMPLE_SEEDS,
    token_batch,
)
from rljob_trainer.workers.hybrid import HybridWorker
from rljob_trainer.workers.rollout import RolloutWorker

MODEL = Path(str(files("rljob_trainer"))) / "assets/sort_digits/model"
VOCABULARY = 64
SEED = 11
PROMPTS = ((4, 9, 5), (12, 7, 3, 8, 4, 6, 11, 5, 9), (3, 3, 7))
RESPONSES_PER_PROMPT = 4
SAMPLING = SamplingSettings(1.0, 1.0, 0, 24, ())
SHORT = SamplingSettings(1.0, 1.0, 0, 8, ())
"""For runs of several steps."""
MAX_SEQUENCES = 6
"""Fewer than there are responses: a rollout has two batches."""
LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 0.3}
"""Largest accepted difference between the log-probabilities of the generator, which uses a cache, and of the
trainer."""
KV_CACHE_BYTES = 1 << 20


class FreeingHfEngine(SleepingHfEngine):
    """While it sleeps, its weights and its KV cache are not on the device, as with vLLM. At level KEEPS, the weights
    are on the host. Weights that return are NaN unless they were kept."""

    def __init__(self, settings: HfSettings, level: int) -> None:
        super().__init__(settings, level)
        self.kv_cache = torch.zeros(KV_CACHE_BYTES, dtype=torch.uint8, device=settings.device)
        """Stands for vLLM's cache, which is allocated as long as the engine is awake. This engine does not use it."""
        self.storages = distinct_storages([*self.model.parameters(), *self.model.buffers()])
        self.sizes = [storage.nbytes() for storage in self.storages]

    def sleep(self) -> None:
        """See SleepingHfEngine."""
        super().sleep()
        self.saved = {name: tensor.cpu() for name, tensor in self.saved.items()}
        for storage in (*self.storages, self.kv_cache.untyped_storage()):
            storage.resize_(0)

    def wake(self, *, weights: bool, kv_cache: bool) -> None:
        """See SleepingHfEngine."""
        if weights and not self.has_weights:
            for storage, size in zip(self.storages, self.sizes, strict=True):
                storage.resize_(size)
            self._fill_with_nan()
        if kv_cache and not self.has_kv_cache:
            self.kv_cache.untyped_storage().resize_(KV_CACHE_BYTES)
        super().wake(weights=weights, kv_cache=kv_cache)

    @property
    def memory(self) -> RolloutMemory:
        """See SleepingHfEngine."""
        return RolloutMemory(super().memory.weights, KV_CACHE_BYTES if self.has_kv_cache else 0)


def hf_hybrid(
    case: DeviceContext,
    dtype: torch.dtype,
    level: int | None = None,
    *,
    learning_rate: float = 1e-2,
    offload: OffloadSettings = NO_OFFLOAD,
    lora: Lora | None = None,
) -> HybridWorker:
    """Actor and generator. `level`: how deep the generator sleeps; None: it never sleeps."""
    optimizer = Optimizer(learning_rate=learning_rate)
    engine = engine_updates.engine_settings(MODEL, case.device, dtype, optimizer=optimizer)
    adapters = None if lora is None else AdapterSettings(lora, SEED)
    engine = replace(engine, offload=offload, adapters=adapters)
    actor = engine_updates.grpo_actor(
        case.context, engine, optimizer, max(engine_updates.LENGTHS), RESPONSES_PER_PROMPT
    )
    settings = HfSettings(MODEL, case.device, dtype, MAX_SEQUENCES)

    def make_engine() -> HfEngine:
        return HfEngine(settings) if level is None else FreeingHfEngine(settings, level)

    rollout = RolloutWorker(case.context, make_engine, 1)
    return HybridWorker(case.context, actor, rollout, dtype, SEED, others=())


def prompt_batch(seed: int = 0) -> DataProto:
    """Prompts for a rollout. Each of PROMPTS occurs RESPONSES_PER_PROMPT times."""
    prompts = [torch.tensor(prompt) for prompt in PROMPTS for _ in range(RESPONSES_PER_PROMPT)]
    return DataProto(
        {SAMPLE_SEEDS: torch.arange(len(prompts)) + seed}, ragged={PROMPT_TOKEN_IDS: RaggedColumn.from_rows(prompts)}
    )


def with_random_advantages(rollout: DataProto, seed: int) -> DataProto:
    """A rollout that can be trained on."""
    num_rows = len(rollout)
    advantages_B = torch.randn(num_rows, generator=torch.Generator().manual_seed(seed))
    return rollout.with_columns({ADVANTAGES: advantages_B, IS_TRAINED: torch.ones(num_rows, dtype=torch.bool)})


def largest_difference(hybrid: HybridWorker, rollout: DataProto) -> float:
    """The largest difference between the trainer's and the generator's log-probabilities of a rollout."""
    mask = rollout.ragged_column(RESPONSE_MASK)
    rollout_N = rollout.ragged_column(ROLLOUT_LOGPROBS).values[mask.values]
    found_N = hybrid.actor.engine.forward(token_batch(rollout), SAMPLING.temperature).logprobs_N
    return float((found_N - rollout_N).abs().max())
