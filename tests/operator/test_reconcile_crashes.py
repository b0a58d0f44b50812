"""A job from creation to its end in a simulated outside, over several attempts: the operator crashes anywhere, or is
paused anywhere and comes back when another one leads. The result is the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.v1alpha1.status import AttemptState, RLJobStatus
from rljob_operator.controller.reconcile_loop import without_informational_fields
from rljob_operator.reconcile.decision import Decision, SubmitRayJob
from rljob_operator.reconcile.observed import EffectFailure
from rljob_operator.reconcile.reconcile import reconcile
from rljob_testing.operator import inputs, simulation
from rljob_testing.operator.scenarios import Scenario, Start

LIMITS = {"provisioningDeadlineSeconds": 60, "gracePeriodSeconds": 30}
NO_RETRY = {"maxAppRetries": 0, "maxInfraRetries": 0}
ELASTIC = {
    "pools[0].nodes": 2, "training.batchSize": 8, "training.rollout.groupSize": 4,
    "runPolicy": {"elastic": {"minNodes": 1, "waitSeconds": 12}},
}  # fmt: skip
PATIENT = (Start(waits_at_step=7),)
MAX_PASSES = 2500
NODES = {"a node stays away, and comes back": [2, 1, 2]}
"""Number of nodes of each start of the elastic job."""

SCENARIOS: dict[str, tuple[Scenario, str, str, int]] = {
    "success": (Scenario(), "Complete", "Succeeded", 1),
    "failure, no retry": (
        Scenario(inputs.spec({"runPolicy": NO_RETRY}), (Start(fails_at_step=4),)), "Failed", "ApplicationError", 1,
    ),
    "one failure": (Scenario(starts=(Start(fails_at_step=4),)), "Complete", "Succeeded", 2),
    "two failures": (Scenario(starts=(Start(fails_at_step=4), Start(fails_at_step=7))), "Complete", "Succeeded", 3),
    "a failure at the same step each time": (
        Scenario(starts=(Start(fails_at_step=7),) * 9), "Failed", "ApplicationError", 3,
    ),
    "an infrastructure failure at the end": (Scenario(starts=(Start(exit_code=75),)), "Complete", "Succeeded", 2),
    "a configuration error": (Scenario(starts=(Start(exit_code=2),)), "Failed", "ConfigurationError", 1),
    "no room at first": (
        Scenario(inputs.spec({"runPolicy": LIMITS}), ticks_without_room=range(30)), "Complete", "Succeeded", 2,
    ),
    "in a queue, and evicted": (
        Scenario(ticks_without_quota=(range(8), range(20, 30))), "Complete", "Succeeded", 2,
    ),
    "evicted for a moment": (
        Scenario(ticks_without_quota=(range(8), range(20, 22))), "Complete", "Succeeded", 2,
    ),
    "quota": (Scenario(refused_creations=3), "Complete", "Succeeded", 1),
    "no permission ever": (
        Scenario(inputs.spec({"runPolicy": LIMITS}), refused_creations=1000),
        "Failed", "ProvisioningDeadlineExceeded", 1,
    ),
    "a slow agent": (Scenario(failed_submissions=3), "Complete", "Succeeded", 1),
    "lost answers": (Scenario(lost_answers=True), "Complete", "Succeeded", 1),
    "a silent dashboard": (Scenario(silent_ticks=range(9, 16)), "Complete", "Succeeded", 1),
    "the head is lost": (Scenario(starts=(Start(head_lost_at_step=6),)), "Complete", "Succeeded", 2),
    "the head's node is lost": (Scenario(starts=(Start(node_lost_at_step=6),)), "Complete", "Succeeded", 2),
    "the cluster is deleted": (Scenario(starts=(Start(cluster_deleted_at_step=6),)), "Complete", "Succeeded", 2),
    "a trainer hangs": (
        Scenario(inputs.spec({"runPolicy": {"stallDeadlineSeconds": 60, "gracePeriodSeconds": 30}}),
                 (Start(hangs_at_step=6),)), "Complete", "Succeeded", 2,
    ),
    "suspended while it trains": (Scenario(suspended_ticks=range(11, 30)), "Complete", "Succeeded", 2),
    "suspended while pods start": (Scenario(suspended_ticks=range(3, 12)), "Complete", "Succeeded", 2),
    "too long": (
        Scenario(inputs.spec({"runPolicy.activeDeadlineSeconds": 24})), "Failed", "ActiveDeadlineExceeded", 1,
    ),
    "a node stays away, and comes back": (
        Scenario(inputs.spec(ELASTIC), (Start(worker_lost_at_step=6), Start(waits_at_step=7))),
        "Complete", "Succeeded", 3,
    ),
    "stopped while it trains": (
        Scenario(starts=PATIENT, stopped_in=AttemptState.RUNNING), "Failed", "StoppedByUser", 1,
    ),
    "stopped while pods start": (Scenario(stopped_in=AttemptState.PROVISIONING), "Failed", "StoppedByUser", 1),
    "stopped, and tried again": (
        Scenario(starts=PATIENT, stopped_in=AttemptState.RUNNING, is_retried=True), "Complete", "Succeeded", 2,
    ),
    "failed, and tried again": (
        Scenario(inputs.spec({"runPolicy": NO_RETRY}), (Start(fails_at_step=7),), is_retried=True),
        "Complete", "Succeeded", 2,
    ),
    "deleted when its time has come": (
        Scenario(inputs.spec({"runPolicy.ttlSecondsAfterFinished": 60})), "Complete", "Succeeded", 1,
    ),
}  # fmt: skip


class OperatorCrash(Exception):
    """Raised where the operator's process ends."""


