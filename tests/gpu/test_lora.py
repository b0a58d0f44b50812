"""Adapters (LoRA) on a device: their gradients, and generation with them merged into weights that sleep. They need
peft."""

from __future__ import annotations

from dataclasses import replace

import torch

from rljob_api.v1alpha1.model import Lora, LoraSync
from rljob_testing import compare
from rljob_testing.gpu import hybrids
from rljob_testing.gpu.device import DeviceContext
from rljob_testing.models import tiny_models
from rljob_testing.training import engine_updates
from rljob_testing.training.sleeping_engine import FORGETS
from rljob_testing.training.whole_rollouts import whole_rollout
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.lora import AdapterSettings
from rljob_trainer.engines.train.offload import OffloadSettings
from rljob_trainer.observability.metrics import MERGE_ERROR

LORA = Lora(rank=4, alpha=8.0, sync=LoraSync.MERGED)
SCALING = LORA.alpha / LORA.rank
SEED = 7
LARGEST_DIFFERENCE = 1e-5
"""In float32, relative to the norm."""


def test_gradients_follow_from_those_of_the_whole_weights(case: DeviceContext) -> None:
    """y = x W' + s x A' B', and B is 0: the gradient of B is s G A', where G is that of W by transformers."""
    case.needs_library("peft", "peft")
    folder, batch = tiny_models.save("qwen3", case.folder / "model"), engine_updates.random_batch()
    expected = engine_updates.plain_update(engine_updates.plain_model(folder), batch)
    for dtype, limit in ((torch.float32, LARGEST_DIFFERENCE), (torch.bfloat16, 0.1)):
        settings = engine_updates.engine_settings(folder, case.device, dtype)
        engine = TrainEngine(replace(settings, adapters=AdapterSettings(LORA, SEED)))
        found = engine_updates.update(engine, batch)
        firsts = {
            name: engine_updates.whole_on_host(each) for name, each in engine.named_adapters() if "lora_A" in name
        }
        of_seconds = {name: each for name, each in found.gradients.items() if ".lora_B." in name}
        right = {
            name: SCALING * expected.gradients[f"{layer}.weight"] @ firsts[f"base_model.model.{layer}.lora_A.weight"].T
            for name in of_seconds
            for layer in [name.partition(".lora_B.")[0]]
        }
        difference = compare.relative_difference(of_seconds, right)
        assert case.note(str(dtype).removeprefix("torch."), difference) < limit
        of_firsts = [each for name, each in found.gradients.items() if ".lora_A." in name]
        assert len(found.gradients) == len(of_seconds) + len(of_firsts)
        assert not any(each.any() for each in of_firsts)


def test_the_generator_has_the_adapters_of_every_update(case: DeviceContext) -> None:
    """They are merged into weights that the generator forgets whenever it sleeps. The base does not change."""
    case.needs_library("peft", "peft")
    for dtype, limit in hybrids.LARGEST_DIFFERENCE.items():
        name = str(dtype).removeprefix("torch.")
        offload = OffloadSettings(parameters=True, optimizer=True)
        hybrid = hybrids.hf_hybrid(case, dtype, FORGETS, offload=offload, lora=LORA)
        base = base_of(hybrid.actor.engine)
        for step in range(2):
            rollout = whole_rollout(hybrid, hybrids.prompt_batch(step), hybrids.SHORT)
            assert case.note(f"{name}, version {step}", hybrids.largest_difference(hybrid, rollout)) < limit
            hybrid.actor.update_policy(engine_updates.random_rollout(hybrids.VOCABULARY, step), step)
            # The update was large enough to be noticed if it were not synced.
            assert case.note(f"{name}, stale", hybrids.largest_difference(hybrid, rollout)) > 2 * limit
        compare.assert_bitwise_equal(base_of(hybrid.actor.engine), base)
        metrics = hybrid.take_metrics()
        assert (MERGE_ERROR in metrics) == (dtype is torch.bfloat16)
        case.note(f"{name}, lost by rounding", metrics.get(MERGE_ERROR, 0.0))


def base_of(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Copies of the frozen weights, on the host."""
    return {name: engine_updates.whole_on_host(each) for name, each in engine.named_shards()}
