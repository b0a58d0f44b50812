"""Which metrics raise and clear an alarm, and what it says."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from rljob_api.conditions import ALARMS, Reason
from rljob_api.run_state import Alarm
from rljob_api.v1alpha1.job import RLJob
from rljob_testing.jobs.valid_job import valid_job
from rljob_testing.messages import Mentions
from rljob_trainer.controller.alarm_rules import USUAL_TRUNCATED, WINDOW, rules_of
from rljob_trainer.controller.alarms import MAX_STEPS_WITHOUT_NUMBER, Alarms
from rljob_trainer.observability.jsonl import read_rows
from rljob_trainer.observability.metrics import (
    EQUAL_SCORES_FRACTION,
    GRADIENT_NORM,
    KL_LOSS,
    LOGPROB_DIFF_MAX,
    LOGPROB_DIFF_MEAN,
    LOGPROB_DIFF_SHARE,
    MERGE_ERROR,
    NUM_SKIPPED_UPDATES,
    REJECTED_FRACTION,
    RESPONSE_CLIP_RATIO,
    REWARD_FAILED_FRACTION,
    REWARD_MAX,
    REWARD_MEAN,
    REWARD_MIN,
    ROLLOUT_FAILED_FRACTION,
    SAMPLING_KEPT,
    STALENESS_MAX,
    STEP_SECONDS,
    Metrics,
)
from rljob_trainer.observability.sinks import JsonlSink

_T = "spec.training."
_CORRECTION = _T + "algorithm.rolloutCorrection"


def alarms_of(**edits: object) -> Alarms:
    return Alarms(RLJob.from_wire(valid_job({_T + "model.dtype": "Float32", **edits})).spec)


def raised_by(steps: Iterable[Metrics], **edits: object) -> dict[str, Alarm]:
    """The alarms that are raised after these steps, by reason."""
    alarms = alarms_of(**edits)
    for step, metrics in enumerate(steps, 1):
        alarms.step_done(step, metrics)
    return {alarm.reason: alarm for alarm in raised(alarms)}


def raised(alarms: Alarms) -> tuple[Alarm, ...]:
    assert alarms.raised is not None
    return alarms.raised


def steps_of(name: str, values: Sequence[float]) -> list[Metrics]:
    return [{name: value} for value in values]


def test_every_known_alarm_has_a_rule_in_the_order_of_seriousness() -> None:
    rules = rules_of(RLJob.from_wire(valid_job({_T + "model.dtype": "Float32"})).spec)
    assert tuple(rule.reason for rule in rules) == ALARMS


def test_an_alarm_is_raised_by_several_steps_and_cleared_when_few_are_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    alarms, high = alarms_of(), USUAL_TRUNCATED + 0.1
    # Every other step is unusual: five of the last ten raise the alarm, and it does not come and go.
    for step in range(1, 9):
        assert alarms.step_done(step, {RESPONSE_CLIP_RATIO: high if step % 2 else 0.0}) == ()
    for step in range(9, 30):
        [alarm] = alarms.step_done(step, {RESPONSE_CLIP_RATIO: high if step % 2 else 0.0}) or ()
        assert (alarm.since_step, alarm.step) == (9, step if step % 2 else step - 1)
    # Steps without the number change nothing.
    for step in range(30, 60):
        assert len(alarms.step_done(step, {}) or ()) == 1
    # The steps 24 to 29 have three unusual ones, the steps 26 to 29 two.
    for step in range(60, 65):
        assert len(alarms.step_done(step, {RESPONSE_CLIP_RATIO: USUAL_TRUNCATED}) or ()) == 1
    assert alarms.step_done(65, {RESPONSE_CLIP_RATIO: 0.0}) == ()
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == Mentions("step 9: alarm ResponsesCutOff: 60 % of the responses", "rollout.maxNewTokens")
    assert messages[1:] == ["step 65: alarm ResponsesCutOff is cleared"]


def test_an_alarm_is_cleared_after_many_steps_without_its_number() -> None:
    alarms = alarms_of()
    for step in range(1, 6):
        alarms.step_done(step, {RESPONSE_CLIP_RATIO: 1.0})
    for _ in range(2):
        for step in range(6, 5 + MAX_STEPS_WITHOUT_NUMBER):
            assert len(alarms.step_done(step, {}) or ()) == 1
        assert len(alarms.step_done(5, {RESPONSE_CLIP_RATIO: 1.0}) or ()) == 1
    for step in range(6, 6 + MAX_STEPS_WITHOUT_NUMBER):
        alarms.step_done(step, {})
    assert alarms.raised == ()
    # The steps before it do not count any more.
    assert alarms.step_done(200, {RESPONSE_CLIP_RATIO: 1.0}) == ()


def test_an_error_in_a_rule_ends_the_alarms_but_not_the_training(caplog: pytest.LogCaptureFixture) -> None:
    too_large = {"step": 1, STEP_SECONDS: 1.0, "mine": 10**400}
    alarms = alarms_of()
    for step in range(1, 6):
        alarms.step_done(step, {RESPONSE_CLIP_RATIO: 1.0})
    caplog.clear()
    alarms.load([too_large])
    assert alarms.raised is None
    assert alarms.step_done(6, {RESPONSE_CLIP_RATIO: 1.0}) is None
    alarms.load([too_large])
    assert [record.getMessage() for record in caplog.records] == [
        Mentions("alarms cannot be computed", "OverflowError")
    ]


def test_one_unusual_step_raises_no_alarm() -> None:
    odd: Metrics = {
        REWARD_FAILED_FRACTION: 1.0,
        ROLLOUT_FAILED_FRACTION: 1.0,
        GRADIENT_NORM: math.inf,
        KL_LOSS: 1e6,
        LOGPROB_DIFF_MEAN: 1.0,
        REJECTED_FRACTION: 1.0,
        MERGE_ERROR: 1.0,
        RESPONSE_CLIP_RATIO: 1.0,
        EQUAL_SCORES_FRACTION: 1.0,
        REWARD_MEAN: 0.0,
        REWARD_MIN: 0.0,
        REWARD_MAX: 0.0,
    }
    usual = {**dict.fromkeys(odd, 1e-4), REWARD_FAILED_FRACTION: 0.0, ROLLOUT_FAILED_FRACTION: 0.0}
    assert raised_by([*[usual] * 20, odd, *[usual] * 20]) == {}


def test_failed_rewards_are_named_with_their_kind_of_failure() -> None:
    rates = {
        "reward/score/error_rate": 0.25,
        "reward/score/timeout_rate": 0.125,
        REWARD_FAILED_FRACTION: 0.375,
        ROLLOUT_FAILED_FRACTION: 0.0,
    }
    found = raised_by([{}, rates, rates])
    assert list(found) == [Reason.REWARD_ERRORS]
    assert found[Reason.REWARD_ERRORS].value == 0.375
    assert found[Reason.REWARD_ERRORS].message == Mentions(
        "37.5 % of the responses of the last 2 steps", "at most 5 %", "score error 25 %, score timeout 12.5 %", "logs/"
    )


def test_only_failures_that_exclude_responses_are_named() -> None:
    rewards = [
        {"name": "code", "type": "MathAnswer", "onTimeout": "Score"},
        {"name": "judge", "type": "MathAnswer"},
        {"name": "unused", "type": "MathAnswer", "weight": 0},
    ]
    metrics = {
        "reward/code/timeout_rate": 0.3,
        "reward/code/unreachable_rate": 0.01,
        "reward/judge/timeout_rate": 0.06,
        "reward/unused/error_rate": 0.5,
        REWARD_FAILED_FRACTION: 0.07,
    }
    [alarm] = raised_by([metrics] * 10, **{_T + "rewards": rewards}).values()
    assert alarm.message == Mentions("in this step: judge timeout 6 %, code unreachable 1 %;")


def test_scores_of_failed_rewards_are_no_failures() -> None:
    """`onTimeout: Score`: the reward has the status TIMEOUT, and the response a score."""
    scored = {"reward/timeout_rate": 0.5, "reward/score/timeout_rate": 0.5, REWARD_FAILED_FRACTION: 0.0}
    assert raised_by([scored] * 20) == {}


@pytest.mark.parametrize(
    ("name", "reason"),
    [(REWARD_FAILED_FRACTION, Reason.REWARD_ERRORS), (ROLLOUT_FAILED_FRACTION, Reason.RESPONSES_EXCLUDED)],
)
def test_failures_are_counted_over_the_last_steps_and_compared_with_those_that_end_the_run(
    name: str, reason: Reason
) -> None:
    # 2 of 80 responses, in steps of 8.
    assert raised_by(steps_of(name, [0.125 if step in (3, 9) else 0.0 for step in range(1, 11)])) == {}
    assert raised_by(steps_of(name, [0.05] * 20)) == {}
    assert raised_by(steps_of(name, [0.06] * 8)) == {}
    assert raised_by(steps_of(name, [0.06] * 9))[reason].since_step == 9
    # A quarter of maxFailureRate.
    many, few = {_T + "maxFailureRate": 0.6}, {_T + "maxFailureRate": 0.04}
    assert raised_by(steps_of(name, [0.14] * 20), **many) == {}
    assert list(raised_by(steps_of(name, [0.16] * 20), **many)) == [reason]
    assert list(raised_by(steps_of(name, [0.02] * 20), **few)) == [reason]
    # An outage of two steps is forgotten after ten steps.
    outage = [0.0, 1.0, 1.0, *[0.0] * 9]
    assert list(raised_by(steps_of(name, outage))) == [reason]
    assert raised_by(steps_of(name, [*outage, 0.0])) == {}


def test_a_gradient_is_compared_with_those_of_the_steps_before() -> None:
    usual = [0.0, 3.0, 4.0, 0.0, 5.0] * 4
    found = raised_by(steps_of(GRADIENT_NORM, [*usual, 39.0, 41.0, 60.0, 50.0]))
    assert found[Reason.HIGH_GRADIENT_NORM].message == Mentions(
        "is 50 ", "limit: 40, the larger of 10 times", "learningRate"
    )
    assert raised_by(steps_of(GRADIENT_NORM, [*usual, 39.0, 39.0, 39.0])) == {}
    # What is unusual does not become usual.
    assert list(raised_by(steps_of(GRADIENT_NORM, usual + [1000.0] * 300))) == [Reason.HIGH_GRADIENT_NORM]
    # A slow change does.
    assert raised_by(steps_of(GRADIENT_NORM, [1.01**step for step in range(1000)])) == {}


def test_gradients_are_usual_in_the_first_steps_and_up_to_the_norm_to_which_they_are_clipped() -> None:
    assert raised_by(steps_of(GRADIENT_NORM, [900.0, 700.0, 500.0, 3.0, 2.0])) == {}
    small = [1e-3] * 20 + [0.9] * 5
    assert raised_by(steps_of(GRADIENT_NORM, small)) == {}
    above = raised_by(steps_of(GRADIENT_NORM, [*small, *[1.5] * 3]))[Reason.HIGH_GRADIENT_NORM]
    assert above.message == Mentions("is 1.5 (limit: 1,", "and optimizer.maxGradientNorm")
    low_limit = {_T + "optimizer.maxGradientNorm": 0.1}
    assert list(raised_by(steps_of(GRADIENT_NORM, small), **low_limit)) == [Reason.HIGH_GRADIENT_NORM]


@pytest.mark.parametrize("step", [{GRADIENT_NORM: math.nan}, {GRADIENT_NORM: 1.0, NUM_SKIPPED_UPDATES: 1.0}])
def test_gradients_that_are_not_finite(step: Metrics) -> None:
    alarm = raised_by([step] * 3)[Reason.HIGH_GRADIENT_NORM]
    assert alarm.value is None
    assert alarm.message == Mentions("not finite", "skipped")


def test_a_kl_that_grows_while_the_policy_learns_is_usual() -> None:
    growing = [min(0.9, 1e-4 * 1.2**step) for step in range(100)]
    assert raised_by(steps_of(KL_LOSS, growing)) == {}
    found = raised_by(steps_of(KL_LOSS, [0.2] * 20 + [2.1, 2.5, 3.0]))
    assert found[Reason.HIGH_KL].message == Mentions(
        "is 3 nats per token", "limit: 2, the larger of 1 and", "learningRate"
    )
    for first in (0.0, 0.3):
        assert list(raised_by(steps_of(KL_LOSS, [first, 2.0, 5.0, 4.0]))) == [Reason.HIGH_KL]
    assert list(raised_by(steps_of(KL_LOSS, [0.3, 2.5, 2.8, *[2.9] * 30]))) == [Reason.HIGH_KL]


def test_a_kl_that_begins_high_is_usual_until_it_grows() -> None:
    falling = [3.0 * 0.997**step for step in range(350)]
    assert raised_by(steps_of(KL_LOSS, falling)) == {}
    assert raised_by(steps_of(KL_LOSS, [*falling, *[9.0] * 5])) == {}
    assert list(raised_by(steps_of(KL_LOSS, [3.0, 31.0, 35.0, 40.0]))) == [Reason.HIGH_KL]
    assert list(raised_by(steps_of(KL_LOSS, [*falling, *[40.0] * 5]))) == [Reason.HIGH_KL]


def mismatches(means: Sequence[float], staleness: float = 0.0) -> list[Metrics]:
    rest = {LOGPROB_DIFF_MAX: 2.0, LOGPROB_DIFF_SHARE: 0.5, STALENESS_MAX: staleness}
    return [{LOGPROB_DIFF_MEAN: mean, **rest} for mean in means]


def test_a_kl_to_a_teacher_is_not_compared() -> None:
    teacher = {"spec.roles.ref.model": {"source": "owner/teacher"}, _T + "algorithm.kl.coefficient": 0.1}
    steps = steps_of(KL_LOSS, [0.1] * 10 + [20.0] * 10)
    assert raised_by(steps).keys() == {Reason.HIGH_KL}
    assert raised_by(steps, **teacher) == {}


def test_the_usual_mismatch_depends_on_the_dtype() -> None:
    bfloat16 = {_T + "model.dtype": "BFloat16"}
    assert raised_by(mismatches([1e-3] * 20)) == {}
    assert raised_by(mismatches([0.05] * 20), **bfloat16) == {}
    assert list(raised_by(mismatches([0.06] * 3), **bfloat16)) == [Reason.ROLLOUT_MISMATCH]
    alarm = raised_by(mismatches([1e-6, 1e-3, 2e-3, 2e-3, 3e-3]))[Reason.ROLLOUT_MISMATCH]
    assert (alarm.since_step, alarm.value) == (5, 3e-3)
    assert alarm.message == Mentions("0.003 nats", "50 % of the tokens", "up to 0.001", "{type: TokenTruncated}")
    for edit in ({".type": "TokenTruncated"}, {".oldLogprobs": "Rollout"}):
        edits = {_CORRECTION + field: value for field, value in edit.items()}
        [corrected] = raised_by(mismatches([1.0] * 3), **edits).values()
        assert "rolloutCorrection corrects" in corrected.message
    # Older weights are expected to differ.
    assert raised_by(mismatches([1.0] * 20, staleness=1.0)) == {}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("name", "reason"), [(KL_LOSS, Reason.HIGH_KL), (LOGPROB_DIFF_MEAN, Reason.ROLLOUT_MISMATCH)])
def test_a_number_that_is_no_longer_finite_does_not_clear_its_alarm(name: str, reason: Reason, value: float) -> None:
    steps = [*[1e-4] * 20, *[5.0] * 3, *[value] * 2 * MAX_STEPS_WITHOUT_NUMBER]
    alarm = raised_by(steps_of(name, steps))[reason]
    assert (alarm.since_step, alarm.step, alarm.value) == (23, len(steps), None)
    assert alarm.message == Mentions("not finite", "learningRate")
    assert list(raised_by(steps_of(name, [value] * 3))) == [reason]
    # Values that are not finite do not count in a median.
    assert raised_by(steps_of(name, [value, value, *[1e-4] * 20])) == {}


def test_most_tokens_are_rejected() -> None:
    assert raised_by(steps_of(REJECTED_FRACTION, [0.5] * 20)) == {}
    assert raised_by(steps_of(REJECTED_FRACTION, [0.6] * 3))[Reason.TOKENS_REJECTED].message == Mentions("60 %")
    older = {_T + "rollout.syncEverySteps": 4, "spec.checkpoint.everySteps": 4}
    [alarm] = raised_by(steps_of(REJECTED_FRACTION, [0.6] * 3), **older).values()
    assert "syncEverySteps" in alarm.message


def test_merged_adapters_may_be_lost_by_rounding_only_in_the_first_steps() -> None:
    bfloat16 = {_T + "model.dtype": "BFloat16"}
    assert raised_by(steps_of(MERGE_ERROR, [0.9, 0.7, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.1]), **bfloat16) == {}
    alarm = raised_by(steps_of(MERGE_ERROR, [0.72] * 8), **bfloat16)[Reason.ADAPTERS_ROUNDED]
    assert alarm.message == Mentions("BFloat16", "72 %", "sync: Adapter", "dtype: Float32")


def groups(equal: float, mean: float, lowest: float, highest: float) -> dict[str, float]:
    return {EQUAL_SCORES_FRACTION: equal, REWARD_MEAN: mean, REWARD_MIN: lowest, REWARD_MAX: highest}


def test_equal_scores_are_a_problem_unless_the_policy_solves_its_prompts() -> None:
    unsolved = raised_by([groups(1.0, 0.0, 0.0, 0.0)] * 5)
    assert unsolved[Reason.EQUAL_SCORES].message == Mentions("100 %", "below 90 %", "groupSize")
    learning = [groups(0.9, 0.01, 0.0, 1.0)] * 20
    solved = [groups(1.0, 0.99, 0.0, 1.0), groups(1.0, 1.0, 1.0, 1.0)] * 10
    assert raised_by([*learning, *solved]) == {}
    # Some prompts are always solved, the others never.
    assert list(raised_by([*learning, *[groups(1.0, 0.5, 0.0, 1.0)] * 5])) == [Reason.EQUAL_SCORES]
    # Every response has the highest score because all responses have the same.
    assert list(raised_by([groups(1.0, 1.0, 1.0, 1.0)] * 5)) == [Reason.EQUAL_SCORES]


def test_outlier_scores_do_not_change_whether_prompts_are_solved() -> None:
    learning, failing = groups(0.5, 0.3, 0.0, 1.0), [groups(1.0, 0.02, 0.0, 1.0), groups(1.0, 0.0, 0.0, 0.0)] * 10
    # A penalty.
    low = groups(0.5, 0.1, -10.0, 1.0)
    assert list(raised_by([low, *failing])) == [Reason.EQUAL_SCORES]
    assert list(raised_by([*[learning] * 10, *[low, *[learning] * 4] * 3, *failing * 20])) == [Reason.EQUAL_SCORES]
    # Rare penalties when nothing is learned any more.
    penalties = [groups(0.95, -0.1, -10.0, 0.0)] * 200
    assert list(raised_by([*[learning] * 10, *penalties])) == [Reason.EQUAL_SCORES]
    # A bonus.
    solved = [groups(0.97, 0.99, 0.0, 1.0)] * 30
    assert raised_by([groups(0.5, 0.5, 0.0, 20.0), *solved]) == {}
    assert raised_by([*[learning] * 10, groups(0.5, 0.5, 0.0, 20.0), *solved]) == {}


def test_dynamic_sampling_drops_groups_with_equal_scores() -> None:
    [alarm] = raised_by([{**groups(0.95, 0.01, 0.0, 1.0), SAMPLING_KEPT: 0.05}] * 5).values()
    assert alarm.message == Mentions("95 % of the groups", "dynamic sampling drops nearly all")
    assert "learns" not in alarm.message


def test_a_resumed_run_has_the_same_alarms_as_an_uninterrupted_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = alarms_of()
    sink = JsonlSink(tmp_path, None, lambda: 0.0)
    steps = [
        {
            STEP_SECONDS: 1.0,
            GRADIENT_NORM: math.inf if step % 4 == 0 else 1.0 + step % 7 / 3,
            KL_LOSS: 0.1 + step % 3 / 7 + (5.0 if step > 25 else 0.0),
            **groups(0.95, step % 5 / 50, 0.0, float(step % 2)),
        }
        for step in range(1, 41)
    ]
    for step, metrics in enumerate(steps[:28], 1):
        whole.step_done(step, metrics)
        sink.write(step, metrics)
        sink.write(step, {"eval/heldout/greedy": 0.5})
    sink.close()
    caplog.clear()
    resumed = alarms_of()
    resumed.load(read_rows(tmp_path / "metrics.jsonl"))
    assert {alarm.reason for alarm in raised(resumed)} == {"HighGradientNorm", "HighKl", "EqualScores"}
    assert resumed.raised == whole.raised
    assert [record.getMessage() for record in caplog.records] == [
        f"alarm {alarm.reason} since step {alarm.since_step}: {alarm.message}" for alarm in raised(whole)
    ]
    for step, metrics in enumerate(steps[28:], 29):
        assert resumed.step_done(step, metrics) == whole.step_done(step, metrics)


def test_all_alarms_of_a_step_fit_a_run_state() -> None:
    worst = {
        REWARD_FAILED_FRACTION: 1.0,
        ROLLOUT_FAILED_FRACTION: 1.0,
        **dict.fromkeys((f"reward/score/{kind}_rate" for kind in ("error", "timeout", "died", "unreachable")), 1.0),
        GRADIENT_NORM: 1e300,
        KL_LOSS: 1e300,
        REJECTED_FRACTION: 1.0,
        MERGE_ERROR: 1.0,
        RESPONSE_CLIP_RATIO: 1.0,
        **mismatches([123456.789])[0],
        **groups(1.0, -123456.789, -123456.789, -123456.789),
    }
    found = raised_by([{GRADIENT_NORM: 1.0, KL_LOSS: 0.0}] * WINDOW + [worst] * 10)
    assert set(found) == set(ALARMS)
    for alarm in found.values():
        assert not alarm.message.endswith(" ")
        assert len(json.dumps(alarm.message)) < 512, "the message was cut"