@dataclass
class Store:
    """The job's status on the API server: written only over the version that was read."""

    status: RLJobStatus = field(default_factory=RLJobStatus)
    version: int = 0

    def write(self, status: RLJobStatus, version: int) -> bool:
        """Returns whether it was written."""
        if version != self.version:
            return False
        self.status = RLJobStatus.from_wire(status.to_wire())
        self.version += 1
        return True


@dataclass
class Operator:
    """Passes over one job. It crashes at the points of `crashes`, which are counted over the whole run: before each
    write and each effect, and after each. At the point `pause` it is frozen for `pause_passes` passes of the operator
    that takes over, and then continues where it was."""

    world: simulation.World
    crashes: frozenset[int] = frozenset()
    pause: int = 0
    pause_passes: int = 0
    store: Store = field(default_factory=Store)
    num_points: int = 0
    num_deciding_writes: int = 0
    """Writes of a status that does not only explain."""
    _failure: EffectFailure | None = None
    _frozen: Iterator[None] | None = None
    _thaw_in: int = 0
    _result: tuple[Decision, EffectFailure | None] | None = None

    @property
    def status(self) -> RLJobStatus:
        """The stored status."""
        return self.store.status

    def run(self) -> None:
        """Runs passes until nothing is left to do; raises AssertionError if that does not come."""
        for _ in range(MAX_PASSES):
            if self.ends_with_pass():
                return
        raise AssertionError(f"not done after {MAX_PASSES} passes: {self.status!r}")

    def ends_with_pass(self) -> bool:
        """Runs a pass, or the part before a crash. Returns whether nothing is left to do."""
        self._let_the_frozen_go_on()
        try:
            decision, self._failure = self._pass(self._failure)
        except OperatorCrash:
            self._failure = None
            return False
        return self._is_at_rest(decision)

    def copied(self) -> Operator:
        """An operator and a world in the same state; not while a pass is frozen. Unchanging values are shared."""
        unchanging = (self.world.scenario.job_spec, self.world.scenario.starts, self.store.status, self._result)
        return copy.deepcopy(self, {id(value): value for value in unchanging})

    def _is_at_rest(self, decision: Decision) -> bool:
        is_done = decision.requeue_after_seconds is None and not decision.effects and not self.world.has_later_request
        return self.world.deleted or (is_done and not self.world.clusters and self._frozen is None)

    def _let_the_frozen_go_on(self) -> None:
        if self._frozen is None:
            return
        self._thaw_in -= 1
        if self._thaw_in <= 0:
            frozen, self._frozen = self._frozen, None
            for _ in frozen:
                pass

    def _pass(self, failure: EffectFailure | None) -> tuple[Decision, EffectFailure | None]:
        """Runs one pass; a frozen one counts as one that has not ended."""
        self.world.advance()
        self.world.hear(self.status)
        steps = self._steps(failure)
        for _ in steps:
            self.num_points += 1
            if self.num_points in self.crashes:
                raise OperatorCrash
            if self.num_points == self.pause:
                self._frozen, self._thaw_in = steps, self.pause_passes
                raise OperatorCrash
        assert self._result is not None
        return self._result

    def _steps(self, failure: EffectFailure | None) -> Iterator[None]:
        """The parts of a pass; the operator may stop at each `yield`."""
        version, status = self.store.version, self.store.status
        name = status.attempts[-1].cluster if status.attempts else ""
        seen = self.world.observe(name, failure)
        seen = replace(seen, job=replace(seen.job, status=status))
        decision = reconcile(
            seen, inputs.NOW + timedelta(seconds=simulation.TICK_SECONDS * self.world.tick), inputs.DEFAULTS
        )
        self._result = decision, None
        yield
        if decision.status != status:
            if not self.store.write(decision.status, version):
                return
            self.num_deciding_writes += without_informational_fields(decision.status) != without_informational_fields(
                status
            )
        yield
        for effect in decision.effects:
            failed = self.world.execute(effect, name)
            if failed is not None:
                self._result = decision, failed
                return
            yield


