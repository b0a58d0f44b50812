"""Maps each policy loss type of the API to the function that computes it and the inputs that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TypeVar

from torch import Tensor

from rljob_api.base import WireModel
from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.policy_loss import (
    Cispo,
    ClipCov,
    Clipped,
    Dppo,
    Dro,
    Gmpo,
    Gspo,
    KlCov,
    Loss,
    LossType,
    Sapo,
)
from rljob_api.v1alpha1.recipes import resolved_value
from rljob_trainer.algorithms.covariance_losses import (
    choose_to_clip,
    choose_to_penalize,
    clipped_without_chosen,
    ratio_with_penalty,
)
from rljob_trainer.algorithms.functions import LOSS_FIELD, function_path, load_policy_loss
from rljob_trainer.algorithms.interfaces import (
    ROLLOUT_LOGPROBS,
    HeadOutputs,
    LossInputs,
    PolicyLoss,
    Reduce,
    TokenLosses,
    WholeInputs,
)
from rljob_trainer.algorithms.policy_losses import (
    clipped_surrogate,
    clipped_weight,
    policy_gradient,
    quadratic_penalty,
    soft_gate,
    within_divergence,
)
from rljob_trainer.algorithms.sequence_losses import clipped_geometric_mean, clipped_sequence_ratio

SettingsT = TypeVar("SettingsT", bound=WireModel)
NO_HEAD_OUTPUTS = HeadOutputs()
MakeLoss = Callable[[Loss], PolicyLoss]
"""Makes the policy loss for a resolved `loss` block of a job."""


def policy_loss(resolved: Algorithm) -> PolicyLoss:
    """The policy loss that the job names. A user's function is loaded, and tried on made-up inputs.

    Raises ConfigurationError if a user's function cannot be loaded or fails the trial."""
    chosen = resolved.loss
    if chosen.type is LossType.FUNCTION:
        return load_policy_loss(function_path(chosen.function, LOSS_FIELD))
    return LOSSES[resolved_value(chosen.type)](chosen)


def _with_settings(
    kind: type[SettingsT],
    compute: Callable[[LossInputs, SettingsT], TokenLosses],
    *,
    needs: Iterable[str] = (),
    wanted: HeadOutputs = NO_HEAD_OUTPUTS,
    whole_pass: Callable[[WholeInputs, Reduce, SettingsT], Mapping[str, Tensor]] | None = None,
) -> MakeLoss:
    """For a loss that has a block of settings. The other arguments are those of `PolicyLoss`."""

    def make(chosen: Loss) -> PolicyLoss:
        settings = chosen.settings(kind)
        return PolicyLoss(
            resolved_value(chosen.type),
            lambda inputs: compute(inputs, settings),
            frozenset(needs),
            wanted,
            whole_pass=None if whole_pass is None else lambda inputs, reduce: whole_pass(inputs, reduce, settings),
        )

    return make


LOSSES: Mapping[LossType, MakeLoss] = MappingProxyType(
    {
        LossType.CLIPPED: _with_settings(Clipped, clipped_surrogate),
        LossType.GSPO: _with_settings(Gspo, clipped_sequence_ratio),
        LossType.CISPO: _with_settings(Cispo, clipped_weight),
        LossType.SAPO: _with_settings(Sapo, soft_gate),
        LossType.GPG: lambda _: PolicyLoss(LossType.GPG, policy_gradient),
        LossType.GMPO: _with_settings(Gmpo, clipped_geometric_mean),
        LossType.CLIP_COV: _with_settings(
            ClipCov, clipped_without_chosen, needs=[ROLLOUT_LOGPROBS], whole_pass=choose_to_clip
        ),
        LossType.KL_COV: _with_settings(
            KlCov, ratio_with_penalty, needs=[ROLLOUT_LOGPROBS], whole_pass=choose_to_penalize
        ),
        LossType.DPPO: _with_settings(Dppo, within_divergence),
        LossType.DRO: _with_settings(Dro, quadratic_penalty),
    }
)
