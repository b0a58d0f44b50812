"""The data of the measurements and what workers do with it; the same code for all contenders, in their processes.

Legend: B rows (sequences), T positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

Columns = dict[str, torch.Tensor]

NUM_ROWS = 1024
BYTES_PER_POSITION = 8 + 4 + 4


def made_columns(num_bytes: int, num_rows: int = NUM_ROWS) -> Columns:
    """Columns as a rollout has them: `tokens` int64 [B, T], `logprobs` and `advantages` float32 [B, T], of together
    `num_bytes` (rounded down to whole positions). Row i of all of them is i % 8 everywhere."""
    num_positions = num_bytes // (BYTES_PER_POSITION * num_rows)
    values = (torch.arange(num_rows) % 8)[:, None].expand(num_rows, num_positions)
    return {
        "tokens": values.contiguous(),
        "logprobs": values.to(torch.float32).contiguous(),
        "advantages": values.to(torch.float32).contiguous(),
    }


def row_sums(columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """float32 [B]: of every row, the sum of everything in it. Reads every byte."""
    return torch.stack([column.sum(dim=1).to(torch.float32) for column in columns.values()]).sum(dim=0)


def plus_one(columns: Mapping[str, torch.Tensor]) -> Columns:
    """Columns of the same kind and size in memory of their own."""
    return {name: column + 1 for name, column in columns.items()}


def first_values(columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """float32 [B]: the first value of every row. Reads next to nothing."""
    return columns["logprobs"][:, 0].clone()


def check_sums(sums: torch.Tensor, sent: Mapping[str, torch.Tensor]) -> None:
    """Raises AssertionError unless these are the sums of the rows of what was sent."""
    assert torch.equal(sums.to(torch.float32), row_sums(sent)), "the workers have not read what was sent"


def check_plus_one(received: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor]) -> None:
    """Raises AssertionError unless what came back is what was sent, 1 added."""
    assert set(received) == set(sent)
    for name, column in sent.items():
        assert torch.equal(received[name], column + 1), f"column {name} did not come back as it should"
