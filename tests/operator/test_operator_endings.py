"""Every way in which the outside can keep a job from completing, or end it, is reported with its reason. All jobs run
at once under one operator; each test waits for its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest

from rljob_testing.operator import scripts
from rljob_testing.operator.testbed import Testbed

pytestmark = pytest.mark.apiserver

NO_RETRIES = {"spec.runPolicy.maxAppRetries": 0, "spec.runPolicy.maxInfraRetries": 0}
LARGE_GROUP = {
    "name": "rollout",
    "state": "PENDING",
    "stats": {"scheduling_state": "INFEASIBLE"},
    "bundles": [{"unit_resources": {"CPU": 1.0, "GPU": 8.0}}, {"unit_resources": {"CPU": 1.0, "GPU": 8.0}}],
}
PENDING_GROUP = {**LARGE_GROUP, "stats": {"scheduling_state": "PENDING"}}
OUT_OF_MEMORY = scripts.PodScript(phase="Running", ready=False, ended=("OOMKilled", 137), restarts=1)


def stopped_from_outside(age: float, environment: Mapping[str, object]) -> scripts.RunMoment:
    if age < 0.5:
        return scripts.RunMoment(run_state=scripts.run_state(environment, "Running", 2))
    return scripts.RunMoment(
        "STOPPED", "Job was intentionally stopped.", run_state=scripts.run_state(environment, "Stopped", 2)
    )


def ending_without_result(_: float, environment: Mapping[str, object]) -> scripts.RunMoment:
    return scripts.RunMoment("SUCCEEDED", exit_code=0, run_state=scripts.run_state(environment, "Running", 3))


def losing_its_supervisor(_: float, __: Mapping[str, object]) -> scripts.RunMoment:
    return scripts.RunMoment("FAILED", "Job supervisor actor died: SYSTEM_ERROR", "JOB_SUPERVISOR_ACTOR_DIED")


def not_starting(_: float, __: Mapping[str, object]) -> scripts.RunMoment:
    return scripts.RunMoment("FAILED", "Failed to set up runtime environment", "RUNTIME_ENV_SETUP_FAILURE")


@dataclass(frozen=True)
class Scenario:
    """A job, its environment, and the expected condition."""

    condition: tuple[str, str, str]
    """Type, status and reason."""
    message: tuple[str, ...]
    """Words that all occur in its message."""
    edits: Mapping[str, object] = field(default_factory=dict)
    script: scripts.ClusterScript = field(default_factory=scripts.ClusterScript)
    life: scripts.TrainerScript = field(default_factory=scripts.succeeding)
    dashboard: Mapping[str, object] = field(default_factory=dict)
    """Attributes of the dashboard."""


def waiting(reason: str, message: str) -> scripts.ClusterScript:
    return scripts.ClusterScript({"main": scripts.PodScript(phase="Pending", ready=False, waiting=(reason, message))})


SCENARIOS: Mapping[str, Scenario] = {
    "no-storage": Scenario(
        ("Failed", "True", "StorageMissing"),
        ("spec.checkpoint.storage", "ReadWriteMany"),
        edits={"spec.checkpoint": {}},
    ),
    "unschedulable": Scenario(
        ("ClusterReady", "False", "Unschedulable"),
        ("1 of 2 pods of pool main", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu", "(pod unschedulable-1-"),
        edits={"spec.pools[0].nodes": 2, "spec.training.batchSize": 16},
        script=scripts.ClusterScript(
            {
                "main-0": scripts.PodScript(
                    phase="Pending",
                    ready=False,
                    scheduling_message="0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
                )
            }
        ),
    ),
    "image": Scenario(
        ("ClusterReady", "False", "ImagePullFailed"),
        ("container ray", 'Back-off pulling image "example/missing:1"'),
        script=waiting("ImagePullBackOff", 'Back-off pulling image "example/missing:1"'),
    ),
    "config": Scenario(
        ("ClusterReady", "False", "ContainerConfigError"),
        ('secret "tokens" not found',),
        script=waiting("CreateContainerConfigError", 'secret "tokens" not found'),
    ),
    "crashing": Scenario(
        ("ClusterReady", "False", "ContainerCrashing"),
        ("container ray", "code 127"),
        script=scripts.ClusterScript(
            {
                "main": scripts.PodScript(
                    ready=False, waiting=("CrashLoopBackOff", "back-off 5m0s"), ended=("Error", 127), restarts=4
                )
            }
        ),
    ),
    "mount": Scenario(
        ("ClusterReady", "False", "VolumeMountFailed"),
        ("FailedMount", 'configmap "my-rewards" not found'),
        script=scripts.ClusterScript(
            {
                "head": scripts.PodScript(
                    phase="Pending",
                    ready=False,
                    event=("FailedMount", 'MountVolume.SetUp failed: configmap "my-rewards" not found'),
                    scheduled_seconds_ago=60.0,
                )
            }
        ),
    ),
    "creation": Scenario(
        ("ClusterReady", "False", "PodCreationFailed"),
        ("exceeded quota: gpus",),
        script=scripts.ClusterScript(pod_creation_error='pods "x" is forbidden: exceeded quota: gpus'),
    ),
    "not-taken": Scenario(
        ("ClusterReady", "False", "PodCreationFailed"),
        ("The RayCluster spec is invalid",),
        script=scripts.ClusterScript(invalid="The RayCluster spec is invalid jobs/x: authOptions"),
    ),
    "few-gpus": Scenario(
        ("PlacementFeasible", "False", "InsufficientGPUs"), ("1 of 2 GPUs",), dashboard={"num_gpus_missing": 1}
    ),
    "infeasible": Scenario(
        ("PlacementFeasible", "False", "PlacementGroupInfeasible"),
        ("rollout: 2 x {CPU: 1, GPU: 8}",),
        life=lambda _, __: scripts.RunMoment(),
        dashboard={"infeasible": [PENDING_GROUP, LARGE_GROUP]},
    ),
    "silent": Scenario(
        ("ClusterReady", "False", "DashboardUnreachable"), ("dashboard is unreachable",), dashboard={"down": True}
    ),
    "open-dashboard": Scenario(
        ("Failed", "True", "AuthenticationMissing"), ("authentication is off",), dashboard={"open": True}
    ),
    "refused": Scenario(
        ("JobSubmitted", "False", "SubmissionFailed"),
        ("No available agent",),
        dashboard={"submit_error": "No available agent to submit job, please try again later."},
    ),
    "not-started": Scenario(
        ("Failed", "True", "SubmissionFailed"),
        ("RUNTIME_ENV_SETUP_FAILURE", "Failed to set up runtime environment"),
        edits=NO_RETRIES,
        life=not_starting,
    ),
    "lost-answer": Scenario(("Complete", "True", "Succeeded"), ("4 of 4 steps",), dashboard={"lose_answer": True}),
    "bad-code": Scenario(
        ("Failed", "True", "ApplicationError"),
        ("code 1", "RewardError: my_rewards.score raised ValueError: no number"),
        edits=NO_RETRIES,
        life=scripts.failing(1, ("RewardError", "my_rewards.score raised ValueError: no number"), "a\nb\n"),
    ),
    "no-words": Scenario(
        ("Failed", "True", "ApplicationError"),
        ("code 3", "ModuleNotFoundError: No module named 'rljob_trainer'"),
        edits=NO_RETRIES,
        life=scripts.failing(3, None, "Traceback\nModuleNotFoundError: No module named 'rljob_trainer'\n"),
    ),
    "bad-file": Scenario(
        ("Failed", "True", "ConfigurationError"),
        ("code 2", "ConfigurationError: spec.training.dataset"),
        life=scripts.failing(2, ("ConfigurationError", "spec.training.dataset: no such file"), ""),
    ),
    "lost-node": Scenario(
        ("Failed", "True", "InfrastructureError"),
        ("code 75", "WorkerLostError: node gone"),
        edits=NO_RETRIES,
        life=scripts.failing(75, ("WorkerLostError", "node gone"), ""),
    ),
    "lost-supervisor": Scenario(
        ("Failed", "True", "InfrastructureError"),
        ("JOB_SUPERVISOR_ACTOR_DIED",),
        edits=NO_RETRIES,
        life=losing_its_supervisor,
    ),
    "tried-again": Scenario(
        ("Retrying", "True", "ApplicationError"),
        ("code 1",),
        edits={"spec.runPolicy.maxAppRetries": 1000},
        life=scripts.failing(1, ("RewardError", "no number"), "a\nb\n"),
    ),
    "stopped": Scenario(("Failed", "True", "StoppedThroughRay"), ("not by the operator",), life=stopped_from_outside),
    "no-result": Scenario(
        ("Failed", "True", "ExitedWithoutResult"), ("code 0",), edits=NO_RETRIES, life=ending_without_result
    ),
    "kept": Scenario(("ClusterReady", "True", "Kept"), ("kept",), edits={"spec.runPolicy.cleanup": "KeepCluster"}),
}


@pytest.fixture(scope="module")
def jobs(module_testbed: Testbed) -> Iterator[Testbed]:
    """All of these jobs, running."""
    testbed = module_testbed
    operator = testbed.with_shorter_times({"STOP_SECONDS": 4.0, "STOP_CAUSE_SECONDS": 10.0}).operator()
    operator.start()
    try:
        for name, scenario in SCENARIOS.items():
            testbed.script(f"{name}-1", scenario.script)
            dashboard = testbed.dashboard(f"{name}-1")
            dashboard.life = scenario.life
            for attribute, value in scenario.dashboard.items():
                setattr(dashboard, attribute, value)
            testbed.submit(name, scenario.edits)
        yield testbed
        assert "a bug in the operator" not in operator.log(), operator.log()
    finally:
        operator.kill()
        testbed.delete_all_jobs()


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_condition_has_the_expected_reason(jobs: Testbed, name: str) -> None:
    scenario = SCENARIOS[name]
    kind, status, reason = scenario.condition
    condition = jobs.wait_for(name, kind, reason, status)
    for part in scenario.message:
        assert part in condition["message"]
    assert condition["observedGeneration"] == 1
    assert len(condition["message"]) <= 1024


def test_a_job_fails_when_its_pods_miss_the_provisioning_deadline(jobs: Testbed) -> None:
    missing = scripts.PodScript(phase="Pending", ready=False, waiting=("ErrImagePull", "not found"))
    jobs.script("too-late-1", scripts.ClusterScript({"head": missing, "main": missing}))
    jobs.submit("too-late", NO_RETRIES)
    # Earlier, the message would name another step that was not finished in time.
    jobs.wait(lambda: "0 of 2 pods ready" in jobs.condition("too-late", "ClusterReady").get("message", ""), "its pods")
    jobs.change("too-late", {"spec": {"runPolicy": {"provisioningDeadlineSeconds": 3}}})
    message = jobs.wait_for("too-late", "Failed", "ProvisioningDeadlineExceeded")["message"]
    assert "within 3 s" in message
    assert "0 of 2 pods ready" in message


def test_a_lost_head_cluster_or_driver_is_named(jobs: Testbed) -> None:
    for name in ("no-head", "no-cluster", "no-memory", "no-driver"):
        jobs.dashboard(f"{name}-1").train_forever()
        jobs.submit(name, NO_RETRIES)
    for name in ("no-head", "no-cluster", "no-memory", "no-driver"):
        jobs.wait_for(name, "Progressing", "Training")
    jobs.lose_head("no-head-1")
    jobs.script("no-memory-1", scripts.ClusterScript({"head": OUT_OF_MEMORY}))
    # Before its dashboard forgets the job: the pod's end explains that.
    jobs.wait(lambda: is_known_to_have_ended(jobs, "no-memory-1-head-0"), "the end of the head")
    jobs.dashboard("no-memory-1").forgets_jobs = True
    jobs.dashboard("no-driver-1").forgets_jobs = True
    jobs.http.delete(f"/apis/ray.io/v1/namespaces/{jobs.namespace}/rayclusters/no-cluster-1").raise_for_status()
    assert "head pod was deleted" in jobs.wait_for("no-head", "Failed", "HeadLost")["message"]
    assert "was deleted" in jobs.wait_for("no-cluster", "Failed", "ClusterLost")["message"]
    assert "no longer knows" in jobs.wait_for("no-driver", "Failed", "DriverLost")["message"]
    jobs.script("no-memory-1", scripts.ClusterScript({"head": scripts.PodScript(ended=("OOMKilled", 137), restarts=1)}))
    assert "OOMKilled" in jobs.wait_for("no-memory", "Failed", "OutOfMemory")["message"]


def is_known_to_have_ended(testbed: Testbed, pod: str) -> bool:
    [found] = [item for item in testbed.items("pods") if item["metadata"]["name"] == pod]
    containers = found.get("status", {}).get("containerStatuses", [])
    return any(each.get("lastState") for each in containers)


def test_a_running_job_obeys_a_deadline_that_is_set_later(jobs: Testbed) -> None:
    jobs.dashboard("long-run-1").train_forever(2)
    jobs.submit("long-run")
    jobs.wait_for("long-run", "Progressing", "Training")
    jobs.change("long-run", {"spec": {"runPolicy": {"activeDeadlineSeconds": 1}}})
    ended = jobs.wait_for("long-run", "Failed", "ActiveDeadlineExceeded")
    assert "checkpoint is from step 2" in ended["message"]
    assert list(jobs.dashboard("long-run-1").stopped) == ["long-run-1-1"]
    assert jobs.job("long-run")["status"]["attempts"][0]["outcome"] == "Stopped"
