"""The trainer as it runs in the pods of a cluster: submitted through Ray's Jobs API to a head without GPUs, with
workers on two nodes of one declared GPU each; killed, stopped and finished. Also `rljob run --ray`: the job file and
its folder are local, the workers run on an existing cluster."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors import safe_open

from rljob_api.contract_documents import TrainerJob, dump_job
from rljob_api.job_file import load_job_file
from rljob_api.run_state import RunState
from rljob_testing.cli.rljob_command import JobFolder
from rljob_testing.cluster.kubectl import wait_for
from rljob_testing.ray_clusters import local_ray
from rljob_testing.running_clock import RunningClock
from rljob_testing.settings import inherited_environment, inherited_python_path
from rljob_testing.training import training_runs
from rljob_testing.training.tracker_files import wandb_files
from rljob_trainer.pod.driver_log import DriverLogs
from rljob_trainer.pod.ray_jobs import RayJobs
from rljob_trainer.pod.stop_driver import stop_jobs
from rljob_trainer.pod.wait_for_worker_exit import worker_processes

pytestmark = [pytest.mark.ray, pytest.mark.long]

TOKEN = "a-token-of-the-test"
FIRST_START = 1_767_225_600
SECONDS_TO_CLEAN_UP = 120.0
"""Workers that are not stopped stay for ever."""
SECONDS_TO_STOP = 60.0
SECONDS_TO_TRACK = 120.0
REWARDS = """
import subprocess


def score(prompt, response, answer, row):
    # What a sandbox would do: a process for each response, whose end by a signal must not count as a score.
    if subprocess.run(["sleep", "0.01"]).returncode != 0:
        raise RuntimeError("the sandbox was ended from outside")
    return float(response == answer)


def broken(prompt, response, answer, row):
    raise ValueError("a mistake of the user")
"""
BROUGHT_REWARD = """
from pathlib import Path

from brought.scores import GOOD

FOLDER = Path(__file__).parent


def score(prompt, response, answer, row):
    # Ray unpacks what goes along under this name.
    is_copy = FOLDER.name.startswith("_ray_pkg_")
    return GOOD if is_copy and Path("weights.json").exists() and not (FOLDER / "runs").exists() else 0.0
"""


@dataclass(frozen=True)
class Pods:
    """The Ray cluster and the folder that its pods share."""

    cluster: local_ray.RayCluster
    folder: Path

    @property
    def files(self) -> training_runs.RunFiles:
        """The files that the runs write."""
        return training_runs.RunFiles(self.folder / "storage" / "run")

    @property
    def checkpoints(self) -> Path:
        """Checkpoints in the shared storage."""
        return self.folder / "storage" / "checkpoints"

    def worker_ids(self) -> dict[int, str]:
        """Process ids of the trainer's living workers, and the nodes that they run on."""
        actors = [actor for actor in self.cluster.entries("actors") if actor["class_name"] == "RayWorker"]
        return {int(str(actor["pid"])): str(actor["node_id"]) for actor in actors if actor["state"] == "ALIVE"}


def spec_of(folder: Path, job: local_ray.Document) -> str:
    (folder / "job.json").write_text(json.dumps(job))
    return dump_job(TrainerJob(name="small", spec=load_job_file(folder / "job.json").spec))


def job(reward: str = "score", **training: object) -> local_ray.Document:
    rewards = [training_runs.function_reward(f"my_rewards:{reward}", numProcesses=2)]
    document = training_runs.small_job(rewards=rewards, checkpoint={"everySteps": 2}, **{"steps": 1000, **training})  # type: ignore[arg-type]
    assert isinstance(document["spec"], dict)
    document["spec"]["pools"] = [{"name": "main", "nodes": 2, "gpusPerNode": 1}]
    document["spec"]["env"] = [{"name": "OMP_NUM_THREADS", "value": "1"}]
    return document


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    folder = tmp_path_factory.mktemp("pods")
    (folder / "code").mkdir()
    (folder / "code" / "my_rewards.py").write_text(REWARDS)
    storage = folder / "storage"
    variables = {
        "RLJOB_SPEC": spec_of(folder, job(trackers=[{"type": "WandB", "wandb": {"mode": "Offline"}}])),
        "RLJOB_RUN_FOLDER": str(storage / "run"),
        "RLJOB_CHECKPOINT_FOLDER": str(storage / "checkpoints"),
        "RLJOB_JOB_FOLDER": str(folder / "code"),
        "RLJOB_CACHE": str(folder / "cache"),
        "RLJOB_DEVICE": "cpu",
        "PYTHONPATH": os.pathsep.join([str(folder / "code"), *inherited_python_path()]),
        "OMP_NUM_THREADS": "1",
    }
    with local_ray.pod_cluster(folder, TOKEN, variables, forks_workers=True) as cluster:
        yield Pods(cluster, folder)


