"""Shows which faults a job survives on a real cluster: while it trains it loses a pod, its node, the operator, KubeRay
and the API server, is suspended, stopped, hangs, and runs on fewer nodes, one fault per job.

    python proof/survival.py [--only FAULT ...] [--steps 60]

Uses the kind cluster of the end-to-end tests, creates it if needed, and keeps it. A job passes if it is Complete, each
step was recorded once, no attempt began before the checkpoint that existed at the fault, the attempts are those that
the fault allows, and no pod and no RayCluster is left. The exit code is 1 if a job does not pass.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import cast

from ruamel.yaml import YAML

from rljob_api.conditions import Reason
from rljob_api.v1alpha1.status import Attempt, RLJobStatus
from rljob_kind import faults
from rljob_kind.cluster import CPU_NODE, GPU_NODE, NUM_GPUS, make_volume, set_gpus
from rljob_kind.loading import load_image
from rljob_kind.processes import run
from rljob_kind.progress import Progress
from rljob_kind.settings import repository
from rljob_proof.cluster import ready_cluster
from rljob_testing.cluster.kubectl import Kubectl, wait_for
from rljob_testing.training import training_runs

NAMESPACE, CLAIM = "rljob-proof", "rljob-storage"
NODE_SELECTOR = "scheduler.alpha.kubernetes.io/node-selector"
CHECKPOINT_EVERY = 3
GAME, CONFIG_MAP = repository() / "examples" / "guess_letter", "guess-letter"
END_SECONDS = 900
STALL_SECONDS, ELASTIC_SECONDS = 120, 15
STOP_ALL_WORKERS = (
    "import os, signal; from rljob_trainer.stack_traces import traced_processes;"
    " [os.kill(each.process_id, signal.SIGSTOP) for each in traced_processes(os.environ['RLJOB_RUN_FOLDER'])]"
)


@dataclass(frozen=True)
class Place:
    """The cluster and the storage of the jobs."""

    kubectl: Kubectl
    storage: Path
    """The folder of this machine behind the claim."""
    trainer_image: str
    progress: Progress

    def rljob(self, *arguments: str) -> str:
        """The output of an `rljob` command, which must succeed."""
        command = ["env", f"KUBECONFIG={self.kubectl.kubeconfig}", sys.executable, "-m", "rljob_cli", *arguments]
        place = ("--namespace", self.kubectl.namespace)
        return subprocess.run([*command, *place], capture_output=True, text=True, check=True, timeout=120).stdout


@dataclass(frozen=True)
class Job:
    """A job in training with a saved checkpoint."""

    place: Place
    name: str

    def status(self) -> RLJobStatus:
        return self.place.kubectl.status(self.name)

    def pod(self, group: str) -> str:
        """`pod/<name>` of the first pod of a group in the newest attempt."""
        cluster = self.status().attempts[-1].cluster
        return self.place.kubectl.names("pods", f"ray.io/cluster={cluster},ray.io/group={group}")[0]

    def lose(self, group: str) -> None:
        self.place.kubectl("delete", self.pod(group), "--force", "--grace-period=0")

    def patch(self, spec: training_runs.Document) -> None:
        self.place.kubectl("patch", "rljob", self.name, "--type=merge", "--patch", json.dumps({"spec": spec}))

    def wait(self, look: Callable[[RLJobStatus], object], what: str, seconds: float = 300) -> None:
        wait_for(lambda: bool(look(self.status())), f"{self.name}: {what}", seconds)

    def trains(self, attempt: int) -> None:
        """Waits until this attempt has completed a step."""
        self.wait(
            lambda status: (
                (newest := status.attempts[-1]).number >= attempt
                and newest.state == "Running"
                and status.progress is not None
                and status.progress.step > (newest.resumed_from_step or 0)
            ),
            f"attempt {attempt} trains",
            END_SECONDS,
        )


def worker_pod(job: Job) -> None:
    job.lose("main")


def head_pod(job: Job) -> None:
    job.lose("headgroup")


def node_stopped(job: Job) -> None:
    with faults.stopped_node(GPU_NODE):
        job.wait(lambda status: status.attempts[0].ended, "the operator sees the attempt's end")


def node_paused(job: Job) -> None:
    with faults.paused_node(GPU_NODE):
        job.wait(lambda status: status.attempts[0].ended, "the operator sees the attempt's end")


def fencing(job: Job) -> None:
    """The paused trainer goes on after the next one has saved a checkpoint on another node. It must detect that a later
    start has begun, and the checkpoint that it was saving must stay incomplete."""
    with faults.paused_node(GPU_NODE):
        run(["kubectl", "uncordon", CPU_NODE])
        saved = job.status().checkpoint
        assert saved is not None, "the job had a checkpoint before the fault"
        job.trains(2)
        job.wait(lambda status: status.checkpoint and status.checkpoint.step > saved.step, "a checkpoint of attempt 2")
    folder, attempts = job.place.storage / job.name, job.status().attempts
    log = folder / "run" / "logs" / "attempt-1" / "driver.log"

    def has_detected_it() -> bool:
        # Checked repeatedly, because the later start removes outdated checkpoints when it saves.
        completed = list(fenced(folder / "checkpoints", attempts))
        assert not completed, completed
        return "no longer change the checkpoints" in log.read_text(errors="replace")

    wait_for(has_detected_it, f"{job.name}: the former trainer detects that a later start has begun", 120)


def operator(_: Job) -> None:
    faults.kill_operator()


def kuberay(_: Job) -> None:
    faults.kill_kuberay()


def api_server(_: Job) -> None:
    faults.kill_api_server()


def suspend(job: Job) -> None:
    before = job.status().progress
    job.patch({"suspend": True})
    job.wait(lambda status: status.suspended_at, "suspended")
    assert before is not None
    saved = job.status().checkpoint
    assert saved is not None
    assert saved.step >= before.step, "the completed step is in a checkpoint"
    assert not job.place.kubectl.names("pods", f"rljob.dev/job={job.name}"), "a suspended job has no pods"
    job.patch({"suspend": False})


def stop_and_retry(job: Job) -> None:
    job.place.rljob("stop", job.name)
    job.wait(lambda status: status.result, "it is stopped")
    job.place.rljob("retry", job.name)
    job.wait(lambda status: status.result is None, "it is retried")


def worker_hangs(job: Job) -> None:
    job.place.kubectl("exec", job.pod("main"), "--container=ray", "--", "python", "-c", STOP_ALL_WORKERS)
    job.wait(lambda status: status.attempts[0].ended, "the operator sees the attempt's end")
    assert job.status().attempts[0].reason == Reason.STALLED
    stacks = list((job.place.storage / job.name / "run" / "logs" / "attempt-1").glob("stacks-*.txt"))
    assert len(stacks) >= 3, f"expected stacks of controller, workers and scorers, found {stacks}"


def elastic(job: Job) -> None:
    set_gpus(GPU_NODE, 1)
    job.lose("main")
    job.trains(2)
    assert [pool.nodes for pool in job.status().attempts[1].nodes] == [1]
    set_gpus(GPU_NODE, NUM_GPUS)
    job.trains(3)
    assert job.status().attempts[1].reason == Reason.RESIZED
    assert job.status().attempts[2].nodes == ()


@dataclass(frozen=True)
class Case:
    """A fault and the allowed outcome."""

    fault: Callable[[Job], None]
    attempts: int = 2
    reasons: tuple[Reason, ...] = ()
    """Allowed reasons for the end of the first attempt; empty if there must be only one attempt."""
    policy: training_runs.Document | None = None
    times_steps: int = 1
    on_both_nodes: bool = False
    plays: bool = False
    """The job of examples/guess_letter: rollouts of several turns with a game in processes of its own."""


LOST = (Reason.HEAD_LOST, Reason.INFRASTRUCTURE_ERROR, Reason.DRIVER_LOST)
CASES = {
    "worker-pod": Case(worker_pod, reasons=LOST),
    "head-pod": Case(head_pod, reasons=LOST),
    "node-stopped": Case(node_stopped, reasons=LOST),
    "node-paused": Case(node_paused, reasons=LOST),
    "operator": Case(operator, attempts=1),
    "kuberay": Case(kuberay, attempts=1),
    "api-server": Case(api_server, attempts=1),
    "suspend": Case(suspend, reasons=(Reason.SUSPENDED,)),
    "stop-and-retry": Case(stop_and_retry, reasons=(Reason.STOPPED_BY_USER,)),
    "worker-hangs": Case(worker_hangs, reasons=(Reason.STALLED,), policy={"stallDeadlineSeconds": STALL_SECONDS}),
    "elastic": Case(
        elastic,
        attempts=3,
        reasons=LOST,
        policy={"elastic": {"minNodes": 1, "waitSeconds": ELASTIC_SECONDS}},
        times_steps=4,
    ),
    "fencing": Case(fencing, reasons=LOST, on_both_nodes=True),
    "worker-pod-with-game": Case(worker_pod, reasons=LOST, plays=True),
}


def main() -> int:
    """Runs the program. The exit code is 1 if a job does not survive."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="FAULT")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    rows: list[str] = []
    with ready_cluster("survival", NAMESPACE) as (kubectl, image, progress):
        place = Place(kubectl, make_volume(CLAIM, NAMESPACE), image, progress)
        for name in options.only:
            rows.append(row(place, name, CASES[name], options.steps))
            print(rows[-1], flush=True)
    print(f"\n{datetime.now():%Y-%m-%d}, {options.steps} steps, a checkpoint every {CHECKPOINT_EVERY}:\n")
    print("| fault | attempts | first ended with | attempt ended after | trains again after | resumed at | problems |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    return int(any(not each.endswith("| none |") for each in rows))


def row(place: Place, name: str, case: Case, num_steps: int) -> str:
    """Runs one job from its submission to the end of its last pod, and returns its row."""
    num_steps *= case.times_steps
    with nodes_of(place, case):
        kubectl = place.kubectl
        if case.plays:
            code = {"guess_letter.py": (GAME / "guess_letter.py").read_text()}
            metadata = {"name": CONFIG_MAP}
            config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": code}
            kubectl("apply", "-f", "-", stdin=json.dumps(config_map))
        kubectl("apply", "-f", "-", stdin=json.dumps(document(name, case, num_steps)))
        job, problems = Job(place, name), list[str]()
        job.wait(lambda status: status.checkpoint, "a checkpoint", 420)
        saved = job.status().checkpoint
        assert saved is not None
        began = time.time()
        try:
            case.fault(job)
            kubectl("wait", "--for=condition=Finished", f"rljob/{name}", "--timeout=900s", timeout_seconds=910)
        # The error is shown in the table, and the next fault is tried.
        except Exception as error:
            problems.append(f"{type(error).__name__}: {str(error)[:200]}")
        finally:
            set_gpus(GPU_NODE, NUM_GPUS)
        status = job.status()
        problems += found_problems(place, name, case, status, saved.step, num_steps)
        kubectl("delete", "rljob", name, timeout_seconds=180)
    return text_of(name, status, began, problems)


@contextmanager
def nodes_of(place: Place, case: Case) -> Iterator[None]:
    """Only the GPU node; or both nodes, of which the CPU node accepts pods only when the fault uncordons it."""
    if not case.on_both_nodes:
        yield
        return
    load_image(place.trainer_image, CPU_NODE, place.progress)
    run(["kubectl", "annotate", "namespace", NAMESPACE, f"{NODE_SELECTOR}-"])
    set_gpus(CPU_NODE, NUM_GPUS)
    run(["kubectl", "cordon", CPU_NODE])
    try:
        yield
    finally:
        run(["kubectl", "uncordon", CPU_NODE])
        set_gpus(CPU_NODE, 0)
        run(["kubectl", "annotate", "namespace", NAMESPACE, f"{NODE_SELECTOR}=rljob.dev/node=gpu"])


def document(name: str, case: Case, num_steps: int) -> training_runs.Document:
    """The job of the end-to-end tests, or the game, with more checkpoints."""
    job = read_job(repository() / "e2e" / "jobs" / "sort-digits.yaml")
    if case.plays:
        game = cast("dict[str, training_runs.Document]", read_job(GAME / "guess-letter.yaml"))["spec"]
        changed: training_runs.Document = {"training": game["training"], "code": {"configMap": CONFIG_MAP}}
        job["spec"] = cast("training_runs.Document", job["spec"]) | changed
    return training_runs.merged(
        job,
        {
            "metadata": {"name": name},
            "spec": {
                "training": {"steps": num_steps, "evaluations": []},
                "checkpoint": {"everySteps": CHECKPOINT_EVERY, "keep": 5},
                "runPolicy": case.policy or {},
            },
        },
    )


def read_job(path: Path) -> training_runs.Document:
    """Reads a job file."""
    job: training_runs.Document = YAML(typ="safe", pure=True).load(path.read_text())
    return job


def found_problems(
    place: Place, name: str, case: Case, status: RLJobStatus, saved_step: int, num_steps: int
) -> Iterator[str]:
    """Everything that is not as expected."""
    attempts = status.attempts
    if status.result is None or status.result.reason != Reason.SUCCEEDED:
        yield f"phase {status.phase}, {status.reason}"
    if len(attempts) != case.attempts:
        yield f"{len(attempts)} attempts"
    if case.reasons and attempts[0].reason not in case.reasons:
        yield f"attempt 1 ended with {attempts[0].reason}"
    for attempt in attempts[1:]:
        if (attempt.resumed_from_step or 0) < saved_step:
            yield f"attempt {attempt.number} resumed at {attempt.resumed_from_step}, {saved_step} was saved"
    steps = training_runs.RunFiles(place.storage / name / "run").training_steps()
    if steps != list(range(1, num_steps + 1)):
        yield f"recorded steps are not 1 to {num_steps}, each once"
    yield from fenced(place.storage / name / "checkpoints", attempts)
    try:
        wait_for(lambda: not left(place.kubectl, name), "no RayCluster and no pod is left", 180)
    except AssertionError as error:
        yield f"{error}: {left(place.kubectl, name)}"


def left(kubectl: Kubectl, name: str) -> list[str]:
    """Remaining objects of the job."""
    return [found for kind in ("rayclusters", "pods") for found in kubectl.names(kind, f"rljob.dev/job={name}")]


def fenced(checkpoints: Path, attempts: tuple[Attempt, ...]) -> Iterator[str]:
    """Checkpoints that a start completed after the next start had begun."""
    starts = sorted(attempt.start_number for attempt in attempts if attempt.start_number is not None)
    for former, following in pairwise(starts):
        record = checkpoints / "starts" / f"{following:04d}.json"
        if not record.exists():
            yield f"start {following} is not recorded"
            continue
        for manifest in checkpoints.glob(f"step-*.start-{former}/manifest.json"):
            if manifest.stat().st_mtime > record.stat().st_mtime:
                yield f"{manifest.parent.name} was completed after start {following} had begun"


def text_of(name: str, status: RLJobStatus, began: float, problems: list[str]) -> str:
    """A row of the table. Seconds count from the fault."""

    def seconds(moment: str | None) -> str:
        return "" if moment is None else f"{datetime.fromisoformat(moment).timestamp() - began:.0f} s"

    first, later = status.attempts[0], status.attempts[1:]
    cells = (
        name,
        str(len(status.attempts)),
        first.reason or "",
        seconds(first.ended) if later else "",
        ", ".join(seconds(each.running_since) for each in later),
        ", ".join(str(each.resumed_from_step) for each in later),
        "; ".join(problems) or "none",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
