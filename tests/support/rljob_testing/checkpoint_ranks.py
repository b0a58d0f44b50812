"""A small FSDP2 training on real gloo ranks, one process each, that saves or loads checkpoints of its whole state."""

from __future__ import annotations

import multiprocessing
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # loaded by the first `fully_shard`: here once, before the ranks are forked
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rljob_trainer.checkpoints.layout import ShardRecord
from rljob_trainer.checkpoints.load import find_newest_complete, load_into, open_checkpoint
from rljob_trainer.checkpoints.save import begin_save, commit, num_shard_bytes, save_shard
from rljob_trainer.checkpoints.sharding import sharded_tensors_from_dtensors

STEP = 20


@dataclass(frozen=True)
class RankRun:
    """`task` ("train_and_save" or "load") on this many ranks; rank 0 leaves the whole tensors in the file `out`.

    Saving goes to `root` as start 1, loading takes the newest checkpoint below `root`.
    """

    num_ranks: int
    task: str
    root: Path
    out: Path


def run_in_order(runs: list[RankRun]) -> None:
    """Runs them one after the other; raises RuntimeError where a rank fails, with its traceback on standard error.

    All ranks are forked from one new process, so that torch is imported once and not by every rank.
    """
    launcher = multiprocessing.get_context("spawn").Process(target=_fork_ranks, args=(runs,))
    launcher.start()
    launcher.join()
    if launcher.exitcode != 0:
        raise RuntimeError(f"a rank failed, exit code {launcher.exitcode}")


def _fork_ranks(runs: list[RankRun]) -> None:
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    for run in runs:
        ranks = [fork.Process(target=_rank_program, args=(rank, run)) for rank in range(run.num_ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode != 0 for process in ranks):
            sys.exit(1)


def _rank_program(rank: int, run: RankRun) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{run.out}.rendezvous", rank=rank, world_size=run.num_ranks)
    try:
        model, optimizer = _model(seed=1 if run.task == "train_and_save" else 2)
        if run.task == "train_and_save":
            _train(model, optimizer, num_steps=3)
            _save(run.root, rank, _state(model, optimizer))
        else:
            _train(model, optimizer, num_steps=1)
            found = find_newest_complete(run.root, start_number=2)
            assert found is not None
            load_into(_state(model, optimizer), open_checkpoint(found.folder))
        whole = {name: _whole(tensor) for name, tensor in _state(model, optimizer)}
        if rank == 0:
            save_file(whole, run.out)
    finally:
        dist.destroy_process_group()


def _model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Odd sizes: rows do not divide by 2 or 3, and the last layer has fewer rows than there are ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 5), nn.Linear(5, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for step in range(num_steps):
        inputs = torch.linspace(-1, 1, 28).reshape(4, 7) * (step + 1)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    state: list[tuple[str, torch.Tensor]] = []
    for name, parameter in model.named_parameters():
        state.append((f"model/{name}", parameter))
        state.extend((f"optimizer/{name}/{key}", value) for key, value in optimizer.state[parameter].items())
    return state


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def _save(root: Path, rank: int, state: list[tuple[str, torch.Tensor]]) -> None:
    """Rank 0 plays the controller as well."""
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
