"""Offload on a GPU: what it saves by the allocator's count, and the same numbers to the last bit.

These tests need CUDA and torch only: neither Ray nor vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing.tiny_models import VOCABULARY, save_tiny_model
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.engines.storages import local_part
from rljob_trainer.engines.train.engine import TrainEngine, TrainEngineSettings
from rljob_trainer.engines.train.offload import NO_OFFLOAD, OffloadSettings
from rljob_trainer.engines.train.token_batch import MicroBatch, TokenBatch
from rljob_trainer.engines.train.token_logprobs import TokenDistribution

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda finds none")

EVERYTHING = OffloadSettings(parameters=True, gradients=True, optimizer=True)
LENGTHS = (40, 7, 25, 64, 12, 33, 58, 19)
NUM_UPDATES = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model's, with this process as the only rank of a process group."""
    root = tmp_path_factory.mktemp("gpu")
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{root / 'meeting'}", rank=0, world_size=1)
    torch.cuda.set_device(0)
    yield save_tiny_model("qwen3", root / "model")
    dist.destroy_process_group()


def batch() -> TokenBatch:
    drawing = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCABULARY, (length,), generator=drawing) for length in LENGTHS]
    masks = [torch.arange(length) >= 3 for length in LENGTHS]
    return TokenBatch(RaggedColumn.from_rows(rows), RaggedColumn.from_rows(masks), {})


def trained(folder: Path, offload: OffloadSettings) -> TrainEngine:
    """After some updates of several micro-batches, with a departure after each."""

    def loss(_: MicroBatch, distribution: TokenDistribution) -> torch.Tensor:
        return -distribution.logprobs_N.sum() / 100

    settings = TrainEngineSettings(
        folder, torch.device("cuda"), torch.bfloat16, False, 64, Optimizer(), offload=offload
    )
    engine = TrainEngine(settings)
    for _ in range(NUM_UPDATES):
        engine.forward_backward(batch(), loss, 1.0)
        engine.optimizer_step(1e-3)
        engine.leave_device()
        engine.fetch_parameters()
    return engine


def state(engine: TrainEngine) -> dict[str, torch.Tensor]:
    tensors = {**dict(engine.named_shards()), **dict(engine.named_optimizer_state())}
    return {name: local_part(tensor).cpu() for name, tensor in tensors.items()}


def test_training_is_the_same_to_the_last_bit(folder: Path) -> None:
    plain, away = (state(trained(folder, offload)) for offload in (NO_OFFLOAD, EVERYTHING))
    assert plain.keys() == away.keys()
    for name, tensor in plain.items():
        assert torch.equal(tensor, away[name]), name


def test_what_leaves_is_free_by_the_allocator(folder: Path) -> None:
    engine = trained(folder, EVERYTHING)
    list(engine.named_optimizer_state())
    engine.fetch_parameters(wait=True)
    num_parameter_bytes = engine.memory.parameters
    there = torch.cuda.memory_allocated()
    engine.leave_device()
    torch.cuda.synchronize()
    assert engine.memory.parameters == engine.memory.moments == 0
    assert there - torch.cuda.memory_allocated() >= 3 * num_parameter_bytes
