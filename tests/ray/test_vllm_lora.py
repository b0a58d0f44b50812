"""vLLM generates with the trained adapters after every weight sync: first with separate adapters, then with adapters
merged into the weights; with layers of experts, too. In BFloat16 separate adapters keep their effect, and merged ones
lose it. Runs in processes of its own, without Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rljob_api.v1alpha1.model import Lora, LoraSync
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing.models import tiny_models
from rljob_testing.training import engine_updates, gloo_ranks
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.lora import AdapterSettings
from rljob_trainer.engines.train.settings import TrainEngineSettings

pytestmark = [pytest.mark.vllm]

NUM_VERSIONS = 6
FIRST_MERGED = 4
EFFECT_LENGTHS = (60,) * 16
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


@dataclass(frozen=True)
class Effect:
    """How an adapter changes the mean log-probability of given tokens."""

    exact: float
    """In the trainer, in float32."""
    trained: float
    """In the trainer, in BFloat16, which loses a part, because what an adapter adds to an output is rounded."""
    with_adapters: float
    """In vLLM, in BFloat16, with separate adapters."""
    merged: float
    """In vLLM, in BFloat16, with adapters merged into the weights."""
    merge_error: float | None


def effect_in_16_bits(folder: Path, context: WorkerContext) -> Effect:
    """The effect of an adapter whose B has entries of 1e-4 in the direction of the gradient, as after the first update
    by AdamW."""
    from rljob_testing.models import small_vllm
    from rljob_trainer.weights.sync import sync_weights

    lora = Lora(rank=32, alpha=64.0, sync=LoraSync.ADAPTER)
    settings = TrainEngineSettings(
        folder, CPU, torch.bfloat16, False, 4096, Optimizer(), adapters=AdapterSettings(lora, 7)
    )
    trained = TrainEngine(settings)
    exact = TrainEngine(replace(settings, compute_dtype=torch.float32))
    vllm = small_vllm.start_engine(folder, context.world_size, lora=lora, dtype=torch.bfloat16)
    # Rows of a few tokens only, so that the gradients of all positions have similar directions. With random tokens the
    # effect would be as small as the rounding of log-probabilities.
    drawn = engine_updates.random_batch(EFFECT_LENGTHS)
    rows = [row % 5 + engine_updates.FIRST_TOKEN for row in drawn.tokens.row_tensors()]
    batch = replace(drawn, tokens=RaggedColumn.from_rows(rows))

    def of_vllm() -> float:
        return small_vllm.mean_logprob(vllm, batch)

    def of(engine: TrainEngine) -> float:
        return float(engine.forward(batch, 1.0).logprobs_N.mean())

    sync_weights(trained, vllm, torch.bfloat16, 0)
    before = of(exact), of(trained), of_vllm()
    engine_updates.update(exact, batch)
    with torch.no_grad():
        for (name, tensor), precise in zip(trained.model.named_parameters(), exact.model.parameters(), strict=True):
            if ".lora_B." in name:
                assert precise.grad is not None
                precise.copy_(-1e-4 * precise.grad.sign())
                tensor.copy_(precise)
    sync_weights(trained, vllm, torch.bfloat16, 1, knows_base=True)
    with_adapters = of_vllm()
    merging = AdapterSettings(lora.model_copy(update={"sync": LoraSync.MERGED}), 7)
    trained.settings = replace(settings, adapters=merging)
    merge_error = sync_weights(trained, vllm, torch.bfloat16, 2)
    effects = (of(exact) - before[0], of(trained) - before[1], with_adapters - before[2], of_vllm() - before[2])
    return Effect(*effects, merge_error)


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
    folder = tiny_models.save(name, tmp_path)
    tiny_models.copy_tokenizer(folder)
    # The weights are the same in both precisions.
    weights = load_file(folder / tiny_models.WEIGHTS)
    rounded = {name: tensor.bfloat16().float() for name, tensor in weights.items()}
    save_file(rounded, folder / tiny_models.WEIGHTS, {"format": "pt"})
    [[found]] = gloo_ranks.run_on_ranks([gloo_ranks.RankedRun(partial(effect_in_16_bits, folder), 1)], gloo_ranks.VLLM)
    assert isinstance(found, Effect)
    assert found.with_adapters == pytest.approx(found.trained, rel=0.2)
    assert found.merged < 0.8 * found.trained
    assert found.trained > 0.01
    assert found.merge_error is not None
    assert found.merge_error > 0.3
