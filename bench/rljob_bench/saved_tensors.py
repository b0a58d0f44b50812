"""The tensors that the benchmarks of checkpoints save."""

from __future__ import annotations

import torch

Tensors = dict[str, torch.Tensor]

NUM_TENSORS = 64


def some_tensors(num_bytes: int) -> Tensors:
    """Float32 matrices with this number of bytes in total."""
    generator = torch.Generator().manual_seed(0)
    rows = num_bytes // (4 * 1024 * NUM_TENSORS)
    return {f"layer.{i}": torch.randn(rows, 1024, generator=generator) for i in range(NUM_TENSORS)}
