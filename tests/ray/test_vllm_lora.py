"""vLLM on two tensor-parallel ranks generates with the trained adapters after every weight sync: first with separate
adapters, then with adapters merged into the weights. Runs in processes of its own, without Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from rljob_api.v1alpha1.model import Lora, LoraSync
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing.models import tiny_models
from rljob_testing.training import gloo_ranks
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.lora import AdapterSettings
from rljob_trainer.engines.train.settings import TrainEngineSettings

pytestmark = [pytest.mark.vllm]

NUM_VERSIONS = 6
FIRST_MERGED = 4
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Version:
    """Largest differences of log-probabilities, in nats."""

    from_trainer: float
    from_base: float


def versions(folder: Path, context: WorkerContext) -> list[Version]:
    """Collective: all ranks call it. The difference for each version of the adapters; the first version is the initial
    one."""
    from rljob_testing.models import small_vllm
    from rljob_trainer.weights.sync import sync_weights

    lora = Lora(rank=3, alpha=6.0, sync=LoraSync.ADAPTER)
    settings = TrainEngineSettings(
        folder, CPU, torch.float32, False, 4096, Optimizer(), adapters=AdapterSettings(lora, 7)
    )
    merging = AdapterSettings(lora.model_copy(update={"sync": LoraSync.MERGED}), 7)
    trained = TrainEngine(settings)
    vllm = small_vllm.start_engine(folder, context.world_size, adapter_rank=lora.rank)
    found = []
    for version in range(NUM_VERSIONS):
        if version == FIRST_MERGED:
            trained.settings = replace(settings, adapters=merging)
        sync_weights(trained, vllm, torch.float32, version, knows_base=version != 0)
        sequences = small_vllm.generated(vllm, 12)
        assert all(set(each.policy_versions) == {version} for each in sequences)
        found.append(
            Version(
                small_vllm.largest_logprob_difference(trained, sequences),
                small_vllm.largest_logprob_difference(trained, sequences, with_adapters=False),
            )
        )
        with torch.no_grad():
            for number, (name, tensor) in enumerate(trained.named_adapters()):
                tensor.mul_(1.3) if ".lora_A." in name else tensor.add_(0.02 * (1 + number % 5))
    return found


def test_every_version_of_the_adapters_generates(tmp_path: Path) -> None:
    folder = tiny_models.save("qwen3 tied", tmp_path)
    tiny_models.copy_tokenizer(folder)
    [ranks] = gloo_ranks.run_on_ranks([gloo_ranks.RankedRun(partial(versions, folder), 2)], gloo_ranks.VLLM)
    for found in ranks:
        assert isinstance(found, list)
        assert len(found) == NUM_VERSIONS
        assert all(each.from_trainer < 1e-5 for each in found), found
        assert all(each.from_base > 0.05 for each in found[1:]), found