def run_scenario(
    scenario: Scenario, crashes: frozenset[int] = frozenset(), pause: int = 0, pause_passes: int = 0
) -> Operator:
    """The operator after the whole life of a job in this world."""
    operator = started(scenario)
    operator.crashes, operator.pause, operator.pause_passes = crashes, pause, pause_passes
    operator.run()
    return operator


def started(scenario: Scenario) -> Operator:
    """An undisturbed operator before its first pass."""
    return Operator(simulation.World(simulation.unstarted_copy(scenario)))


def before_each_point(whole: Operator) -> Iterator[tuple[int, Operator]]:
    """Runs `whole` to its end. Yields each of its points, and an operator in the state before the pass with that
    point: without a disturbance all lives of a job are equal until there."""
    for _ in range(MAX_PASSES):
        before = whole.copied()
        is_at_end = whole.ends_with_pass()
        for point in range(before.num_points + 1, whole.num_points + 1):
            yield point, before.copied()
        if is_at_end:
            return
    raise AssertionError(f"not done after {MAX_PASSES} passes: {whole.status!r}")


@pytest.mark.parametrize("clusters", [("example-1",), ("example-1", "example-2")], ids=["one cluster", "two"])
def test_two_concurrent_trainers_are_detected(clusters: tuple[str, ...]) -> None:
    world = simulation.World(Scenario())
    world.clusters.update({name: simulation.Cluster(name, name, since=0) for name in clusters})
    for number, name in enumerate((clusters[0], clusters[-1]), 1):
        world.execute(SubmitRayJob(f"example-{number}-1", number, number), name)
    world.advance()
    assert world.most_running == 2


def comparable_end(status: RLJobStatus) -> object:
    """What must be the same however the operator was disturbed."""
    assert status.result is not None
    retried = status.counters is not None and (status.counters.attempts, status.counters.failed_attempts)
    return status.phase, status.result.reason, retried


