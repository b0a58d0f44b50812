"""The loop around `reconcile` in a modelled outside: operators that crash, or are paused and come back late."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta

from rljob_api.v1alpha1.status import RLJobStatus
from rljob_operator.reconcile.observed import EffectFailure
from rljob_operator.reconcile.plan_types import Plan
from rljob_operator.reconcile.reconcile import reconcile
from rljob_testing.operator_jobs import DEFAULTS
from rljob_testing.operator_observed import NOW
from rljob_testing.operator_observed_world import TICK_SECONDS, Scenario, World, copied

MAX_PASSES = 2500


class OperatorCrash(Exception):
    """The operator's process ends here."""


@dataclass
class Store:
    """The job's status on the API server: written only over the version that was read."""

    status: RLJobStatus = field(default_factory=RLJobStatus)
    version: int = 0

    def write(self, status: RLJobStatus, version: int) -> bool:
        """Whether it was written."""
        if version != self.version:
            return False
        self.status = RLJobStatus.from_wire(status.to_wire())
        self.version += 1
        return True


@dataclass
class Operator:
    """Passes over one job. It crashes at the points of `crashes`, which are counted over the whole run: before each
    write and each effect, and after each. At the point `pause` it is frozen for `pause_passes` passes of the operator
    that takes over, and then goes on where it was."""

    world: World
    crashes: frozenset[int] = frozenset()
    pause: int = 0
    pause_passes: int = 0
    store: Store = field(default_factory=Store)
    num_points: int = 0
    num_writes: int = 0
    _frozen: Iterator[None] | None = None
    _thaw_in: int = 0
    _result: tuple[Plan, EffectFailure | None] | None = None

    @property
    def status(self) -> RLJobStatus:
        """What is stored."""
        return self.store.status

    def run(self) -> None:
        """Passes until nothing is left to do; raises AssertionError if that does not come."""
        failure: EffectFailure | None = None
        for _ in range(MAX_PASSES):
            self._let_the_frozen_go_on()
            try:
                plan, failure = self._pass(failure)
            except OperatorCrash:
                failure = None
                continue
            if self._is_at_rest(plan):
                return
        raise AssertionError(f"not at an end after {MAX_PASSES} passes: {self.status!r}")

    def _is_at_rest(self, plan: Plan) -> bool:
        nothing_follows = plan.requeue_after_seconds is None and not plan.effects and not self.world.is_asked_later
        return self.world.deleted or (nothing_follows and not self.world.clusters and self._frozen is None)

    def _let_the_frozen_go_on(self) -> None:
        if self._frozen is None:
            return
        self._thaw_in -= 1
        if self._thaw_in <= 0:
            frozen, self._frozen = self._frozen, None
            for _ in frozen:
                pass

    def _pass(self, failure: EffectFailure | None) -> tuple[Plan, EffectFailure | None]:
        """One pass; a frozen one counts as one that has not ended."""
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
        plan = reconcile(seen, NOW + timedelta(seconds=TICK_SECONDS * self.world.tick), DEFAULTS)
        self._result = plan, None
        yield
        if plan.status != status:
            if not self.store.write(plan.status, version):
                return
            self.num_writes += 1
        yield
        for effect in plan.effects:
            failed = self.world.carry_out(effect, name)
            if failed is not None:
                self._result = plan, failed
                return
            yield


def ran(scenario: Scenario, crashes: frozenset[int] = frozenset(), pause: int = 0, pause_passes: int = 0) -> Operator:
    """The operator after the whole life of a job in this world."""
    operator = Operator(World(copied(scenario)), crashes, pause, pause_passes)
    operator.run()
    return operator
