"""Injects faults into the cluster."""

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
    """Kills the operator's process and waits until a new one is ready."""
    _kill_deployment(NAMESPACE, f"app.kubernetes.io/instance={RELEASE}")


def kill_kuberay() -> None:
    """Kills the process of KubeRay's operator and waits until a new one is ready."""
    _kill_deployment(KUBERAY_NAMESPACE, "app.kubernetes.io/component=kuberay-operator")


def kill_api_server() -> None:
    """Kills the API server's process and waits until the one that its kubelet starts responds."""
    node, container = _container("kube-system", "component=kube-apiserver")
    _kill_container(node, container)
    deadline = time.monotonic() + READY_SECONDS
    while not succeeds(["kubectl", "get", "nodes", "--request-timeout=5s"]):
        if time.monotonic() > deadline:
            raise CommandError(["kubectl", "get", "nodes"], 1, f"the API server is down after {READY_SECONDS} s")
        time.sleep(1)


@contextmanager
def stopped_node(node: str) -> Iterator[None]:
    """Stops a node, as after a power failure, and starts it at the end of the context."""
    run(["docker", "stop", "--time", "0", node])
    try:
        yield
    finally:
        run(["docker", "start", node])


@contextmanager
def paused_node(node: str) -> Iterator[None]:
    """Pauses all processes of a node and lets them continue at the end of the context."""
    run(["docker", "pause", node])
    try:
        yield
    finally:
        run(["docker", "unpause", node])


def _kill_deployment(namespace: str, selector: str) -> None:
    node, container = _container(namespace, selector)
    _kill_container(node, container)
    # If the container were restarted in place, the kubelet would wait longer after every kill. A new pod starts at
    # once.
    pods = [f"--selector={selector}", "--force", "--grace-period=0"]
    run(["kubectl", "--namespace", namespace, "delete", "pods", *pods])
    # The status of the Deployment may still describe the previous pod.
    deadline = time.monotonic() + READY_SECONDS
    while container in (found := _ready_containers(namespace, selector)) or not found:
        if time.monotonic() > deadline:
            raise CommandError(["kubectl", "get", "pods"], 1, f"{selector}: no ready pod after {READY_SECONDS} s")
        time.sleep(0.5)


def _container(namespace: str, selector: str) -> tuple[str, str]:
    """The node and the id of the only ready container."""
    [(container, node)] = _ready_containers(namespace, selector).items()
    return node, container


def _ready_containers(namespace: str, selector: str) -> dict[str, str]:
    """The ids of the ready containers, and the nodes of their pods."""
    command = ["kubectl", "--namespace", namespace, "get", "pods", f"--selector={selector}", "--output=json"]
    return {
        status["containerID"].removeprefix("containerd://"): pod["spec"]["nodeName"]
        for pod in json.loads(run(command))["items"]
        for status in pod["status"].get("containerStatuses", ())
        if status["ready"]
    }


def _kill_container(node: str, container: str) -> None:
    on_node(node, ["ctr", "--namespace", "k8s.io", "tasks", "kill", "--signal", "SIGKILL", container])
