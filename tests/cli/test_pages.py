"""The pages' job files are valid, and their commands print what the pages show; numbers and times may differ. What a
training prints is compared in `tests/ray/test_tutorial.py`. After a change of messages, `--update-pages` writes the
present output into the pages."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rljob_api.job_file import load_job_file
from rljob_testing import pages
from rljob_testing.cli.job_cluster import JobCluster, Json

README, QUICKSTART, TUTORIAL, PLANNING, OWN_ENVIRONMENT, QUEUES = (
    pages.REPOSITORY / name
    for name in (
        "README.md",
        "docs/quickstart.md",
        "docs/tutorial-own-reward.md",
        "docs/planning.md",
        "docs/tutorial-own-environment.md",
        "docs/queues.md",
    )
)
PARTS_OF_A_SPEC = ("spec", "pools", "roles", "training", "runPolicy", "checkpoint", "envFrom", "code")
PARTS_OF_JOBS = [
    pytest.param(block, id=f"{page.stem}-{block.section}")
    for page in sorted((pages.REPOSITORY / "docs").glob("*.md"))
    for block in pages.blocks(page, "yaml")
    if block.text.startswith(("apiVersion: rljob.dev", *(f"{part}:" for part in PARTS_OF_A_SPEC)))
]
USUAL_TRAINING = {
    "steps": 100,
    "batchSize": 64,
    "dataset": {"type": "File", "file": {"path": "train.jsonl"}},
    "rewards": [{"type": "MathAnswer"}],
}

Rljob = Callable[..., tuple[int, str, str]]
yaml = YAML(typ="safe", pure=True)


def whole_job(part: Json) -> Json:
    """Completes a job from the part that a page shows; the rest is that of a mathematical training on one node."""
    if "apiVersion" in part:
        return part
    spec = part.get("spec", part)
    assert isinstance(spec, dict)
    training = USUAL_TRAINING | spec.get("training", {})
    if "datasets" in training:
        del training["dataset"]
    training["model"] = {"source": "Qwen/Qwen3-0.6B"} | training.get("model", {})
    training["rollout"] = {"groupSize": 8, "maxNewTokens": 4096} | training.get("rollout", {})
    rest = {"pools": [{"name": "main", "nodes": 1, "gpusPerNode": 8}], **spec, "training": training}
    return {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "page"}, "spec": rest}


@pytest.mark.parametrize("block", PARTS_OF_JOBS)
def test_the_yaml_of_every_page_is_a_valid_job(block: pages.Block, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    yaml.dump(whole_job(yaml.load(block.text)), file)
    load_job_file(file)


def test_the_readme_job_is_short_and_equals_the_tutorials(tmp_path: Path) -> None:
    [of_readme] = pages.blocks(README, "yaml")
    (tmp_path / "job.yaml").write_text(of_readme.text)
    load_job_file(tmp_path / "job.yaml")
    assert len(of_readme.text.splitlines()) <= 17
    of_tutorial = yaml.load(pages.saved_files(TUTORIAL)["job.yaml"])
    del of_tutorial["spec"]["training"]["evaluations"]
    assert yaml.load(of_readme.text) == of_tutorial


def test_the_reward_of_readme_and_tutorial_works_as_documented(tmp_path: Path) -> None:
    [of_readme] = pages.blocks(README, "python")
    files = pages.saved_files(TUTORIAL)
    assert of_readme.text == files["my_reward.py"]
    for name in ("my_reward.py", "try_reward.py"):
        (tmp_path / name).write_text(files[name])
    [shown] = pages.shown_commands(TUTORIAL, "2. Test it on rows")
    _, *arguments = shlex.split(shown.command)
    run = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert tuple(run.stdout.splitlines()) == shown.output


def test_the_game_of_the_tutorial_is_played_as_documented(tmp_path: Path) -> None:
    files = pages.saved_files(OWN_ENVIRONMENT)
    for name in ("my_game.py", "try_game.py"):
        (tmp_path / name).write_text(files[name])
    [shown] = pages.shown_commands(OWN_ENVIRONMENT, "2. Play it yourself")
    _, *arguments = shlex.split(shown.command)
    run = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert tuple(run.stdout.splitlines()) == shown.output


TROUBLESHOOTING = pages.REPOSITORY / "docs/troubleshooting.md"
MESSAGES_OF_LIBRARIES = ("CUDA out of memory",)


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_programs() -> None:
    _, of_training = TROUBLESHOOTING.read_text().split("## Messages of the training\n")
    headings = re.findall(r"^### (.*)$", of_training, re.MULTILINE)
    folders = [pages.REPOSITORY / folder / "src" for folder in ("crds", "cli", "operator", "trainer")]
    files = [path for folder in folders for path in folder.rglob("*.py") if path.parent.name != "crdgen"]
    sources = [path.read_text() for path in files]
    assert len(headings) > 5
    assert [
        words
        for words in headings
        if words not in MESSAGES_OF_LIBRARIES and not any(words in source for source in sources)
    ] == []


Compare = Callable[[Path, str], None]


@pytest.fixture
def compare(rljob: Rljob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Compare:
    """Runs the commands of a page's section and compares their output with the page."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(pages.REPOSITORY / "examples")

    def run(page: Path, section: str) -> None:
        commands = pages.shown_commands(page, section)
        assert commands, section
        for shown in commands:
            _, *arguments = shlex.split(shown.command)
            _, output, errors = rljob(*arguments)
            missing = pages.first_line_not_printed(shown, output + errors)
            if missing is not None and pytestconfig.getoption("update_pages"):
                pages.update_output(page, shown, output + errors)
                continue
            assert missing is None, f"{shown.command}\nis not printed: {missing}\nprinted:\n{output}{errors}"

    return run


