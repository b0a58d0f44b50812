"""The operator's own Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rljob_api.conditions import ALARMS, Reason

PASS_BUCKETS_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """All metrics of one process. Names begin with `rljob_operator_`, except `rljob_jobs` and
    `rljob_training_alarms`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        gauge, counter = partial(Gauge, registry=self.registry), partial(Counter, registry=self.registry)
        self.queue_depth = gauge(
            "rljob_operator_queue_depth",
            "Jobs that wait for a reconcile pass; maxConcurrentReconciles limits how many passes run at the same time.",
        )
        self.queue_delayed = gauge("rljob_operator_queue_delayed", "Jobs with a reconcile pass scheduled for later.")
        self.queue_working = gauge(
            "rljob_operator_queue_working",
            "Jobs that are being reconciled, including those that wait for a response of Ray.",
        )
        self.passes = counter(
            "rljob_operator_passes",
            "Reconcile passes, by outcome: done, deleted, conflict, unavailable, crd_outdated, failed.",
            ["outcome"],
        )
        self.pass_seconds = Histogram(
            "rljob_operator_pass_seconds",
            "Duration of a reconcile pass, including the time until Ray responds.",
            buckets=PASS_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.kube_requests = counter(
            "rljob_operator_kube_requests",
            "Requests to the API server, excluding watches.",
            ["verb", "resource", "code"],
        )
        self.ray_requests = counter(
            "rljob_operator_ray_requests", "Requests to Ray dashboards.", ["operation", "outcome"]
        )
        self.status_writes = counter("rljob_operator_status_writes", "Status updates written.")
        self.status_faults = counter(
            "rljob_operator_status_faults",
            "Passes that failed because of a job's status, by fault: unreadable (its fields cannot be parsed),"
            " not_written (the API server rejects the new status).",
            ["fault"],
        )
        self.foreign_status_events = counter(
            "rljob_operator_foreign_status_events",
            "Watch events of jobs whose status another installation of the operator writes; it should stay 0.",
        )
        self.effects = counter(
            "rljob_operator_effects",
            "Changes in Kubernetes and Ray (effects), by kind and outcome: done, failed.",
            ["kind", "outcome"],
        )
        self.watch_restarts = counter(
            "rljob_operator_watch_restarts", "Restarts of all watches after they ended unexpectedly."
        )
        self.definition_outdated = gauge(
            "rljob_operator_definition_outdated",
            "1 if the CustomResourceDefinition of RLJobs is older than the operator, so that jobs wait; else 0.",
        )
        self.cached_objects = gauge("rljob_operator_cached_objects", "Objects in the cache.")
        self.leader = gauge("rljob_operator_leader", "1 in the replica that is the leader; 0 in the others.")
        self.jobs = gauge("rljob_jobs", "Jobs, by phase; New before the operator has processed a job.", ["phase"])

        self.alarms = gauge("rljob_training_alarms", "Running jobs by alarm of their training.", ["reason"])

    def read_queue_from(
        self, waiting: Callable[[], int], delayed: Callable[[], int], working: Callable[[], int]
    ) -> None:
        """Makes the gauges of the queue call these functions at each scrape."""
        self.queue_depth.set_function(waiting)
        self.queue_delayed.set_function(delayed)
        self.queue_working.set_function(working)

    def read_cache_from(self, num_objects: Callable[[], int]) -> None:
        """Makes the gauge of the cache call this function at each scrape."""
        self.cached_objects.set_function(num_objects)

    def set_jobs(self, num_by_phase: Mapping[str, int]) -> None:
        """Replaces the job counts of all phases."""
        self.jobs.clear()
        for phase, num_jobs in num_by_phase.items():
            self.jobs.labels(phase).set(num_jobs)

    def set_alarms(self, num_by_reason: Mapping[str, int]) -> None:
        """Replaces the numbers of jobs by alarm, one of `ALARMS` or OtherAlarm."""
        for reason in (*ALARMS, Reason.OTHER_ALARM):
            self.alarms.labels(reason).set(num_by_reason.get(reason, 0))

    def exposition(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)
