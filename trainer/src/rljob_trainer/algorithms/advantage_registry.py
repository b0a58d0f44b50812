"""Maps each advantage type of the API to the function that computes it and the inputs that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from torch import Tensor

from rljob_api.base import WireModel
from rljob_api.v1alpha1.advantage import (
    GROUP_ADVANTAGES,
    Advantage,
    AdvantageType,
    Gae,
    GroupRelative,
    GroupRelativePassAtK,
    OptimalTokenBaseline,
    ReinforcePlusPlus,
)
from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.recipes import resolved_value
from rljob_trainer.algorithms.advantages import (
    gdpo_advantages,
    gpg_advantages,
    group_relative_advantages,
    leave_one_out_advantages,
    opo_advantages,
    pass_at_k_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
)
from rljob_trainer.algorithms.functions import ADVANTAGE_FIELD, function_path, load_advantage
from rljob_trainer.algorithms.interfaces import (
    GREEDY_REWARDS,
    KL_PENALTIES,
    NAMED_REWARDS,
    OLD_LOGPROBS,
    REF_LOGPROBS,
    SQUARES,
    VALUES,
    AdvantageEstimator,
    Level,
    Reduce,
    ResponseInputs,
    TokenAdvantages,
    TokenInputs,
)
from rljob_trainer.algorithms.token_advantages import (
    distillation_advantages,
    generalized_advantages,
    optimal_token_baseline_advantages,
    reinforce_plus_plus_advantages,
)
from rljob_trainer.errors import ConfigurationError

TRIAL_GROUP_SIZE = 4
"""The number of responses per group in the trial of a user's function, if the caller specifies none."""

SettingsT = TypeVar("SettingsT", bound=WireModel)
MakeEstimator = Callable[[Advantage], AdvantageEstimator]
"""Makes the estimator for a resolved `advantage` block of a job."""


def advantage_estimator(resolved: Algorithm, group_size: int = TRIAL_GROUP_SIZE) -> AdvantageEstimator:
    """The estimator that the job names. A user's function is loaded, and tried on made-up groups of `group_size`
    responses.

    Raises ConfigurationError if a user's function cannot be loaded, fails the trial, or does not read the KL penalties
    although the job puts KL into the reward."""
    chosen = resolved.advantage
    if chosen.type is AdvantageType.FUNCTION:
        return _user_estimator(resolved, group_size)
    kind = resolved_value(chosen.type)
    return replace(ADVANTAGES[kind](chosen), compares_groups=kind in GROUP_ADVANTAGES)


def _user_estimator(resolved: Algorithm, group_size: int) -> AdvantageEstimator:
    found = load_advantage(function_path(resolved.advantage.function, ADVANTAGE_FIELD), group_size)
    if resolved.kl.is_in_reward and found.level is Level.TOKEN and KL_PENALTIES not in found.needs:
        raise ConfigurationError(
            f"spec.training.algorithm.kl.placement: KL is part of the reward, but {found.name} computes advantages "
            f"per token and does not read the KL penalties; add {KL_PENALTIES!r} to its `needs`, or set "
            "`placement: Loss`"
        )
    return found


def _plain(compute: Callable[[ResponseInputs], Tensor], *, needs: Iterable[str] = ()) -> MakeEstimator:
    """For an estimator that computes one advantage per response and has no settings."""
    return lambda chosen: AdvantageEstimator(resolved_value(chosen.type), for_responses=compute, needs=frozenset(needs))


def _on_responses(
    kind: type[SettingsT], compute: Callable[[ResponseInputs, SettingsT], Tensor], *, needs: Iterable[str] = ()
) -> MakeEstimator:
    """For an estimator that computes one advantage per response and has a block of settings."""

    def make(chosen: Advantage) -> AdvantageEstimator:
        settings = chosen.settings(kind)
        return AdvantageEstimator(
            resolved_value(chosen.type), for_responses=lambda inputs: compute(inputs, settings), needs=frozenset(needs)
        )

    return make


def _plain_on_tokens(
    compute: Callable[[TokenInputs, Reduce], TokenAdvantages], *, needs: Iterable[str] = ()
) -> MakeEstimator:
    """For an estimator that computes one advantage per token and has no settings."""
    return lambda chosen: AdvantageEstimator(resolved_value(chosen.type), for_tokens=compute, needs=frozenset(needs))


def _on_tokens(
    kind: type[SettingsT],
    compute: Callable[[TokenInputs, Reduce, SettingsT], TokenAdvantages],
    *,
    needs: Iterable[str] = (),
) -> MakeEstimator:
    """For an estimator that computes one advantage per token and has a block of settings."""

    def make(chosen: Advantage) -> AdvantageEstimator:
        settings = chosen.settings(kind)
        return AdvantageEstimator(
            resolved_value(chosen.type),
            for_tokens=lambda inputs, reduce: compute(inputs, reduce, settings),
            needs=frozenset(needs),
        )

    return make


ADVANTAGES: Mapping[AdvantageType, MakeEstimator] = MappingProxyType(
    {
        AdvantageType.GROUP_RELATIVE: _on_responses(GroupRelative, group_relative_advantages),
        AdvantageType.GROUP_RELATIVE_PASS_AT_K: _on_responses(GroupRelativePassAtK, pass_at_k_advantages),
        AdvantageType.GDPO: _plain(gdpo_advantages, needs=[NAMED_REWARDS]),
        AdvantageType.LEAVE_ONE_OUT: _plain(leave_one_out_advantages),
        AdvantageType.REINFORCE_PLUS_PLUS: _on_tokens(
            ReinforcePlusPlus, reinforce_plus_plus_advantages, needs=[KL_PENALTIES]
        ),
        AdvantageType.REINFORCE_PLUS_PLUS_BASELINE: _plain(reinforce_plus_plus_baseline_advantages),
        AdvantageType.REMAX: _plain(remax_advantages, needs=[GREEDY_REWARDS]),
        AdvantageType.OPO: _plain(opo_advantages),
        AdvantageType.GPG: _plain(gpg_advantages),
        AdvantageType.GAE: _on_tokens(Gae, generalized_advantages, needs=[VALUES, KL_PENALTIES]),
        AdvantageType.OPTIMAL_TOKEN_BASELINE: _on_tokens(
            OptimalTokenBaseline, optimal_token_baseline_advantages, needs=[OLD_LOGPROBS, SQUARES, KL_PENALTIES]
        ),
        AdvantageType.DISTILLATION: _plain_on_tokens(
            distillation_advantages, needs=[OLD_LOGPROBS, REF_LOGPROBS, KL_PENALTIES]
        ),
    }
)
