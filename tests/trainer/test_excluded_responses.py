"""Responses without a score: they are not trained on, count in no mean, and end the run if there are too many. By hand,
on a step whose worker groups are fakes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from rljob_api.v1alpha1.advantage import AdvantageType
from rljob_testing.messages import Mentions
from rljob_testing.training import stub_step
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.controller.evaluations.evaluation import EvaluationResult, evaluation_error
from rljob_trainer.controller.outcomes import FailureRate, Outcome, Reasons, too_many_excluded
from rljob_trainer.errors import ResourceError, RewardError
from rljob_trainer.observability.samples import SampleKind
from rljob_trainer.rewards.base import RewardStatus
from rljob_trainer.workers.columns import ADVANTAGES, IS_TRAINED, PROMPT_TOKEN_IDS, REWARDS, SAMPLE_SEEDS, TOKENS

TIMEOUT, DIED, ERROR, UNREACHABLE = (
    RewardStatus.TIMEOUT,
    RewardStatus.DIED,
    RewardStatus.ERROR,
    RewardStatus.UNREACHABLE,
)
PLAIN = {"type": "GroupRelative", "groupRelative": {"normalizeByStd": False}}
Scores = list[float | RewardStatus]


@pytest.fixture(autouse=True)
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the object store."""
    monkeypatch.setattr("rljob_trainer.controller.rollout_phase.stored", lambda batch: batch)


def run(
    wire: dict[str, object], scores: dict[str, Scores], *, group_size: int = 3, weights: dict[str, float] | None = None
) -> tuple[stub_step.Step, dict[str, float]]:
    """A step with three prompts."""
    found = stub_step.step_of(wire, weights or dict.fromkeys(scores, 1.0), dict(scores), group_size=group_size)
    return found, found.step.run(stub_step.PROMPTS, 0)[1]


def causes(metrics: dict[str, float]) -> tuple[float, float]:
    return metrics["outcome/reward_failed_fraction"], metrics["outcome/rollout_failed_fraction"]


def trained(found: stub_step.Step) -> list[int]:
    """The rows that are trained on. In row i all response tokens are i."""
    [update] = found.actor.updates
    rows = [int(row[-1]) for row in update.ragged_column(TOKENS).row_tensors()]
    return [row for row, is_trained in zip(rows, update[IS_TRAINED].tolist(), strict=True) if is_trained]


def advantages(found: stub_step.Step) -> list[float]:
    """Of the rows that are trained on."""
    [update] = found.actor.updates
    values: list[float] = update[ADVANTAGES][update[IS_TRAINED]].tolist()
    assert update[ADVANTAGES].isfinite().all()
    return values


def test_a_group_trains_on_the_rest_and_a_response_that_is_left_alone_is_dropped() -> None:
    scores: Scores = [1, TIMEOUT, 0, 1, DIED, UNREACHABLE, 1, 1, 4]
    found, metrics = run({"advantage": PLAIN}, {"score": scores})
    assert trained(found) == [0, 2, 6, 7, 8]
    assert advantages(found) == [0.5, -0.5, -1, -1, 2]
    assert metrics["critic/rewards/mean"] == metrics["reward/score/mean"] == pytest.approx(8 / 6)
    assert metrics["critic/rewards/min"] == 0
    for name, number in (("timeout", 1), ("died", 1), ("unreachable", 1), ("error", 0)):
        assert metrics[f"reward/score/{name}_rate"] == metrics[f"reward/{name}_rate"] == number / 9
    assert metrics["outcome/excluded_fraction"] == pytest.approx(3 / 9)
    assert metrics["outcome/alone_fraction"] == pytest.approx(1 / 9)
    assert metrics["actor/trained_fraction"] == pytest.approx(5 / 9)
    assert metrics["outcome/completed_fraction"] == 1
    assert causes(metrics) == pytest.approx((3 / 9, 0))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("GroupRelativePassAtK", [1.0, 0.0, 0.0, 0.0, 3.0]),
        ("LeaveOneOut", [1.0, -1.0, -1.5, -1.5, 3.0]),
        ("OPO", [0.5, -0.5, -1.0, -1.0, 2.0]),
        ("GPG", [0.5, -0.5, -1.0, -1.0, 2.0]),
    ],
)
def test_advantages_that_compare_a_group_use_its_remaining_responses(kind: str, expected: list[float]) -> None:
    settings: dict[str, object] = {"type": kind}
    if kind == "GroupRelativePassAtK":
        settings["groupRelativePassAtK"] = {"normalizeByStd": False}
    found, _ = run({"advantage": settings}, {"score": [1, TIMEOUT, 0, 5, DIED, DIED, 1, 1, 4]})
    assert trained(found) == [0, 2, 6, 7, 8]
    assert advantages(found) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["ReinforcePlusPlusBaseline", "GDPO"])
