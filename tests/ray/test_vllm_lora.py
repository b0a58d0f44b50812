"""vLLM generates with the trained adapters after every weight sync: first with separate adapters, then with adapters
merged into the weights; with layers of experts, too. In BFloat16 separate adapters keep their effect, and merged ones
lose it. Runs in processes of its own, without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from rljob_api.v1alpha1.model import Lora, LoraSync
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing.gpu.device import DeviceContext
from rljob_testing.models import tiny_models
from rljob_testing.training import gloo_ranks
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.lora import AdapterSettings
from rljob_trainer.engines.train.settings import TrainEngineSettings

pytestmark = [pytest.mark.vllm]

NUM_VERSIONS = 6
FIRST_MERGED = 4
LARGEST_DIFFERENCES = {"qwen3 tied": 2e-5, "qwen3_moe": 2e-5, "qwen2_moe": 3e-4}
"""From the trainer, in nats. Measured: 7.6e-6, 5.2e-6 and 9.2e-5. The last one is that of the last version, whose
weights are the largest; the versions before had at most 4.6e-6."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Version:
    """Largest differences of log-probabilities, in nats."""

    from_trainer: float
    from_base: float


def versions(folder: Path, context: WorkerContext) -> list[Version]:
    """Collective: all ranks call it. All linear layers have adapters. The difference for each version of the
    adapters; the first version is the initial one."""
    from rljob_testing.models import small_vllm
    from rljob_trainer.weights.sync import sync_weights

    lora = Lora(rank=3, alpha=6.0, sync=LoraSync.ADAPTER)
    settings = TrainEngineSettings(
        folder, CPU, torch.float32, False, 4096, Optimizer(), adapters=AdapterSettings(lora, 7)
    )
    merging = AdapterSettings(lora.model_copy(update={"sync": LoraSync.MERGED}), 7)
    trained = TrainEngine(settings)
    vllm = small_vllm.start_engine(folder, context.world_size, lora=lora)
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


def effect_on_a_rank(name: str, folder: Path, context: WorkerContext) -> Mapping[str, float]:
    """What the check for GPUs measures."""
    from rljob_testing.gpu import engine_checks

    place = DeviceContext(context, folder)
    engine_checks.adapters_in_16_bits(place, name)
    return place.notes


@pytest.mark.parametrize(("name", "largest"), LARGEST_DIFFERENCES.items())
def test_every_version_of_the_adapters_generates(name: str, largest: float, tmp_path: Path) -> None:
    folder = tiny_models.save(name, tmp_path)
    if name == "qwen2_moe":
        # vLLM ignores the window of Qwen2's experts.
        full = ["full_attention"] * 2
        tiny_models.change_json(folder / "config.json", use_sliding_window=False, layer_types=full)
    tiny_models.copy_tokenizer(folder)
    [ranks] = gloo_ranks.run_on_ranks([gloo_ranks.RankedRun(partial(versions, folder), 2)], gloo_ranks.VLLM)
    for found in ranks:
        assert isinstance(found, list)
        assert len(found) == NUM_VERSIONS
        assert all(each.from_trainer < largest for each in found), found
        assert all(each.from_base > 0.05 for each in found[1:]), found


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_separate_adapters_keep_their_effect_in_16_bits(name: str, tmp_path: Path) -> None:
    program = partial(effect_on_a_rank, name, tmp_path)
    [[found]] = gloo_ranks.run_on_ranks([gloo_ranks.RankedRun(program, 1)], gloo_ranks.VLLM)
    assert isinstance(found, Mapping)
    assert {"exact", "trained", "with_adapters", "merged", "merge_error", "error_of_logits"} == set(found)
