"""The learning rule: a recipe by name, and what a job changes in it: advantages, policy loss, aggregation, KL term.

What is left out here is the recipe's (`recipes.py`), which gives every field its value.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.scalars import Flag, Number
from rljob_api.v1alpha1.advantage import Advantage
from rljob_api.v1alpha1.dynamic_sampling import DynamicSampling
from rljob_api.v1alpha1.kl import Kl
from rljob_api.v1alpha1.policy_filtration import PolicyFiltration
from rljob_api.v1alpha1.policy_loss import Loss
from rljob_api.v1alpha1.rollout_correction import RolloutCorrection


class AlgorithmType(StrEnum):
    """Recipes: an advantage, a loss, an aggregation and their settings under one name. GRPO has the
    advantages of Shao et al. 2024 (arXiv 2402.03300), with the token mean, the dual clip and no KL term, as is usual
    since; the paper's own form is `aggregation: SequenceMeanTokenMean`, `dualClipRatio: 0` and a KL coefficient. DrGRPO
    is of Liu et al. 2025 (arXiv 2503.20783), DAPO of Yu et al. 2025 (arXiv 2503.14476), whose penalty for length is a
    reward (`type: Overlong`) and for the job to write. RLOO (arXiv 2402.14740), ReinforcePlusPlus (arXiv 2501.03262)
    and ReMax (arXiv 2310.10505) stand for their advantages in the same setting; docs/algorithms.md has the papers' own.
    PPO (arXiv 1707.06347) has GAE, a critic and no dual clip. GSPO is of Zheng et al. 2025 (arXiv 2507.18071), CISPO
    of MiniMax 2025 (arXiv 2506.13585)."""

    GRPO = "GRPO"
    DR_GRPO = "DrGRPO"
    DAPO = "DAPO"
    RLOO = "RLOO"
    REINFORCE_PLUS_PLUS = "ReinforcePlusPlus"
    REMAX = "ReMax"
    PPO = "PPO"
    GSPO = "GSPO"
    CISPO = "CISPO"


class LossAggregation(StrEnum):
    """How per-token losses become one number. All denominators are those of the whole mini-batch on all workers;
    SequenceMeanTokenSumNorm divides each response's sum by rollout.maxNewTokens, whatever the response's length.
    TokenSum has no denominator: loss and gradient grow with the number of tokens in a mini-batch, and so does what a
    learning rate means to an optimizer that does not normalise; maxGradientNorm bounds nearly every update."""

    TOKEN_MEAN = "TokenMean"
    TOKEN_SUM = "TokenSum"
    SEQUENCE_MEAN_TOKEN_MEAN = "SequenceMeanTokenMean"
    SEQUENCE_MEAN_TOKEN_SUM = "SequenceMeanTokenSum"
    SEQUENCE_MEAN_TOKEN_SUM_NORM = "SequenceMeanTokenSumNorm"


class Algorithm(WireModel):
    """The learning rule: `type` names a recipe, the rest overrides it; `rljob validate --resolved FILE` prints what
    becomes of it."""

    type: AlgorithmType = AlgorithmType.GRPO
    advantage: Advantage = Field(default_factory=Advantage)
    loss: Loss = Field(default_factory=Loss)
    aggregation: LossAggregation | None = None
    """How per-token losses become one number. The recipe's when unset."""
    drop_zero_variance_groups: Flag | None = None
    """Leave out groups whose scores are all equal: group-relative advantages are 0 there, and with this they do not
    enter the denominators either. A KL term does not pull on them, in the reward or in the loss. When unset, true with
    dynamicSampling, else false."""
    dynamic_sampling: DynamicSampling | None = None
    """Replace groups whose scores are all equal by those of fresh prompts. The recipe's when unset."""
    mask_truncated_responses: Flag = False
    """Do not learn from responses that rollout.maxNewTokens cut off (the overlong filtering of DAPO, arXiv 2503.14476,
    section 3.4): they are not in the denominators of the loss either, and no KL term pulls on them. Advantages
    on responses still compare the others of their group with them. Their share is `response_length/clip_ratio`."""
    entropy_coefficient: Number = 0.0
    """Weight of the entropy bonus (subtracted from the loss)."""
    kl: Kl = Field(default_factory=Kl)
    rollout_correction: RolloutCorrection = Field(default_factory=RolloutCorrection)
    policy_filtration: PolicyFiltration = Field(default_factory=PolicyFiltration)
