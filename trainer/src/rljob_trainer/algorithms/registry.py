"""Advantages and policy losses by name: from a job's resolved algorithm to what computes them.

Legend: B responses, N response tokens.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from rljob_api.v1alpha1.algorithm import AdvantageType, Function, LossType
from rljob_api.v1alpha1.recipes import ResolvedAlgorithm, ResolvedClipped, ResolvedGroupRelative
from rljob_trainer.algorithms.advantages import group_relative_advantages
from rljob_trainer.algorithms.functions import ADVANTAGE_FIELD, LOSS_FIELD, load_advantage, load_policy_loss
from rljob_trainer.algorithms.interfaces import (
    KL_PENALTIES,
    AdvantageEstimator,
    Level,
    LossInputs,
    PolicyLoss,
    ResponseInputs,
    TokenLosses,
)
from rljob_trainer.algorithms.policy_losses import clipped_surrogate
from rljob_trainer.errors import ConfigurationError

TRIAL_GROUP_SIZE = 4


def advantage_estimator(resolved: ResolvedAlgorithm, group_size: int = TRIAL_GROUP_SIZE) -> AdvantageEstimator:
    """The job's estimator. A user's function is loaded and tried on groups of `group_size`, which a job knows.

    Raises ConfigurationError."""
    chosen = resolved.advantage
    match chosen.type:
        case AdvantageType.GROUP_RELATIVE:
            assert chosen.group_relative is not None
            return AdvantageEstimator(chosen.type, for_responses=partial(_group_relative, chosen.group_relative))
        case AdvantageType.FUNCTION:
            found = load_advantage(_path(chosen.function, ADVANTAGE_FIELD), group_size)
            if resolved.has_kl_in_reward and found.level is Level.TOKEN and KL_PENALTIES not in found.needs:
                raise ConfigurationError(
                    f"spec.training.algorithm.kl.placement: the KL goes into the reward, but {found.name} works on "
                    f"tokens and does not ask for it; let it need {KL_PENALTIES!r}, or write `placement: Loss`"
                )
            return found


def policy_loss(resolved: ResolvedAlgorithm) -> PolicyLoss:
    """The job's policy loss. A user's function is loaded and tried. Raises ConfigurationError."""
    chosen = resolved.loss
    match chosen.type:
        case LossType.CLIPPED:
            assert chosen.clipped is not None
            return PolicyLoss(chosen.type, partial(_clipped, chosen.clipped))
        case LossType.FUNCTION:
            return load_policy_loss(_path(chosen.function, LOSS_FIELD))


def _group_relative(settings: ResolvedGroupRelative, inputs: ResponseInputs) -> Tensor:
    return group_relative_advantages(inputs.rewards_B, inputs.groups_B, normalize_by_std=settings.normalize_by_std)


def _clipped(settings: ResolvedClipped, inputs: LossInputs) -> TokenLosses:
    return clipped_surrogate(
        inputs.logprobs_N,
        inputs.old_logprobs_N,
        inputs.advantages_N,
        clip_ratio_low=settings.clip_ratio_low,
        clip_ratio_high=settings.clip_ratio_high,
        dual_clip_ratio=settings.dual_clip_ratio,
    )


def _path(function: Function | None, field: str) -> str:
    if function is None:
        raise ConfigurationError(
            f"{field}: missing for type Function; add `function: {{path: package.module:function}}`"
        )
    return function.path
