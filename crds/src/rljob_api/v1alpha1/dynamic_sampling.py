"""Groups that nothing can be learned from are replaced: one part of a learning rule (`algorithm`)."""

from __future__ import annotations

from enum import StrEnum

from rljob_api.base import WireModel
from rljob_api.rule import rule
from rljob_api.scalars import Flag, PositiveCount
from rljob_api.v1alpha1.reward import RewardName


class MaxRoundsPolicy(StrEnum):
    """What a batch that is not full after the last round does to the job."""

    FAIL = "Fail"
    TRAIN_ON_FEWER = "TrainOnFewer"
    """The step learns from the groups that there are, spread evenly over its updates, and from none where there are
    none; their share is `actor/learned_fraction`."""


class DynamicSampling(WireModel):
    """Groups whose scores are all equal are replaced by those of fresh prompts, until the batch is full (DAPO,
    arXiv 2503.14476, section 3.2). A step takes the first groups with different scores, in the order of the dataset;
    prompts behind the last of them are drawn again in the next step. Scores are compared before any KL term."""

    enabled: Flag = True
    """false turns off what the recipe does."""
    max_rounds: PositiveCount | None = None
    """Rounds of generation in one step, the first one included. The first asks batchSize prompts, each other as many
    as should fill the batch, by the share of groups that was kept so far, and at most batchSize. 10 when unset."""
    on_max_rounds: MaxRoundsPolicy | None = None
    """What a batch that is not full after maxRounds does to the job. Fail when unset."""
    reward: RewardName | None = None
    """One of training.rewards by name: its scores, before its weight, must differ, too. DAPO's paper compares whether
    answers are right and not the penalty for length. When unset, only the weighted sums of all rewards must differ."""


def _is_in_use(block: DynamicSampling) -> bool:
    return block.enabled or (block.max_rounds, block.on_max_rounds, block.reward) == (None, None, None)


DYNAMIC_SAMPLING_RULES = (
    rule(
        DynamicSampling,
        "DynamicSampling.enabled",
        field=".enabled",
        cel="!has(self.enabled) || self.enabled || !(has(self.maxRounds) || has(self.onMaxRounds) || has(self.reward))",
        wrong="the other fields of the block are ignored",
        advice="remove them, or write enabled: true",
        holds=_is_in_use,
    ),
)
