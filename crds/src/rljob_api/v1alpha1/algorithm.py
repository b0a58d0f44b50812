"""The algorithm: the name of a recipe, and fields that override parts of it: advantage, policy loss, aggregation, KL
term.

Unset fields get their value from the recipe (`recipes.py`).
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.scalars import Flag, Number
from rljob_api.v1alpha1.advantage import Advantage
from rljob_api.v1alpha1.kl import Kl
from rljob_api.v1alpha1.policy_loss import Loss
from rljob_api.v1alpha1.response_selection import DynamicSampling, PolicyFiltration
from rljob_api.v1alpha1.rollout_correction import RolloutCorrection


class AlgorithmType(StrEnum):
    """Recipe: an advantage, a policy loss, an aggregation and their settings under one name; docs/algorithms.md has
    the formulas."""

    GRPO = "GRPO"
    """Group-relative advantages (Shao et al. 2024, arXiv 2402.03300) with the token mean, the dual clip and no KL term,
    which is today's common form. The paper's form is `aggregation: SequenceMeanTokenMean`, `dualClipRatio: 0` and a KL
    coefficient."""
    DR_GRPO = "DrGRPO"
    """Liu et al. 2025, arXiv 2503.20783."""
    DAPO = "DAPO"
    """Yu et al. 2025, arXiv 2503.14476. Its length penalty is a reward (`type: Overlong`), which the job must add."""
    RLOO = "RLOO"
    """The leave-one-out advantages of Ahmadian et al. 2024 (arXiv 2402.14740), with GRPO's other settings."""
    REINFORCE_PLUS_PLUS = "ReinforcePlusPlus"
    """The advantages of REINFORCE++ (arXiv 2501.03262), with GRPO's other settings."""
    REMAX = "ReMax"
    """The advantages of ReMax (arXiv 2310.10505), with GRPO's other settings."""
    PPO = "PPO"
    """Schulman et al. 2017, arXiv 1707.06347: GAE, a critic, and no dual clip."""
    GSPO = "GSPO"
    """Zheng et al. 2025, arXiv 2507.18071."""
    CISPO = "CISPO"
    """MiniMax 2025, arXiv 2506.13585."""
    DISTILLATION = "Distillation"
    """On-policy distillation from the teacher in roles.ref.model, without rewards (Agarwal et al. 2023, arXiv
    2306.13649)."""


class LossAggregation(StrEnum):
    """How the losses of all tokens are combined into one number. Means are over the whole mini-batch on all workers."""

    TOKEN_MEAN = "TokenMean"
    """Mean over all tokens."""
    TOKEN_SUM = "TokenSum"
    """Sum over all tokens. Loss and gradient grow with the number of tokens in a mini-batch, so that maxGradientNorm
    clips nearly every update."""
    SEQUENCE_MEAN_TOKEN_MEAN = "SequenceMeanTokenMean"
    """Mean over responses of the mean over the response's tokens."""
    SEQUENCE_MEAN_TOKEN_SUM = "SequenceMeanTokenSum"
    """Mean over responses of the sum over the response's tokens."""
    SEQUENCE_MEAN_TOKEN_SUM_NORM = "SequenceMeanTokenSumNorm"
    """Mean over responses of the sum over the response's tokens, divided by rollout.maxNewTokens."""


class Algorithm(WireModel):
    """The training algorithm: `type` names a recipe, and the other fields override parts of it.

    `rljob validate --resolved FILE` prints the result with all values."""

    type: AlgorithmType = AlgorithmType.GRPO
    advantage: Advantage = Field(default_factory=Advantage)
    loss: Loss = Field(default_factory=Loss)
    aggregation: LossAggregation | None = None
    """How the losses of all tokens are combined into one number. Set by the recipe when unset."""
    drop_zero_variance_groups: Flag | None = None
    """Exclude groups whose scores are all equal from the update. When unset, true with dynamicSampling, else false.

    Group-relative advantages are 0 in such groups. If true, such groups also do not count in the denominators of
    the loss, and the KL term does not apply to them."""
    dynamic_sampling: DynamicSampling | None = None
    """Replace groups whose scores are all equal with groups of new prompts. Set by the recipe when unset."""
    mask_truncated_responses: Flag = False
    """Exclude responses that were truncated at rollout.maxNewTokens from the update (the overlong filtering of DAPO,
    arXiv 2503.14476, section 3.4).

    Truncated responses then do not count in the denominators of the loss, and the KL term does not apply to them. Their
    scores still count in the advantages of the other responses of their group. The metric `response_length/clip_ratio`
    is the fraction of truncated responses."""
    entropy_coefficient: Number = 0.0
    """Weight of the entropy bonus: coefficient x entropy is subtracted from the loss."""
    kl: Kl = Field(default_factory=Kl)
    rollout_correction: RolloutCorrection = Field(default_factory=RolloutCorrection)
    policy_filtration: PolicyFiltration = Field(default_factory=PolicyFiltration)