def test_whitening_counts_only_responses_with_a_score(kind: str) -> None:
    wire: dict[str, object] = {"advantage": {"type": kind}}
    scores: dict[str, Scores] = {"score": [1, TIMEOUT, 0, 1, DIED, 0, 1, 0, ERROR], "form": [0.0] * 9}
    found, _ = run(wire, scores, weights={"score": 1.0, "form": 0.5})
    assert trained(found) == [0, 2, 3, 5, 6, 7]
    whitened = advantages(found)
    assert sum(whitened) == pytest.approx(0, abs=1e-5)
    # Two tokens each: the variance is sum of squares / 11.
    assert sum(2 * each**2 for each in whitened) / 11 == pytest.approx(1, rel=1e-4)


def test_gdpo_needs_all_its_rewards_and_ignores_those_that_are_only_reported() -> None:
    scores: dict[str, Scores] = {"right": [1, 0] * 3, "form": [0, TIMEOUT, 1, 0, 0, 1], "style": [DIED] * 6}
    weights = {"right": 1.0, "form": 0.5, "style": 0.0}
    found, metrics = run({"advantage": {"type": "GDPO"}}, scores, group_size=2, weights=weights)
    assert trained(found) == [2, 3, 4, 5]
    assert metrics["outcome/excluded_fraction"] == pytest.approx(1 / 6)
    assert metrics["reward/style/died_rate"] == 1
    # Training does not need the reward with weight 0.
    assert causes(metrics) == pytest.approx((1 / 6, 0))
    assert "reward/style/mean" not in metrics
    assert metrics["critic/rewards/mean"] == pytest.approx((1 + 1.5 + 0 + 1 + 0.5) / 5)


def test_a_response_for_which_several_rewards_fail_is_one_failure() -> None:
    scores: dict[str, Scores] = {"right": [1, 0, TIMEOUT, 0], "form": [0, TIMEOUT, ERROR, 0]}
    _, metrics = run({"advantage": PLAIN}, {name: each * 2 for name, each in scores.items()}, group_size=2)
    assert causes(metrics) == pytest.approx((metrics["outcome/excluded_fraction"], 0))


def test_groups_of_one_are_trained_on_if_the_job_has_only_those() -> None:
    found, _ = run({"advantage": {"type": "ReMax"}}, {"score": [1, 2, TIMEOUT, 0.5, 0.5, 0.5]}, group_size=1)
    assert trained(found) == [0, 1]
    assert advantages(found) == [0.5, 1.5]


def test_remax_excludes_the_responses_whose_greedy_response_has_no_score() -> None:
    scores: Scores = [1, 2, 3, 4, 5, TIMEOUT, 0.5, DIED, 1]
    found, metrics = run({"advantage": {"type": "ReMax"}}, {"score": scores}, group_size=2)
    # The fifth remains: it is compared with a greedy response, not with its group.
    assert trained(found) == [0, 1, 4]
    assert advantages(found) == [0.5, 1.5, 4]
    assert metrics["outcome/excluded_fraction"] == pytest.approx(3 / 6)
    assert metrics["reward/score/mean"] == 3


@pytest.mark.parametrize("kind", [kind for kind in AdvantageType if kind is not AdvantageType.FUNCTION])
def test_only_advantages_that_compare_groups_drop_a_response_that_is_left_alone(kind: AdvantageType) -> None:
    found = stub_step.step_of({"advantage": {"type": kind}}, {"score": 1.0}, {"score": [1.0] * 6})
    alone = (AdvantageType.REINFORCE_PLUS_PLUS, AdvantageType.REMAX, AdvantageType.GAE, AdvantageType.DISTILLATION)
    compares = kind not in alone
    assert found.step.min_members == (2 if compares else 1)


