"""Policy losses by name: from a job's resolved algorithm to what computes them.

Legend: B responses, N response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from rljob_api.v1alpha1.policy_loss import ClipCov, KlCov, LossType
from rljob_api.v1alpha1.recipes import ResolvedAlgorithm
from rljob_api.v1alpha1.resolved_loss import ResolvedLoss
from rljob_trainer.algorithms.covariance_losses import (
    choose_to_clip,
    choose_to_penalise,
    clipped_without_chosen,
    ratio_with_penalty,
)
from rljob_trainer.algorithms.functions import LOSS_FIELD, function_path, load_policy_loss
from rljob_trainer.algorithms.interfaces import ROLLOUT_LOGPROBS, LossInputs, PolicyLoss, TokenLosses
from rljob_trainer.algorithms.policy_losses import (
    clipped_surrogate,
    clipped_weight,
    policy_gradient,
    quadratic_penalty,
    soft_gate,
    within_divergence,
)
from rljob_trainer.algorithms.segments import Segments
from rljob_trainer.algorithms.sequence_losses import clipped_geometric_mean, clipped_sequence_ratio

TokenFormula = Callable[[Tensor, Tensor, Tensor], TokenLosses]
SequenceFormula = Callable[[Tensor, Tensor, Tensor, Segments], TokenLosses]


def policy_loss(resolved: ResolvedAlgorithm) -> PolicyLoss:
    """The job's policy loss. A user's function is loaded and tried. Raises ConfigurationError."""
    chosen = resolved.loss
    if chosen.type is LossType.FUNCTION:
        return load_policy_loss(function_path(chosen.function, LOSS_FIELD))
    if chosen.clip_cov is not None:
        return _clip_cov(chosen.clip_cov)
    if chosen.kl_cov is not None:
        return _kl_cov(chosen.kl_cov)
    of_sequence = _sequence_formula(chosen)
    if of_sequence is not None:
        return PolicyLoss(chosen.type, partial(_on_rows, of_sequence))
    return PolicyLoss(chosen.type, partial(_on_tokens, _token_formula(chosen)))


def _token_formula(chosen: ResolvedLoss) -> TokenFormula:
    if clipped := chosen.clipped:
        return partial(
            clipped_surrogate,
            clip_ratio_low=clipped.clip_ratio_low,
            clip_ratio_high=clipped.clip_ratio_high,
            dual_clip_ratio=clipped.dual_clip_ratio,
        )
    if cispo := chosen.cispo:
        return partial(clipped_weight, clip_ratio_low=cispo.clip_ratio_low, clip_ratio_high=cispo.clip_ratio_high)
    if sapo := chosen.sapo:
        return partial(
            soft_gate,
            temperature_positive=sapo.temperature_positive,
            temperature_negative=sapo.temperature_negative,
        )
    if dppo := chosen.dppo:
        return partial(
            within_divergence,
            divergence=dppo.divergence,
            threshold_low=dppo.threshold_low,
            threshold_high=dppo.threshold_high,
            max_ratio=dppo.max_ratio,
        )
    if dro := chosen.dro:
        return partial(quadratic_penalty, beta=dro.beta)
    assert chosen.type is LossType.GPG
    return policy_gradient


def _sequence_formula(chosen: ResolvedLoss) -> SequenceFormula | None:
    """None for a loss of tokens by themselves."""
    if gspo := chosen.gspo:
        return partial(clipped_sequence_ratio, clip_ratio_low=gspo.clip_ratio_low, clip_ratio_high=gspo.clip_ratio_high)
    if gmpo := chosen.gmpo:
        return partial(
            clipped_geometric_mean,
            clip_log_ratio_low=gmpo.clip_log_ratio_low,
            clip_log_ratio_high=gmpo.clip_log_ratio_high,
        )
    return None


def _clip_cov(block: ClipCov) -> PolicyLoss:
    return PolicyLoss(
        LossType.CLIP_COV,
        partial(clipped_without_chosen, clip_ratio_low=block.clip_ratio_low, clip_ratio_high=block.clip_ratio_high),
        needs=frozenset({ROLLOUT_LOGPROBS}),
        whole_pass=partial(
            choose_to_clip,
            token_share=block.token_share,
            covariance_low=block.covariance_low,
            covariance_high=block.covariance_high,
            clip_ratio_low=block.clip_ratio_low,
            clip_ratio_high=block.clip_ratio_high,
        ),
    )


def _kl_cov(block: KlCov) -> PolicyLoss:
    return PolicyLoss(
        LossType.KL_COV,
        partial(ratio_with_penalty, coefficient=block.coefficient),
        needs=frozenset({ROLLOUT_LOGPROBS}),
        whole_pass=partial(choose_to_penalise, token_share=block.token_share),
    )


def _on_tokens(formula: TokenFormula, inputs: LossInputs) -> TokenLosses:
    return formula(inputs.logprobs_N, inputs.old_logprobs_N, inputs.advantages_N)


def _on_rows(formula: SequenceFormula, inputs: LossInputs) -> TokenLosses:
    return formula(inputs.logprobs_N, inputs.old_logprobs_N, inputs.advantages_N, inputs.segments)
