"""The data of the measurements and what workers compute with it. All contenders run this code in their processes.

Legend: B rows (sequences), T positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

Columns = dict[str, torch.Tensor]

NUM_ROWS = 1024
BYTES_PER_POSITION = 8 + 4 + 4


def new_columns(num_bytes: int, num_rows: int = NUM_ROWS) -> Columns:
    """Columns like those of a rollout: `tokens` int64 [B, T], `logprobs` and `advantages` float32 [B, T], with
    `num_bytes` in total, rounded down to whole positions. Every value of row i is i % 8."""
    num_positions = num_bytes // (BYTES_PER_POSITION * num_rows)
    values = (torch.arange(num_rows) % 8)[:, None].expand(num_rows, num_positions)
    return {
        "tokens": values.contiguous(),
        "logprobs": values.to(torch.float32).contiguous(),
        "advantages": values.to(torch.float32).contiguous(),
    }


def row_sums(columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The sum of all values of every row, float32 [B]. Reads every byte."""
    return torch.stack([column.sum(dim=1).to(torch.float32) for column in columns.values()]).sum(dim=0)


def plus_one(columns: Mapping[str, torch.Tensor]) -> Columns:
    """The columns plus 1, in new memory."""
    return {name: column + 1 for name, column in columns.items()}


def first_values(columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The first value of every row, float32 [B]. Reads almost nothing."""
    return columns["logprobs"][:, 0].clone()


def check_sums(sums: torch.Tensor, sent: Mapping[str, torch.Tensor]) -> None:
    """Raises AssertionError unless these are the row sums of the sent columns."""
    assert torch.equal(sums.to(torch.float32), row_sums(sent)), "the workers returned wrong row sums"


def check_plus_one(received: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor]) -> None:
    """Raises AssertionError unless the received columns are the sent ones plus 1."""
    assert set(received) == set(sent)
    for name, column in sent.items():
        assert torch.equal(received[name], column + 1), f"column {name} of the result is wrong"
