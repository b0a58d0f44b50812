"""A penalty for responses near the limit of their length, computed from lengths alone."""

from __future__ import annotations

from collections.abc import Iterable

from rljob_api.v1alpha1.reward import OverlongPenalty


def overlong_scores(penalty: OverlongPenalty, num_tokens: Iterable[int], max_new_tokens: int) -> tuple[float, ...]:
    """min(-exceed / buffer * factor, 0) with exceed = tokens - (max_new_tokens - buffer): 0 below the buffer, -factor
    at the limit.

    Source: DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.4, equation 13, where the factor is 1; there what is
    longer than the limit gets -1, and here nothing is longer. `num_tokens` are those of each response, its end token
    included.
    """
    first = max_new_tokens - penalty.buffer_tokens
    return tuple(min((first - each) / penalty.buffer_tokens * penalty.penalty_factor, 0.0) for each in num_tokens)
