"""From creation to the end in a modelled outside, the operator crashing anywhere: the end is the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.v1alpha1.status import RLJobStatus
from rljob_testing.operator_jobs import spec
from rljob_testing.operator_observed_world import Operator, Scenario, ran

LIMITS = {"provisioningDeadlineSeconds": 60, "gracePeriodSeconds": 30}

SCENARIOS: dict[str, tuple[Scenario, str, str]] = {
    "success": (Scenario(), "Complete", "Succeeded"),
    "failure of the application": (Scenario(fails_at_step=4), "Failed", "ApplicationError"),
    "failure at the end": (Scenario(exit_code=75), "Failed", "InfrastructureError"),
    "no node": (Scenario(spec({"runPolicy": LIMITS}), pods_get_ready=False), "Failed", "ProvisioningDeadlineExceeded"),
    "quota": (Scenario(refused_creations=3), "Complete", "Succeeded"),
    "no quota ever": (
        Scenario(spec({"runPolicy": LIMITS}), refused_creations=1000),
        "Failed",
        "ProvisioningDeadlineExceeded",
    ),
    "a slow agent": (Scenario(failed_submissions=3), "Complete", "Succeeded"),
    "lost answers": (Scenario(lost_answers=True), "Complete", "Succeeded"),
    "a silent dashboard": (Scenario(silent_ticks=range(9, 16)), "Complete", "Succeeded"),
    "the head is lost": (Scenario(head_lost_at_step=6), "Failed", "HeadLost"),
    "the cluster is deleted": (Scenario(cluster_deleted_at_step=6), "Failed", "ClusterLost"),
    "too long": (Scenario(spec({"runPolicy.activeDeadlineSeconds": 44})), "Failed", "ActiveDeadlineExceeded"),
}


SUDDEN = ("HeadLost", "ClusterLost")
"""How much of the run was seen before these depends on when the operator looked."""


def timeless(status: RLJobStatus) -> object:
    """The status without its times, and of a sudden ending only the ending."""
    wire, ending = status.to_wire(), status.conditions[-1]
    if ending.reason in SUDDEN:
        return (status.phase, ending.reason, ending.message, status.attempts[0].outcome, status.attempts[0].cluster_uid)
    if ending.reason == "ActiveDeadlineExceeded":
        # Of the moment in which the operator saw that the deadline had passed.
        wire.pop("progress")
    return without_times(wire)


def without_times(value: object) -> object:
    if isinstance(value, dict):
        times = ("lastTransitionTime", "updatedAt", "savedAt", "started", "ended")
        return {key: without_times(item) for key, item in value.items() if key not in times}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def check_the_outside(operator: Operator, scenario: str) -> None:
    """One cluster and one trainer at the most, and nothing left."""
    assert operator.world.num_clusters == (0 if scenario == "no quota ever" else 1)
    assert operator.world.num_jobs <= 1
    assert operator.world.cluster_since is None


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_end_is_the_same_wherever_the_operator_crashes(name: str) -> None:
    scenario, phase, reason = SCENARIOS[name]
    whole = ran(scenario)
    assert whole.status.phase == phase
    assert whole.status.conditions[-1].reason == reason
    check_the_outside(whole, name)
    for point in range(1, whole.num_points + 1):
        crashed = ran(scenario, frozenset([point]))
        assert timeless(crashed.status) == timeless(whole.status), f"crash at point {point}"
        check_the_outside(crashed, name)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(SCENARIOS)), st.frozensets(st.integers(1, 60), max_size=12))
def test_the_end_is_the_same_after_many_crashes(name: str, crashes: frozenset[int]) -> None:
    scenario, _, _ = SCENARIOS[name]
    crashed = ran(scenario, crashes)
    assert timeless(crashed.status) == timeless(ran(scenario).status)
    check_the_outside(crashed, name)


def test_a_job_that_goes_well_costs_few_writes() -> None:
    # The attempt; the cluster; its pods; ready and submitting; submitted; training; the end; the cluster gone. Between
    # them 10 steps in 40 s: progress every 8 s, that of the checkpoint among them.
    assert ran(Scenario()).num_writes <= 8 + 40 / 8
