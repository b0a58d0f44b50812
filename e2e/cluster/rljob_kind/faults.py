"""What breaks in a cluster, done on purpose."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rljob_kind.cluster import on_node
from rljob_kind.errors import CommandError
from rljob_kind.installation import NAMESPACE, RELEASE
from rljob_kind.kuberay import NAMESPACE as KUBERAY_NAMESPACE
from rljob_kind.processes import run, succeeds

READY_SECONDS = 180


def kill_operator() -> None:
    """Kills the operator's process without a warning and waits until another one is ready."""
    _kill_deployment(NAMESPACE, f"app.kubernetes.io/instance={RELEASE}")


def kill_kuberay() -> None:
    """The same with KubeRay's operator."""
    _kill_deployment(KUBERAY_NAMESPACE, "app.kubernetes.io/component=kuberay-operator")


def kill_api_server() -> None:
    """Kills the API server's process; its kubelet starts another one. Waits until that answers."""
    node, container = _container("kube-system", "component=kube-apiserver")
    _kill_container(node, container)
    deadline = time.monotonic() + READY_SECONDS
    while not succeeds(["kubectl", "get", "nodes", "--request-timeout=5s"]):
        if time.monotonic() > deadline:
            raise CommandError(["kubectl", "get", "nodes"], 1, f"no answer within {READY_SECONDS} s")
        time.sleep(1)


@contextmanager
def stopped_node(node: str) -> Iterator[None]:
    """A node without power, which has it again at the end."""
    run(["docker", "stop", "--time", "0", node])
    try:
        yield
    finally:
        run(["docker", "start", node])


@contextmanager
def paused_node(node: str) -> Iterator[None]:
    """A node on which nothing runs, and everything goes on at the end as if nothing had happened."""
    run(["docker", "pause", node])
    try:
        yield
    finally:
        run(["docker", "unpause", node])


def _kill_deployment(namespace: str, selector: str) -> None:
    node, container = _container(namespace, selector)
    _kill_container(node, container)
    # In place the kubelet would wait longer with every kill; a new pod starts at once.
    pods = [f"--selector={selector}", "--force", "--grace-period=0"]
    run(["kubectl", "--namespace", namespace, "delete", "pods", *pods])
    # The status of the Deployment may still be that of the pod before.
    deadline = time.monotonic() + READY_SECONDS
    while container in (found := _ready_containers(namespace, selector)) or not found:
        if time.monotonic() > deadline:
            raise CommandError(["kubectl", "get", "pods"], 1, f"{selector}: none is ready within {READY_SECONDS} s")
        time.sleep(0.5)


def _container(namespace: str, selector: str) -> tuple[str, str]:
    """The node and the id of the only container that is ready."""
    [(container, node)] = _ready_containers(namespace, selector).items()
    return node, container


def _ready_containers(namespace: str, selector: str) -> dict[str, str]:
    """Their ids, and the nodes of their pods."""
    command = ["kubectl", "--namespace", namespace, "get", "pods", f"--selector={selector}", "--output=json"]
    return {
        status["containerID"].removeprefix("containerd://"): pod["spec"]["nodeName"]
        for pod in json.loads(run(command))["items"]
        for status in pod["status"].get("containerStatuses", ())
        if status["ready"]
    }


def _kill_container(node: str, container: str) -> None:
    on_node(node, ["ctr", "--namespace", "k8s.io", "tasks", "kill", "--signal", "SIGKILL", container])
