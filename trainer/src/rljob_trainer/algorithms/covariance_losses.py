"""Policy losses that treat tokens with a high covariance of log-probability and advantage differently, because these
tokens reduce the policy's entropy the most (Cui et al. 2025, arXiv 2505.22617, section 3).

A token's covariance is (A - mean A) (logprob - mean logprob), with means over the mini-batch of all workers before the
update; verl 0.9.1 takes means, and chooses tokens, within each micro-batch. Here the tokens are chosen before each
update, for the whole mini-batch. This costs one more forward pass per update.

Legend: N response tokens, C tokens that are chosen or can be chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rljob_api.v1alpha1.policy_loss import NO_DUAL_CLIP, ClipCov, Clipped, KlCov
from rljob_trainer.algorithms.interfaces import ROLLOUT_LOGPROBS, LossInputs, Reduce, TokenLosses, WholeInputs
from rljob_trainer.algorithms.kl import MAX_LOG_RATIO, absolute_difference
from rljob_trainer.algorithms.policy_losses import (
    KL_SUM,
    clamped_log_ratio,
    clipped_losses,
    clipped_surrogate,
)
from rljob_trainer.algorithms.selection import drawn_keys, largest, nth_largest

IS_CHOSEN = "is_chosen"
"""Name of the result of a choice in `LossInputs.whole`: float32 [N], 1 for the tokens that are treated differently, 0
for the others."""
CHOSEN_SUM = "pg_cov_frac"
"""The number of chosen tokens."""


@dataclass(frozen=True)
class _Means:
    """Means over the mini-batch of all workers."""

    logprob: float
    advantage: float
    num_tokens: int

    def covariances(self, logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
        """[N]: the covariance of each token."""
        return (logprobs_N - self.logprob) * (advantages_N - self.advantage)

    def num_chosen(self, token_fraction: float) -> int:
        """The number of tokens in this fraction of the mini-batch, at least one."""
        return max(1, int(token_fraction * self.num_tokens))


def choose_to_clip(inputs: WholeInputs, reduce: Reduce, settings: ClipCov) -> Mapping[str, Tensor]:
    """Collective. Returns IS_CHOSEN for Clip-Cov: the fraction `tokenShare` of the mini-batch's tokens (at least one
    token), drawn by `drawn_keys` from those whose covariance is between the bounds and whose ratio PPO would not clip.
    If there are fewer such tokens, all of them are chosen."""
    means = _means(inputs, reduce)
    covariances_N = means.covariances(inputs.logprobs_N, inputs.advantages_N)
    is_between_N = (covariances_N > settings.covariance_low) & (covariances_N < settings.covariance_high)
    ratio_N = (inputs.logprobs_N - inputs.old_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    _, is_clipped_N = clipped_losses(ratio_N, inputs.advantages_N, settings.clip_ratio_low, settings.clip_ratio_high)
    positions_C = (is_between_N & ~is_clipped_N).nonzero().squeeze(1)
    drawn_C = drawn_keys(inputs.columns[ROLLOUT_LOGPROBS], inputs.segments, positions_C)
    bound = nth_largest(drawn_C, means.num_chosen(settings.token_share), reduce)
    return {IS_CHOSEN: _marked(positions_C[drawn_C >= bound.key], covariances_N)}


def choose_to_penalize(inputs: WholeInputs, reduce: Reduce, settings: KlCov) -> Mapping[str, Tensor]:
    """Collective. Returns IS_CHOSEN for KL-Cov: the fraction `tokenShare` of the mini-batch's tokens (at least one
    token) with the largest covariances. Ties are broken by `drawn_keys`."""
    means = _means(inputs, reduce)
    covariances_N = means.covariances(inputs.logprobs_N, inputs.advantages_N)

    def draw(positions_C: Tensor) -> Tensor:
        return drawn_keys(inputs.columns[ROLLOUT_LOGPROBS], inputs.segments, positions_C)

    positions_C = largest(covariances_N, means.num_chosen(settings.token_share), reduce, draw)
    return {IS_CHOSEN: _marked(positions_C, covariances_N)}


def clipped_without_chosen(inputs: LossInputs, settings: ClipCov) -> TokenLosses:
    """Clip-Cov: the PPO loss without dual clip, but 0 (no gradient) for the tokens of IS_CHOSEN, [N].

    Source: Cui et al. 2025, arXiv 2505.22617, section 4. Chosen tokens still count in the denominators. When to use:
    against entropy collapse in long runs.
    """
    is_chosen_N = inputs.whole[IS_CHOSEN]
    # With an advantage of 0 a token has no loss, no gradient and is never counted as clipped.
    masked = replace(inputs, advantages_N=inputs.advantages_N * (1.0 - is_chosen_N))
    bounds = {"clip_ratio_low": settings.clip_ratio_low, "clip_ratio_high": settings.clip_ratio_high}
    found = clipped_surrogate(masked, Clipped(**bounds, dual_clip_ratio=NO_DUAL_CLIP))
    return TokenLosses(found.losses_N, {**found.sums, CHOSEN_SUM: is_chosen_N.sum()})


def ratio_with_penalty(inputs: LossInputs, settings: KlCov) -> TokenLosses:
    """KL-Cov: -A r, plus `coefficient` |log-ratio| for the tokens of IS_CHOSEN, [N].

    Source: Cui et al. 2025, arXiv 2505.22617, section 4, in the authors' form. Log-ratios are clamped to +-20 for r,
    but not for the penalty. If old and new policy are equal, as in the first update of a step, the penalty has no
    gradient (`kl.ROUNDING`). When to use: against entropy collapse in long runs; a softer version of Clip-Cov.
    """
    is_chosen_N = inputs.whole[IS_CHOSEN]
    penalties_N = absolute_difference(inputs.logprobs_N, inputs.old_logprobs_N)
    losses_N = -inputs.advantages_N * clamped_log_ratio(inputs).exp() + settings.coefficient * is_chosen_N * penalties_N
    kl_sum = (inputs.old_logprobs_N - inputs.logprobs_N.detach()).sum()
    return TokenLosses(losses_N, {CHOSEN_SUM: is_chosen_N.sum(), KL_SUM: kl_sum})


def _marked(positions_C: Tensor, like_N: Tensor) -> Tensor:
    """[N]: 1 at these positions, 0 elsewhere."""
    return torch.zeros_like(like_N).index_fill(0, positions_C, 1.0)


def _means(inputs: WholeInputs, reduce: Reduce) -> _Means:
    sums = [
        inputs.logprobs_N.sum(dtype=torch.float64),
        inputs.advantages_N.sum(dtype=torch.float64),
        torch.tensor(float(inputs.segments.num_values), dtype=torch.float64, device=inputs.logprobs_N.device),
    ]
    logprob_sum, advantage_sum, num_tokens = reduce.sum(torch.stack(sums)).tolist()
    count = max(num_tokens, 1.0)
    return _Means(logprob_sum / count, advantage_sum / count, int(num_tokens))
