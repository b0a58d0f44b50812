"""`rljob explain`: what a job is waiting for, why, and what comes next, written out by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import pytest
from ruamel.yaml import YAML

from rljob.kubernetes_models import Event, Pod
from rljob.stored_job import stored_job
from rljob_api.conditions import Reason
from rljob_api.explanations import EXPLANATIONS
from rljob_cli.cluster.explain import explanation
from rljob_testing.cli import job_statuses
from rljob_testing.cli.job_cluster import JobCluster
from rljob_testing.cli.rljob_command import SMALL_JOB
from rljob_testing.messages import Mentions

Rljob = Callable[..., tuple[int, str, str]]
NOW = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)
CREATED = "2026-01-31T12:00:00Z"
VALID = job_statuses.condition("SpecValid", "True", "Valid", CREATED)
ATTEMPT = {"number": 1, "cluster": "small-1", "started": "2026-01-31T12:10:00Z"}
STORAGE = "  checkpoint: {storage: {persistentVolumeClaim: results}}\n"


def explained(
    status: Mapping[str, object],
    pods: list[Pod] | None = None,
    warnings: list[Event] | None = None,
    more: str = "",
    flags: str = "",
    checkpoint: str = STORAGE,
) -> str:
    metadata = {"name": "small", "namespace": "team-a", "uid": "u", "creationTimestamp": CREATED}
    spec = YAML(typ="safe", pure=True).load(SMALL_JOB + checkpoint + more)["spec"]
    job = stored_job({"metadata": metadata, "spec": spec, "status": dict(status)})
    return "\n".join(line.plain for line in explanation(job, pods or [], warnings or [], NOW, flags))


def pod(name: str, status: Mapping[str, object]) -> Pod:
    labels = {"rljob.dev/pool": "main", "ray.io/node-type": "worker"}
    metadata = {"name": name, "creationTimestamp": CREATED, "labels": labels}
    return Pod.model_validate({"metadata": metadata, "status": dict(status)})


def waiting_container(name: str, reason: str, message: str, **more: object) -> dict[str, object]:
    return {"name": name, "state": {"waiting": {"reason": reason, "message": message}}, **more}


def warning(name: str, reason: str, message: str, seen: str, count: int) -> Event:
    about = {"kind": "Pod", "name": name}
    event = {"metadata": {"name": "e", "creationTimestamp": seen}, "involvedObject": about, "lastTimestamp": seen}
    return Event.model_validate(event | {"reason": reason, "message": message, "count": count})


def test_an_unschedulable_pool_is_explained() -> None:
    message = "1 of 2 pods of pool main: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu"
    stuck = job_statuses.condition("ClusterReady", "False", "Unschedulable", "2026-01-31T12:10:20Z", message)
    scheduling = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    pods = [
        pod("small-1-main-a", {"conditions": [scheduling]}),
        pod("small-1-main-b", {"conditions": [{"type": "Ready", "status": "True"}]}),
    ]
    warnings = [
        warning("small-1-main-a", "FailedScheduling", "0/3 nodes are available", "2026-01-31T12:29:00Z", 12),
        warning("small-1-main-a", "Failed", "Error: Unschedulable", "2026-01-31T12:29:30Z", 1),
    ]
    status = {"phase": "Pending", "attempts": [ATTEMPT], "conditions": [VALID, stuck]}
    assert explained(status, pods, warnings).split("\n") == [
        "RLJob team-a/small: Pending, 30m old",
        "",
        Mentions("waiting", "ClusterReady=False", "Unschedulable", "19m"),
        f"  {message}",
        f"What to do: {EXPLANATIONS[Reason.UNSCHEDULABLE].advice}",
        "",
        "Pods that are not ready:",
        "  small-1-main-a (main): Unschedulable: 0/3 nodes",
        "",
        "Latest warnings:",
        "    60s  Pod small-1-main-a: FailedScheduling (x12): 0/3 nodes are available",
        "",
        "What comes next:",
        Mentions("ClusterReady", "operator", "pools", "trainer"),
        Mentions("quota or free capacity", "2026-01-31T12:40:00Z (in 10m)", "deletes its RayCluster", "tries again"),
    ]


@pytest.mark.parametrize(
    ("status", "trouble"),
    [
        (
            {"containerStatuses": [waiting_container("ray", "ImagePullBackOff", "no such image")]},
            "container ray: ImagePullBackOff: no such image",
        ),
        (
            {
                "containerStatuses": [
                    waiting_container(
                        "ray",
                        "CrashLoopBackOff",
                        "back-off 40s",
                        lastState={"terminated": {"reason": "OOMKilled", "exitCode": 137}},
                    )
                ]
            },
            Mentions("container ray: CrashLoopBackOff: back-off 40s", "OOMKilled", "exit code 137"),
        ),
        (
            {
                "initContainerStatuses": [{"name": "wait-gcs-ready", "state": {"running": {}}}],
                "containerStatuses": [waiting_container("ray", "PodInitializing", "")],
            },
            Mentions("init container wait-gcs-ready", "running"),
        ),
        (
            {"containerStatuses": [{"name": "ray", "state": {"terminated": {"reason": "Error", "exitCode": 3}}}]},
            "container ray: Error (exit code 3)",
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "node was low on memory"},
            "Evicted: node was low on memory",
        ),
        ({"phase": "Pending"}, "Pending"),
    ],
)
def test_a_waiting_pod_is_explained_by_the_message_of_its_source(
    status: dict[str, object], trouble: str | Mentions
) -> None:
    waits = job_statuses.condition("ClusterReady", "False", "PodsPending", CREATED)
    lines = explained({"conditions": [VALID, waits]}, [pod("p", status)]).split("\n")
    shown = lines[lines.index("Pods that are not ready:") + 1]
    assert shown.startswith("  p (main): ")
    assert shown.removeprefix("  p (main): ") == trouble


def test_long_text_is_shortened_in_the_middle() -> None:
    waits = job_statuses.condition("ClusterReady", "False", "ImagePullFailed", CREATED)
    message = "cannot pull " + "registry.example.com/" * 30 + "trainer: no such host"
    status = {"containerStatuses": [waiting_container("ray", "ErrImagePull", message)]}
    line = next(
        line for line in explained({"conditions": [VALID, waits]}, [pod("p", status)]).split("\n") if "p (" in line
    )
    assert line.startswith("  p (main): container ray: ErrImagePull: cannot pull registry.example.com/")
    assert line.endswith("/trainer: no such host")
    assert " ... " in line
    assert len(line) == len("  p (main): ") + 240


def test_long_lists_of_pods_and_warnings_are_shortened() -> None:
    waits = job_statuses.condition("ClusterReady", "False", "PodsPending", CREATED)
    pods = [pod(f"p{number:02}", {}) for number in range(20)]
    warnings = [warning("p01", f"Reason{number}", "m", CREATED, 1) for number in range(9)]
    text = explained({"conditions": [VALID, waits]}, pods, warnings)
    assert "  p07 (main): Pending\n  and 12 more\n" in text
    assert "Reason3" not in text
    assert text.count("  30m  Pod p01: Reason") == 5


def test_explain_reports_no_problem_of_a_training_job() -> None:
    assert explained(job_statuses.full_status(), more="  runPolicy: {activeDeadlineSeconds: 3600}\n") == (
        "RLJob team-a/small: Running, 30m old\n"
        "  step 12/80, reward 0.4125, eval 0.25, checkpoint 10, ETA 9m30s\n"
        "\n"
        "Running: step 12 of 80, last progress 10s ago.\n"
        "\n"
        "What comes next:\n"
        "  the job is Complete after the last step, with the exported model at status.exportUri\n"
        "  the job ends as Failed, without a retry, if the job has not finished by 2026-01-31T13:02:00Z (in 32m)"
    )


def test_a_job_that_exports_no_model_is_not_promised_one() -> None:
    text = explained(job_statuses.full_status(), checkpoint="  checkpoint: {exportHuggingFace: Never}\n")
    assert text == Mentions("Complete after the last step", without=["export"])


def test_without_a_checkpoint_explain_says_that_a_failure_restarts_from_step_0() -> None:
    none = job_statuses.condition("Checkpointed", "False", "NoCheckpointYet", CREATED)
    text = explained({"conditions": [VALID, none]})
    assert f".\nNo checkpoint yet: {EXPLANATIONS[Reason.NO_CHECKPOINT_YET].advice}\n" in text


@pytest.mark.parametrize(
    ("reason", "more", "said"),
    [
        (None, {}, Mentions("Nothing blocks the job", "waits for its first step")),
        ("Starting", {}, Mentions("waits for its first step", "Starting for 10m")),
        # The progress of the attempt before.
        (
            "Starting",
            {"progress": {"step": 7, "totalSteps": 80, "updatedAt": CREATED}},
            Mentions("waits for its first step", without=["step 7"]),
        ),
        ("Training", {}, Mentions("Running", "no progress is recorded")),
        (
            "Training",
            {"progress": {"step": 7, "totalSteps": 80, "updatedAt": CREATED}},
            Mentions("step 7 of 80", "last progress 30m ago"),
        ),
        # A step that takes long: its trainer generated responses at 12:28.
        (
            "Training",
            {
                "progress": {"step": 7, "totalSteps": 80, "updatedAt": CREATED},
                "attempts": [ATTEMPT | {"progressedAt": "2026-01-31T12:28:00Z"}],
            },
            Mentions("step 7 of 80", "last progress 2m ago"),
        ),
        ("OfANewerOperator", {}, Mentions("Nothing blocks the job", "OfANewerOperator", without=["first step"])),
    ],
)
def test_a_job_that_nothing_blocks_is_described_by_what_is_known(
    reason: str | None, more: Mapping[str, object], said: Mentions
) -> None:
    conditions = [VALID]
    if reason is not None:
        conditions.append(job_statuses.condition("Progressing", "True", reason, "2026-01-31T12:20:00Z"))
    lines = explained({"conditions": conditions, "attempts": [ATTEMPT], **more}).split("\n")
    assert lines[lines.index("") + 1] == said
    assert "making progress" not in lines[lines.index("") + 1]


@pytest.mark.parametrize(
    "more",
    [
        {
            "conditions": [
                job_statuses.condition("Failed", "True", "ConfigurationError", "2026-01-31T12:20:00Z", "exit code 2")
            ]
        },
        {"suspendedAt": "2026-01-31T12:20:00Z"},
        {"nextAttempt": {"reason": "HeadLost", "failureClass": "Infrastructure", "notBefore": "2026-01-31T12:31:00Z"}},
    ],
    ids=["failed", "suspended", "between attempts"],
)
def test_commands_repeat_the_given_cluster_and_namespace(more: Mapping[str, object]) -> None:
    flags = " --context prod --namespace team-a"
    suspend = "  suspend: true\n" if "suspendedAt" in more else ""
    text = explained({"attempts": [ATTEMPT], "conditions": [VALID], **more}, more=suspend, flags=flags)
    commands = re.findall("`(rljob [^`]*)`", text.partition("What comes next:")[2])
    assert commands
    for command in commands:
        assert command.endswith(flags), command


def test_a_failure_is_explained_with_how_to_resume() -> None:
    failed = job_statuses.condition(
        "Failed", "True", "ApplicationError", "2026-01-31T12:20:00Z", "exit code 1\n  division by zero"
    )
    status = job_statuses.full_status() | {"phase": "Failed", "attempts": [ATTEMPT], "conditions": [VALID, failed]}
    text = explained(status, [pod("p", {})], more="  runPolicy: {cleanup: KeepCluster}\n")
    assert text.split("\n") == [
        "RLJob team-a/small: Failed, 30m old",
        "  step 12/80, reward 0.4125, eval 0.25, checkpoint 10",
        "",
        Mentions("finished", "attempt 1", "Failed", "ApplicationError", "10m ago"),
        "  exit code 1",
        "    division by zero",
        f"What to do: {EXPLANATIONS[Reason.APPLICATION_ERROR].advice}",
        "",
        "What comes next:",
        Mentions("fix", "`rljob retry small`", "step 10", "retry budgets"),
        Mentions("results, logs and checkpoints: pvc://results/small"),
        Mentions("RayCluster is kept until 2026-02-01T12:20:00Z (in 23h", "keepClusterSeconds", "`rljob delete small`"),
    ]
    given_up = status | {"attempts": [ATTEMPT | {"trainerMayRun": True}]}
    text = explained(given_up, [pod("p", {})], more="  runPolicy: {cleanup: KeepCluster}\n")
    assert text.split("\n")[-1] == Mentions("cluster is not kept", "trainer", "running")
    for reason in ("Removed", "ClusterLost"):
        gone = job_statuses.condition("ClusterReady", "False", reason, CREATED)
        text = explained(status | {"conditions": [VALID, gone, failed]}, more="  runPolicy: {cleanup: KeepCluster}\n")
        assert text.split("\n")[-1] == Mentions("results, logs and checkpoints", without=["kept"])


def test_a_stopping_trainer_is_shown_with_its_grace_period() -> None:
    status = job_statuses.full_status()
    assert isinstance(status["conditions"], list)
    status["conditions"][4] = job_statuses.condition(
        "Progressing", "False", "Stopping", CREATED, "the trainer was asked to stop"
    )
    text = explained(status, more="  runPolicy: {gracePeriodSeconds: 300}\n")
    assert text.endswith(
        "What comes next:\n"
        "  the trainer saves a checkpoint, if training has started, and exits within 5m (runPolicy.gracePeriodSeconds)"
    )


def test_a_cluster_that_loses_a_pod_under_the_trainer_is_not_reported_as_starting() -> None:
    status = job_statuses.full_status()
    assert isinstance(status["conditions"], list)
    status["conditions"][1] = job_statuses.condition(
        "ClusterReady", "False", "PodsPending", CREATED, "2 of 3 pods ready"
    )
    text = explained(status)
    assert text == Mentions("waiting", "ClusterReady=False", "PodsPending", "30m", "2 of 3 pods ready")
    assert text.split("\n")[-2:] == ["What comes next:", Mentions("already started", "Retrying or Failed")]


def test_an_expired_deadline_is_reported_as_due() -> None:
    early = ATTEMPT | {"started": "2026-01-31T11:00:00Z"}
    text = explained({"attempts": [early], "conditions": [VALID]})
    assert text.split("\n")[-1] == Mentions(
        "Failed, without a retry", "attempt 1", "not started", "2026-01-31T11:30:00Z (now)"
    )


def test_a_success_is_explained_with_the_path_of_the_model() -> None:
    complete = job_statuses.condition("Complete", "True", "Succeeded", CREATED)
    status = {"phase": "Complete", "conditions": [VALID, complete], "exportUri": "pvc://results/small/run/export"}
    assert explained(status).split("\n")[-3:] == [
        "Results:",
        Mentions("exported model", "pvc://results/small/run/export"),
        Mentions("checkpoints", "pvc://results/small"),
    ]


def test_a_job_without_a_status_is_explained() -> None:
    command = "kubectl get pods --all-namespaces -l app.kubernetes.io/name=rljob-operator"
    assert explained({}).split("\n") == [
        "RLJob team-a/small: New, 30m old",
        "",
        Mentions("No operator"),
        Mentions("What to do:", "operator", "namespace", "watchNamespaces", command),
        "",
        "What comes next:",
        Mentions("operator", "RayCluster"),
    ]


def test_a_job_of_another_controller_is_not_promised_to_start() -> None:
    text = explained({}, more="  managedBy: kueue.x-k8s.io/multikueue\n")
    ignored = Mentions("operator ignores the job", "spec.managedBy is kueue.x-k8s.io/multikueue")
    assert text == ignored
    assert text == Mentions("only that controller", without=["creates its RayCluster", "check that the operator"])


def test_an_unknown_reason_of_a_newer_operator_is_shown() -> None:
    later = job_statuses.condition("Progressing", "False", "Retrying", CREATED, "attempt 2 of 3")
    text = explained({"conditions": [VALID, later]})
    assert text == Mentions("waiting", "Progressing=False", "Retrying", "30m", "attempt 2 of 3")
    assert text == Mentions("What to do:", "Update rljob", "reason")


@pytest.mark.parametrize("text", ["OutOfMemory", "outofmemory"])
def test_a_reason_alone_needs_no_cluster(rljob: Rljob, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("KUBECONFIG", "none")
    code, output, _ = rljob("explain", "--reason", text)
    assert code == 0
    found = EXPLANATIONS[Reason.OUT_OF_MEMORY]
    assert output == f"OutOfMemory: {found.means}\nWhat to do: {found.advice}\n"


def test_an_unknown_reason_is_reported_with_the_known_ones(rljob: Rljob) -> None:
    code, _, errors = rljob("explain", "--reason", "Tired")
    assert code == 2
    assert errors == Mentions("error: --reason Tired:", "unknown", "Valid, InvalidSpec,")


def test_a_name_or_a_reason_is_required_but_not_both(rljob: Rljob) -> None:
    for arguments in ([], ["small", "--reason", "Valid"]):
        code, _, errors = rljob("explain", *arguments)
        assert code == 2
        assert errors == Mentions("error: rljob explain:", "name of a job", "--reason REASON")


@pytest.mark.apiserver
def test_only_pods_and_warnings_of_the_job_are_read_from_the_server(job_cluster: JobCluster, rljob: Rljob) -> None:
    stored = job_cluster.create_small_job()
    metadata = stored["metadata"]
    assert isinstance(metadata, dict)
    waits = job_statuses.condition("ClusterReady", "False", "PodsPending", CREATED)
    job_cluster.write_status("small", {"phase": "Pending", "attempts": [ATTEMPT], "conditions": [VALID, waits]})
    for name, uid in (("mine", metadata["uid"]), ("other", "another-job")):
        job_cluster.create_pod(name, {"rljob.dev/job-uid": uid, "rljob.dev/pool": "main"}, ["ray"], {})
        job_cluster.warn("Pod", name, "FailedMount", f"volume of {name}", count=3, seen=CREATED)
    job_cluster.warn("RLJob", "small", "PodsPending", "what the condition says", count=1, seen=CREATED)
    job_cluster.warn("RayCluster", "small-1", "FailedToCreateWorkerPod", "quota", count=1, seen=CREATED)
    code, output, errors = rljob("explain", "small")
    assert (code, errors) == (0, "")
    assert "Pods that are not ready:\n  mine (main): Pending\n\n" in output
    assert "Pod mine: FailedMount (x3): volume of mine\n" in output
    assert "RayCluster small-1: FailedToCreateWorkerPod: quota\n" in output
    assert "volume of other" not in output
    assert "what the condition says" not in output
