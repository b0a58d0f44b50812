"""What happens to a simulated job: its failures, what users request, and when there is room or quota for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import AttemptState
from rljob_testing.operator import inputs

STEPS = 10


@dataclass(frozen=True)
class Start:
    """The course of one start of the trainer and of its cluster. Steps count from the beginning of the job."""

    exit_code: int = 0
    """Exit code after the last step."""
    fails_at_step: int | None = None
    """The trainer fails at this step with exit code 1."""
    head_lost_at_step: int | None = None
    node_lost_at_step: int | None = None
    """The head's node is lost: its pod stays listed, but does not respond."""
    cluster_deleted_at_step: int | None = None
    hangs_at_step: int | None = None
    worker_lost_at_step: int | None = None
    """The node of the last worker is lost, and the trainer fails with exit code 75."""
    waits_at_step: int | None = None
    """At this step the lost node is back, and the trainer makes no further step until it is asked to stop."""

    @property
    def last_step(self) -> int:
        """The last step that this start reaches."""
        ends = (self.fails_at_step, self.hangs_at_step, self.worker_lost_at_step, self.waits_at_step)
        return min([STEPS, *(end for end in ends if end is not None)])

    def fails_at(self, step: int) -> bool:
        """Whether the trainer has failed at this step."""
        return any(end is not None and step >= end for end in (self.fails_at_step, self.worker_lost_at_step))


@dataclass
class Scenario:
    """The failures and user requests of one simulated job."""

    job_spec: RLJobSpec = field(default_factory=inputs.spec)
    starts: tuple[Start, ...] = ()
    """The course of each start, in order; later starts succeed."""
    ticks_without_room: range = range(0)
    """Ticks in which no node has room for new worker pods."""
    ticks_without_quota: tuple[range, ...] = ()
    """Ticks in which the cluster's queue (Kueue) suspends it. If there are any, the cluster is in a queue."""
    refused_creations: int = 0
    failed_submissions: int = 0
    """Number of submissions that fail without an effect."""
    lost_answers: bool = False
    """The first request of each kind takes effect, but is reported as failed."""
    silent_ticks: range = range(0)
    """Ticks in which the dashboard does not respond."""
    suspended_ticks: range = range(0)
    stopped_in: AttemptState | None = None
    """A user stops the job when its first attempt is in this state."""
    is_retried: bool = False
    """A user retries the job after it has failed."""
