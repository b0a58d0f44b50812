"""What a step requests from generator, rewards and actor, and which rows of it reach advantages and update: by hand.
Nothing is generated or trained: the groups are fakes that record their arguments.

Legend: B responses.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_testing.training import stub_step
from rljob_trainer.algorithms.interfaces import AdvantageEstimator, ResponseInputs
from rljob_trainer.controller.prompt_batches import sample_seeds
from rljob_trainer.errors import RewardError
from rljob_trainer.observability.metrics import ADVANTAGE_MEAN, KL_COEFFICIENT, KL_LOSS, REWARD_MAX, REWARD_MEAN
from rljob_trainer.workers.columns import (
    ADVANTAGES,
    ANSWERS,
    IS_GREEDY,
    IS_TRAINED,
    OLD_LOGPROBS,
    PASS_MICRO_BATCHES,
    PROMPT_TOKEN_IDS,
    RESPONSE_LENGTHS,
    ROLLOUT_LOGPROBS,
    SAMPLE_SEEDS,
    TOKENS,
)


@pytest.fixture(autouse=True)
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the object store."""
    monkeypatch.setattr("rljob_trainer.controller.rollout_phase.stored", lambda batch: batch)


def test_remax_has_a_greedy_response_to_each_prompt_and_does_not_train_on_it() -> None:
    found = stub_step.step_of({"type": "ReMax"}, {"score": 2.0}, {"score": [1, 2, 3, 4, 5, 6, 0.5, 1.5, 2.5]})
    rollout, metrics = found.step.run(stub_step.PROMPTS, 0)
    [request] = found.generator.requests
    assert [row.tolist() for row in request.ragged_column(PROMPT_TOKEN_IDS).row_tensors()] == [
        *([[0, 9]] * 2 + [[1, 9]] * 2 + [[2, 9]] * 2),
        *([0, 9], [1, 9], [2, 9]),
    ]
    assert request[IS_GREEDY].tolist() == [False] * 6 + [True] * 3
    assert request[SAMPLE_SEEDS][6:].tolist() == [0, 0, 0]
    assert len(set(request[SAMPLE_SEEDS][:6].tolist())) == 6
    [scored] = found.rewards.asked
    assert scored.object_column(ANSWERS)[6:] == ("answer 0", "answer 1", "answer 2")
    assert len(rollout.prompts) == len(rollout.batch) == 6
    assert rollout.greedy_rewards_B is not None
    assert rollout.greedy_rewards_B.tolist() == [1, 1, 3, 3, 5, 5]
    # Only of the responses that are trained on.
    assert (metrics[REWARD_MEAN], metrics[REWARD_MAX]) == (7, 12)
    [update] = found.actor.updates
    assert [row.tolist()[2:] for row in update.ragged_column(TOKENS).row_tensors()] == [[row, row] for row in range(6)]
    assert update[ADVANTAGES].tolist() == [2 - 1, 4 - 1, 6 - 3, 8 - 3, 10 - 5, 12 - 5]


@pytest.mark.parametrize(
    ("weight", "score", "message"),
    [
        (1.0, math.nan, r"rewards\[0\] \(reward score\): .*nan .*'p1' \(1 of 9 responses\); fix"),
        (1.0, -1e39, r"rewards\[0\] \(reward score\): .*-1e\+39 .*'p1'"),
        (1e30, 1e9, r"rewards \(weighted sum of all rewards\): .*e\+3[89] .*'p1'"),
    ],
)
@pytest.mark.parametrize("index", [3, 7])
def test_a_score_that_is_not_finite_in_float32_is_rejected_and_named(
    weight: float, score: float, message: str, index: int
) -> None:
    """From a model that nothing else calls, and from a function: 1e39 is finite in 64 bits. Row 7 is prompt 1's greedy
    response."""
    scores = [0.0] * 9
    scores[index] = score
    found = stub_step.step_of({"type": "ReMax"}, {"score": weight}, {"score": scores})
    with pytest.raises(RewardError, match=rf"spec\.training\.{message}"):
        found.step.run(stub_step.PROMPTS, 0)
    assert found.actor.updates == []


def test_other_advantages_have_no_greedy_responses() -> None:
    found = stub_step.step_of({}, {"score": 1.0}, {"score": [0, 1] * 3})
    rollout, _ = found.step.run(stub_step.PROMPTS, 0)
    [request] = found.generator.requests
    assert IS_GREEDY not in request
    assert len(request) == 6
    assert rollout.greedy_rewards_B is None


