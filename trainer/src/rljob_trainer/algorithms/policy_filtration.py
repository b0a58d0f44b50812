"""Policy filtration: resamples the responses of a step's updates by their scores.

Source: PF-PPO, Zhang et al. 2024, arXiv 2409.06957. The paper compares responses to the same prompt (`scope: Group`).
verl 0.9.1 compares all responses of a batch (`scope: Batch`). The weights are verl's (`compute_pf_ppo_reweight_data`).
When to use: a noisy reward model that is more reliable at extreme scores.

Legend: B responses of a step, S responses that are compared with each other, P responses of these that can be drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_api.v1alpha1.response_selection import FiltrationScope, PolicyFiltration, PolicyFiltrationType

HIGHEST_WEIGHT, OTHER_WEIGHT = 0.4, 0.1
"""The weights of MaxRandom: of the responses with the highest score, and of the others."""


def filtration_weights(scores_S: Tensor, filtration: PolicyFiltration) -> Tensor:
    """[S] float64: the weight with which each response is drawn; at least one is above 0, their sum is arbitrary.
    `scores_S` has at least one element, and `filtration` is resolved."""
    scores_S = scores_S.double()
    is_highest_S = scores_S == scores_S.max()
    match filtration.type:
        case PolicyFiltrationType.NONE:
            return torch.ones_like(scores_S)
        case PolicyFiltrationType.POWER:
            sizes_S = scores_S.abs()
            if not sizes_S.any():
                return torch.ones_like(scores_S)
            # Divided by the largest to avoid overflow. verl adds 1e-8 to each weight; here a score of 0 is never drawn.
            assert filtration.exponent is not None, "the resolved form has it"
            return (sizes_S / sizes_S.max()).pow(filtration.exponent)
        case PolicyFiltrationType.MAX_MIN:
            return (is_highest_S | (scores_S == scores_S.min())).double()
        case PolicyFiltrationType.MAX_RANDOM:
            return torch.full_like(scores_S, OTHER_WEIGHT).masked_fill(is_highest_S, HIGHEST_WEIGHT)


def drawn_rows(
    scores_B: Tensor, groups_B: Tensor, is_trained_B: Tensor, filtration: PolicyFiltration, uniform_B: Tensor
) -> Tensor:
    """[B] int64: for each row the number of the row that replaces it in the updates.

    A row that is not trained on keeps its own number and replaces no other row. `groups_B` is equal for responses to
    the same prompt. `uniform_B` (float64 in [0, 1)) is the only source of randomness."""
    drawn_B = torch.arange(len(scores_B))
    scopes_B = groups_B if filtration.scope is FiltrationScope.GROUP else torch.zeros_like(groups_B)
    for scope in sorted(set(scopes_B[is_trained_B].tolist())):
        rows_S = (is_trained_B & (scopes_B == scope)).nonzero()[:, 0]
        weights_S = filtration_weights(scores_B[rows_S], filtration)
        is_possible_S = weights_S > 0
        sums_P = weights_S[is_possible_S].cumsum(0)
        found_S = torch.searchsorted(sums_P, uniform_B[rows_S] * sums_P[-1], right=True).clamp(max=len(sums_P) - 1)
        drawn_B[rows_S] = rows_S[is_possible_S][found_S]
    return drawn_B
