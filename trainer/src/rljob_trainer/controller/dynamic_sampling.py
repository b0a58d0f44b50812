"""Dynamic sampling: groups whose scores are all equal are replaced by groups of new prompts, until the batch is full.
This happens in rounds (`refill: Round`), or while other groups are still being generated (`Continuous`).

A step takes the first groups with different scores, in the order of their prompts in the data. The prompts after the
last taken group are drawn again in the next step. So, for the same responses and scores, a step takes the same groups
as if prompts were drawn one by one. The number of prompts per round only affects the time, and which responses are
generated in the same batch.

Source: DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2 and equation 11.

Legend: G groups (prompts) of all rounds of a step, B responses of the batch (batch size x group size).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count

import torch

from rljob_api.v1alpha1.recipes import resolved_value
from rljob_api.v1alpha1.response_selection import MaxRoundsPolicy, Refill
from rljob_trainer.controller.outcomes import is_skipped, reasons_text, too_many_excluded
from rljob_trainer.controller.rollout import Rollout
from rljob_trainer.controller.rollout_phase import Requested, RolloutPhase
from rljob_trainer.controller.step_plan import StepPlan
from rljob_trainer.controller.step_rows import StepRows
from rljob_trainer.datasets.cursor import DrawnRow, PromptStream
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.errors import BatchNotFullError, TrainerError
from rljob_trainer.observability.metrics import (
    SAMPLING_KEPT,
    SAMPLING_PROMPTS,
    SAMPLING_RETURNED,
    SAMPLING_REWARD_PREFIX,
    SAMPLING_ROUNDS,
    SAMPLING_SURPLUS,
    spread,
)

MIN_MEMBERS = 2
"""Number of responses that a group needs, because their scores are compared."""
MARGIN = 1.25
"""A further round has this many times the number of prompts that is expected to fill the batch. Without a margin about
half of these rounds would not fill the batch, and a round takes as long as its longest response, even with few
prompts."""

Generate = Callable[[Sequence[DrawnRow[PromptRow]], int], Rollout]
"""(prompts, number of prompts drawn before in the same step) -> scored responses to these prompts."""
Request = Callable[[Sequence[DrawnRow[PromptRow]], int], Requested]
"""The same without waiting for the responses."""


class DynamicSampling:
    """Fills the batches of a run. `cursor` is the prompt stream of the run."""

    def __init__(self, plan: StepPlan, cursor: PromptStream[PromptRow], *, by_name: bool = False) -> None:
        """For `by_name` see `Rollout.has_reward_variance`."""
        self.plan = plan
        self.settings = resolved_value(plan.algorithm.dynamic_sampling)
        self.is_continuous = self.settings.refill is Refill.CONTINUOUS
        self.by_name = by_name
        self.cursor = cursor
        self.group_size = plan.group_size
        self.multiple = plan.num_data_ranks // math.gcd(plan.num_data_ranks, plan.group_size)
        """The number of prompts of a round must be a multiple of this, so that the responses can be split evenly over
        the workers."""

    def filled(self, prompts: Sequence[DrawnRow[PromptRow]], step: int, generate: Generate) -> StepRows:
        """Generates responses in rounds, at most `maxRounds`, until there are as many groups with different scores as
        `prompts`. The first round uses `prompts`, which must be the last rows that were drawn. Returns these groups. If
        they are too few after the last round, groups with equal scores, which are not trained on, fill the batch
        (`onMaxRounds: TrainOnFewer`).

        If they are too few and `onMaxRounds` is `Fail`, raises BatchNotFullError, or ResourceError or RewardError if
        too many responses were excluded. Raises whatever `generate` raises. After an error the position of the prompt
        stream is undefined."""
        num_wanted, rounds, drawn = len(prompts), [generate(prompts, 0)], list(prompts)
        is_kept_G = self._is_kept(rounds[0])
        while int(is_kept_G.sum()) < num_wanted and len(rounds) < resolved_value(self.settings.max_rounds):
            num_fresh = num_fresh_prompts(num_wanted, int(is_kept_G.sum()), len(is_kept_G), self.multiple)
            fresh = self.cursor.next_batch(num_fresh)
            rounds.append(generate(fresh, len(is_kept_G)))
            drawn += fresh
            is_kept_G = torch.cat([is_kept_G, self._is_kept(rounds[-1])])
        return self._step_rows(step, num_wanted, drawn, rounds, is_kept_G)

    def filled_continuously(
        self, prompts: Sequence[DrawnRow[PromptRow]], step: int, request: Request, rollout: RolloutPhase
    ) -> StepRows:
        """Like `filled`, without rounds: requests further prompts as soon as it is likely that the groups that are
        being generated will not fill the batch. Draws at most `maxRounds` times as many prompts as the first batch
        has. As soon as it is known which groups are taken, drops those that are still being generated or scored.

        For the same responses and scores, the same groups are taken, whatever the order in which they finish."""
        num_wanted, drawn = len(prompts), list(prompts)
        max_drawn = num_wanted * resolved_value(self.settings.max_rounds)
        requested = request(drawn, 0).by_group()
        found: dict[int, Rollout] = {}
        is_kept: dict[int, bool] = {}
        while True:
            num_decided = num_groups_decided(is_kept, num_wanted)
            if num_decided == max_drawn or sum(is_kept[each] for each in range(num_decided)) == num_wanted:
                break
            num_fresh = num_missing_prompts(num_wanted, sum(is_kept.values()), len(is_kept), len(requested))
            if num_fresh := min(num_fresh, max_drawn - len(drawn)):
                fresh = self.cursor.next_batch(num_fresh)
                requested |= request(fresh, len(drawn)).by_group()
                drawn += fresh
            for number in rollout.poll(requested):
                found[number] = rollout.scored(rollout.collected(requested.pop(number)))
                is_kept[number] = bool(self._is_kept(found[number]))
        rollout.abandon()
        is_kept_G = torch.tensor([is_kept[number] for number in range(num_decided)])
        return self._step_rows(step, num_wanted, drawn, [found[number] for number in range(num_decided)], is_kept_G)

    def _step_rows(
        self,
        step: int,
        num_wanted: int,
        drawn: Sequence[DrawnRow[PromptRow]],
        found: Sequence[Rollout],
        is_kept_G: torch.Tensor,
    ) -> StepRows:
        """Takes the first groups that are kept. `found`: the groups by number, one or several in each rollout."""
        everything, num_kept, num_returned = Rollout.concat(found), int(is_kept_G.sum()), 0
        if num_kept >= num_wanted:
            taken = is_kept_G.nonzero().flatten()[:num_wanted]
            last = int(taken[-1])
            num_returned = len(drawn) - 1 - last
            self.cursor.rewind(drawn[last].ordinal)
        elif self.settings.on_max_rounds is MaxRoundsPolicy.FAIL:
            raise self._not_full_error(step, num_wanted, is_kept_G, everything)
        else:
            taken = spread_groups(is_kept_G, num_wanted, self.plan.rows_per_update // self.group_size)
        batch = everything.selected(torch.cat([(everything.groups_B == group).nonzero().flatten() for group in taken]))
        return StepRows.of(
            self.plan,
            batch,
            is_kept_G[taken].repeat_interleave(self.group_size) & batch.is_counted(MIN_MEMBERS),
            everything,
            {
                **({} if self.is_continuous else {SAMPLING_ROUNDS: float(len(found))}),
                SAMPLING_PROMPTS: float(len(drawn)),
                SAMPLING_KEPT: num_kept / len(is_kept_G),
                SAMPLING_SURPLUS: float(max(0, num_kept - num_wanted)),
                SAMPLING_RETURNED: float(num_returned),
                **spread(SAMPLING_REWARD_PREFIX, batch.rewards_B[~batch.rewards_B.isnan()].tolist()),
            },
        )

    def _is_kept(self, rollout: Rollout) -> torch.Tensor:
        """Returns [groups of this rollout] bool: whether the scores of the group differ. If `dynamicSampling.reward` is
        set, the scores of that reward must differ, too, if it scores the prompt. Excluded responses do not count."""
        differs_B = rollout.has_reward_variance(by_name=self.by_name)
        if self.settings.reward is not None:
            name = self.settings.reward
            differs_B = differs_B & (rollout.differs(rollout.named_rewards_B[name]) | is_skipped(rollout.batch, name))
        first, last = int(rollout.groups_B[0]), int(rollout.groups_B[-1])
        num_differing_G = torch.zeros(last - first + 1, dtype=torch.int64)
        return num_differing_G.index_add_(0, rollout.groups_B - first, differs_B.long()) > 0

    def _not_full_error(self, step: int, num_wanted: int, is_kept_G: torch.Tensor, everything: Rollout) -> TrainerError:
        """Returns the error of a step whose batch is not full; if too many responses were excluded, that of
        `maxFailureRate`."""
        num_excluded, num_responses = int(everything.is_excluded_B.sum()), len(everything.prompts)
        scores = everything.rewards_B[~everything.rewards_B.isnan()]
        if num_excluded > self.plan.max_failure_rate * num_responses or not len(scores):
            counted = f"{num_excluded} of {num_responses} responses of step {step + 1}"
            return too_many_excluded(counted, self.plan.max_failure_rate, "them", everything.reasons())
        # Groups that lost responses may be the cause.
        lost = f"{num_excluded} of {num_responses} responses have no score: {reasons_text(everything.reasons())}"
        excluded = f"; {lost}" if num_excluded else ""
        by_name = f", or all scores of {self.settings.reward!r}," if self.settings.reward is not None else ""
        values = f"{float(scores.mean()):.4g}, min {float(scores.min()):.4g}, max {float(scores.max()):.4g}"
        when = f"{len(is_kept_G)} prompts" if self.is_continuous else f"{self.settings.max_rounds} rounds"
        return BatchNotFullError(
            f"spec.training.algorithm.dynamicSampling.maxRounds: the batch of step {step + 1} is not full after "
            f"{when}: {int(is_kept_G.sum())} of {len(is_kept_G)} groups can be trained on, {num_wanted} are needed; in "
            f"the other groups all scores{by_name} are equal, or fewer than two responses have scores (mean score of "
            f"all responses: {values}{excluded}); use prompts that the model sometimes solves, or a reward that gives "
            "partial credit, increase rollout.groupSize or maxRounds, or set onMaxRounds: TrainOnFewer"
        )


def num_fresh_prompts(num_wanted: int, num_kept: int, num_drawn: int, multiple: int) -> int:
    """Returns the number of prompts of the next round: enough to fill a batch of `num_wanted` groups if the kept
    fraction stays the same, times MARGIN, rounded up to `multiple`, at most `num_wanted`. If no group was kept so far,
    it is `num_wanted`."""
    if not num_kept:
        return num_wanted
    expected = math.ceil(MARGIN * (num_wanted - num_kept) * num_drawn / num_kept)
    return min(num_wanted, -(-expected // multiple) * multiple)


def num_groups_decided(is_kept: Mapping[int, bool], num_wanted: int) -> int:
    """Returns the number of consecutive groups, from the first one, for which it is known whether they are kept; at
    most up to the group that fills the batch. `is_kept`: whether a group is kept, for each group that is known.

    Example: of the groups 0, 1 and 3, group 2 being unknown, the first two are decided."""
    num_kept = 0
    for number in count():
        if number not in is_kept or num_kept == num_wanted:
            return number
        num_kept += is_kept[number]
    raise AssertionError("count does not end")


def num_missing_prompts(num_wanted: int, num_kept: int, num_known: int, num_open: int) -> int:
    """Returns the number of further prompts after which `num_wanted` kept groups are expected; at most `num_wanted`,
    and 0 if no group is known yet. So far `num_kept` of `num_known` groups are kept, and `num_open` further groups are
    being generated or scored. The kept fraction is estimated as if `num_wanted` / 2 more groups were known, and half of
    them kept, so that the first few groups do not have too much weight."""
    fraction = (num_kept + num_wanted / 4) / (num_known + num_wanted / 2)
    missing = num_wanted - num_kept - fraction * num_open
    return min(num_wanted, math.ceil(missing / fraction)) if num_known and missing > 0 else 0


def spread_groups(is_kept_G: torch.Tensor, num_wanted: int, groups_per_update: int) -> torch.Tensor:
    """Returns [num_wanted] int64: all kept groups, and other groups to fill the batch. In this order the numbers of
    kept groups in any two updates differ by at most one. Each `groups_per_update` consecutive groups are one update."""
    taken = torch.cat([is_kept_G.nonzero().flatten(), (~is_kept_G).nonzero().flatten()])[:num_wanted]
    return taken.view(groups_per_update, -1).T.flatten()
