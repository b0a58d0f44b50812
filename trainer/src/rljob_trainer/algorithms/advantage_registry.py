"""Advantages by name: from a job's resolved algorithm to what computes them.

Legend: B responses, N response tokens.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from rljob_api.v1alpha1.advantage import AdvantageType
from rljob_api.v1alpha1.recipes import ResolvedAlgorithm
from rljob_api.v1alpha1.resolved_advantage import ResolvedAdvantage
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
    SQUARES,
    VALUES,
    AdvantageEstimator,
    Level,
    ResponseInputs,
)
from rljob_trainer.algorithms.token_advantages import (
    generalized_advantages,
    optimal_token_baseline_advantages,
    reinforce_plus_plus_advantages,
)
from rljob_trainer.errors import ConfigurationError

TRIAL_GROUP_SIZE = 4


def advantage_estimator(resolved: ResolvedAlgorithm, group_size: int = TRIAL_GROUP_SIZE) -> AdvantageEstimator:
    """The job's estimator. A user's function is loaded and tried on groups of `group_size`, which a job knows.

    Raises ConfigurationError."""
    chosen = resolved.advantage
    match chosen.type:
        case AdvantageType.FUNCTION:
            return _own(resolved, group_size)
        case AdvantageType.REINFORCE_PLUS_PLUS | AdvantageType.GAE | AdvantageType.OPTIMAL_TOKEN_BASELINE:
            return _on_tokens(chosen)
        case _:
            return _on_responses(chosen)


def _own(resolved: ResolvedAlgorithm, group_size: int) -> AdvantageEstimator:
    found = load_advantage(function_path(resolved.advantage.function, ADVANTAGE_FIELD), group_size)
    if resolved.has_kl_in_reward and found.level is Level.TOKEN and KL_PENALTIES not in found.needs:
        raise ConfigurationError(
            f"spec.training.algorithm.kl.placement: the KL goes into the reward, but {found.name} works on "
            f"tokens and does not ask for it; let it need {KL_PENALTIES!r}, or write `placement: Loss`"
        )
    return found


def _on_tokens(chosen: ResolvedAdvantage) -> AdvantageEstimator:
    if chosen.gae is not None:
        gae = partial(generalized_advantages, gamma=chosen.gae.gamma, lambda_=chosen.gae.lambda_)
        return AdvantageEstimator(chosen.type, for_tokens=gae, needs=frozenset({VALUES, KL_PENALTIES}))
    if chosen.optimal_token_baseline is not None:
        baseline = partial(optimal_token_baseline_advantages, zero_tail=chosen.optimal_token_baseline.zero_tail)
        needs = frozenset({OLD_LOGPROBS, SQUARES, KL_PENALTIES})
        return AdvantageEstimator(chosen.type, for_tokens=baseline, needs=needs)
    assert chosen.reinforce_plus_plus is not None
    plus_plus = partial(reinforce_plus_plus_advantages, gamma=chosen.reinforce_plus_plus.gamma)
    return AdvantageEstimator(chosen.type, for_tokens=plus_plus, needs=frozenset({KL_PENALTIES}))


def _on_responses(chosen: ResolvedAdvantage) -> AdvantageEstimator:
    needs = {AdvantageType.REMAX: {GREEDY_REWARDS}, AdvantageType.GDPO: {NAMED_REWARDS}}
    return AdvantageEstimator(
        chosen.type,
        for_responses=partial(_response_advantages, chosen),
        needs=frozenset(needs.get(chosen.type, ())),
    )


def _response_advantages(chosen: ResolvedAdvantage, inputs: ResponseInputs) -> Tensor:
    rewards_B, groups_B, lengths_B = inputs.rewards_B, inputs.groups_B, inputs.lengths_B
    match chosen.type:
        case AdvantageType.GROUP_RELATIVE:
            assert chosen.group_relative is not None
            by_std = chosen.group_relative.normalize_by_std
            return group_relative_advantages(rewards_B, groups_B, normalize_by_std=by_std)
        case AdvantageType.GROUP_RELATIVE_PASS_AT_K:
            assert chosen.group_relative_pass_at_k is not None
            by_std = chosen.group_relative_pass_at_k.normalize_by_std
            return pass_at_k_advantages(rewards_B, groups_B, normalize_by_std=by_std)
        case AdvantageType.GDPO:
            assert inputs.named_rewards, "GDPO: no named rewards"
            return gdpo_advantages(inputs.named_rewards, inputs.reward_weights, groups_B, inputs.learned_lengths_B)
        case AdvantageType.LEAVE_ONE_OUT:
            return leave_one_out_advantages(rewards_B, groups_B)
        case AdvantageType.REINFORCE_PLUS_PLUS_BASELINE:
            return reinforce_plus_plus_baseline_advantages(rewards_B, groups_B, inputs.learned_lengths_B)
        case AdvantageType.REMAX:
            assert inputs.greedy_rewards_B is not None, "ReMax: no greedy rewards"
            return remax_advantages(rewards_B, inputs.greedy_rewards_B)
        case AdvantageType.OPO:
            return opo_advantages(rewards_B, groups_B, lengths_B)
        case AdvantageType.GPG:
            return gpg_advantages(rewards_B, groups_B)
        case _:
            raise AssertionError(f"{chosen.type} is no advantage on responses")
