"""A mixture of experts on two ranks: vLLM holds half of each layer on each rank, receives the trainer's weights bit for
bit, and generates with them after every weight sync, not only after the first.

Runs in processes of its own without Ray: a training engine of two replicas, and vLLM over both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing.models import tiny_models
from rljob_testing.training import gloo_ranks
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.engines.train.settings import TrainEngineSettings

if TYPE_CHECKING:
    from rljob_trainer.engines.rollout.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm]

NUM_VERSIONS = 3
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Generated:
    """The results of one rank."""

    versions: list[tuple[float, list[str]]]
    """For each version of the weights: the largest difference of log-probabilities, in nats, and the tensors that
    `load_weights` did not receive bit for bit."""


def seen_on_a_rank(folder: Path, context: WorkerContext) -> Generated:
    """Collective: all ranks call it."""
    from rljob_testing.models import small_vllm
    from rljob_trainer.weights.sync import sync_weights

    layout = ParallelLayout.of(context.world_size, shard_size=1)
    trained = TrainEngine(TrainEngineSettings(folder, CPU, torch.float32, False, 4096, Optimizer(), layout))
    vllm = small_vllm.start_engine(folder, context.world_size)
    expected = load_file(folder / "model.safetensors")
    received = recorded_weights(vllm)
    found = []
    for version in range(NUM_VERSIONS):
        sync_weights(trained, vllm, torch.float32, version)
        largest = small_vllm.largest_logprob_difference(trained, small_vllm.generated(vllm, 12))
        wrong = [
            name
            for name in {*expected, *received}
            if name not in received or not torch.equal(expected[name], received[name])
        ]
        found.append((largest, wrong))
        received.clear()
        with torch.no_grad():
            for tensor in expected.values():
                tensor.mul_(1.1)
            for _, tensor in trained.named_shards():
                tensor.mul_(1.1)
    return Generated(found)


def recorded_weights(vllm: VllmEngine) -> dict[str, torch.Tensor]:
    """Copies of all tensors that reach vLLM's model on this rank from now on, before vLLM packs them."""
    received: dict[str, torch.Tensor] = {}

    def copied(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            received[name] = tensor.clone()
            yield name, tensor

    def watch(model: torch.nn.Module) -> None:
        load = model.load_weights
        model.load_weights = lambda weights: load(copied(weights))  # type: ignore[operator]

    vllm.engine.apply_model(watch)
    return received


def test_every_version_of_the_weights_generates(tmp_path: Path) -> None:
    folder = tiny_models.save("qwen3_moe", tmp_path)
    tiny_models.copy_tokenizer(folder)
    [ranks] = gloo_ranks.run_on_ranks([gloo_ranks.RankedRun(partial(seen_on_a_rank, folder), 2)], gloo_ranks.VLLM)
    for found in ranks:
        assert isinstance(found, Generated)
        assert len(found.versions) == NUM_VERSIONS
        assert all(difference < 1e-5 for difference, _ in found.versions), found
        assert all(wrong == [] for _, wrong in found.versions), found
