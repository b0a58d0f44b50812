"""The measured policy losses, with the same settings on both sides: for a job and for verl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LossCase:
    """One policy loss."""

    wire: Mapping[str, object]
    """`algorithm.loss` of a job."""
    mode: str
    """verl's name of the loss."""
    by_sequence: bool = False
    """Aggregates by the mean over sequences of their token means; otherwise by the mean over all tokens."""
    actor: Mapping[str, float] = field(default_factory=dict)
    """Settings of verl's actor."""
    policy_loss: Mapping[str, float] = field(default_factory=dict)
    """Settings of verl's policy loss."""
    is_drawn: bool = False
    """verl draws random numbers, so the results differ."""


_RATIOS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
LOSS_CASES: Mapping[str, LossCase] = {
    "GSPO": LossCase({"type": "GSPO"}, "gspo", True, {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    "CISPO": LossCase({"type": "CISPO"}, "cispo", actor={"clip_ratio_low": 1.0, "clip_ratio_high": 4.0}),
    "SAPO": LossCase({"type": "SAPO"}, "sapo", True),
    "GPG": LossCase({"type": "GPG"}, "gpg"),
    "GMPO": LossCase({"type": "GMPO"}, "geo_mean", True, {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
    "Clip-Cov, with its choice of tokens": LossCase({"type": "ClipCov"}, "clip_cov", actor=_RATIOS, is_drawn=True),
    "KL-Cov, with its choice of tokens": LossCase(
        {"type": "KLCov", "klCov": {"coefficient": 0.1}}, "kl_cov", policy_loss={"ppo_kl_coef": 0.1}
    ),
    "DPPO, TV": LossCase(
        {"type": "DPPO"}, "dppo_tv", actor={"clip_ratio_low": 0.15, "clip_ratio_high": 0.15, "clip_ratio_c": 20.0}
    ),
    "DPPO, KL": LossCase(
        {"type": "DPPO", "dppo": {"divergence": "KL"}},
        "dppo_kl",
        actor={"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 20.0},
    ),
    "DRO": LossCase({"type": "DRO", "dro": {"beta": 0.1}}, "dro", policy_loss={"dro_beta": 0.1}),
}