@dataclass(frozen=True)
class Killed:
    """The first start, whose driver is killed after a checkpoint."""

    info: local_ray.Document
    worker_nodes: set[str]
    seen_by_hook: set[int]
    left: tuple[int, ...]
    """Process ids of workers that outlived it."""
    checkpoint: int


def has_tracked(pods: Pods, num_starts: int) -> bool:
    """Whether that many starts have a row in W&B's files."""
    files = wandb_files(pods.files.folder)
    return len(files) == num_starts and bool(files[-1].rows)


@pytest.fixture(scope="module")
def killed(pods: Pods) -> Killed:
    run = pods.cluster.submit("small-1-1", FIRST_START)
    run.wait_for_state(lambda state: state.checkpoint is not None)
    wait_for(lambda: has_tracked(pods, 1), "the run to begin in W&B's files", SECONDS_TO_TRACK, 0.1)
    workers = pods.worker_ids()
    seen = set(worker_processes(Path("/proc")))
    driver = run.info()["driver_info"]
    assert isinstance(driver, dict)
    os.kill(int(str(driver["pid"])), signal.SIGKILL)
    info = run.end()
    deadline = time.monotonic() + SECONDS_TO_CLEAN_UP
    while set(workers) & set(worker_processes(Path("/proc"))) and time.monotonic() < deadline:
        time.sleep(0.2)
    left = tuple(set(workers) & set(worker_processes(Path("/proc"))))
    state = run.state()
    assert state is not None
    assert state.checkpoint is not None
    return Killed(info, set(workers.values()), seen & set(workers), left, state.checkpoint.step)


@dataclass(frozen=True)
class Stopped:
    """The second start, which the head's stop hook ends."""

    first: RunState
    """The first run state after the search for a checkpoint."""
    begun: RunState
    info: local_ray.Document
    state: RunState
    ended: bool
    seconds: float
    """Seconds in which this process ran meanwhile."""


@pytest.fixture(scope="module")
def stopped(pods: Pods, killed: Killed) -> Stopped:
    run = pods.cluster.submit("small-1-2", FIRST_START + 1)
    first = run.wait_for_state(lambda state: state.activity not in (None, "looks for a checkpoint"))
    begun = run.wait_for_state(lambda state: state.progress.step > killed.checkpoint)
    wait_for(lambda: has_tracked(pods, 2), "the run to begin in W&B's files", SECONDS_TO_TRACK, 0.1)
    clock = RunningClock()
    ended = stop_jobs(RayJobs(pods.cluster.port, TOKEN), local_ray.STOP_WAIT_SECONDS)
    seconds = clock.seconds
    state = run.state()
    assert state is not None
    return Stopped(first, begun, run.info(), state, ended, seconds)


@pytest.fixture(scope="module")
def finished(pods: Pods, stopped: Stopped) -> local_ray.RayJob:
    """The third start, of the recreated job with fewer steps, on vLLM."""
    document = job(steps=stopped.state.progress.step + 2, rollout={"engine": "Auto"})
    run = pods.cluster.submit("small-1-1b", FIRST_START + 600, RLJOB_SPEC=spec_of(pods.folder, document))
    run.end()
    return run


def test_workers_run_on_the_nodes_with_gpus(pods: Pods, killed: Killed) -> None:
    nodes = {str(node["node_id"]) for node in pods.cluster.entries("nodes")}
    assert killed.worker_nodes == nodes - {pods.cluster.head_node()}
    assert len(killed.worker_nodes) == 2


