"""The trainer's alarms reach the status, with one event when an alarm is raised."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_api.conditions import ConditionType
from rljob_api.run_state import Alarm, RunPhase, RunState
from rljob_api.v1alpha1.status import RLJobStatus
from rljob_operator.reconcile.decision import Decision, EventRecord, EventType
from rljob_operator.reconcile.observed import Observed, RayJobStatus
from rljob_operator.reconcile.retries import start_attempt
from rljob_operator.reconcile.status_draft import StatusDraft
from rljob_operator.reconcile.trainer import new_alarms
from rljob_testing.operator import inputs
from rljob_testing.operator.inputs import alarm

HEALTHY = ConditionType.TRAINING_HEALTHY


def after(*states: RunState) -> tuple[Decision, list[EventRecord]]:
    """The last decision of passes that observe these run states, and the events of all passes, without `Training`."""
    events: list[EventRecord] = []
    seen: Observed | None = None
    decision: Decision | None = None
    for number, state in enumerate(states):
        status = None if decision is None else decision.status
        seen = inputs.healthy(state=state, status=status)
        decision = inputs.decide(seen, inputs.at(10 * number))
        events += [event for event in decision.events if event.type is EventType.WARNING]
    assert decision is not None
    return decision, events


def test_an_alarm_gets_one_event_however_long_it_lasts_and_whatever_comes_before_it() -> None:
    cut_off, errors = alarm("ResponsesCutOff", "75 %"), alarm("RewardErrors", "12 % failed")
    states = [
        inputs.run_state(step=4),
        inputs.run_state(step=5, alarms=(cut_off,)),
        inputs.run_state(step=6, alarms=(cut_off.model_copy(update={"step": 6, "message": "80 %"}),)),
        inputs.run_state(step=7, alarms=(errors, cut_off)),
        inputs.run_state(step=8, alarms=(cut_off,)),
        inputs.run_state(step=9),
    ]
    decision, events = after(*states)
    assert events == [
        EventRecord(EventType.WARNING, "ResponsesCutOff", "75 % (since step 3, last in step 4)"),
        EventRecord(EventType.WARNING, "RewardErrors", "12 % failed (since step 3, last in step 4)"),
    ]
    assert decision.status.alarms == ()
    assert inputs.condition_of(decision.status, HEALTHY) == ("True", "NoAlarms", "")
    both, _ = after(*states[:4])
    assert both.status.alarms == ("RewardErrors", "ResponsesCutOff")
    status, reason, message = inputs.condition_of(both.status, HEALTHY) or ("", "", "")
    assert (status, reason) == ("False", "RewardErrors")
    assert message == "12 % failed (since step 3, last in step 4)"


def test_alarms_that_are_raised_together_get_an_event_each_and_unknown_ones_share_one() -> None:
    names = ("RewardErrors", "EntropyCollapse", "EqualScores", "ValueExplosion")
    _, events = after(inputs.run_state(alarms=tuple(alarm(name, name[0]) for name in names)))
    steps = "(since step 3, last in step 4)"
    assert [(event.reason, event.message) for event in events] == [
        ("RewardErrors", f"R {steps}"),
        ("OtherAlarm", f"EntropyCollapse: E {steps}; ValueExplosion: V {steps}"),
        ("EqualScores", f"E {steps}"),
    ]


def test_an_alarm_gets_its_event_in_the_pass_that_starts_the_next_attempt_too() -> None:
    """Ray has no job of that attempt."""
    seen = inputs.healthy(state=inputs.run_state(alarms=(alarm(),)))
    draft = StatusDraft(seen.job, inputs.at(0))
    draft.alarms = ("ResponsesCutOff",)
    start_attempt(draft, seen.job, on_same_cluster=True)
    assert [event.reason for event in new_alarms(draft, seen)] == ["ResponsesCutOff"]


def test_the_longest_alarms_of_a_trainer_fit_into_status_and_event() -> None:
    """What a trainer reports is not trusted: inputs.decide checks that the status can be stored."""
    message = "\x1b[31m\x00" + "é" * 506
    alarms = tuple(alarm(f"A{number:02}" + "a" * 61, message) for number in range(16))
    decision, [event] = after(inputs.run_state(alarms=alarms))
    assert len(decision.status.alarms) == 16
    assert len(event.message.encode()) <= 1024
    status, reason, shown = inputs.condition_of(decision.status, HEALTHY) or ("", "", "")
    assert (status, reason) == ("False", "OtherAlarm")
    assert "\x1b" not in shown
    assert "\x00" not in shown
    assert shown.endswith("(since step 3, last in step 4)")
    twice, _ = after(inputs.run_state(alarms=(alarm(), alarm())))
    assert twice.status.alarms == ("ResponsesCutOff",)


NOT_STARTED = [
    inputs.run_state(RunPhase.STARTING, step=4, alarms=None),
    inputs.run_state(RunPhase.RUNNING, step=0),
    inputs.run_state(RunPhase.FAILED, step=4, alarms=None),
    inputs.run_state(RunPhase.STOPPED, step=4, alarms=None),
]


@pytest.mark.parametrize("state", NOT_STARTED, ids=lambda state: f"{state.phase}-{state.progress.step}")
@pytest.mark.parametrize("before", [(), (alarm(),)], ids=["healthy", "alarm"])
def test_alarms_stay_until_another_attempt_has_trained(state: RunState, before: tuple[Alarm, ...]) -> None:
    known = inputs.run_state(alarms=before)
    decision, events = after(known, state, known)
    first, _ = after(known)
    assert decision.status.alarms == first.status.alarms
    assert inputs.condition_of(decision.status, HEALTHY) == inputs.condition_of(first.status, HEALTHY)
    assert [event.reason for event in events if event.reason == "ResponsesCutOff"] == ["ResponsesCutOff"] * len(before)


@pytest.mark.parametrize("state", NOT_STARTED, ids=lambda state: f"{state.phase}-{state.progress.step}")
def test_the_health_is_unknown_before_the_first_step(state: RunState) -> None:
    decision, _ = after(state)
    found = inputs.condition_of(decision.status, HEALTHY)
    assert found == ("Unknown", "Starting", "the trainer has not completed a step")


def test_alarms_are_cleared_when_the_job_continues_with_a_trainer_without_alarms() -> None:
    decision, _ = after(inputs.run_state(alarms=(alarm(),)), inputs.run_state(alarms=None))
    assert decision.status.alarms == ()
    assert (inputs.condition_of(decision.status, HEALTHY) or ())[:2] == ("Unknown", "NotReported")


def test_a_finished_job_keeps_its_last_alarms() -> None:
    state = inputs.run_state(RunPhase.COMPLETE, step=10, alarms=(alarm(step=10),))
    seen = inputs.healthy(inputs.ray_job(RayJobStatus.SUCCEEDED, 0), state)
    decision = inputs.decide(seen)
    ended: RLJobStatus = decision.status
    assert ended.phase == "Complete"
    later = inputs.decide(inputs.observed(ended), inputs.at(100))
    assert later.status.alarms == ("ResponsesCutOff",)
    assert inputs.condition_of(later.status, HEALTHY) == inputs.condition_of(ended, HEALTHY)
    assert "ResponsesCutOff" not in [event.reason for event in later.events]


def test_the_first_alarm_of_an_unobserved_trainer_stays() -> None:
    known, _ = after(inputs.run_state(alarms=(alarm(),)))
    seen = inputs.healthy(status=known.status)
    silent = replace(seen, ray=inputs.silent_ray(seconds=300))
    decision = inputs.decide(silent, inputs.at(10))
    assert decision.status.alarms == ("ResponsesCutOff",)