@pytest.mark.parametrize("tutorial", [TUTORIAL, OWN_ENVIRONMENT], ids=lambda page: page.stem)
def test_the_checks_of_the_tutorials_jobs_print_the_documented_output(
    tutorial: Path, compare: Compare, tmp_path: Path
) -> None:
    for name, text in pages.saved_files(tutorial).items():
        (tmp_path / name).write_text(text)
    compare(tutorial, "3. Write the job")


def test_the_checks_of_the_first_jobs_print_the_documented_output(compare: Compare, tmp_path: Path) -> None:
    compare(QUICKSTART, "Check the job")
    compare(QUICKSTART, "A job of your own")
    (tmp_path / "job.yaml").write_text((tmp_path / "job.yaml").read_text().replace("  steps: 24", "  stepss: 24"))
    compare(QUICKSTART, "Mistakes")


def test_a_first_plan(compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))  # this user's profiles
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    for block in pages.blocks(PLANNING, "yaml"):
        (tmp_path / f"{yaml.load(block.text)['metadata']['name']}.yaml").write_text(block.text)
    compare(PLANNING, "A first plan")


def ago(seconds: int) -> str:
    """A time before now, as the API server writes it."""
    return (datetime.now(UTC) - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(name: str, status: str, reason: str, message: str = "") -> Json:
    """One condition of a job."""
    return {"type": name, "status": status, "reason": reason, "message": message, "lastTransitionTime": ago(90)}


def attempt(number: int, state: str, **fields: object) -> Json:
    """One attempt that began two minutes ago."""
    return {"number": number, "cluster": f"quickstart-{number}", "started": ago(120), "state": state, **fields}


def checkpoint(step: int) -> Json:
    """A checkpoint that was saved ten seconds ago."""
    uri = f"pvc://rljob-storage/quickstart/checkpoints/step-{step:08}"
    return {"step": step, "uri": uri, "savedAt": ago(10), "digest": "d"}


VALID = condition("SpecValid", "True", "Valid")
COUNTERS = {"attempts": 1}
PROVISIONING: Json = {
    "phase": "Provisioning",
    "conditions": [
        VALID,
        condition(
            "ClusterReady", "False", "PodsPending", "0 of 2 pods ready; waiting for the head pod and 1 of pool main"
        ),
    ],
    "attempts": [attempt(1, "Provisioning", activeSince=ago(120))],
    "counters": COUNTERS,
}
RUNNING: Json = {
    "phase": "Running",
    "reason": "Training",
    "gpus": 1,
    "conditions": [
        VALID,
        condition("ClusterReady", "True", "Ready", "2 of 2 pods ready and in Ray"),
        condition("PlacementFeasible", "True", "Feasible", "Ray has 1 of 1 GPUs"),
        condition("JobSubmitted", "True", "Submitted", "Ray job quickstart-1-1"),
        condition("Progressing", "True", "Training", "80 steps in total"),
        condition("Checkpointed", "False", "NoCheckpointYet"),
        condition("TrainingHealthy", "True", "NoAlarms"),
    ],
    "progress": {
        "step": 13,
        "totalSteps": 80,
        "rewardMean": 0.6191,
        "evalScore": 0.2383,
        "tokensPerSecond": 2997,
        "updatedAt": ago(7),
        "etaSeconds": 191,
    },
    "pools": [{"name": "main", "desired": 1, "ready": 1}],
    "attempts": [attempt(1, "Running", runningSince=ago(89), progressedAt=ago(7))],
    "counters": COUNTERS,
}
SUSPENDED: Json = {
    "phase": "Suspended",
    "suspendedAt": ago(4),
    "checkpoint": checkpoint(22),
    "attempts": [attempt(1, "Ended", ended=ago(10), outcome="Stopped", reason="Suspended")],
}
COMPLETE: Json = {
    "phase": "Complete",
    "suspendedAt": None,
    "result": {"outcome": "Succeeded", "reason": "Succeeded", "message": "80 of 80 steps are done", "at": ago(6)},
    "conditions": [condition("Complete", "True", "Succeeded", "80 of 80 steps are done")],
    "progress": {"step": 80, "totalSteps": 80, "rewardMean": 0.9355, "evalScore": 0.9883, "updatedAt": ago(9)},
    "checkpoint": checkpoint(80),
    "exportUri": "pvc://rljob-storage/quickstart/run/export",
    "attempts": [attempt(2, "Ended", ended=ago(6), outcome="Succeeded", reason="Succeeded")],
}


@pytest.mark.apiserver
def test_the_quickstart_on_a_cluster_prints_the_documented_output(compare: Compare, job_cluster: JobCluster) -> None:
    """The commands run against a real API server; the test writes what the operator and the kubelet would write."""
    stored = job_cluster.create_job(yaml.load(pages.REPOSITORY / "examples/quickstart.yaml"))
    job_cluster.write_status("quickstart", RUNNING)
    compare(QUICKSTART, "Watch")
    job_cluster.write_status("quickstart", PROVISIONING | {"progress": None})
    for pod, group in (("quickstart-1-head-hggwv", "head"), ("quickstart-1-main-worker-cpjbj", "main")):
        job_cluster.create_pod(pod, _labels(stored, group), ["ray"], _STARTING)
    compare(QUICKSTART, "Explain")
    job_cluster.write_status("quickstart", RUNNING)
    compare(QUICKSTART, "Suspend")
    job_cluster.write_status("quickstart", SUSPENDED)
    compare(QUICKSTART, "Resume")
    job_cluster.write_status("quickstart", COMPLETE)
    compare(QUICKSTART, "Result")
    compare(QUICKSTART, "Delete")


WAITS_IN_QUEUE = (
    "RayCluster second-1 waits in queue gpus (Kueue): couldn't assign flavors to pod set main: insufficient unused"
    " quota for nvidia.com/gpu in flavor any-node, 16 more needed"
)


@pytest.mark.apiserver
def test_the_explanation_of_a_job_in_a_queue_is_the_documented_one(compare: Compare, job_cluster: JobCluster) -> None:
    """The API server stores what Kueue and the operator would write."""
    job: Json = yaml.load(pages.REPOSITORY / "examples/quickstart.yaml")
    labels = {"kueue.x-k8s.io/queue-name": "gpus", "kueue.x-k8s.io/priority-class": "low"}
    job_cluster.create_job(job | {"metadata": {"name": "second", "labels": labels}})
    conditions = [condition(kind, "False", "Queued", WAITS_IN_QUEUE) for kind in ("QuotaReserved", "ClusterReady")]
    queued = {"number": 1, "cluster": "second-1", "clusterUid": "uid", "started": ago(190), "state": "Queued"}
    status = {"phase": "Queued", "reason": "Queued", "gpus": 16, "waitingSince": ago(190), "counters": COUNTERS}
    job_cluster.write_status("second", status | {"conditions": [VALID, *conditions], "attempts": [queued]})
    compare(QUEUES, "See why a job waits")


def test_the_queue_of_the_page_is_the_example() -> None:
    [shown] = [block.text for block in pages.blocks(QUEUES, "yaml") if "kind: ClusterQueue" in block.text]
    assert shown == (pages.REPOSITORY / "examples/queue.yaml").read_text()


_STARTING: Json = {
    "containerStatuses": [
        {
            "name": "ray",
            "ready": False,
            "restartCount": 0,
            "image": "i",
            "imageID": "i",
            "state": {"running": {"startedAt": ago(5)}},
        }
    ]
}


def _labels(job: Json, group: str) -> dict[str, str]:
    metadata = job["metadata"]
    assert isinstance(metadata, dict)
    kind = {"ray.io/node-type": "head"} if group == "head" else {"rljob.dev/pool": group}
    return {"rljob.dev/job-uid": str(metadata["uid"]), "rljob.dev/attempt": "1", **kind}
