"""How rewards become advantages: one part of a learning rule (`algorithm`). What a block leaves out is the recipe's."""

from __future__ import annotations

from enum import StrEnum

from rljob_api.base import WireModel
from rljob_api.scalars import Flag
from rljob_api.v1alpha1.user_function import Function


class AdvantageType(StrEnum):
    """How rewards become advantages."""

    GROUP_RELATIVE = "GroupRelative"
    FUNCTION = "Function"


class GroupRelative(WireModel):
    """A reward less the mean reward of all responses to the same prompt (arXiv 2402.03300)."""

    normalize_by_std: Flag | None = None
    """Divide by the group's standard deviation. The recipe's when unset."""


class Advantage(WireModel):
    """How rewards become advantages."""

    type: AdvantageType | None = None
    """The recipe's when unset."""
    group_relative: GroupRelative | None = None
    function: Function | None = None
    """For `type: Function`: takes `rljob_trainer.algorithms.ResponseInputs`, returns an advantage for each response.
    Decorated with `token_advantage` it takes `TokenInputs` and `Reduce`, and returns one for each token."""