def test_your_own_advantage_gets_only_responses_with_a_score_and_never_one_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "my_advantage.py").write_text("def advantage(inputs):\n    return inputs.rewards_B - 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    wire: dict[str, object] = {"advantage": {"type": "Function", "function": {"path": "my_advantage:advantage"}}}
    found, _ = run(wire, {"score": [1, TIMEOUT, 0, 5, DIED, DIED, 1, 1, 4]})
    assert trained(found) == [0, 2, 6, 7, 8]
    assert advantages(found) == [0, -1, 0, 0, 3]


def test_a_missing_score_fakes_no_variance() -> None:
    """The first group has equal scores, the second one score."""
    wire: dict[str, object] = {"advantage": PLAIN, "dropZeroVarianceGroups": True}
    found, metrics = run(wire, {"score": [1, TIMEOUT, 1, 1, DIED, DIED, 0, ERROR, 1]})
    assert trained(found) == [6, 8]
    assert metrics["outcome/alone_fraction"] == pytest.approx(1 / 9)
    assert metrics["groups/equal_scores_fraction"] == pytest.approx(1 / 2)


def test_groups_with_equal_scores_are_counted_if_advantages_compare_them() -> None:
    name = "groups/equal_scores_fraction"
    assert run({"advantage": PLAIN}, {"score": [1, 1, TIMEOUT, 0, 0, 0, 0, 1, 1]})[1][name] == pytest.approx(2 / 3)
    assert name not in run({"advantage": PLAIN}, {"score": [UNREACHABLE] * 9})[1]
    assert name not in run({"advantage": {"type": "ReinforcePlusPlus"}}, {"score": [0.0] * 9})[1]
    # The sums of all responses are equal, the rewards by name are not.
    named: dict[str, Scores] = {"right": [1, 0] * 3, "form": [0, 1] * 2 + [1, 0]}
    for advantage, expected in ({"type": "GDPO"}, 0.0), (PLAIN, 2 / 3):
        metrics = run({"advantage": advantage}, named, group_size=2)[1]
        assert metrics[name] == pytest.approx(expected)


def test_advantages_per_token_get_no_missing_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    found = stub_step.step_of({"advantage": {"type": "GAE"}}, {"score": 1.0}, {"score": [1, TIMEOUT, 0, 1, 1, 0]})
    seen: list[DataProto] = []
    compute = found.actor.compute_token_advantages

    def watched(batch: DataProto, coefficient: float) -> DataProto:
        seen.append(batch)
        return compute(batch, coefficient)

    monkeypatch.setattr(found.actor, "compute_token_advantages", watched)
    found.step.run(stub_step.PROMPTS, 0)
    [batch] = seen
    assert batch[IS_TRAINED].tolist() == [True, False, True, True, True, True]
    assert batch[REWARDS][batch[IS_TRAINED]].tolist() == [1, 0, 1, 1, 0]


def test_a_step_without_any_score_trains_on_nothing_and_reports_no_mean() -> None:
    found, metrics = run({"advantage": PLAIN}, {"score": [UNREACHABLE] * 9})
    assert trained(found) == []
    assert "critic/rewards/mean" not in metrics
    assert "reward/score/mean" not in metrics
    assert metrics["outcome/excluded_fraction"] == metrics["reward/score/unreachable_rate"] == 1
    assert metrics["actor/trained_fraction"] == 0


def test_a_response_that_the_engine_did_not_complete_is_excluded() -> None:
    found = stub_step.step_of(
        {"advantage": PLAIN}, {"score": 1.0}, {"score": [1, 0, 1, 1, 0, 1, 1, 0, 4]}, group_size=3
    )
    found.generator.failed, found.generator.cut_off = frozenset([4]), frozenset([0])
    rollout, metrics = found.step.run(stub_step.PROMPTS, 0)
    assert trained(found) == [0, 1, 2, 3, 5, 6, 7, 8]
    ends = {
        name: metrics[f"outcome/{name}_fraction"] for name in ("completed", "max_tokens", "infrastructure", "excluded")
    }
    assert ends == pytest.approx({"completed": 7 / 9, "max_tokens": 1 / 9, "infrastructure": 1 / 9, "excluded": 1 / 9})
    assert rollout.reasons() == Reasons({("rollout", Outcome.INFRASTRUCTURE): 1})
    assert causes(metrics) == pytest.approx((0, 1 / 9))
    # The reward has scored it with 0.
    assert metrics["critic/rewards/mean"] == metrics["reward/score/mean"] == pytest.approx(9 / 8)
    assert math.isnan(rollout.rewards_B[4])


def test_a_rollout_whose_environment_raised_is_trained_only_with_a_score_by_a_policy() -> None:
    """Also if the weight of the environment's reward is 0. Response 2 has a score by `onError: Score`; response 4 has
    only no score from a reward with weight 0."""
    scores: dict[str, Scores] = {"game": [1, ERROR, -1, 1, ERROR, 1], "form": [1, 2, 3, 4, 5, 6]}
    found = stub_step.step_of({"advantage": PLAIN}, {"game": 0.0, "form": 1.0}, dict(scores), group_size=2)
    found.generator.raised = frozenset([1, 2])
    rollout, metrics = found.step.run(stub_step.PROMPTS, 0)
    # Response 0 is left alone in its group.
    assert trained(found) == [2, 3, 4, 5]
    assert metrics["outcome/excluded_fraction"] == pytest.approx(1 / 6)
    assert rollout.reasons() == Reasons({("game", ERROR): 1})


def test_excluded_responses_are_replaced_if_the_job_says_so() -> None:
    """Response 1 has no score, nor has its first replacement, number 6; the second one, number 7, has score 5."""
    scores: Scores = [1, TIMEOUT, 1, 0, 0, 1, UNREACHABLE, 5]
    found = stub_step.step_of({"advantage": PLAIN}, {"score": 1.0}, {"score": scores})
    found.step.plan = replace(found.step.plan, refills_groups=True)
    rollout, metrics = found.step.run(stub_step.PROMPTS, 0)
    assert trained(found) == [0, 7, 2, 3, 4, 5]
    assert advantages(found) == [-2, 2, 0.5, -0.5, -0.5, 0.5]
    assert (metrics["outcome/replaced_fraction"], metrics["outcome/excluded_fraction"]) == (2 / 6, 0)
    assert causes(metrics) == pytest.approx((2 / 8, 0))
    assert (rollout.num_lost, rollout.reasons()) == (2, reasons_of_score(TIMEOUT=1, UNREACHABLE=1))
    # The same prompt, with seeds of their own.
    first, *more = found.generator.requests
    seeds = [first[SAMPLE_SEEDS].tolist()[1], *(each[SAMPLE_SEEDS].tolist()[0] for each in more)]
    assert len(set(seeds)) == len(seeds) == 3
    prompts = [each.ragged_column(PROMPT_TOKEN_IDS).row_tensors()[0].tolist() for each in found.generator.requests]
    assert prompts[0] == prompts[1] == prompts[2]


def test_a_replacement_begins_with_the_environment_of_its_group() -> None:
    found = stub_step.step_of({"advantage": PLAIN}, {"score": 1.0}, {"score": [1, 0, TIMEOUT, 1, 0, TIMEOUT, 1, 5]})
    found.step.plan = replace(found.step.plan, refills_groups=True)
    with mock.patch.object(found.step.rollout, "begin", wraps=found.step.rollout.begin) as begin:
        found.step.run(stub_step.PROMPTS, 0)
    of_groups, of_replacements = (call.kwargs["environment_seeds"].tolist() for call in begin.call_args_list)
    assert len(set(of_groups)) == 3
    assert of_replacements == of_groups[1:]


def reasons_of_score(**counts: int) -> Reasons:
    return Reasons({("score", RewardStatus(status)): number for status, number in counts.items()})


def reasons(**counts: int) -> Reasons:
    return Reasons({("judge", RewardStatus(status)): number for status, number in counts.items()})


def test_a_short_failure_at_the_start_does_not_end_the_run_and_an_outage_ends_it_after_three_steps() -> None:
    failures = FailureRate(0.2)
    failures.add(10, 10, reasons(UNREACHABLE=10))
    failures.add(10, 10, reasons(UNREACHABLE=10))
    assert (failures.rate, failures.error()) == (0.2, None)
    failures.add(10, 1, reasons(TIMEOUT=1))
    error = failures.error()
    assert isinstance(error, ResourceError)
    assert str(error).startswith("spec.training.maxFailureRate: 21 of 30 responses of the last 3 steps were excluded")
    assert "allowed: 0.2 of the responses of 10 steps; failures: judge UNREACHABLE: 20, judge TIMEOUT: 1" in str(error)


def test_a_job_whose_last_steps_have_no_score_at_all_does_not_succeed() -> None:
    """However few steps it has; a single score is enough."""
    failures = FailureRate(0.2)
    assert failures.error(is_end=True) is None
    failures.add(10, 10, reasons(UNREACHABLE=10))
    assert failures.error() is None
    assert isinstance(failures.error(is_end=True), ResourceError)
    failures.add(10, 9, reasons(UNREACHABLE=9))
    assert failures.error(is_end=True) is None
    unlimited = FailureRate(1.0)
    unlimited.add(10, 10, reasons(UNREACHABLE=10))
    assert unlimited.error(is_end=True) is None


def test_only_the_last_ten_steps_count() -> None:
    failures = FailureRate(0.2)
    failures.add(10, 10, reasons(DIED=10))
    for _ in range(9):
        failures.add(10, 1, reasons(DIED=1))
    assert failures.rate == pytest.approx(0.19)
    failures.add(10, 1, reasons(DIED=1))
    assert failures.rate == pytest.approx(0.1)


def test_exceptions_of_the_rewards_code_are_errors_of_the_application() -> None:
    failures = FailureRate(0.0)
    assert failures.error() is None
    failures.add(10, 3, reasons(ERROR=2, DIED=1))
    assert isinstance(failures.error(), RewardError)
    assert math.isclose(failures.rate, 0.03)


def test_a_rate_of_one_never_ends_the_run() -> None:
    failures = FailureRate(1.0)
    for _ in range(20):
        failures.add(10, 10, reasons(UNREACHABLE=10))
    assert failures.error() is None


def test_a_batch_without_any_score_is_an_error_without_a_limit_too_and_advises_something_else() -> None:
    """Dynamic sampling cannot fill such a batch."""
    advice = "or set dynamicSampling.onMaxRounds: TrainOnFewer"
    assert str(too_many_excluded("6 of 6 responses of step 5", 1.0, "them", reasons(DIED=1))).endswith(advice)
    assert str(too_many_excluded("6 of 6", 0.5, "them", reasons(DIED=1))).endswith("or increase maxFailureRate")


@pytest.mark.parametrize(
    ("scores", "max_rate", "has_failed"),
    [([1, 0, 1], 0.0, False), ([1, 0, TIMEOUT], 0.4, False), ([1, 0, TIMEOUT], 0.3, True), ([TIMEOUT] * 3, 1.0, True)],
)
def test_a_job_that_only_evaluates_fails_if_too_many_responses_have_no_score(
    scores: Scores, max_rate: float, has_failed: bool
) -> None:
    phase = stub_step.step_of({"advantage": PLAIN}, {"score": 1.0}, {"score": scores}).step.rollout
    prompts = [each.row for each in stub_step.PROMPTS]
    seeds_B = torch.zeros(3, dtype=torch.int64)
    rollout = phase.run(prompts, 1, stub_step.SAMPLING, seeds_B, seeds_B, {"score": 1.0})
    error = evaluation_error([EvaluationResult("small", {}, (), {SampleKind.GREEDY: rollout})], max_rate)
    assert (error is not None) == has_failed
    if error is not None:
        assert isinstance(error, ResourceError)
        assert str(error) == Mentions("maxFailureRate", "of 3 responses of evaluation small", "TIMEOUT")