@pytest.mark.parametrize(
    ("placement", "passes"),
    [
        # Of steps in which only the critic trains, and of others.
        ("Loss", [(0, 0), (0, 0), (1, 1)]),
        ("Reward", [(1, 1), (2, 2), (3, 3)]),
    ],
)
def test_inputs_of_the_actor_update_are_not_computed_while_only_the_critic_trains(
    placement: str, passes: list[tuple[int, int]]
) -> None:
    reference = stub_step.Reference()
    algorithm: dict[str, object] = {"kl": {"coefficient": 0.1, "placement": placement}}
    scores = {"score": [0, 1] * 3}
    found = stub_step.step_of(
        algorithm, {"score": 1.0}, scores, reference, critic_warmup_steps=2, has_single_update=False
    )
    seen = []
    for step in range(3):
        found.step.run(stub_step.PROMPTS, step)
        seen.append((found.actor.num_passes, reference.num_passes))
    assert seen == passes
    assert len(found.actor.updates) == 1


@pytest.mark.parametrize(("old_logprobs", "num_passes"), [("Trainer", 1), ("Rollout", 0)])
@pytest.mark.parametrize("placement", ["Loss", "Reward"])
def test_old_logprobs_of_the_rollout_engine_need_no_pass(old_logprobs: str, num_passes: int, placement: str) -> None:
    algorithm: dict[str, object] = {
        "kl": {"coefficient": 0.1, "placement": placement},
        "rolloutCorrection": {"oldLogprobs": old_logprobs},
    }
    scores = {"score": [0, 1] * 3}
    found = stub_step.step_of(algorithm, {"score": 1.0}, scores, stub_step.Reference(), has_single_update=False)
    found.step.run(stub_step.PROMPTS, 0)
    assert found.actor.num_passes == num_passes
    [update] = found.actor.updates
    old, rollout = (update.ragged_column(name) for name in (OLD_LOGPROBS, ROLLOUT_LOGPROBS))
    assert old.same_as(rollout) is (old_logprobs == "Rollout")


@pytest.mark.parametrize("has_actors_layout", [True, False])
def test_passes_of_another_layout_do_not_follow_the_actors_micro_batches(*, has_actors_layout: bool) -> None:
    reference, critic = stub_step.Reference(), stub_step.Critic()
    found = stub_step.step_of(
        {"kl": {"coefficient": 0.1}, "advantage": {"type": "GAE"}},
        {"score": 1.0},
        {"score": [0, 1] * 3},
        reference,
        critic,
        critic_tokens=100 if has_actors_layout else 200,
        reference_follows_actor=has_actors_layout,
    )
    found.step.run(stub_step.PROMPTS, 0)
    for columns in (reference.columns, critic.columns):
        assert TOKENS in columns
        assert (PASS_MICRO_BATCHES in columns) is has_actors_layout


# The second prompt's totals are equal, though each of its rewards differs; the third's are equal in both.
NAMED = {"right": [1.0, 0.0, 0.5, 0.0, 0.0, 0.0], "form": [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]}
WITH_EQUALS = {"right": [1.0, 0.0, 0.5, 0.0, 0.5, 0.5], "form": [0.0, 1.0, 0.0, 1.0, 1.0, 1.0]}
WEIGHTS = {"right": 1.0, "form": 0.5}
GDPO: dict[str, object] = {"advantage": {"type": "GDPO"}, "dropZeroVarianceGroups": True}


def test_gdpo_gets_each_reward_of_the_kept_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    found = stub_step.step_of(GDPO, WEIGHTS, WITH_EQUALS)
    seen: list[ResponseInputs] = []

    def watched(inputs: ResponseInputs) -> torch.Tensor:
        seen.append(inputs)
        return torch.zeros_like(inputs.rewards_B)

    named = AdvantageEstimator("watched", for_responses=watched, needs=found.step.advantages.needs)
    monkeypatch.setattr(found.step, "advantages", named)
    found.step.run(stub_step.PROMPTS, 0)
    [inputs] = seen
    assert inputs.rewards_B.tolist() == [1.0, 0.5, 0.5, 0.5]
    assert inputs.groups_B.tolist() == [0, 0, 1, 1]
    named_rewards = {name: each.tolist() for name, each in inputs.named_rewards.items()}
    assert named_rewards == {"right": [1.0, 0.0, 0.5, 0.0], "form": [0.0, 1.0, 0.0, 1.0]}
    assert inputs.reward_weights == WEIGHTS
    assert inputs.lengths_B.tolist() == [2] * 4


