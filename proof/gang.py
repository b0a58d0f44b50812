"""Shows that two jobs which each need three of a cluster's four GPUs do not block each other with gang scheduling, and
that they do without it.

    python proof/gang.py

Uses the kind cluster of the end-to-end tests, creates it if needed, and keeps it. Installs a second scheduler
(scheduler-plugins), and makes KubeRay use it until the end. The jobs are deleted before they train. The exit code is 1
if both jobs have pods on a node although they are gangs, or if only one has without gang scheduling.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

from ruamel.yaml import YAML

from rljob_api.conditions import ConditionType
from rljob_kind.cluster import make_namespace, make_volume
from rljob_kind.gang_scheduler import gang_scheduling
from rljob_kind.installation import ensure_own_images, install
from rljob_kind.kuberay import bring_up
from rljob_kind.locking import cluster_lock
from rljob_kind.progress import Progress
from rljob_kind.settings import cluster_folder, kubeconfig_file, program_folder, repository
from rljob_testing.cluster.kubectl import Kubectl, wait_for
from rljob_testing.training import training_runs

NAMESPACE, CLAIM = "rljob-proof-gang", "rljob-storage"
JOBS = ("first", "second")
NUM_WORKERS = 3
NUM_PODS = NUM_WORKERS + 1
"""With the head, which belongs to the gang."""
SECONDS = 240.0


def main() -> int:
    """Runs the program and returns the exit code."""
    progress = Progress(cluster_folder() / "timings" / "gang.json")
    with cluster_lock(progress):
        bring_up(progress)
        install(ensure_own_images(progress), progress)
        make_namespace(NAMESPACE)
        make_volume(CLAIM, NAMESPACE)
        kubectl = Kubectl(program_folder() / "kubectl", kubeconfig_file(), NAMESPACE)
        with gang_scheduling(progress):
            alone = without_gang(kubectl)
            print(f"without gang scheduling: workers on the node by job: {alone}", flush=True)
            together = with_gang(kubectl)
            print(f"with gang scheduling: pods on the node by job, each state once: {together}", flush=True)
    has_blocked = all(alone[job] > 0 for job in JOBS)
    is_whole = not any(all(state.values()) for state in together)
    return int(not (has_blocked and is_whole))


def without_gang(kubectl: Kubectl) -> dict[str, int]:
    """The workers of each job that have a node when all GPUs are in use: together four, so no job has all, or one has
    all and the other holds a GPU for nothing."""
    apply(kubectl, is_gang=False)
    wait_for(lambda: sum(on_node(kubectl, "main").values()) == 4, "all GPUs are in use", SECONDS)
    seen = on_node(kubectl, "main")
    delete(kubectl, *JOBS)
    return seen


def with_gang(kubectl: Kubectl) -> list[dict[str, int]]:
    """The different numbers of pods with a node, in their order: until the pods of one job are ready, and after its
    deletion until the pods of the other one are ready."""
    apply(kubectl, is_gang=True)
    states: list[dict[str, int]] = []

    def ready_job(jobs: tuple[str, ...]) -> str | None:
        state = on_node(kubectl)
        if not states or states[-1] != state:
            states.append(state)
        return next((job for job in jobs if is_ready(kubectl, job)), None)

    winner = wait_for(lambda: ready_job(JOBS), "the pods of one job are ready", SECONDS, every_seconds=0.3)
    [other] = [job for job in JOBS if job != winner]
    assert states[-1] == {winner: NUM_PODS, other: 0}, states
    kubectl("delete", "rljob", winner, timeout_seconds=SECONDS)
    wait_for(lambda: is_ready(kubectl, other), "the pods of the other job are ready", SECONDS)
    states.append(on_node(kubectl))
    assert states[-1] == {winner: 0, other: NUM_PODS}, states
    delete(kubectl, other)
    return states


def apply(kubectl: Kubectl, *, is_gang: bool) -> None:
    """Creates both jobs at once."""
    job: training_runs.Document = YAML(typ="safe", pure=True).load(
        (repository() / "e2e" / "jobs" / "sort-digits.yaml").read_text()
    )
    small: training_runs.Document = {"requests": {"cpu": "100m", "memory": "500Mi"}}
    pool: training_runs.Document = {"name": "main", "nodes": NUM_WORKERS, "gpusPerNode": 1, "resources": small}
    spec: training_runs.Document = {"head": {"resources": small}, "pools": [pool], "scheduling": {"gang": is_gang}}
    # The batch must be divisible by the number of GPUs.
    spec["training"] = {"batchSize": 36, "evaluations": []}
    documents = [training_runs.merged(job, {"metadata": {"name": name}, "spec": spec}) for name in JOBS]
    kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}))


def delete(kubectl: Kubectl, *jobs: str) -> None:
    """Deletes jobs and waits until their pods are gone."""
    kubectl("delete", "rljob", *jobs, timeout_seconds=SECONDS)
    wait_for(lambda: not kubectl.names("pods"), "all pods are gone", SECONDS)


def on_node(kubectl: Kubectl, pool: str | None = None) -> dict[str, int]:
    """How many pods of each job have a node and have not ended; of a pool, or all."""
    selector = [f"--selector=rljob.dev/pool={pool}"] if pool is not None else []
    items = json.loads(kubectl("get", "pods", "-o", "json", *selector))["items"]
    bound = Counter(
        each["metadata"]["labels"]["rljob.dev/job"]
        for each in items
        if each["spec"].get("nodeName") and each["status"]["phase"] not in ("Succeeded", "Failed")
    )
    return {job: bound[job] for job in JOBS}


def is_ready(kubectl: Kubectl, job: str) -> bool:
    """Whether all pods of the job are ready and in Ray."""
    conditions = kubectl.status(job).conditions
    return any(each.type == ConditionType.CLUSTER_READY and each.status == "True" for each in conditions)


if __name__ == "__main__":
    sys.exit(main())
