"""What the operator counts about itself, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

PASS_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """One set per process. All names begin with `rljob_operator_`, but for the gauge of jobs."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.queue_depth = Gauge("rljob_operator_queue_depth", "Jobs that wait for a worker.", registry=registry)
        self.queue_delayed = Gauge("rljob_operator_queue_delayed", "Jobs with a look set for later.", registry=registry)
        self.queue_working = Gauge("rljob_operator_queue_working", "Jobs that are worked on.", registry=registry)
        self.passes = Counter(
            "rljob_operator_passes", "Passes over a job, by how they ended.", ["outcome"], registry=registry
        )
        self.pass_seconds = Histogram(
            "rljob_operator_pass_seconds",
            "Length of a pass, waiting for Ray included.",
            buckets=PASS_SECONDS,
            registry=registry,
        )
        self.kube_requests = Counter(
            "rljob_operator_kube_requests",
            "Requests to the API server, without watches.",
            ["verb", "resource", "code"],
            registry=registry,
        )
        self.ray_requests = Counter(
            "rljob_operator_ray_requests", "Requests to Ray dashboards.", ["operation", "outcome"], registry=registry
        )
        self.status_writes = Counter("rljob_operator_status_writes", "Statuses written.", registry=registry)
        self.effects = Counter(
            "rljob_operator_effects", "Effects, by what came of them.", ["kind", "outcome"], registry=registry
        )
        self.watch_restarts = Counter(
            "rljob_operator_watch_restarts", "Times that all watches had to be begun anew.", registry=registry
        )
        self.definition_outdated = Gauge(
            "rljob_operator_definition_outdated",
            "1 where the CustomResourceDefinition is older than the operator, so that jobs wait.",
            registry=registry,
        )
        self.cached_objects = Gauge(
            "rljob_operator_cached_objects", "Objects known from watches and listings.", registry=registry
        )
        self.leader = Gauge("rljob_operator_leader", "1 in the replica that works.", registry=registry)
        self.jobs = Gauge("rljob_jobs", "Jobs, by phase.", ["phase"], registry=registry)

    def watch_queue(self, waiting: Callable[[], int], delayed: Callable[[], int], working: Callable[[], int]) -> None:
        """From now on the queue is asked for its numbers when metrics are read."""
        self.queue_depth.set_function(waiting)
        self.queue_delayed.set_function(delayed)
        self.queue_working.set_function(working)

    def watch_cache(self, num_objects: Callable[[], int]) -> None:
        """From now on the cache is asked for its size when metrics are read."""
        self.cached_objects.set_function(num_objects)

    def set_jobs(self, num_by_phase: Mapping[str, int]) -> None:
        """Replaces all numbers of jobs."""
        self.jobs.clear()
        for phase, num_jobs in num_by_phase.items():
            self.jobs.labels(phase).set(num_jobs)

    def exposition(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)
