"""Which pass rates a step records, also with dynamic sampling."""

from __future__ import annotations

from rljob_testing.training.group_world import World, rows_of
from rljob_trainer.controller.evaluations.pass_rate_records import pass_rates, record_pass_rates
from rljob_trainer.rewards.base import RewardStatus


def test_pass_rates_do_not_depend_on_the_number_of_prompts_of_a_round() -> None:
    """Prompts that return to the stream have no pass rate yet, and are drawn again."""
    few, many = (World(40, lambda row: row % 3 == 0, shuffle=True, by_pass_rate=True) for _ in range(2))
    num_returned = 0.0
    for _ in range(40):
        taken = list[list[int]]()
        for world, num_workers in ((few, 1), (many, 16)):
            # More workers need more prompts per round.
            rows = world.filled(3, num_workers=num_workers)
            assert rows.everything is not None
            metrics = record_pass_rates(world.cursor, rows.everything, 1.0, rows.sampling_metrics)
            assert 0 < metrics["prompt_sampling/pass_rate_mean"] <= 0.5
            num_returned += rows.sampling_metrics["dynamic_sampling/returned_prompts"]
            taken.append(rows_of(rows.rollout))
        assert taken[0] == taken[1]
        assert few.cursor.state() == many.cursor.state()
    assert few.rounds != many.rounds
    assert num_returned > 20
    assert few.cursor.epochs > 6


def test_responses_without_a_score_do_not_count_for_pass_rates() -> None:
    def status(row: int, number: int) -> RewardStatus:
        is_missing = row == 1 or (row == 2 and number == 0)
        return RewardStatus.TIMEOUT if is_missing else RewardStatus.OK

    world = World(4, lambda row: row == 2, status_of=status)
    rollout = world.generate(world.cursor.next_batch(4), 0)
    found = {prompt.index: rate for prompt, rate in pass_rates(rollout, 1.0, 4)}
    assert found == {0: 0.0, 2: 1.0, 3: 0.0}
    assert {prompt.index for prompt, _ in pass_rates(rollout, 1.0, 3)} == {0, 2}
    assert dict.fromkeys(rate for _, rate in pass_rates(rollout, 1.01, 4)) == {0.0: None}
