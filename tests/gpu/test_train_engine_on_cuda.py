"""The training engine on a GPU: the numbers of a CPU, the kernel for variable lengths, and how often the host waits.

These tests need CUDA and torch only: neither Ray nor vLLM.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing.tiny_models import VOCABULARY, save_tiny_model
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.engines.train import attention, attention_kernels
from rljob_trainer.engines.train.attention_kernels import Kernel
from rljob_trainer.engines.train.engine import TrainEngine, TrainEngineSettings
from rljob_trainer.engines.train.token_batch import MicroBatch, TokenBatch
from rljob_trainer.engines.train.token_logprobs import TokenDistribution

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda finds none")

ARCHITECTURE = "qwen3"
LENGTHS = (40, 7, 25, 64, 12, 33, 58, 19)
SETTINGS = TrainEngineSettings(Path(), torch.device("cuda"), torch.float32, False, 4096, Optimizer())
SYNCHRONISATION = "synchronizing CUDA operation"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model's, with this process as the only rank of a process group."""
    root = tmp_path_factory.mktemp("gpu")
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{root / 'meeting'}", rank=0, world_size=1)
    torch.cuda.set_device(0)
    yield save_tiny_model(ARCHITECTURE, root / "model")
    dist.destroy_process_group()


@dataclass(frozen=True)
class Update:
    """The gradient of a mini-batch."""

    loss: float
    gradients: dict[str, Tensor]


def batch_of(lengths: Sequence[int]) -> TokenBatch:
    """Rows whose first three tokens are the prompt."""
    drawing = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCABULARY, (length,), generator=drawing) for length in lengths]
    masks = [torch.arange(length) >= 3 for length in lengths]
    return TokenBatch(RaggedColumn.from_rows(rows), RaggedColumn.from_rows(masks), {})


def engine_of(folder: Path, device: str, dtype: torch.dtype = torch.float32, max_tokens: int = 4096) -> TrainEngine:
    return TrainEngine(
        replace(
            SETTINGS,
            model_folder=folder,
            device=torch.device(device),
            compute_dtype=dtype,
            max_tokens_per_micro_batch=max_tokens,
        )
    )


def update(engine: TrainEngine, batch: TokenBatch) -> Update:
    losses: list[Tensor] = []

    def loss(_: MicroBatch, distribution: TokenDistribution) -> Tensor:
        part = -distribution.logprobs_N.sum() / sum(batch.response_lengths)
        losses.append(part.detach())
        return part

    engine.forward_backward(batch, loss, 1.0)
    gradients = {
        name: parameter.grad.full_tensor().cpu()  # type: ignore[attr-defined]
        for name, parameter in engine.model.named_parameters()
        if parameter.grad is not None
    }
    return Update(float(torch.stack(losses).sum()), gradients)


def test_float32_gives_the_numbers_of_a_cpu(folder: Path) -> None:
    batch = batch_of(LENGTHS)
    ours, right = (update(engine_of(folder, device), batch) for device in ("cuda", "cpu"))
    assert ours.loss == pytest.approx(right.loss, rel=1e-5)
    assert ours.gradients.keys() == right.gradients.keys()
    for name, gradient in ours.gradients.items():
        torch.testing.assert_close(gradient, right.gradients[name], rtol=1e-4, atol=1e-5)


def test_variable_lengths_in_half_precision_are_no_further_off_than_padding(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(LENGTHS)
    right = engine_of(folder, "cuda").forward(batch, 1.0).logprobs_N
    engine = engine_of(folder, "cuda", torch.bfloat16)
    kernels: list[Kernel] = []
    attend = attention_kernels.attend

    def errors() -> Tensor:
        return (engine.forward(batch, 1.0).logprobs_N - right).abs()

    def seen(kernel: Kernel, *others: object) -> Tensor:
        kernels.append(kernel)
        return attend(kernel, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "attend", seen)
    flat = errors()
    assert set(kernels) == {Kernel.VARIABLE_LENGTH}
    monkeypatch.setattr(attention, "choose_kernel", lambda *_: Kernel.PADDED)
    padded = errors()
    assert float(flat.mean()) <= 1.1 * float(padded.mean())
    assert float(flat.max()) <= 1.5 * float(padded.max())


def test_the_host_waits_at_most_once_per_micro_batch(folder: Path) -> None:
    """By torch's own count, beyond what an update costs however many micro-batches it has."""
    length, few_rows, many_rows = 64, 4, 12
    engine = engine_of(folder, "cuda", torch.bfloat16, max_tokens=length)
    few, many = (num_waits(engine, batch_of([length] * rows)) for rows in (few_rows, many_rows))
    num_more = many_rows - few_rows
    assert many - few <= num_more, f"{few} waits, and {many} with {num_more} micro-batches more"


def num_waits(engine: TrainEngine, batch: TokenBatch) -> int:
    """Of one update, after one that warms up."""

    def loss(_: MicroBatch, distribution: TokenDistribution) -> Tensor:
        return -distribution.logprobs_N.mean()

    engine.forward_backward(batch, loss, 1.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.forward_backward(batch, loss, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum(SYNCHRONISATION in str(each.message) for each in caught)
