"""How rewards become advantages: one part of a learning rule (`algorithm`). What a block leaves out is the recipe's."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from rljob_api.base import WireModel
from rljob_api.rule import required_block_rules
from rljob_api.scalars import Flag, Fraction
from rljob_api.v1alpha1.user_function import Function
from rljob_api.variants import Variants


class AdvantageType(StrEnum):
    """How rewards become advantages; docs/algorithms.md has the formulas and their sources.

    GroupRelative, GroupRelativePassAtK, GDPO, LeaveOneOut, ReinforcePlusPlusBaseline, OPO, GPG and OptimalTokenBaseline
    compare responses to the same prompt. ReinforcePlusPlus compares all tokens of a batch, ReMax a response with the
    greedy one to its prompt, GAE a reward with what the critic expected of it."""

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
    FUNCTION = "Function"


COMPARING = (
    AdvantageType.GROUP_RELATIVE,
    AdvantageType.GROUP_RELATIVE_PASS_AT_K,
    AdvantageType.GDPO,
    AdvantageType.LEAVE_ONE_OUT,
    AdvantageType.REINFORCE_PLUS_PLUS_BASELINE,
    AdvantageType.OPO,
    AdvantageType.GPG,
    AdvantageType.OPTIMAL_TOKEN_BASELINE,
)
"""What compares responses to the same prompt."""
MAY_NEED_CRITIC = (AdvantageType.GAE, AdvantageType.FUNCTION)
"""What asks a critic for values; a function of one's own may."""


class GroupRelative(WireModel):
    """A reward less the mean reward of all responses to the same prompt (arXiv 2402.03300)."""

    normalize_by_std: Flag | None = None
    """Divide by the group's standard deviation. The recipe's when unset."""


class GroupRelativePassAtK(WireModel):
    """The best reward of a group less the second best, for the best response; 0 for the others (arXiv 2503.19595)."""

    normalize_by_std: Flag = True
    """Divide by the group's standard deviation."""


class ReinforcePlusPlus(WireModel):
    """The rewards from a token on, less their mean over the batch, by their standard deviation (arXiv 2501.03262)."""

    gamma: Fraction = 1.0
    """Discount of what comes a token later."""


class Gae(WireModel):
    """Generalized advantage estimation (arXiv 1506.02438)."""

    gamma: Fraction = 1.0
    """Discount of what comes a token later."""
    lambda_: Fraction = Field(default=1.0, alias="lambda")
    """1 trusts rewards alone, 0 the critic's value of the next token."""


class OptimalTokenBaseline(WireModel):
    """A baseline for each group and token position, by how uncertain the policy was on the way."""

    zero_tail: Flag = True
    """No baseline where a response has outlasted all others of its group; false makes its advantages 0 there."""


class Advantage(Variants):
    """How rewards become advantages."""

    type: AdvantageType | None = None
    """The recipe's when unset."""
    group_relative: GroupRelative | None = None
    group_relative_pass_at_k: GroupRelativePassAtK | None = None
    reinforce_plus_plus: ReinforcePlusPlus | None = None
    gae: Gae | None = None
    optimal_token_baseline: OptimalTokenBaseline | None = None
    function: Function | None = None
    """For `type: Function`: takes `rljob_trainer.algorithms.ResponseInputs`, returns an advantage for each response.
    Decorated with `token_advantage` it takes `TokenInputs` and `Reduce`, and returns one for each token."""


ADVANTAGE_RULES = required_block_rules(Advantage, AdvantageType)
