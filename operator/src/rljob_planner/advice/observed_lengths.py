"""Lengths of a run's responses, from the numbers that its metrics have of them: mean, longest, share cut off.

They become a log-normal distribution that is cut off at the limit (timing/lengths.py says why that form): where some
responses were cut off, that of their mean and that share; else that of the mean and the longest of so many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

from rljob_planner.workload import TokenLengths

_STANDARD = NormalDist()
_LEAST_SIGMA, _LARGEST_SIGMA = 0.01, 2.0


@dataclass(frozen=True)
class ObservedLengths:
    """In tokens, of the responses of a step or of several."""

    prompt_mean: float
    response_mean: float
    """After the cut."""
    response_max: float
    """Of a step; of several the mean of their longest."""
    clip_ratio: float
    """Share that was cut off."""

    @classmethod
    def together(cls, steps: Sequence[ObservedLengths]) -> ObservedLengths:
        """Of several steps with as many responses each; at least one."""
        return cls(
            prompt_mean=fmean(each.prompt_mean for each in steps),
            response_mean=fmean(each.response_mean for each in steps),
            response_max=fmean(each.response_max for each in steps),
            clip_ratio=fmean(each.clip_ratio for each in steps),
        )

    def token_lengths(self, planned: TokenLengths, num_responses: int) -> TokenLengths:
        """With the limits that were planned, and their means where the run says none; `num_responses` are those of a
        step."""
        prompt = _within(planned.prompt_max, self.prompt_mean, planned.prompt_mean)
        response = _within(planned.response_max, self.response_mean, planned.response_mean)
        longest = _within(planned.response_max, self.response_max, response)
        clipped = min(1.0, max(0.0, self.clip_ratio))
        sigma = _sigma(response, longest, num_responses)
        return TokenLengths(
            prompt_mean=prompt,
            prompt_max=planned.prompt_max,
            response_mean=response,
            response_max=planned.response_max,
            response_cv=math.sqrt(math.expm1(sigma * sigma)),
            clipped_share=clipped,
            assumption=(
                f"as in the run: mean {response:,.0f}, longest {longest:,.0f},"
                f" {clipped:.1%} cut off at {planned.response_max:,}"
            ),
        )


def _within(limit: int, length: float, otherwise: float) -> float:
    """Tokens, of which there is at least one; metrics that lack a length have 0."""
    return min(float(limit), max(1.0, length)) if length > 0 else otherwise


def _sigma(mean: float, longest: float, num_responses: int) -> float:
    """Standard deviation of the logarithms, of so many responses none of which is cut off.

    The longest is about the quantile 1 - 1 / 2n, as in timing/lengths.py. With z that quantile of the standard normal
    distribution, longest = exp(m + z s) and mean = exp(m + s^2 / 2) give s = z - sqrt(z^2 - 2 ln(longest / mean));
    where that has no solution, s = z is the nearest."""
    if mean <= 0 or longest <= mean:
        return _LEAST_SIGMA
    z = _STANDARD.inv_cdf(1 - 0.5 / max(2, num_responses))
    under_root = z * z - 2 * math.log(longest / mean)
    sigma = z - math.sqrt(under_root) if under_root > 0 else z
    return min(_LARGEST_SIGMA, max(_LEAST_SIGMA, sigma))
