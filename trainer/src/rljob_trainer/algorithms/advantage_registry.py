"""Advantages by name: from a job's resolved algorithm to what computes them.

Legend: B responses, N response tokens.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from rljob_api.v1alpha1.advantage import AdvantageType
from rljob_api.v1alpha1.recipes import ResolvedAlgorithm
from rljob_api.v1alpha1.resolved_advantage import ResolvedGroupRelative
from rljob_trainer.algorithms.advantages import group_relative_advantages
from rljob_trainer.algorithms.functions import ADVANTAGE_FIELD, function_path, load_advantage
from rljob_trainer.algorithms.interfaces import KL_PENALTIES, AdvantageEstimator, Level, ResponseInputs
from rljob_trainer.errors import ConfigurationError

TRIAL_GROUP_SIZE = 4


def advantage_estimator(resolved: ResolvedAlgorithm, group_size: int = TRIAL_GROUP_SIZE) -> AdvantageEstimator:
    """The job's estimator. A user's function is loaded and tried on groups of `group_size`, which a job knows.

    Raises ConfigurationError."""
    chosen = resolved.advantage
    match chosen.type:
        case AdvantageType.GROUP_RELATIVE:
            assert chosen.group_relative is not None
            return AdvantageEstimator(chosen.type, for_responses=partial(_group_relative, chosen.group_relative))
        case AdvantageType.FUNCTION:
            found = load_advantage(function_path(chosen.function, ADVANTAGE_FIELD), group_size)
            if resolved.has_kl_in_reward and found.level is Level.TOKEN and KL_PENALTIES not in found.needs:
                raise ConfigurationError(
                    f"spec.training.algorithm.kl.placement: the KL goes into the reward, but {found.name} works on "
                    f"tokens and does not ask for it; let it need {KL_PENALTIES!r}, or write `placement: Loss`"
                )
            return found


def _group_relative(settings: ResolvedGroupRelative, inputs: ResponseInputs) -> Tensor:
    return group_relative_advantages(inputs.rewards_B, inputs.groups_B, normalize_by_std=settings.normalize_by_std)
