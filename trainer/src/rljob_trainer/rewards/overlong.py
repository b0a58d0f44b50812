"""The penalty for long responses, which needs no scoring process."""

from __future__ import annotations

from collections.abc import Iterable

from rljob_api.v1alpha1.reward import OverlongPenalty


def overlong_scores(penalty: OverlongPenalty, num_tokens: Iterable[int], max_new_tokens: int) -> tuple[float, ...]:
    """Soft overlong punishment: min(-exceed / buffer * factor, 0) with exceed = num_tokens - (max_new_tokens - buffer).
    The score is 0 up to the buffer's beginning and -factor at the limit.

    Source: DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.4, equation 13, where the factor is 1 and responses beyond
    the limit get -1; here no response is longer than the limit. `num_tokens` includes the end token. When to use:
    against truncation, instead of a hard penalty at the limit.
    """
    begin = max_new_tokens - penalty.buffer_tokens
    return tuple(min((begin - each) / penalty.buffer_tokens * penalty.penalty_factor, 0.0) for each in num_tokens)
