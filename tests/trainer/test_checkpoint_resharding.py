"""FSDP2 parameters and AdamW state that some ranks save and other ranks load are bitwise equal. A small training on
real gloo ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rljob_testing.training import gloo_ranks
from rljob_trainer.checkpoints.layout import ShardRecord
from rljob_trainer.checkpoints.load import find_newest_complete, load_into, open_checkpoint
from rljob_trainer.checkpoints.save import begin_save, commit, num_shard_bytes, save_shard
from rljob_trainer.checkpoints.sharding import sharded_tensors_from_dtensors
from rljob_trainer.dispatch.worker import WorkerContext

DIRECTIONS = [(1, 2), (2, 1), (2, 2), (2, 3)]
STEP = 20


def save_after_training(root: Path, out: Path, context: WorkerContext) -> None:
    """Start 1 trains and saves to `root`; rank 0 writes the whole tensors to the file `out`."""
    model, optimizer = made_model(seed=1)
    train(model, optimizer, num_steps=3)
    save(root, context.rank, state_of(model, optimizer))
    keep_whole(state_of(model, optimizer), out, context)


def load_over_others(root: Path, out: Path, context: WorkerContext) -> None:
    """Start 2 has trained something else and loads the newest checkpoint below `root`; `out` is as above."""
    model, optimizer = made_model(seed=2)
    train(model, optimizer, num_steps=1)
    found = find_newest_complete(root, start_number=2)
    assert found is not None
    load_into(state_of(model, optimizer), open_checkpoint(found.folder))
    keep_whole(state_of(model, optimizer), out, context)


def keep_whole(state: list[tuple[str, torch.Tensor]], out: Path, context: WorkerContext) -> None:
    """Collective: all ranks call it."""
    found = {name: whole(tensor) for name, tensor in state}
    if context.rank == 0:
        save_file(found, out)


def made_model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Odd sizes: rows do not divide by 2 or 3, and the last layer has fewer rows than there are ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 5), nn.Linear(5, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for step in range(num_steps):
        inputs = torch.linspace(-1, 1, 28).reshape(4, 7) * (step + 1)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    state: list[tuple[str, torch.Tensor]] = []
    for name, parameter in model.named_parameters():
        state.append((f"model/{name}", parameter))
        state.extend((f"optimizer/{name}/{key}", value) for key, value in optimizer.state[parameter].items())
    return state


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def save(root: Path, rank: int, state: list[tuple[str, torch.Tensor]]) -> None:
    """Rank 0 also plays the controller."""
    tensors = sharded_tensors_from_dtensors(state, rank)
    sizes: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(sizes, num_shard_bytes(tensors))
    folders: list[Path | None] = [begin_save(root, STEP, start_number=1, num_bytes=sum(sizes)) if rank == 0 else None]
    dist.broadcast_object_list(folders)
    folder = folders[0]
    assert folder is not None
    record = save_shard(folder, rank, tensors)
    records: list[ShardRecord] = [record] * dist.get_world_size()
    dist.all_gather_object(records, record)
    if rank == 0:
        commit(root, folder, STEP, 1, records, {"cursor": 7})


@dataclass(frozen=True)
class Runs:
    folder: Path

    def root(self, saved_on: int) -> Path:
        """Folder of the checkpoint that this many ranks saved."""
        return self.folder / f"saved-on-{saved_on}"

    def expected(self, saved_on: int) -> dict[str, torch.Tensor]:
        """The whole tensors as gathered by the saving ranks."""
        return load_file(self.expected_file(saved_on))

    def expected_file(self, saved_on: int) -> Path:
        return self.folder / f"expected-{saved_on}.safetensors"

    def loaded_file(self, saved_on: int, loaded_on: int) -> Path:
        return self.folder / f"loaded-{saved_on}-{loaded_on}.safetensors"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("ranks"))
    saves = [gloo_ranks.RankedRun(partial(save_after_training, runs.root(n), runs.expected_file(n)), n) for n in (1, 2)]
    loads = [
        gloo_ranks.RankedRun(partial(load_over_others, runs.root(saved), runs.loaded_file(saved, n)), n)
        for saved, n in DIRECTIONS
    ]
    gloo_ranks.run_on_ranks([*saves, *loads])
    return runs


@pytest.mark.parametrize(("saved_on", "loaded_on"), DIRECTIONS)
def test_state_is_equal_after_loading_on_another_number_of_ranks(runs: Runs, saved_on: int, loaded_on: int) -> None:
    expected, loaded = runs.expected(saved_on), load_file(runs.loaded_file(saved_on, loaded_on))
    assert len(expected) == 3 * 2 * 4  # three layers, weight and bias, each with two moments and a step count
    assert expected.keys() == loaded.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, loaded[name]), name


def test_one_process_reads_whole_tensors_of_a_sharded_checkpoint(runs: Runs) -> None:
    reader = open_checkpoint(next(runs.root(2).glob("step-*")))
    expected = runs.expected(2)
    assert set(reader.names) == set(expected)
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in expected.items())
    assert reader.entry("model/0.weight").global_shape == (13, 7)
    assert [(piece.offsets, piece.shape) for piece in reader.entry("model/0.weight").pieces] == [
        ((0, 0), (7, 7)),
        ((7, 0), (6, 7)),
    ]
    # One row for two ranks: rank 1 holds nothing of it.
    assert [piece.file for piece in reader.entry("model/2.weight").pieces] == ["rank-00000.safetensors"]
    assert reader.manifest.world_size == 2
    assert reader.manifest.extra == {"cursor": 7}


def test_shard_files_open_with_the_safetensors_library(runs: Runs) -> None:
    folder = next(runs.root(2).glob("step-*"))
    first, second = (load_file(folder / f"rank-0000{rank}.safetensors") for rank in (0, 1))
    name = "optimizer/1.weight/exp_avg_sq"
    assert torch.equal(torch.cat([first[name], second[name]]), runs.expected(2)[name])
