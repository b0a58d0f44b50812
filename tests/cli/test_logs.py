"""`rljob logs`: the right container of the right pod. The API server is real; the kubelet behind it is a stand-in."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from rljob.polling import Clock
from rljob_api.constants import ANNOTATION_RETRY
from rljob_testing.cli import job_statuses
from rljob_testing.cli.job_cluster import JobCluster, StandInKubelet
from rljob_testing.messages import Mentions

pytestmark = pytest.mark.apiserver

Rljob = Callable[..., tuple[int, str, str]]
SINCE = "2026-01-31T12:30:00Z"
RUNNING = {"running": {"startedAt": SINCE}}
ATTEMPT = {"number": 1, "cluster": "small-1", "started": SINCE}
PENDING = job_statuses.condition("ClusterReady", "False", "PodsPending", SINCE, "0 of 2 pods are ready")


@pytest.fixture
def small(job_cluster: JobCluster) -> JobCluster:
    job_cluster.create_small_job("  checkpoint: {storage: {persistentVolumeClaim: results}}\n", num_nodes=2)
    job_cluster.write_status("small", {"phase": "Pending", "attempts": [ATTEMPT], "conditions": [PENDING]})
    return job_cluster


def create_pod(
    small: JobCluster, name: str, group: str, *, attempt: int = 1, state: object = RUNNING, cluster: str | None = None
) -> None:
    containers = ["ray", "driver"] if group == "head" else ["ray"]
    uid = small.job("small")["metadata"]["uid"]  # type: ignore[index]
    labels = {
        "rljob.dev/job-uid": uid,
        "rljob.dev/attempt": str(attempt),
        "ray.io/node-type": "head" if group == "head" else "worker",
        **({} if group == "head" else {"rljob.dev/pool": group}),
        **({"ray.io/cluster": cluster} if cluster else {}),
    }
    small.create_pod(name, labels, containers, {"containerStatuses": container_statuses(containers, state)})


def container_statuses(containers: list[str], state: object) -> list[dict[str, object]]:
    status = {"ready": state is RUNNING, "restartCount": 0, "image": "i", "imageID": "i", "state": state}
    return [{"name": name, **status} for name in containers]


def test_the_driver_log_is_printed_unchanged(small: JobCluster, kubelet: StandInKubelet, rljob: Rljob) -> None:
    create_pod(small, "small-1-head-a", "head")
    create_pod(small, "small-1-main-b", "main")
    kubelet.logs[f"{small.namespace}/small-1-head-a/driver"] = [b"step 1 \x1b[32mok\x1b[0m\n", b"step 2\n"]
    code, output, errors = rljob("logs", "small")
    assert (code, errors) == (0, "")
    assert output == "step 1 \x1b[32mok\x1b[0m\nstep 2\n"
    rljob("logs", "small", "--tail", "5")
    path = f"/containerLogs/{small.namespace}/small-1-head-a/driver"
    assert kubelet.asked[-2:] == [(path, {}), (path, {"tailLines": ["5"]})]


@pytest.mark.parametrize(
    ("arguments", "pod"),
    [
        (["--container", "ray"], "small-1-head-a/ray"),
        (["--pool", "main"], "small-1-main-a/ray"),
        (["--pool", "main", "--index", "1"], "small-1-main-b/ray"),
    ],
)
def test_other_containers_can_be_selected(
    small: JobCluster, kubelet: StandInKubelet, rljob: Rljob, arguments: list[str], pod: str
) -> None:
    create_pod(small, "small-1-main-b", "main")
    create_pod(small, "small-1-main-a", "main")
    create_pod(small, "small-1-head-a", "head")
    kubelet.logs[f"{small.namespace}/{pod}"] = [b"this one\n"]
    assert rljob("logs", "small", *arguments) == (0, "this one\n", "")


def test_pods_of_an_earlier_attempt_and_of_other_jobs_are_ignored(
    small: JobCluster, kubelet: StandInKubelet, rljob: Rljob
) -> None:
    create_pod(small, "small-1-head-a", "head")
    create_pod(small, "small-2-head-a", "head", attempt=2)
    other = {"rljob.dev/job-uid": "other", "rljob.dev/attempt": "2", "ray.io/node-type": "head"}
    status = {"containerStatuses": container_statuses(["ray", "driver"], RUNNING)}
    small.create_pod("a-other-head", other, ["ray", "driver"], status)
    small.write_status("small", {"attempts": [ATTEMPT, {"number": 2, "cluster": "small-2", "started": SINCE}]})
    kubelet.logs[f"{small.namespace}/small-2-head-a/driver"] = [b"second\n"]
    assert rljob("logs", "small") == (0, "second\n", "")


def test_an_attempt_can_be_selected_and_the_newest_one_with_pods_is_the_default(
    small: JobCluster, kubelet: StandInKubelet, rljob: Rljob
) -> None:
    lost = {"state": "Ended", "ended": SINCE, "outcome": "Failed", "reason": "HeadLost"}
    attempts = [ATTEMPT | {"number": number, "cluster": f"small-{number}"} | lost for number in (1, 2)]
    third = ATTEMPT | {"number": 3, "cluster": "small-3", "state": "Provisioning"}
    small.write_status("small", {"attempts": [*attempts, third]})
    for number in (1, 2):
        create_pod(small, f"small-{number}-head-a", "head", attempt=number)
        kubelet.logs[f"{small.namespace}/small-{number}-head-a/driver"] = [f"log {number}\n".encode()]
    code, output, errors = rljob("logs", "small")
    assert (code, output) == (0, "log 2\n")
    assert errors == Mentions("attempt 3", "Provisioning", "attempt 2", "Failed, HeadLost")
    assert rljob("logs", "small", "--attempt", "1") == (0, "log 1\n", "")
    code, _, errors = rljob("logs", "small", "--attempt", "3")
    assert code == 2
    assert errors == Mentions("head pod", "attempt 3", "ClusterReady=False PodsPending: 0 of 2 pods are ready")
    code, _, errors = rljob("logs", "small", "--attempt", "4", "--follow")
    assert (code, errors) == (2, Mentions(f"error: RLJob {small.namespace}/small:", "from 1 to 3", "--attempt 4"))


def test_attempts_on_one_cluster_share_its_pods(small: JobCluster, kubelet: StandInKubelet, rljob: Rljob) -> None:
    ended = ATTEMPT | {"state": "Ended", "ended": SINCE, "outcome": "Failed", "reason": "ApplicationError"}
    small.write_status("small", {"attempts": [ended, ATTEMPT | {"number": 2}]})
    create_pod(small, "small-1-head-a", "head", cluster="small-1")
    kubelet.logs[f"{small.namespace}/small-1-head-a/driver"] = [b"both\n"]
    for arguments in ([], ["--attempt", "1"], ["--attempt", "2"]):
        assert rljob("logs", "small", *arguments) == (0, "both\n", Mentions("attempts 1, 2", "pod"))


def test_a_pod_belongs_only_to_attempts_on_the_last_cluster_of_its_name(
    small: JobCluster, kubelet: StandInKubelet, rljob: Rljob
) -> None:
    """After an attempt without capacity, the next cluster has the same name."""
    ended = ATTEMPT | {"state": "Ended", "ended": SINCE, "outcome": "Stopped", "reason": "Unschedulable"}
    attempts = [ended | {"clusterUid": "c1"}, ATTEMPT | {"number": 2, "clusterUid": "c2"}]
    small.write_status("small", {"attempts": attempts})
    create_pod(small, "small-1-head-a", "head", cluster="small-1")
    kubelet.logs[f"{small.namespace}/small-1-head-a/driver"] = [b"second\n"]
    assert rljob("logs", "small") == (0, "second\n", "")
    code, output, errors = rljob("logs", "small", "--attempt", "1")
    assert (code, output) == (1, "")
    assert errors == Mentions("attempt 1", "Unschedulable")


def test_without_pods_the_path_of_the_log_copy_is_shown(small: JobCluster, rljob: Rljob) -> None:
    lost = {"state": "Ended", "ended": SINCE, "outcome": "Failed", "reason": "HeadLost", "message": "node n7 was lost"}
    waits = {"reason": "HeadLost", "failureClass": "Infrastructure", "notBefore": "2026-01-31T12:31:00Z"}
    attempts = [ATTEMPT | {"number": number, "submissions": 1} | lost for number in (3, 4)]
    small.write_status("small", {"attempts": attempts, "nextAttempt": waits})
    command = "rljob logs small --storage FOLDER"
    where = f"RLJob {small.namespace}/small"
    code, output, errors = rljob("logs", "small")
    assert (code, output) == (1, "")
    assert errors.splitlines() == [
        Mentions(where, "pods of attempt 4", "deleted"),
        Mentions("copy", "pvc://results/small/run/logs/attempt-4/driver.log"),
        Mentions("mount", "results", f"{command} --attempt 4"),
        Mentions("attempt 4", "Failed, HeadLost"),
        "node n7 was lost",
    ]
    # No longer listed, and of a worker.
    code, _, errors = rljob("logs", "small", "--attempt", "2", "--pool", "main", "--follow")
    assert code == 1
    assert errors.splitlines() == [
        Mentions(where, "pods of attempt 2", "deleted"),
        Mentions("workers", "pvc://results/small/run/logs/"),
        Mentions("mount", "results", f"{command} --pool main --index RANK"),
    ]


@pytest.mark.parametrize("is_retry_of_user", [False, True])
def test_follow_waits_for_the_next_attempt(
    small: JobCluster,
    kubelet: StandInKubelet,
    rljob: Rljob,
    monkeypatch: pytest.MonkeyPatch,
    is_retry_of_user: bool,
) -> None:
    ended = ATTEMPT | {"state": "Ended", "ended": SINCE, "outcome": "Failed", "reason": "HeadLost"}
    waits = {"reason": "HeadLost", "failureClass": "Infrastructure", "notBefore": "2026-01-31T12:31:00Z"}
    why = {"result": job_statuses.FAILED} if is_retry_of_user else {"nextAttempt": waits}
    small.write_status("small", {"attempts": [ended], **why})
    if is_retry_of_user:
        small.annotate("small", {ANNOTATION_RETRY: "now"})
    kubelet.logs[f"{small.namespace}/small-2-head-a/driver"] = [b"second\n"]
    kubelet.more.set()

    def next_attempt(_: float) -> None:
        second = ATTEMPT | {"number": 2, "cluster": "small-2"}
        small.write_status("small", {"attempts": [ended, second], "nextAttempt": None, "result": None})
        create_pod(small, "small-2-head-a", "head", attempt=2)

    monkeypatch.setattr("rljob_cli.cluster.logs.Clock", lambda: Clock(sleep=next_attempt))
    code, output, errors = rljob("logs", "small", "--follow")
    assert (code, output) == (0, "second\n")
    details = [] if is_retry_of_user else ["next attempt", "2026-01-31T12:31:00Z"]
    assert errors == Mentions("waiting:", "head pod", *details)
    assert errors.count("\n") == 1


def test_a_suspended_job_has_no_pods_to_wait_for(small: JobCluster, rljob: Rljob) -> None:
    rljob("suspend", "small")
    small.write_status("small", {"attempts": [], "suspendedAt": SINCE})
    code, _, errors = rljob("logs", "small")
    assert code == 2
    assert errors == Mentions("head pod", "suspended", "--follow")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pool", "spare"], Mentions("RLJob", "small:", "no pool spare", "main")),
        (["--pool", "main", "--index", "2"], Mentions("RLJob", "small:", "pool main", "2 pods", "--index 2")),
        (
            ["--pool", "main", "--container", "driver"],
            Mentions("--container driver:", "head pod", "--pool", "--container ray"),
        ),
    ],
)
def test_a_pod_that_the_job_never_has_is_rejected(
    small: JobCluster, rljob: Rljob, arguments: list[str], message: Mentions
) -> None:
    code, output, errors = rljob("logs", "small", "--follow", *arguments)
    assert (code, output) == (2, "")
    assert errors.startswith(("error: --", f"error: RLJob {small.namespace}/small:"))
    assert errors == message


def test_a_missing_pod_is_reported_with_its_cause(small: JobCluster, rljob: Rljob) -> None:
    code, _, errors = rljob("logs", "small")
    assert code == 2
    condition = "ClusterReady=False PodsPending: 0 of 2 pods are ready"
    where = f"error: RLJob {small.namespace}/small:"
    assert errors == Mentions(where, "head pod", condition, "--follow", "`rljob explain small`")


def test_a_container_that_has_not_started_is_reported_with_the_kubelet_reason(small: JobCluster, rljob: Rljob) -> None:
    create_pod(small, "small-1-head-a", "head", state={"waiting": {"reason": "ImagePullBackOff"}})
    code, _, errors = rljob("logs", "small")
    assert code == 2
    assert errors == Mentions("container driver", "pod small-1-head-a", "ImagePullBackOff", "--follow")


def test_follow_waits_for_the_container_and_prints_output_at_once(
    small: JobCluster, kubelet: StandInKubelet, rljob: Rljob, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_pod(small, "small-1-head-a", "head", state={"waiting": {"reason": "ContainerCreating"}})
    kubelet.logs[f"{small.namespace}/small-1-head-a/driver"] = [b"step 1\n", b"step \xff\n"]
    kubelet.more.clear()
    seen: list[bytes] = []
    when_seen: list[bool] = []

    class Output(io.BytesIO):
        def write(self, data: object) -> int:
            assert isinstance(data, bytes)
            seen.append(data)
            when_seen.append(kubelet.more.is_set())
            return len(data)

    def start(_: float) -> None:
        """Runs while the command waits."""
        statuses = container_statuses(["ray", "driver"], RUNNING)
        small.write_pod_status("small-1-head-a", {"containerStatuses": statuses})
        player.start()

    def go_on() -> None:
        deadline = time.monotonic() + 30
        while not seen and time.monotonic() < deadline:
            time.sleep(0.05)
        kubelet.more.set()

    player = threading.Thread(target=go_on)
    monkeypatch.setattr("rljob_cli.cluster.logs._standard_output", Output)
    monkeypatch.setattr("rljob_cli.cluster.logs.Clock", lambda: Clock(sleep=start))
    code, _, errors = rljob("logs", "small", "--follow")
    player.join()
    assert code == 0
    assert errors == Mentions("waiting:", "container driver", "pod small-1-head-a", "ContainerCreating")
    assert errors.count("\n") == 1
    assert b"".join(seen) == b"step 1\nstep \xff\n"
    assert when_seen[0] is False  # the first piece came before the container had written the second


def log_process(cluster: JobCluster, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rljob_cli", "logs", "small", *arguments]
    return subprocess.Popen(command, env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_closed_pipe_ends_the_command_quietly(small: JobCluster, kubelet: StandInKubelet) -> None:
    create_pod(small, "small-1-head-a", "head")
    kubelet.logs[f"{small.namespace}/small-1-head-a/driver"] = [b"a line of the log\n" * 4000] * 20
    with log_process(small) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"a line of the log\n"
        process.stdout.close()
        assert process.stderr.read() == b""


def test_ctrl_c_while_following_is_quiet(small: JobCluster, kubelet: StandInKubelet) -> None:
    create_pod(small, "small-1-head-a", "head")
    kubelet.logs[f"{small.namespace}/small-1-head-a/driver"] = [b"step 1\n", b"step 2\n"]
    kubelet.more.clear()
    with log_process(small, "--follow") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"step 1\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read() == b""
    kubelet.more.set()


def test_without_pods_the_path_of_the_log_copy_and_its_last_lines_are_shown(small: JobCluster, rljob: Rljob) -> None:
    message = "exit code 1, last lines of the log:\nZeroDivisionError: division by zero"
    failed = job_statuses.condition("Failed", "True", "ApplicationError", SINCE, message)
    attempts = [ATTEMPT | {"submissions": 1}]
    small.write_status("small", {"phase": "Failed", "conditions": [failed], "attempts": attempts})
    for follow in ([], ["--follow"]):
        code, output, errors = rljob("logs", "small", *follow)
        assert (code, output) == (1, "")
        assert errors.splitlines() == [
            Mentions(f"RLJob {small.namespace}/small", "pods of attempt 1", "deleted"),
            Mentions("copy", "pvc://results/small/run/logs/attempt-1/driver.log"),
            Mentions("mount", "results", "rljob logs small --storage FOLDER --attempt 1"),
            Mentions("Failed, ApplicationError"),
            "exit code 1, last lines of the log:",
            "ZeroDivisionError: division by zero",
        ]


def test_a_job_with_its_own_folder_in_the_claim_gets_a_matching_command(job_cluster: JobCluster, rljob: Rljob) -> None:
    storage = "{persistentVolumeClaim: results, subPath: team/my runs}"
    job_cluster.create_small_job(f"  checkpoint: {{storage: {storage}}}\n")
    ended = {"state": "Ended", "ended": SINCE, "outcome": "Failed", "reason": "HeadLost"}
    job_cluster.write_status("small", {"attempts": [ATTEMPT | {"submissions": 1} | ended]})
    errors = rljob("logs", "small")[2]
    assert "pvc://results/team/my runs/run/logs/attempt-1/driver.log\n" in errors
    assert " rljob logs small --storage FOLDER/'team/my runs' --attempt 1\n" in errors


def test_a_job_that_never_trained_has_no_log(small: JobCluster, rljob: Rljob) -> None:
    failed = job_statuses.condition("Failed", "True", "ProvisioningDeadlineExceeded", SINCE, "no node has 32 GPUs")
    small.write_status("small", {"phase": "Failed", "conditions": [failed]})
    code, _, errors = rljob("logs", "small")
    assert code == 1
    assert errors.splitlines() == [
        Mentions(f"RLJob {small.namespace}/small", "attempt 1", "trainer", "no log"),
        Mentions("Failed, ProvisioningDeadlineExceeded"),
        "no node has 32 GPUs",
    ]


def test_the_log_of_a_finished_job_exists_while_its_cluster_is_kept(
    small: JobCluster, kubelet: StandInKubelet, rljob: Rljob
) -> None:
    create_pod(small, "small-1-head-a", "head", state={"terminated": {"exitCode": 0}})
    small.write_status("small", {"conditions": [job_statuses.condition("Complete", "True", "Succeeded", SINCE)]})
    kubelet.logs[f"{small.namespace}/small-1-head-a/driver"] = [b"all of it\n"]
    assert rljob("logs", "small") == (0, "all of it\n", "")


def test_an_unresponsive_kubelet_is_reported_in_one_line(small: JobCluster, rljob: Rljob) -> None:
    create_pod(small, "small-1-head-a", "head")
    code, output, errors = rljob("logs", "small")
    assert (code, output) == (2, "")
    assert errors == Mentions("error: context here:", "API server", "request")
    assert errors.count("\n") == 1


def test_only_new_lines_can_be_printed(small: JobCluster, kubelet: StandInKubelet, rljob: Rljob) -> None:
    create_pod(small, "small-1-head-a", "head")
    kubelet.logs[f"{small.namespace}/small-1-head-a/driver"] = [b"step 2\n"]
    assert rljob("logs", "small", "--since", "1h30m") == (0, "step 2\n", "")
    assert kubelet.asked[-1] == (f"/containerLogs/{small.namespace}/small-1-head-a/driver", {"sinceSeconds": ["5400"]})
    code, _, errors = rljob("logs", "small", "--since", "1 hour")
    assert (code, errors) == (2, Mentions("error: --since: '1 hour' is not a duration"))


def test_the_previous_attempt_is_the_one_before_the_newest(
    small: JobCluster, kubelet: StandInKubelet, rljob: Rljob
) -> None:
    code, _, errors = rljob("logs", "small", "--previous")
    assert (code, errors) == (2, Mentions("error:", "only one attempt", "--previous"))
    ended = ATTEMPT | {"state": "Ended", "ended": SINCE, "outcome": "Failed", "reason": "HeadLost", "submissions": 1}
    small.write_status("small", {"attempts": [ended, ATTEMPT | {"number": 2, "cluster": "small-2"}]})
    for number in (1, 2):
        create_pod(small, f"small-{number}-head-a", "head", attempt=number)
        kubelet.logs[f"{small.namespace}/small-{number}-head-a/driver"] = [f"log {number}\n".encode()]
    assert rljob("logs", "small", "-p") == (0, "log 1\n", "")
    small.delete_pod("small-1-head-a")
    code, output, errors = rljob("logs", "small", "--previous")
    assert (code, output) == (1, "")
    assert errors == Mentions("the pods of attempt 1 and their logs were deleted", "Failed, HeadLost")
    code, _, errors = rljob("logs", "small", "--previous", "--attempt", "1")
    assert (code, errors) == (2, Mentions("error: --previous: cannot be combined with --attempt"))
