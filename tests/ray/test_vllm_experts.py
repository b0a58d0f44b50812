"""Mixtures of experts on two ranks: vLLM holds half of each layer on each rank, receives the trainer's weights bit for
bit, and generates with them after every weight sync, not only after the first. All experts of a layer arrive as two
tensors and are loaded in three calls; a model that does not accept that gets one expert after the other. Runs in
processes of its own without Ray: a training engine of two replicas, and vLLM over both."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
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

NUM_VERSIONS = 4
FIRST_SEPARATE = 3
"""From this version on vLLM receives each expert separately, as models do that do not accept whole experts."""
NUM_LAYERS, NUM_EXPERTS = 2, 4
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Version:
    """The result for one version of the weights."""

    difference: float
    """The largest difference of log-probabilities, in nats."""
    wrong: list[str]
    """The tensors of the files that `load_weights` did not receive bit for bit, in BFloat16 or in float32."""
    num_tensors: int
    """Number of tensors of experts that `load_weights` received."""
    num_loads: int
    """Number of calls that loaded experts."""


def versions_on_a_rank(folder: Path, context: WorkerContext) -> list[Version]:
    """Collective: all ranks call it."""
    from rljob_testing.models import small_vllm
    from rljob_trainer.weights.sync import sync_weights

    layout = ParallelLayout.of(context.world_size, shard_size=1)
    trained = TrainEngine(TrainEngineSettings(folder, CPU, torch.float32, False, 4096, Optimizer(), layout))
    vllm = small_vllm.start_engine(folder, context.world_size)
    expected = load_file(folder / "model.safetensors")
    received, loads = recorded_weights(vllm), counted_loads()
    found = []
    for version in range(NUM_VERSIONS):
        if version == FIRST_SEPARATE:
            refuse_whole_experts(vllm)
        # The dtype on GPUs.
        sync_weights(trained, vllm, torch.bfloat16, version)
        wrong = wrong_names(expected, received, torch.bfloat16)
        received.clear()
        loads.clear()
        sync_weights(trained, vllm, torch.float32, version)
        largest = small_vllm.largest_logprob_difference(trained, small_vllm.generated(vllm, 12))
        num_tensors = sum(".experts." in name for name in received)
        wrong += wrong_names(expected, received, torch.float32)
        found.append(Version(largest, wrong, num_tensors, len(loads)))
        received.clear()
        loads.clear()
        with torch.no_grad():
            for tensor in expected.values():
                tensor.mul_(1.1)
            for _, tensor in trained.named_shards():
                tensor.mul_(1.1)
    return found


def wrong_names(
    expected: Mapping[str, torch.Tensor], received: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> list[str]:
    """The tensors that are missing, that should not exist, or whose bits are wrong. Tensors that the model needs in
    float32 may have another dtype than `dtype`, but experts are none of them."""
    separate = dict(separate_experts(received))

    def is_right(name: str) -> bool:
        if name not in separate or name not in expected:
            return False
        found = separate[name]
        has_dtype = found.dtype == dtype or ".experts." not in name
        return has_dtype and torch.equal(expected[name].to(found.dtype), found)

    return [name for name in {*expected, *separate} if not is_right(name)]


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


def separate_experts(received: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as they are in files: each expert has its own."""
    for name, tensor in received.items():
        path, _, end = name.rpartition(".")
        if end == "gate_up_proj":
            for number, both in enumerate(tensor):
                gate, up = both.chunk(2)
                yield from ((f"{path}.{number}.gate_proj.weight", gate), (f"{path}.{number}.up_proj.weight", up))
        elif end == "down_proj":
            yield from ((f"{path}.{number}.down_proj.weight", each) for number, each in enumerate(tensor))
        else:
            yield name, tensor


def counted_loads() -> list[str]:
    """The list to which each call that loads experts adds a name from now on. vLLM first counts what a call will load;
    the count is replaced, because vLLM makes it exactly once for each call."""
    from vllm.model_executor.model_loader.reload import layerwise

    loads: list[str] = []
    count = layerwise.get_numel_loaded

    def counted(weight_loader: Callable[..., object], args: inspect.BoundArguments) -> object:
        if "expert_id" in args.arguments:
            loads.append(args.arguments["shard_id"])
        return count(weight_loader, args)

    layerwise.get_numel_loaded = counted
    return loads


def refuse_whole_experts(vllm: VllmEngine) -> None:
    """Restores vLLM's own loader of experts."""

    def restore(model: torch.nn.Module) -> None:
        for module in model.modules():
            if type(module).__name__ == "RoutedExperts":
                del module.load_weights

    vllm.engine.apply_model(restore)
    vllm.takes_whole_experts = False


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe"])
def test_every_version_of_the_weights_generates(name: str, tmp_path: Path) -> None:
    folder = tiny_models.save(name, tmp_path)
    # vLLM ignores the window of Qwen2's experts.
    tiny_models.change_json(
        folder / "config.json", use_sliding_window=False, layer_types=["full_attention"] * NUM_LAYERS
    )
    tiny_models.copy_tokenizer(folder)
    [ranks] = gloo_ranks.run_on_ranks([gloo_ranks.RankedRun(partial(versions_on_a_rank, folder), 2)], gloo_ranks.VLLM)
    for found in ranks:
        assert isinstance(found, list)
        assert len(found) == NUM_VERSIONS
        assert all(each.difference < 1e-5 for each in found), found
        assert all(each.wrong == [] for each in found), found
        numbers = [(each.num_tensors / NUM_LAYERS, each.num_loads / NUM_LAYERS) for each in found]
        whole, separate = (2, 3), (3 * NUM_EXPERTS, 3 * NUM_EXPERTS)
        assert numbers == [whole] * FIRST_SEPARATE + [separate] * (NUM_VERSIONS - FIRST_SEPARATE)
