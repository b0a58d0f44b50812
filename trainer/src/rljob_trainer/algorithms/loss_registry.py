"""Policy losses by name: from a job's resolved algorithm to what computes them.

Legend: B responses, N response tokens.
"""

from __future__ import annotations

from functools import partial

from rljob_api.v1alpha1.policy_loss import LossType
from rljob_api.v1alpha1.recipes import ResolvedAlgorithm
from rljob_api.v1alpha1.resolved_loss import ResolvedClipped
from rljob_trainer.algorithms.functions import LOSS_FIELD, function_path, load_policy_loss
from rljob_trainer.algorithms.interfaces import LossInputs, PolicyLoss, TokenLosses
from rljob_trainer.algorithms.policy_losses import clipped_surrogate


def policy_loss(resolved: ResolvedAlgorithm) -> PolicyLoss:
    """The job's policy loss. A user's function is loaded and tried. Raises ConfigurationError."""
    chosen = resolved.loss
    match chosen.type:
        case LossType.CLIPPED:
            assert chosen.clipped is not None
            return PolicyLoss(chosen.type, partial(_clipped, chosen.clipped))
        case LossType.FUNCTION:
            return load_policy_loss(function_path(chosen.function, LOSS_FIELD))


def _clipped(settings: ResolvedClipped, inputs: LossInputs) -> TokenLosses:
    return clipped_surrogate(
        inputs.logprobs_N,
        inputs.old_logprobs_N,
        inputs.advantages_N,
        clip_ratio_low=settings.clip_ratio_low,
        clip_ratio_high=settings.clip_ratio_high,
        dual_clip_ratio=settings.dual_clip_ratio,
    )
