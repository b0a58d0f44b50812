"""vLLM generates with the trained weights, although it loses them or its KV cache when it sleeps, as on a GPU.

Runs in a process of its own, without Ray."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest

from rljob_api.v1alpha1.model import Lora, LoraSync
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing.models import tiny_models
from rljob_testing.training import engine_updates, gloo_ranks
from rljob_trainer.dispatch.worker import WorkerContext

pytestmark = [pytest.mark.vllm]

LIMIT = 1e-4
"""Largest difference of log-probabilities, in nats."""
LORA = Lora(rank=4, alpha=8.0, sync=LoraSync.ADAPTER)


def differences(folder: Path, levels: tuple[int, ...], lora: Lora | None, context: WorkerContext) -> list[float]:
    """Generates at each level in two versions of the weights. Returns the largest difference from the trainer's
    log-probabilities for each version, then the same without a hand-over after sleep."""
    import torch

    from rljob_testing.models import small_vllm
    from rljob_testing.models.vllm_sleep import add_sleep_mode
    from rljob_trainer.workers.hybrid import HybridWorker
    from rljob_trainer.workers.rollout import RolloutWorker

    actor = engine_updates.build_actor(folder, context, optimizer=Optimizer(learning_rate=1e-2), lora=lora)
    vllm = small_vllm.start_engine(folder, 1, lora=lora)
    add_sleep_mode(vllm, keeps_weights=levels[0] == 1)
    hybrid = HybridWorker(context, actor, RolloutWorker(context, lambda: vllm, 1), torch.float32, 0, others=())
    found: list[float] = []
    for version in range(2 * len(levels)):
        vllm.keeps_weights_asleep = levels[version // 2] == 1
        with hybrid.generating():
            sequences = small_vllm.generated(vllm, 12)
        assert {each for row in sequences for each in row.policy_versions} == {version}
        found.append(small_vllm.largest_logprob_difference(actor.engine, sequences))
        actor.update_policy(engine_updates.random_rollout(tiny_models.VOCABULARY, version), version)
        # The update is large enough to be noticed if it were not handed over.
        assert small_vllm.largest_logprob_difference(actor.engine, sequences) > 100 * LIMIT
    hybrid.trainer_mode()
    vllm.wake(weights=True, kv_cache=True)
    sequences = small_vllm.generated(vllm, 2)
    return [*found, small_vllm.largest_logprob_difference(actor.engine, sequences)]


def found_on_the_rank(folder: Path, levels: tuple[int, ...], lora: Lora | None = None) -> list[float]:
    tiny_models.copy_tokenizer(folder)
    run = gloo_ranks.RankedRun(partial(differences, folder, levels, lora), 1)
    [[found]] = gloo_ranks.run_on_ranks([run], gloo_ranks.VLLM)
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("name", ["qwen3 tied", "qwen3_moe"])
def test_every_version_of_the_weights_generates_at_both_levels(name: str, tmp_path: Path) -> None:
    *found, without = found_on_the_rank(tiny_models.save(name, tmp_path), (1, 2))
    assert len(found) == 4
    assert max(found) < LIMIT
    # Level 2 has really lost the weights.
    assert math.isnan(without)


def test_every_version_of_the_adapters_generates_beside_a_kept_base(tmp_path: Path) -> None:
    *found, without = found_on_the_rank(tiny_models.save("qwen3", tmp_path), (1,), LORA)
    assert len(found) == 2
    assert max(found) < LIMIT
    assert LIMIT < without < 10
