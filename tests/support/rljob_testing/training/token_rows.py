"""Rows of response tokens for tests of algorithms.

Legend: B rows, T columns of a padded table, N response tokens, row after row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_trainer.algorithms.segments import Segments
from rljob_trainer.algorithms.several_workers import on_workers

__all__ = ["flat", "on_workers", "segments_of", "segments_of_mask"]

CPU = torch.device("cpu")


def segments_of(*lengths: int) -> Segments:
    """Segments with these lengths."""
    return Segments.of(lengths, CPU)


def segments_of_mask(mask_BT: Tensor) -> Segments:
    """Segments with as many tokens in each row as the mask has ones."""
    return segments_of(*(int(length) for length in mask_BT.sum(dim=1)))


def flat(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The values where the mask is 1, row after row, [N]."""
    return values_BT[mask_BT.bool()]
