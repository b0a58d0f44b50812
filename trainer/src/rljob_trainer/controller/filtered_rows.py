"""The rows of a step's updates where the job draws them by their scores: the same on any number of workers, and in a
resumed run.

Legend: B responses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rljob_api.v1alpha1.policy_filtration import PolicyFiltration
from rljob_trainer.algorithms.policy_filtration import drawn_rows

FILTRATION_STREAM = 5
"""Beside those of the responses' seeds (`sample_seeds`)."""


@dataclass(frozen=True)
class FilteredRows:
    """Rows of a rollout, in its order."""

    drawn_B: torch.Tensor
    """int64: the row that is learned from in the place of each."""
    distinct_fraction: float
    """Of the rows that are learned from: how many different ones were drawn."""


def filtered_rows(
    filtration: PolicyFiltration,
    scores_B: torch.Tensor,
    groups_B: torch.Tensor,
    is_learned_B: torch.Tensor,
    job_seed: int,
    step: int,
) -> FilteredRows:
    """Depends on nothing but the arguments. At least one row is learned from."""
    # Raw output, whose stream NumPy promises to keep between versions (NEP 19); 53 bits of it.
    source = np.random.Philox(np.random.SeedSequence([job_seed, FILTRATION_STREAM, step]))
    uniform_B = torch.from_numpy((source.random_raw(len(scores_B)) >> np.uint64(11)) * 2.0**-53)
    drawn_B = drawn_rows(scores_B, groups_B, is_learned_B, filtration, uniform_B)
    learned_B = drawn_B[is_learned_B]
    return FilteredRows(drawn_B, len(set(learned_B.tolist())) / len(learned_B))