def test_a_killed_driver_leaves_nothing_behind(pods: Pods, killed: Killed) -> None:
    assert killed.info["status"] == "FAILED"
    # The signal's number, or a shell's exit code for it: Ray starts the driver through a shell.
    assert killed.info["driver_exit_code"] in (-9, 128 + 9)
    # The stop hook of the worker pods sees the workers as long as they exist.
    assert len(killed.seen_by_hook) == 2
    assert killed.left == ()
    # Workers of later starts are in other states.
    groups = pods.cluster.entries("placement_groups")
    driver = killed.info["job_id"]
    assert [group["state"] for group in groups if group["creator_job_id"] == driver] == ["REMOVED", "REMOVED"]


def test_the_next_start_resumes_from_its_checkpoint(killed: Killed, stopped: Stopped) -> None:
    assert killed.checkpoint >= 2
    assert stopped.begun.resumed_from_step == killed.checkpoint
    assert stopped.first.progress.step >= killed.checkpoint


def test_a_stop_saves_a_checkpoint_and_ends_in_time(pods: Pods, stopped: Stopped) -> None:
    assert stopped.ended
    assert stopped.seconds < SECONDS_TO_STOP
    assert stopped.info["status"] == "STOPPED", stopped.info
    assert stopped.state.phase == "Stopped"
    assert stopped.state.checkpoint is not None
    assert stopped.state.checkpoint.step == stopped.state.progress.step
    folder = pods.checkpoints / f"step-{stopped.state.progress.step:08d}.start-{FIRST_START + 1}"
    assert stopped.state.checkpoint.uri == folder.as_uri()
    assert (folder / "manifest.json").stat().st_size > 0
    assert pods.worker_ids() == {}


def test_a_tracker_outlives_the_processes_that_ray_ends(pods: Pods, stopped: Stopped) -> None:
    """Ray kills or stops every process below the driver."""
    codes = wait_for(
        lambda: [code] if (code := wandb_files(pods.files.folder)[0].exit_code) is not None else [],
        "the end of the killed start in W&B's files",
        SECONDS_TO_TRACK,
        0.1,
    )
    codes += [each.exit_code for each in wandb_files(pods.files.folder)[1:2]]
    assert codes == [1, 130]
    assert max(wandb_files(pods.files.folder)[1].rows) == stopped.state.progress.step


def test_the_recreated_job_completes_with_all_files_in_storage(
    pods: Pods, stopped: Stopped, finished: local_ray.RayJob
) -> None:
    assert finished.info()["status"] == "SUCCEEDED", finished.output()
    state = finished.state()
    assert state is not None
    last = stopped.state.progress.step + 2
    assert (state.phase, state.attempt, state.progress.step) == ("Complete", 1, last)
    assert state.resumed_from_step == stopped.state.progress.step
    # Three starts write one learning curve.
    assert pods.files.training_steps() == list(range(1, last + 1))
    newest = sorted(path.name for path in pods.checkpoints.glob("step-*"))[-1]
    assert newest == f"step-{last:08d}.start-{FIRST_START + 600}"
    assert state.checkpoint is not None
    assert state.checkpoint.uri.endswith(newest)
    assert state.export_uri == (pods.files.folder / "export").as_uri()
    with safe_open(pods.files.folder / "export" / "model.safetensors", "pt") as weights:
        assert "model.embed_tokens.weight" in weights.keys()  # noqa: SIM118 - not a mapping
    assert {path.name for path in (pods.files.folder / "logs").glob("worker-*.log")} == {"worker-0.log", "worker-1.log"}


def test_the_driver_log_container_prints_what_drivers_print(pods: Pods, finished: local_ray.RayJob) -> None:
    output = io.BytesIO()
    logs = DriverLogs(pods.cluster.log_folder, output, pods.folder / "copies")
    logs.close()
    assert "resumed from step" in finished.output()
    assert finished.output() in output.getvalue().decode()
    # Its id is not that of an attempt.
    assert (pods.folder / "copies" / "logs" / "driver-small-1-1b.log").read_text() == finished.output()
    assert (pods.folder / "copies" / "logs" / "attempt-1" / "driver.log").stat().st_size > 0


