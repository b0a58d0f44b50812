"""Dynamic sampling: which groups a step uses, the position in the stream of prompts afterwards, and a batch that is not
full. Responses are remote and cannot be fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.v1alpha1.response_selection import DynamicSampling as DynamicSamplingSpec
from rljob_api.v1alpha1.response_selection import MaxRoundsPolicy, Refill
from rljob_testing.training.group_world import GROUP_SIZE, NUMBERS, Nowhere, World, plan_of, rows_of
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller.dynamic_sampling import (
    DynamicSampling,
    num_fresh_prompts,
    num_missing_prompts,
    spread_groups,
)
from rljob_trainer.controller.rollout import Rollout
from rljob_trainer.controller.rollout_phase import Requested, RolloutPhase
from rljob_trainer.controller.step_rows import StepRows
from rljob_trainer.controller.stop_request import StepAbandonedError
from rljob_trainer.datasets.cursor import CursorState, DrawnRow
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.errors import BatchNotFullError, ResourceError
from rljob_trainer.rewards.base import RewardStatus

FEWER = MaxRoundsPolicy.TRAIN_ON_FEWER
OK, TIMEOUT = RewardStatus.OK, RewardStatus.TIMEOUT


def test_the_first_differing_groups_are_used_and_later_prompts_are_returned() -> None:
    world = World(20, lambda row: row in (1, 4, 5, 6, 7, 11))
    found = world.filled(4)
    # One of four is kept; 1.25 x 3 x 4 prompts should be enough, and a round has at most four.
    assert world.rounds == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found.everything is not None
    assert rows_of(found.rollout) == [1, 4, 5, 6]
    assert rows_of(found.everything) == list(range(8))
    assert found.is_kept_B.tolist() == [True] * 8
    assert found.rollout.batch[NUMBERS].tolist() == [1, 1, 4, 4, 5, 5, 6, 6]
    assert found.rollout.rows.is_remote("tokens")
    [block] = found.rollout.rows.remote
    assert [block.shards[shard] for shard in block.shard_of_row] == [Nowhere(1)] * 2 + [Nowhere(2)] * 6
    assert block.row_in_shard.tolist() == [2, 3, 0, 1, 2, 3, 4, 5]
    assert found.sampling_metrics == {
        "dynamic_sampling/rounds": 2.0,
        "dynamic_sampling/prompts": 8.0,
        "dynamic_sampling/kept_fraction": 5 / 8,
        "dynamic_sampling/surplus_groups": 1.0,
        "dynamic_sampling/returned_prompts": 1.0,
        "dynamic_sampling/batch_rewards/mean": 0.5,
        "dynamic_sampling/batch_rewards/max": 1.0,
        "dynamic_sampling/batch_rewards/min": 0.0,
    }
    assert [drawn.row.index for drawn in world.cursor.next_batch(3)] == [7, 8, 9]


def test_a_batch_that_is_full_at_once_needs_one_round() -> None:
    world = World(8, lambda _row: True)
    assert world.filled(4).sampling_metrics["dynamic_sampling/rounds"] == 1.0
    assert world.rounds == [[0, 1, 2, 3]]
    assert [drawn.row.index for drawn in world.cursor.next_batch(1)] == [4]


@given(
    differing=st.lists(st.booleans(), min_size=1, max_size=40).filter(any),
    batch_sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    num_workers=st.sampled_from([1, 3, 8]),
    shuffle=st.booleans(),
)
def test_a_step_uses_the_same_groups_as_drawing_one_by_one_also_when_resumed(
    differing: list[bool], batch_sizes: list[int], num_workers: int, shuffle: bool
) -> None:
    world = World(len(differing), lambda row: differing[row], shuffle)
    slow = World(len(differing), lambda row: differing[row], shuffle)
    for num_wanted in batch_sizes:
        expected: list[tuple[int, int]] = []
        number = 0
        while len(expected) < num_wanted:
            [drawn] = slow.cursor.next_batch(1)
            expected += [(drawn.row.index, number)] if differing[drawn.row.index] else []
            number += 1
        text = world.cursor.state().model_dump_json(by_alias=True)
        found = world.filled(num_wanted, max_rounds=10_000, num_workers=num_workers).rollout
        assert list(zip(rows_of(found), found.batch[NUMBERS].tolist()[::GROUP_SIZE], strict=True)) == expected
        resumed = World(len(differing), lambda row: differing[row], shuffle)
        resumed.cursor.restore(CursorState.model_validate_json(text))
        again = resumed.filled(num_wanted, max_rounds=10_000, num_workers=1).rollout
        assert rows_of(again) == rows_of(found)
    later = [[drawn.row.index for drawn in each.cursor.next_batch(50)] for each in (world, slow)]
    assert later[0] == later[1]


@dataclass
class FinishingGroups:
    """Replaces the rollout phase: groups finish in a random order, some at each poll."""

    world: World
    random: Random
    num_requested: int = 0
    num_dropped: int = 0

    def request(self, prompts: Sequence[DrawnRow[PromptRow]], num_drawn: int) -> Requested:
        """Two responses to each prompt."""
        assert num_drawn == self.num_requested
        groups_S = torch.arange(num_drawn, num_drawn + len(prompts)).repeat_interleave(GROUP_SIZE)
        self.num_requested += len(prompts)
        repeated = tuple(prompt.row for prompt in prompts for _ in range(GROUP_SIZE))
        return Requested(repeated, groups_S, groups_S, DataProto({"any": groups_S}), {})

    def poll(self, requested: Mapping[int, Requested]) -> list[int]:
        """Up to three of the groups."""
        return self.random.sample(sorted(requested), min(len(requested), self.random.randint(0, 3)))

    def collected(self, requested: Requested) -> Rollout:
        """The responses of a group."""
        return self.world.generate([DrawnRow(0, requested.prompts[0])], int(requested.groups_S[0]))

    def scored(self, rollout: Rollout) -> Rollout:
        """The rollout has its scores already."""
        return rollout

    def abandon(self) -> None:
        """See RolloutPhase."""
        self.num_dropped += 1

    def filled(self, num_wanted: int, max_rounds: int = 10, policy: MaxRoundsPolicy = MaxRoundsPolicy.FAIL) -> StepRows:
        """The groups of the next step."""
        settings = DynamicSamplingSpec(max_rounds=max_rounds, on_max_rounds=policy, refill=Refill.CONTINUOUS)
        sampling = DynamicSampling(plan_of(settings, num_wanted, 1), self.world.cursor)
        assert sampling.is_continuous
        prompts = self.world.cursor.next_batch(num_wanted)
        self.num_requested = 0
        return sampling.filled_continuously(prompts, 4, self.request, cast(RolloutPhase, self))


@given(
    differing=st.lists(st.booleans(), min_size=1, max_size=40).filter(any),
    batch_sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    shuffle=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_without_rounds_a_step_uses_the_same_groups_in_whatever_order_they_finish(
    differing: list[bool], batch_sizes: list[int], shuffle: bool, seed: int
) -> None:
    in_rounds = World(len(differing), lambda row: differing[row], shuffle)
    finishing = FinishingGroups(World(len(differing), lambda row: differing[row], shuffle), Random(seed))
    for number, num_wanted in enumerate(batch_sizes):
        expected = in_rounds.filled(num_wanted, max_rounds=10_000)
        found = finishing.filled(num_wanted, max_rounds=10_000)
        assert rows_of(found.rollout) == rows_of(expected.rollout)
        assert torch.equal(found.rollout.groups_B, expected.rollout.groups_B)
        assert torch.equal(found.is_kept_B, expected.is_kept_B)
        assert finishing.world.cursor.state() == in_rounds.cursor.state()
        assert finishing.num_dropped == number + 1
        # Groups after the last one that is used depend on the order, and are left out.
        assert found.everything is not None
        assert int(found.everything.groups_B[-1]) == int(found.rollout.groups_B[-1])


@given(seed=st.integers(0, 1000))
def test_without_rounds_the_number_of_prompts_is_limited(seed: int) -> None:
    world = World(40, lambda row: row in (2, 9))
    with pytest.raises(BatchNotFullError, match=r"not full after 12 prompts: 2 of 12"):
        FinishingGroups(world, Random(seed)).filled(4, max_rounds=3)
    world = World(40, lambda row: row in (2, 9))
    found = FinishingGroups(world, Random(seed)).filled(4, max_rounds=3, policy=FEWER)
    assert rows_of(found.rollout) == [2, 9, 0, 1]
    assert found.is_kept_B.tolist() == [True] * 4 + [False] * 4
    assert [drawn.row.index for drawn in world.cursor.next_batch(1)] == [12]


@pytest.mark.parametrize(
    ("num_kept", "num_known", "num_open", "expected"),
    [
        (0, 0, 8, 0),  # nothing is known yet
        (4, 8, 4, 4),  # half are kept: 4 and 2 of the open ones; 2 are missing
        (4, 8, 8, 0),
        (0, 8, 0, 8),  # not more than the batch, whatever the fraction is
        (8, 8, 0, 0),
    ],
)
def test_prompts_are_requested_for_the_groups_that_will_probably_be_missing(
    num_kept: int, num_known: int, num_open: int, expected: int
) -> None:
    assert num_missing_prompts(8, num_kept, num_known, num_open) == expected


def test_a_named_reward_must_differ_too() -> None:
    # Row 3 has equal scores of `right`; rows 1 and 2 have equal sums, whatever `right` is.
    world = World(12, lambda row: row not in (1, 2))
    found = world.filled(4, reward="right").rollout
    assert rows_of(found) == [4, 5, 7, 8]


def test_missing_scores_make_no_group_different_and_their_groups_are_replaced() -> None:
    """Without the second of its two responses, a group has nothing to compare."""
    world = World(12, lambda _row: True, status_of=lambda row, number: TIMEOUT if row < 2 and number else OK)
    found = world.filled(4)
    assert rows_of(found.rollout) == [2, 3, 4, 5]
    assert found.is_kept_B.all()
    assert found.everything is not None
    assert found.everything.is_excluded_B.tolist()[:4] == [False, True, False, True]
    fewer = World(2, lambda _row: True, status_of=lambda row, number: TIMEOUT if row == 0 and number else OK)
    assert fewer.filled(2, max_rounds=1, policy=FEWER).is_kept_B.tolist() == [True, True, False, False]


def test_a_batch_that_is_not_full_because_of_failures_names_them() -> None:
    world = World(12, lambda _row: True, status_of=lambda _row, _number: RewardStatus.UNREACHABLE)
    with pytest.raises(ResourceError, match=r"maxFailureRate: 24 of 24 responses of step 5 .*right UNREACHABLE: 24"):
        world.filled(4, max_rounds=3)
    # Half of the responses is not too many; the scores of the others are in the message.
    world = World(12, lambda _row: True, status_of=lambda _row, number: TIMEOUT if number else OK)
    with pytest.raises(BatchNotFullError, match=r"0 of 12 groups .*: 0, min 0, max 0; 12 of 24 .* right TIMEOUT: 12\)"):
        world.filled(4, max_rounds=3)


def test_a_batch_that_never_fills_is_one_clear_error() -> None:
    world = World(40, lambda row: row == 5)
    with pytest.raises(BatchNotFullError) as error:
        world.filled(4, max_rounds=3)
    message = str(error.value)
    assert message.startswith(
        "spec.training.algorithm.dynamicSampling.maxRounds: the batch of step 5 is not full after 3 rounds: 1 of 12 "
    )
    for part in ("4 are needed", "mean score of all responses: 0.04167, min 0, max 1", "onMaxRounds: TrainOnFewer"):
        assert part in message
    with pytest.raises(BatchNotFullError, match=r"all scores, or all scores of 'right', are equal, or fewer than two"):
        World(4, lambda _row: False).filled(2, reward="right")


def test_fewer_groups_are_spread_over_the_updates_and_others_are_placeholders() -> None:
    world = World(40, lambda row: row in (2, 3, 9))
    found = world.filled(4, max_rounds=3, policy=FEWER, num_updates=2)
    assert rows_of(found.rollout) == [2, 9, 3, 0]
    assert found.is_kept_B.tolist() == [True] * 6 + [False] * 2
    assert found.sampling_metrics["dynamic_sampling/returned_prompts"] == 0.0
    assert [drawn.row.index for drawn in world.cursor.next_batch(1)] == [12]
    nothing = World(40, lambda _row: False).filled(4, max_rounds=2, policy=FEWER)
    assert not nothing.is_kept_B.any()
    assert nothing.sampling_metrics["dynamic_sampling/kept_fraction"] == 0.0


@given(num_updates=st.integers(1, 5), groups_per_update=st.integers(1, 5), data=st.data())
def test_updates_differ_by_one_kept_group_at_most(
    num_updates: int, groups_per_update: int, data: st.DataObject
) -> None:
    num_wanted = num_updates * groups_per_update
    num_kept = data.draw(st.integers(0, num_wanted))
    is_kept_G = torch.zeros(num_wanted + data.draw(st.integers(0, 9)), dtype=torch.bool)
    is_kept_G[torch.tensor(data.draw(st.permutations(range(len(is_kept_G))))[:num_kept], dtype=torch.int64)] = True
    selected = spread_groups(is_kept_G, num_wanted, groups_per_update)
    assert len(set(selected.tolist())) == num_wanted
    by_update = is_kept_G[selected].view(num_updates, groups_per_update).sum(dim=1).tolist()
    assert sum(by_update) == num_kept
    assert max(by_update) - min(by_update) <= 1


def test_a_stop_between_rounds_ends_the_step() -> None:
    world = World(40, lambda row: row == 5)

    def stops(prompts: Sequence[DrawnRow[PromptRow]], num_drawn: int) -> Rollout:
        if num_drawn:
            raise StepAbandonedError
        return world.generate(prompts, num_drawn)

    sampling = DynamicSampling(plan_of(DynamicSamplingSpec(max_rounds=10), 4, 1), world.cursor)
    with pytest.raises(StepAbandonedError):
        sampling.filled(world.cursor.next_batch(4), 0, stops)
    assert len(world.rounds) == 1


@pytest.mark.parametrize(
    ("num_wanted", "num_kept", "num_drawn", "multiple", "expected"),
    [
        (32, 0, 32, 1, 32),
        (32, 1, 32, 1, 32),
        (32, 24, 32, 1, 14),  # 8 are missing, 3 of 4 are kept: 10.7, and a quarter more is 13.3
        (32, 31, 32, 1, 2),
        (32, 31, 64, 1, 3),
        (32, 24, 32, 4, 16),
        (6, 5, 6, 4, 4),
        (6, 1, 6, 3, 6),
    ],
)
def test_a_round_draws_enough_to_fill_the_batch(
    num_wanted: int, num_kept: int, num_drawn: int, multiple: int, expected: int
) -> None:
    assert num_fresh_prompts(num_wanted, num_kept, num_drawn, multiple) == expected
