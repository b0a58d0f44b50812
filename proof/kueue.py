"""Shows how jobs behave in queues of Kueue on a real cluster: a job waits for a queue that does not exist yet, waits
for GPUs for longer than its provisioning deadline, is admitted when another job ends, is preempted by a job with a
higher priority and resumes, frees its GPUs when it is deleted, and gets into the queue of its namespace.

    python proof/kueue.py [--steps 60]

Uses the kind cluster of the end-to-end tests, creates it if needed, installs Kueue, and keeps both. The exit code is 1
if a story ends in another way than described.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from ruamel.yaml import YAML

from rljob_api.conditions import ConditionType, Reason
from rljob_api.v1alpha1.status import Condition, RLJobStatus
from rljob_kind.cluster import make_namespace, make_volume
from rljob_kind.installation import ensure_own_images, install
from rljob_kind.kuberay import bring_up
from rljob_kind.kueue import ensure_kueue, make_priorities, make_queue
from rljob_kind.locking import cluster_lock
from rljob_kind.progress import Progress
from rljob_kind.settings import cluster_folder, kubeconfig_file, program_folder, repository
from rljob_testing.cluster.kubectl import Kubectl, wait_for
from rljob_testing.training import training_runs

NAMESPACE, CLAIM = "rljob-proof-queues", "rljob-storage"
NAMESPACE_WITH_DEFAULT = "rljob-proof-default"
QUEUE, NUM_GPUS = "two-gpus", 2
QUEUE_LABEL, PRIORITY_LABEL = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
DEADLINE_SECONDS = 45
"""`provisioningDeadlineSeconds` of the jobs. Starting the pods takes half of it."""
NO_QUOTA = "insufficient unused quota for nvidia.com/gpu"
SOON, END = 60.0, 600.0
"""Seconds: for what needs no pod, and for a whole job."""


@dataclass(frozen=True)
class Place:
    """A namespace with storage for jobs."""

    kubectl: Kubectl
    storage: Path
    num_steps: int

    def apply(self, name: str, *, gpus: int = NUM_GPUS, queue: str | None = QUEUE, priority: str = "low") -> Job:
        """Creates a job with one node. It keeps its cluster at the end, except in a queue."""
        labels: training_runs.Document = {} if queue is None else {QUEUE_LABEL: queue, PRIORITY_LABEL: priority}
        job: training_runs.Document = YAML(typ="safe", pure=True).load(
            (repository() / "e2e" / "jobs" / "sort-digits.yaml").read_text()
        )
        resources: training_runs.Document = {"requests": {"cpu": "300m", "memory": "2Gi"}, "limits": {"memory": "4Gi"}}
        pool: training_runs.Document = {
            "name": "main",
            "nodes": 1,
            "gpusPerNode": gpus,
            "sharedMemory": "512Mi",
            "resources": resources,
        }
        changes: training_runs.Document = {
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "pools": [pool],
                "training": {"steps": self.num_steps, "evaluations": []},
                "runPolicy": {"cleanup": "KeepCluster", "provisioningDeadlineSeconds": DEADLINE_SECONDS},
            },
        }
        self.kubectl("apply", "-f", "-", stdin=json.dumps(training_runs.merged(job, changes)))
        return Job(self, name)


@dataclass(frozen=True)
class Job:
    """A job of a story."""

    place: Place
    name: str

    def status(self) -> RLJobStatus:
        return self.place.kubectl.status(self.name)

    def quota(self) -> Condition | None:
        """The condition QuotaReserved."""
        found = (c for c in self.status().conditions if c.type == ConditionType.QUOTA_RESERVED)
        return next(found, None)

    def wait(self, look: Callable[[RLJobStatus], object], what: str, seconds: float = SOON) -> None:
        wait_for(lambda: bool(look(self.status())), f"{self.name}: {what}", seconds, every_seconds=0.5)

    def waits_with(self, message: str) -> None:
        """Waits until the job is queued with this text of Kueue, also in `rljob explain`, and checks that it has no
        pods."""

        def has_message() -> bool:
            found = self.quota()
            return found is not None and found.status == "False" and message in found.message

        wait_for(has_message, f"{self.name} waits: {message}", SOON)
        status = self.status()
        assert (status.phase, status.reason) == ("Queued", Reason.QUEUED), (status.phase, status.reason)
        pods = self.place.kubectl.names("pods", f"rljob.dev/job={self.name}")
        assert not pods, f"{self.name} is queued but has {pods}"
        explained = self.explained()
        assert message in explained, explained

    def is_admitted(self, seconds: float = SOON) -> None:
        def has_quota() -> bool:
            found = self.quota()
            return found is not None and found.status == "True"

        wait_for(has_quota, f"{self.name} is admitted", seconds, every_seconds=0.2)

    def completes(self) -> None:
        """Waits until the job is Complete, and checks that its cluster does not stay."""
        self.wait(lambda status: status.result, "the end", END)
        status = self.status()
        assert (status.phase, status.reason) == ("Complete", Reason.SUCCEEDED), (status.phase, status.reason)
        wait_for(lambda: not self.cluster(), f"{self.name}: the RayCluster is deleted", SOON)
        counters = status.counters
        assert counters is not None
        assert (counters.infrastructure_retries, counters.failed_attempts) == (0, 0), counters

    def cluster(self) -> list[str]:
        """The job's RayClusters."""
        return self.place.kubectl.names("rayclusters", f"rljob.dev/job={self.name}")

    def delete(self) -> None:
        """Deletes the job and does not wait until it is gone."""
        self.place.kubectl("delete", "rljob", self.name, "--wait=false")

    def explained(self) -> str:
        """The output of `rljob explain`."""
        kubectl = self.place.kubectl
        command = ["env", f"KUBECONFIG={kubectl.kubeconfig}", sys.executable, "-m", "rljob_cli", "explain", self.name]
        command += ["--namespace", kubectl.namespace]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@dataclass
