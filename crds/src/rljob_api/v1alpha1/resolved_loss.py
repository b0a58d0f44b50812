"""The chosen policy loss without open questions."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.v1alpha1.policy_loss import (
    Cispo,
    ClipCov,
    Clipped,
    Divergence,
    Dppo,
    Dro,
    Gmpo,
    Gspo,
    KlCov,
    Loss,
    LossType,
    Sapo,
)
from rljob_api.v1alpha1.user_function import Function

NO_DUAL_CLIP = 0.0
"""What a job says for no bound; unset is the recipe's."""
DPPO_THRESHOLDS = {Divergence.TV: 0.15, Divergence.KL: 0.05}
"""Those that the authors train with."""


@dataclass(frozen=True, slots=True)
class ResolvedClipped:
    """`Clipped` with its values."""

    clip_ratio_low: float
    clip_ratio_high: float
    dual_clip_ratio: float | None
    """None: negative advantages have no bound of their own."""


@dataclass(frozen=True, slots=True)
class ResolvedDppo:
    """`Dppo` with its values."""

    divergence: Divergence
    threshold_low: float
    threshold_high: float
    max_ratio: float


@dataclass(frozen=True, slots=True)
class ResolvedLoss:
    """The chosen loss; the block that `type` names is there, and no other. GPG has none."""

    type: LossType
    clipped: ResolvedClipped | None = None
    gspo: Gspo | None = None
    cispo: Cispo | None = None
    sapo: Sapo | None = None
    gmpo: Gmpo | None = None
    clip_cov: ClipCov | None = None
    kl_cov: KlCov | None = None
    dppo: ResolvedDppo | None = None
    dro: Dro | None = None
    function: Function | None = None

    def as_written(self) -> Loss:
        """The job's form."""
        return Loss(
            type=self.type,
            clipped=_clipped_as_written(self.clipped) if self.clipped else None,
            gspo=self.gspo,
            cispo=self.cispo,
            sapo=self.sapo,
            gmpo=self.gmpo,
            clip_cov=self.clip_cov,
            kl_cov=self.kl_cov,
            dppo=_dppo_as_written(self.dppo) if self.dppo else None,
            dro=self.dro,
            function=self.function,
        )


def resolve_loss(chosen: LossType, written: Loss, default: ResolvedClipped) -> ResolvedLoss:
    """Loss `chosen` with what the job has written; `default` are the recipe's settings of `Clipped`."""
    match chosen:
        case LossType.CLIPPED:
            return ResolvedLoss(chosen, clipped=_resolved_clipped(written.clipped or Clipped(), default))
        case LossType.GSPO:
            return ResolvedLoss(chosen, gspo=written.gspo or Gspo())
        case LossType.CISPO:
            return ResolvedLoss(chosen, cispo=written.cispo or Cispo())
        case LossType.SAPO:
            return ResolvedLoss(chosen, sapo=written.sapo or Sapo())
        case LossType.GPG:
            return ResolvedLoss(chosen)
        case LossType.GMPO:
            return ResolvedLoss(chosen, gmpo=written.gmpo or Gmpo())
        case LossType.CLIP_COV:
            return ResolvedLoss(chosen, clip_cov=written.clip_cov or ClipCov())
        case LossType.KL_COV:
            return ResolvedLoss(chosen, kl_cov=written.kl_cov or KlCov())
        case LossType.DPPO:
            return ResolvedLoss(chosen, dppo=_resolved_dppo(written.dppo or Dppo()))
        case LossType.DRO:
            return ResolvedLoss(chosen, dro=written.dro)
        case LossType.FUNCTION:
            return ResolvedLoss(chosen, function=written.function)


def _resolved_clipped(block: Clipped, default: ResolvedClipped) -> ResolvedClipped:
    dual = default.dual_clip_ratio if block.dual_clip_ratio is None else block.dual_clip_ratio or None
    return ResolvedClipped(
        clip_ratio_low=default.clip_ratio_low if block.clip_ratio_low is None else block.clip_ratio_low,
        clip_ratio_high=default.clip_ratio_high if block.clip_ratio_high is None else block.clip_ratio_high,
        dual_clip_ratio=dual,
    )


def _clipped_as_written(clipped: ResolvedClipped) -> Clipped:
    return Clipped(
        clip_ratio_low=clipped.clip_ratio_low,
        clip_ratio_high=clipped.clip_ratio_high,
        dual_clip_ratio=NO_DUAL_CLIP if clipped.dual_clip_ratio is None else clipped.dual_clip_ratio,
    )


def _resolved_dppo(block: Dppo) -> ResolvedDppo:
    threshold = DPPO_THRESHOLDS[block.divergence]
    return ResolvedDppo(
        block.divergence, block.threshold_low or threshold, block.threshold_high or threshold, block.max_ratio
    )


def _dppo_as_written(dppo: ResolvedDppo) -> Dppo:
    return Dppo(
        divergence=dppo.divergence,
        threshold_low=dppo.threshold_low,
        threshold_high=dppo.threshold_high,
        max_ratio=dppo.max_ratio,
    )
