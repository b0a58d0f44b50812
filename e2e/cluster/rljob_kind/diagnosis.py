"""Collects what a person would look at first after a failed test on the cluster."""

from __future__ import annotations

from collections.abc import Sequence

from rljob_kind.errors import CommandError
from rljob_kind.installation import NAMESPACE as OPERATOR_NAMESPACE
from rljob_kind.installation import RELEASE
from rljob_kind.kuberay import NAMESPACE as KUBERAY_NAMESPACE
from rljob_kind.processes import run

ANSWER_SECONDS = 30.0
DRIVER_LOGS = "tail -n 80 /tmp/ray/session_latest/logs/job-driver-*.log"


def diagnosis(namespace: str) -> list[tuple[str, str]]:
    """(title, text) of pods, jobs, events and logs of a namespace and of the operators. Never raises: an error is
    reported in the text."""
    here = ["kubectl", "--namespace", namespace]
    looks: list[tuple[str, Sequence[str]]] = [
        ("pods", ["kubectl", "get", "pods", "--all-namespaces", "--output=wide"]),
        ("jobs", [*here, "get", "rljobs,rayclusters", "--output=wide"]),
        ("status of the jobs", [*here, "get", "rljobs", "--output=jsonpath={range .items[*]}{.status}{'\\n'}{end}"]),
        ("events", [*here, "get", "events", "--sort-by=.lastTimestamp"]),
        ("operator log", _log_of(OPERATOR_NAMESPACE, RELEASE)),
        ("operator log before its restart", [*_log_of(OPERATOR_NAMESPACE, RELEASE), "--previous"]),
    ]
    found = [(title, _said(command)) for title, command in looks]
    found.append(("warnings of KubeRay", _warnings(_said(_log_of(KUBERAY_NAMESPACE, "kuberay-operator")))))
    for pod in _said([*here, "get", "pods", "--selector=ray.io/node-type=head", "--output=name"]).split():
        if pod.startswith("pod/"):
            found.append((f"logs of {pod}", _said([*here, "logs", pod, "--all-containers", "--prefix", "--tail=60"])))
            found.append((f"driver logs of {pod}", _said([*here, "exec", pod, "--", "sh", "-c", DRIVER_LOGS])))
    return found


def _log_of(namespace: str, deployment: str) -> list[str]:
    return ["kubectl", "--namespace", namespace, "logs", f"deployment/{deployment}", "--tail=150"]


def _warnings(log: str) -> str:
    """Lines with warnings and errors only: KubeRay logs each of its steps, and errors with a full stack trace."""
    return "\n".join(line[:400] for line in log.splitlines() if '"level":"info"' not in line)


def _said(command: Sequence[str]) -> str:
    try:
        return run(command, timeout_seconds=ANSWER_SECONDS)
    except CommandError as error:
        return f"({error.output.strip() or error})"