def test_gdpo_matches_a_case_by_hand() -> None:
    """Each reward of a group of two that differs is 1 / sqrt(2) to both sides; so are the sums then, by their weights 1
    - 1/2 and 1/2: the same, also if the totals are equal, and whitened over 12 tokens 1 / sqrt(12 / 11)."""
    found = stub_step.step_of(GDPO, WEIGHTS, NAMED)
    rollout, _ = found.step.run(stub_step.PROMPTS, 0)
    assert rollout.rewards_B.tolist() == [1.0, 0.5, 0.5, 0.5, 0.5, 0.0]
    [update] = found.actor.updates
    size = (11 / 12) ** 0.5
    assert update[ADVANTAGES].tolist() == pytest.approx([size, -size] * 3, abs=1e-5)
    assert update[IS_TRAINED].tolist() == [True] * 6
    assert rollout.batch[RESPONSE_LENGTHS].tolist() == [2] * 6


def test_only_advantages_that_ask_for_rewards_get_them_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = stub_step.step_of({}, WEIGHTS, NAMED)
    seen: list[ResponseInputs] = []
    estimator = found.step.advantages.for_responses
    assert estimator is not None

    def watched(inputs: ResponseInputs) -> torch.Tensor:
        seen.append(inputs)
        return estimator(inputs)

    monkeypatch.setattr(found.step, "advantages", AdvantageEstimator("watched", for_responses=watched))
    found.step.run(stub_step.PROMPTS, 0)
    assert (seen[0].named_rewards, seen[0].reward_weights, seen[0].greedy_rewards_B) == ({}, {}, None)


def test_truncated_responses_count_only_in_their_group() -> None:
    """Rewards minus 0.5 x KL: 1 and -1, -2 and 0, 0 and 1. The third is not trained on, and its KL of 6 is left out of
    the step's, too. 5 of 10 responses of the horizon move the coefficient by half of the error, which is (0 + 2 + 2 + 1
    + 0) / 10 tokens by 0.625, minus 1."""
    kl = {"coefficient": 0.5, "placement": "Reward"}
    kl["controller"] = {"type": "Adaptive", "adaptive": {"target": 0.625, "horizon": 10}}
    advantage = {"type": "GroupRelative", "groupRelative": {"normalizeByStd": False}}
    wire: dict[str, object] = {"kl": kl, "maskTruncatedResponses": True, "advantage": advantage}
    found = stub_step.step_of(wire, {"score": 1.0}, {"score": [1, 0, 1, 1, 0.5, 1]}, stub_step.Reference())
    found.generator.cut_off, found.actor.kl_sums = frozenset([2]), [0.0, 2.0, 6.0, 2.0, 1.0, 0.0]
    _, metrics = found.step.run(stub_step.PROMPTS, 0)
    [update] = found.actor.updates
    assert update[ADVANTAGES].tolist() == [1, -1, -1, 1, -0.5, 0.5]
    assert update[IS_TRAINED].tolist() == [True, True, False, True, True, True]
    assert (metrics[KL_LOSS], metrics[ADVANTAGE_MEAN]) == (0.5, pytest.approx(0.2))
    assert metrics[KL_COEFFICIENT] == 0.5
    assert found.step.kl_coefficient.value == pytest.approx(0.5 * (1 - 0.2 / 2), rel=1e-12)


def test_truncated_responses_are_left_out_of_whitening() -> None:
    """Minus the means of their groups: 1/2, -1/2, 1/2, -1/2, 0 and 0. The third is not trained on: the mean of the
    others is -1/10, the variance over their ten tokens 2 (0.36 + 2 x 0.16 + 2 x 0.01) / 9."""
    wire: dict[str, object] = {"advantage": {"type": "ReinforcePlusPlusBaseline"}, "maskTruncatedResponses": True}
    found = stub_step.step_of(wire, {"score": 1.0}, {"score": [1, 0, 1, 0, 0.5, 0.5]})
    found.generator.cut_off = frozenset([2])
    found.step.run(stub_step.PROMPTS, 0)
    [update] = found.actor.updates
    learned = update[ADVANTAGES][update[IS_TRAINED]].tolist()
    assert learned == pytest.approx([each / (1.4 / 9) ** 0.5 for each in (0.6, -0.4, -0.4, 0.1, 0.1)], abs=1e-5)


@given(num_before=st.integers(0, 300), count=st.integers(1, 300), step=st.integers(0, 1000))
def test_a_response_has_the_same_seed_in_any_round(num_before: int, count: int, step: int) -> None:
    whole = sample_seeds(7, 0, step, num_before + count)
    assert torch.equal(sample_seeds(7, 0, step, num_before), whole[:num_before])
    # Of 600 numbers below 2^31, two are equal by chance in one of 12,000 draws; a second round repeats none.
    assert len(set(whole.tolist())) >= math.floor(0.99 * len(whole))