class Stories:
    """The stories in their order. A later one uses jobs of the former ones."""

    place: Place
    place_with_default: Place
    facts: list[str] = field(default_factory=list)
    """Measured values of the current story."""

    def all(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "a queue that does not exist", self.missing_queue
        yield "waits longer than its deadline, and is admitted", self.waits_and_is_admitted
        yield "is preempted, and resumes without a retry", self.is_preempted
        yield "a deleted job frees its GPUs", self.quota_is_freed
        yield "the queue `default` of a namespace", self.default_queue

    def seconds_until(self, what: str, wait: Callable[[], object]) -> None:
        """Measures how long something takes."""
        began = time.monotonic()
        wait()
        self.facts.append(f"{what} {time.monotonic() - began:.0f} s")

    def missing_queue(self) -> None:
        first = self.place.apply("first")
        first.waits_with(f"LocalQueue {QUEUE} doesn't exist")
        make_queue(QUEUE, self.place.kubectl.namespace, NUM_GPUS)
        self.seconds_until("admitted after", first.is_admitted)

    def waits_and_is_admitted(self) -> None:
        first = Job(self.place, "first")
        second = self.place.apply("second")
        second.waits_with(NO_QUOTA)
        began = time.monotonic()
        first.completes()
        second.is_admitted()
        waited = time.monotonic() - began
        self.facts.append(f"waited {waited:.0f} s")
        assert waited > DEADLINE_SECONDS, (
            f"this shows nothing about the deadline: waited {waited:.0f} s; use more --steps"
        )
        assert [attempt.number for attempt in second.status().attempts] == [1]

    def is_preempted(self) -> None:
        second = Job(self.place, "second")
        second.wait(lambda status: status.checkpoint, "a checkpoint", END)
        saved = second.status().checkpoint
        urgent = self.place.apply("urgent", priority="high")
        self.seconds_until("GPUs after", lambda: urgent.is_admitted(120))
        second.waits_with(NO_QUOTA)
        urgent.completes()
        second.completes()
        first, last = second.status().attempts
        ended = (first.reason, first.outcome, first.failure_class)
        assert ended == (Reason.EVICTED, "Stopped", "Resumable"), ended
        assert (first.cluster_uid, first.cluster) == (last.cluster_uid, last.cluster)
        assert saved is not None
        resumed = last.resumed_from_step or 0
        assert resumed >= saved.step, (resumed, saved.step)
        self.facts.append(f"saved at {saved.step}, resumed at {resumed}")
        steps = training_runs.RunFiles(self.place.storage / "second" / "run").training_steps()
        assert steps == list(range(1, self.place.num_steps + 1)), "each step is recorded once"

    def quota_is_freed(self) -> None:
        deleted, waiting = self.place.apply("deleted"), self.place.apply("waiting")
        wait_for(lambda: deleted.cluster() and waiting.cluster(), "both have a RayCluster", SOON)
        deleted.is_admitted()
        waiting.waits_with(NO_QUOTA)
        deleted.delete()
        self.seconds_until("freed after", waiting.is_admitted)
        waiting.delete()

    def default_queue(self) -> None:
        kubectl = self.place_with_default.kubectl
        make_queue("default", kubectl.namespace, NUM_GPUS)
        first = self.place_with_default.apply("unlabelled", queue=None)
        first.is_admitted()
        second = self.place_with_default.apply("unlabelled-too", queue=None)
        second.waits_with(NO_QUOTA)
        assert "queue default" in (quota.message if (quota := second.quota()) else "")
        first.delete()
        second.is_admitted()
        second.completes()


def main() -> int:
    """Runs the program. The exit code is 1 if a story ends in another way than described."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    progress = Progress(cluster_folder() / "timings" / "kueue.json")
    with cluster_lock(progress):
        bring_up(progress)
        ensure_kueue(progress)
        install(ensure_own_images(progress), progress)
        make_priorities(low=1, high=100)
        stories = Stories(new_place(NAMESPACE, options.steps), new_place(NAMESPACE_WITH_DEFAULT, options.steps))
        problems = dict(told(stories))
    return int(any(problems.values()))


def new_place(namespace: str, num_steps: int) -> Place:
    """An empty namespace with storage."""
    make_namespace(namespace)
    kubectl = Kubectl(program_folder() / "kubectl", kubeconfig_file(), namespace)
    return Place(kubectl, make_volume(CLAIM, namespace), num_steps)


def told(stories: Stories) -> Iterator[tuple[str, str]]:
    """Runs the stories and prints a row of a table for each. Gives the name and the problem of each."""
    print(f"\n{datetime.now():%Y-%m-%d}, {stories.place.num_steps} steps:\n\n| story | seconds | measured | problem |")
    print("|---|---|---|---|")
    for name, story in stories.all():
        stories.facts.clear()
        began, problem = time.monotonic(), ""
        try:
            story()
        # The problem is shown in the table. Later stories that use the same jobs may fail, too.
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error)[:300]}"
        seconds = time.monotonic() - began
        print(f"| {name} | {seconds:.0f} | {', '.join(stories.facts)} | {problem or 'none'} |", flush=True)
        yield name, problem


if __name__ == "__main__":
    sys.exit(main())
