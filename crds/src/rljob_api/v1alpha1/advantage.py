"""The advantage, a part of the algorithm: how advantages are computed from rewards. The recipe sets unset fields."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.rule import required_block_rules
from rljob_api.scalars import Flag, Fraction, FunctionPath
from rljob_api.variants import Variants


class AdvantageType(StrEnum):
    """How advantages are computed from rewards; docs/algorithms.md has the formulas and their sources.

    GroupRelative, GroupRelativePassAtK, GDPO, LeaveOneOut, ReinforcePlusPlusBaseline, OPO, GPG and OptimalTokenBaseline
    compare responses to the same prompt. ReinforcePlusPlus compares all tokens of a batch. ReMax compares a response
    with the greedy response to its prompt. GAE compares the rewards with the critic's values. Distillation compares the
    log-probability of each token with that of a teacher (roles.ref.model), without rewards."""

    GROUP_RELATIVE = "GroupRelative"
    GROUP_RELATIVE_PASS_AT_K = "GroupRelativePassAtK"
    GDPO = "GDPO"
    LEAVE_ONE_OUT = "LeaveOneOut"
    REINFORCE_PLUS_PLUS = "ReinforcePlusPlus"
    REINFORCE_PLUS_PLUS_BASELINE = "ReinforcePlusPlusBaseline"
    REMAX = "ReMax"
    OPO = "OPO"
    GPG = "GPG"
    GAE = "GAE"
    OPTIMAL_TOKEN_BASELINE = "OptimalTokenBaseline"
    DISTILLATION = "Distillation"
    FUNCTION = "Function"


GROUP_ADVANTAGES = (
    AdvantageType.GROUP_RELATIVE,
    AdvantageType.GROUP_RELATIVE_PASS_AT_K,
    AdvantageType.GDPO,
    AdvantageType.LEAVE_ONE_OUT,
    AdvantageType.REINFORCE_PLUS_PLUS_BASELINE,
    AdvantageType.OPO,
    AdvantageType.GPG,
    AdvantageType.OPTIMAL_TOKEN_BASELINE,
)
"""Advantages that compare responses to the same prompt."""
MAY_NEED_CRITIC = (AdvantageType.GAE, AdvantageType.FUNCTION)
"""Advantages that need a critic's values (GAE), or may need them (a user-defined function)."""


class GroupRelative(WireModel):
    """Reward - mean reward of all responses to the same prompt (arXiv 2402.03300)."""

    normalize_by_std: Flag | None = None
    """Divide by the standard deviation of the group. Set by the recipe when unset."""


class GroupRelativePassAtK(WireModel):
    """Best reward of the group - second best reward, for the best response; 0 for the others (arXiv 2503.19595)."""

    normalize_by_std: Flag = True
    """Divide by the standard deviation of the group."""


class ReinforcePlusPlus(WireModel):
    """Discounted return of each token, normalized by mean and standard deviation over the batch (arXiv 2501.03262)."""

    gamma: Fraction = 1.0
    """Discount factor per token."""


class Gae(WireModel):
    """Generalized advantage estimation (arXiv 1506.02438)."""

    gamma: Fraction = 1.0
    """Discount factor per token."""
    lambda_: Fraction = Field(default=1.0, alias="lambda")
    """Trade-off between variance and bias. 1: a token is judged by all later rewards; 0: by its reward and the critic's
    value of the next token."""


class OptimalTokenBaseline(WireModel):
    """A baseline for each group and token position, weighted by the policy's uncertainty up to the token."""

    zero_tail: Flag = True
    """If true, the baseline is 0 at positions that only the longest response of the group reaches. If false, the
    advantages are 0 there."""


class Function(WireModel):
    """A user-defined advantage or policy loss: a function in a module that Python can import (see spec.code)."""

    path: FunctionPath
    """`package.module:function`, for example `my_losses:tapered`."""


class Advantage(Variants):
    """How advantages are computed from rewards."""

    type: AdvantageType | None = None
    """Kind of advantage, for example LeaveOneOut. Set by the recipe when unset."""
    group_relative: GroupRelative | None = None
    group_relative_pass_at_k: GroupRelativePassAtK | None = None
    reinforce_plus_plus: ReinforcePlusPlus | None = None
    gae: Gae | None = None
    optimal_token_baseline: OptimalTokenBaseline | None = None
    function: Function | None = None
    """User-defined advantage for `type: Function`: takes `rljob_trainer.algorithms.ResponseInputs`, returns an
    advantage per response.

    With the decorator `token_advantage` it takes `TokenInputs` and `Reduce`, and returns an advantage per token."""


ADVANTAGE_RULES = required_block_rules(Advantage, AdvantageType)