def test_an_unreadable_job_is_a_configuration_error(pods: Pods) -> None:
    run = pods.cluster.submit("unread-3-1", FIRST_START, RLJOB_ATTEMPT="3", RLJOB_SPEC='{"contractVersion":99}')
    info = run.end()
    assert (info["status"], info["driver_exit_code"]) == ("FAILED", 2)
    state = run.state()
    assert state is not None
    assert (state.phase, state.attempt) == ("Failed", 3)
    assert state.error is not None
    assert "contract versions 1 to 2 (seen: 99)" in state.error.message


def test_a_failing_reward_is_an_application_error(pods: Pods) -> None:
    document = job(reward="broken")
    folders = {"RLJOB_RUN_FOLDER": "failed/run", "RLJOB_CHECKPOINT_FOLDER": "failed/checkpoints"}
    own = {name: str(pods.folder / path) for name, path in folders.items()}
    run = pods.cluster.submit("broken-1-1", FIRST_START, RLJOB_SPEC=spec_of(pods.folder, document), **own)
    info = run.end()
    assert (info["status"], info["driver_exit_code"]) == ("FAILED", 1)
    state = run.state()
    assert state is not None
    assert state.error is not None
    assert (state.phase, state.error.kind) == ("Failed", "RewardError")
    assert "a mistake of the user" in state.error.message


def job_with_code(folder: Path) -> local_ray.Document:
    """A job with two workers whose reward imports a file from the job file's folder."""
    (folder / "brought_rewards.py").write_text(BROUGHT_REWARD)
    (folder / "brought").mkdir()
    (folder / "brought" / "__init__.py").touch()
    (folder / "brought" / "scores.py").write_text("GOOD = 0.75\n")
    (folder / "weights.json").write_text("{}")
    return training_runs.small_job(
        num_workers=2, steps=2, rewards=[training_runs.function_reward("brought_rewards:score", numProcesses=2)]
    )


def test_run_uploads_the_folder_to_a_cluster(tmp_path: Path, cluster: str) -> None:
    """`rljob run --ray` from outside the cluster."""
    job_folder = JobFolder(tmp_path)
    job_folder.job_file.write_text(json.dumps(job_with_code(tmp_path)))
    process = job_folder.command(
        "run", "job.yaml", "--ray", cluster, RLJOB_DEVICE="cpu", RAY_AUTH_MODE="disabled", OMP_NUM_THREADS="1"
    )
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert f"connecting to {cluster}" in output
    assert training_runs.RunFiles(job_folder.run_folder).series("critic/rewards/mean") == [0.75, 0.75]


def test_a_ray_job_uploads_the_folder(pods: Pods, tmp_path: Path) -> None:
    """`ray job submit` starts `rljob run --ray auto` on the head; the workers are on two other nodes."""
    folder, run_folder = tmp_path / "job", tmp_path / "run"
    folder.mkdir()
    job = job_with_code(folder)
    assert isinstance(job["spec"], dict)
    job["spec"]["pools"] = [{"name": "main", "nodes": 2, "gpusPerNode": 1}]
    (folder / "job.yaml").write_text(json.dumps(job))
    # Ray's command streams the log over a socket and waits for it without a time limit.
    submitted = subprocess.run(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--no-wait"),
            *("--submission-id", "by-hand", "--address", f"http://127.0.0.1:{pods.cluster.port}"),
            *("--working-dir", str(folder), "--"),
            *("rljob", "run", "job.yaml", "--ray", "auto", "--run-folder", str(run_folder)),
        ],
        env=inherited_environment() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert submitted.returncode == 0, submitted.stdout
    job_of_ray = local_ray.RayJob(pods.cluster, "by-hand")
    assert job_of_ray.end(seconds=180)["status"] == "SUCCEEDED", job_of_ray.output()
    assert training_runs.RunFiles(run_folder).series("critic/rewards/mean") == [0.75, 0.75]
