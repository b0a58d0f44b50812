"""What a rollout engine receives from a sharded model: the bits of its files, on every rank, with little memory."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from torch._ops import OpOverload
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing.models import tiny_models
from rljob_testing.training import gloo_ranks
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.rollout.base import RolloutEngine
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.weights.buckets import whole_tensors
from rljob_trainer.weights.sync import sync_weights

MODELS = ("smollm2", "phi3", "qwen3_moe")
"""Models with tied embeddings; with projections that are fused in the files; with experts that are fused in memory
only."""
DTYPES = (torch.float32, torch.bfloat16)
CPU = torch.device("cpu")
BUCKET_BYTES = 64 * 1024
RELEASE_SECONDS = 10.0
Weights = dict[str, torch.Tensor]


class Recorder:
    """Replaces a rollout engine: keeps copies of the weights that it receives."""

    takes_hub_names = True

    def __init__(self, *, takes_whole_experts: bool) -> None:
        self.takes_whole_experts = takes_whole_experts
        self.given: Weights = {}

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """See RolloutEngine.update_weights."""
        assert policy_version == 3
        self.given = {name: tensor.clone() for name, tensor in weights}


def synced_weights(root: Path, context: WorkerContext) -> dict[tuple[str, torch.dtype, bool], Weights]:
    """Collective: all ranks call it. The trainer's compute dtype is float32."""
    del context
    found = {}
    for name in MODELS:
        engine = TrainEngine(TrainEngineSettings(root / name, CPU, torch.float32, False, 4096, Optimizer()))
        for dtype in DTYPES:
            for whole in (False, True):
                recorder = Recorder(takes_whole_experts=whole)
                sync_weights(engine, cast(RolloutEngine, recorder), dtype, 3)
                found[name, dtype, whole] = recorder.given
    return found


def with_whole_experts(files: Weights) -> Weights:
    """The tensors of files, with all experts of a layer as two tensors: gate and up projections, and down
    projections."""
    found = {name: tensor for name, tensor in files.items() if ".experts." not in name}
    for path in sorted({name.partition(".experts.")[0] + ".experts." for name in files if ".experts." in name}):
        numbers = range(sum(name.startswith(path) and name.endswith(".down_proj.weight") for name in files))
        experts = [[files[f"{path}{number}.{part}_proj.weight"] for part in ("gate", "up")] for number in numbers]
        found[f"{path}gate_up_proj"] = torch.stack([torch.cat(both) for both in experts])
        found[f"{path}down_proj"] = torch.stack([files[f"{path}{number}.down_proj.weight"] for number in numbers])
    return found


class LiveStorages(TorchDispatchMode):
    """While it is open, measures the peak number of bytes of all storages except those that existed before. Above
    `expected_bytes` it waits a while, because a thread of gloo may hold what a finished operation used a moment
    longer."""

    def __init__(self, before: Iterable[torch.Tensor], expected_bytes: int) -> None:
        super().__init__()
        self.most = 0
        self.expected_bytes = expected_bytes
        self.before = {StorageWeakRef(tensor.untyped_storage()) for tensor in before}
        self.alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        del types
        result = func(*args, **(kwargs or {}))
        for result_tensor in result if isinstance(result, list | tuple) else [result]:
            reference = (
                StorageWeakRef(result_tensor.untyped_storage()) if isinstance(result_tensor, torch.Tensor) else None
            )
            if reference is not None and reference not in self.before:
                self.alive.setdefault(reference, result_tensor.untyped_storage().nbytes())
        deadline = time.monotonic() + RELEASE_SECONDS
        while (held := self._bytes_held()) > self.expected_bytes and time.monotonic() < deadline:
            time.sleep(0.01)
        self.most = max(self.most, held)
        return result

    def _bytes_held(self) -> int:
        self.alive = {each: size for each, size in self.alive.items() if not each.expired()}
        return sum(self.alive.values())


def most_bytes_held(context: WorkerContext) -> tuple[int, int]:
    """Collective: all ranks call it. The peak number of bytes beyond the shards while buckets of 64 KiB are read one
    tensor at a time, and the bytes of everything that was read."""
    mesh = init_device_mesh("cpu", (context.world_size,))
    shards = [
        (str(number), distribute_tensor(torch.full((64, 64), float(number)), mesh, [Shard(0)])) for number in range(64)
    ]
    seen = 0
    with LiveStorages((tensor.to_local() for _, tensor in shards), 2 * BUCKET_BYTES) as storages:
        for _, tensor in whole_tensors(shards, torch.float32, bucket_bytes=BUCKET_BYTES):
            seen += tensor.nbytes
            # A reference to a tensor keeps its memory.
            del tensor
    return storages.most, seen


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in MODELS:
        tiny_models.save(name, root / name)
    return root


def test_every_rank_syncs_the_bits_of_the_files(folders: Path) -> None:
    runs = gloo_ranks.run_on_ranks(
        [gloo_ranks.RankedRun(partial(synced_weights, folders), num_ranks) for num_ranks in (1, 2)]
    )
    for ranks in runs:
        for of_rank in ranks:
            assert isinstance(of_rank, dict)
            for (name, dtype, whole), given in of_rank.items():
                files = load_file(folders / name / "model.safetensors")
                files = with_whole_experts(files) if whole else files
                # A tied head is in no file, and is not sent twice.
                assert set(given) == set(files)
                for key, tensor in files.items():
                    assert given[key].dtype is dtype
                    assert torch.equal(given[key], tensor.to(dtype)), (name, key)


def test_at_most_two_buckets_exist_beyond_the_shards() -> None:
    for most, seen in gloo_ranks.run_on_ranks([gloo_ranks.RankedRun(most_bytes_held, 2)])[0]:  # type: ignore[misc]
        assert seen == 16 * BUCKET_BYTES
        assert BUCKET_BYTES < most <= 2 * BUCKET_BYTES