def check(operator: Operator, name: str, what: str) -> None:
    """One trainer at a time, start numbers that grow, checkpoints by the newest start only, and nothing left."""
    scenario, phase, reason, num_attempts = SCENARIOS[name]
    assert operator.status.phase == phase, what
    assert operator.status.result is not None
    assert operator.status.result.reason == reason, what
    assert operator.status.counters is not None
    assert operator.status.counters.attempts == num_attempts, what
    world = operator.world
    assert world.clusters == {}, what
    assert world.most_running <= 1, what
    assert world.starts == sorted(set(world.starts)), what
    assert world.savers == sorted(world.savers), what
    assert world.nodes_of_starts == NODES.get(name, world.nodes_of_starts), what
    if phase == "Complete":
        assert world.saved_step == 10, what
    assert world.deleted == (scenario.job_spec.run_policy.ttl_seconds_after_finished is not None), what


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_result_is_the_same_wherever_the_operator_crashes(name: str) -> None:
    scenario = SCENARIOS[name][0]
    whole = run_scenario(scenario)
    check(whole, name, "undisturbed")
    point = 0
    for point, crashed in before_each_point(started(scenario)):
        crashed.crashes = frozenset([point])
        crashed.run()
        assert comparable_end(crashed.status) == comparable_end(whole.status), f"crash at point {point}"
        check(crashed, name, f"crash at point {point}")
    assert point == whole.num_points


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_leader_that_comes_back_late_does_no_harm(name: str) -> None:
    for point, late in before_each_point(started(SCENARIOS[name][0])):
        # For a moment, or until the next attempt has begun.
        late.pause, late.pause_passes = point, 3 if point % 2 else 25
        late.run()
        check(late, name, f"paused at point {point} for {late.pause_passes} passes")


@pytest.mark.parametrize("name", ["in a queue, and evicted", "evicted for a moment"])
def test_an_eviction_uses_no_retry_although_no_operator_runs_for_a_while(name: str) -> None:
    scenario = SCENARIOS[name][0]
    for start in range(12, 40):
        for ticks in (1, 2, 3, 5, 8, 12, 20):
            operator = started(scenario)
            run_with_outage(operator, range(start, start + ticks))
            what = f"no operator from tick {start} for {ticks} ticks"
            counters = operator.status.counters
            assert (operator.status.phase, operator.world.num_clusters) == ("Complete", 1), what
            assert counters is not None, what
            assert (counters.failed_attempts, counters.infrastructure_retries) == (0, 0), what
            assert operator.world.most_running <= 1, what
            assert operator.world.starts == sorted(set(operator.world.starts)), what


def run_with_outage(operator: Operator, ticks: range) -> None:
    """Runs passes until nothing is left to do. No operator runs during `ticks`."""
    for _ in range(MAX_PASSES):
        if operator.world.tick + 1 in ticks:
            operator.world.advance()
        elif operator.ends_with_pass():
            return
    raise AssertionError(f"not done after {MAX_PASSES} passes: {operator.status!r}")


def test_a_cluster_that_is_created_late_is_removed() -> None:
    """The leader is paused before it creates the first cluster, and comes back at any time of the job's life."""
    num_clusters = set()
    for point in range(1, 8):
        for passes in range(2, 30):
            late = run_scenario(SCENARIOS["the head is lost"][0], pause=point, pause_passes=passes)
            check(late, "the head is lost", f"paused at point {point} for {passes} passes")
            num_clusters.add(late.world.num_clusters)
    assert num_clusters == {2, 3}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(SCENARIOS)), st.frozensets(st.integers(1, 150), max_size=12))
def test_the_result_is_the_same_after_many_crashes(name: str, crashes: frozenset[int]) -> None:
    scenario = SCENARIOS[name][0]
    crashed = run_scenario(scenario, crashes)
    assert comparable_end(crashed.status) == comparable_end(run_scenario(scenario).status)
    check(crashed, name, f"crashes at {sorted(crashes)}")


def test_a_successful_job_costs_few_writes() -> None:
    # The attempt; the cluster; ready, submitting; submitted; training; two checkpoints; the end; the cluster deleted.
    # Progress is written beside them, at most every 10 s.
    assert run_scenario(Scenario()).num_deciding_writes <= 9
