"""Operators as processes, each with its own API server: ours, from this or another checkout, and KubeRay's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from ruamel.yaml import YAML

from rljob_testing.cluster.api_server import ApiServer
from rljob_testing.cluster.go_programs import ensure_program, module_folder
from rljob_testing.local_servers import free_ports
from rljob_testing.operator import forked_operator
from rljob_testing.operator.forked_operator import OperatorProcess
from rljob_testing.settings import inherited_environment

NUM_IN_FLIGHT = 16
SERVED_SECONDS = 30.0
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
REPOSITORY = Path(__file__).resolve().parents[2]


def read_yaml(path: Path) -> dict[str, Any]:
    """The only document of a file."""
    found: dict[str, Any] = YAML(typ="safe", pure=True).load(path.read_text())
    return found


def install_resources(server: ApiServer, checkout: Path = REPOSITORY) -> None:
    """Installs RLJob from a checkout, and KubeRay's RayCluster and RayJob; waits until all are served."""
    bases = module_folder("kuberay-operator") / "config" / "crd" / "bases"
    paths = {
        "/apis/rljob.dev/v1alpha1/rljobs": checkout / "crds" / "rljobs.yaml",
        "/apis/ray.io/v1/rayclusters": bases / "ray.io_rayclusters.yaml",
        "/apis/ray.io/v1/rayjobs": bases / "ray.io_rayjobs.yaml",
        "/apis/ray.io/v1/rayservices": bases / "ray.io_rayservices.yaml",
        "/apis/ray.io/v1/raycronjobs": bases / "ray.io_raycronjobs.yaml",
    }
    for file in paths.values():
        server.http.post(CRDS, json=read_yaml(file)).raise_for_status()
    deadline = time.monotonic() + SERVED_SECONDS
    while not all(server.http.get(path).status_code == 200 for path in paths):
        if time.monotonic() > deadline:
            raise TimeoutError(f"resources are not served after {SERVED_SECONDS:.0f} s")
        time.sleep(0.1)


def create_all(server: ApiServer, path: str, objects: list[dict[str, Any]]) -> None:
    """Creates the objects, several at a time."""

    def create(each: dict[str, Any]) -> None:
        server.http.post(path, json=each).raise_for_status()

    with ThreadPoolExecutor(NUM_IN_FLIGHT) as pool:
        list(pool.map(create, objects))


def wait_for_objects(server: ApiServer, path: str, number: int, seconds: float) -> None:
    """Waits until this number of objects exists. Requests only their metadata, which the server answers from its
    cache."""
    headers = {"Accept": "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"}
    deadline = time.monotonic() + seconds
    while True:
        listed = server.http.get(path, params={"resourceVersion": "0"}, headers=headers).raise_for_status().json()
        found = len(listed["items"] or [])
        if found >= number:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path}: {found} of {number} objects after {seconds:.0f} s")
        time.sleep(0.05)


@contextmanager
def our_operator(
    server: ApiServer, folder: Path, namespaces: list[str], dashboards: str, checkout: Path = REPOSITORY
) -> Iterator[int]:
    """Runs our operator from a checkout until the end of the context. Yields its process id."""
    folder.mkdir(parents=True, exist_ok=True)
    setup = forked_operator.OperatorSetup(
        folder, server.url, server.certificate, forked_operator.prepare_account(server), dashboards, namespaces, {}
    )
    described = OperatorProcess(setup)
    sources = os.pathsep.join(str(checkout / each / "src") for each in ("crds", "operator"))
    environment = dict(described.environment) | {"PYTHONPATH": sources}
    with (
        (folder / "operator.log").open("wb") as log,
        _process([sys.executable, "-m", "rljob_operator"], environment, log) as process,
    ):
        _wait_until_answered(process, f"http://127.0.0.1:{described.health_port}/healthz", folder / "operator.log")
        yield process.pid


@contextmanager
def kuberay_operator(server: ApiServer, folder: Path, *arguments: str) -> Iterator[int]:
    """Runs KubeRay's operator until the end of the context. Yields its process id."""
    folder.mkdir(parents=True, exist_ok=True)
    setup = forked_operator.OperatorSetup(folder, server.url, server.certificate, server.token, "", [], {})
    metrics, probes = free_ports(2)
    command = [
        str(ensure_program("kuberay-operator")),
        f"--kubeconfig={setup.kubeconfig()}",
        f"--metrics-addr=127.0.0.1:{metrics}",
        f"--health-probe-bind-address=127.0.0.1:{probes}",
        "--enable-leader-election=false",
        *arguments,
    ]
    with (folder / "kuberay.log").open("wb") as log, _process(command, inherited_environment(), log) as process:
        _wait_until_answered(process, f"http://127.0.0.1:{probes}/readyz", folder / "kuberay.log")
        yield process.pid


def cpu_seconds(process_id: int) -> float:
    """User and system CPU time of a process so far."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(process_id: int) -> float:
    """Resident memory of a process in MiB."""
    return int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def _process(command: list[str], environment: dict[str, str], log: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_answered(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + SERVED_SECONDS
    while True:
        try:
            if httpx.get(url, timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError(f"{url} does not respond; the log {log} ends with: {log.read_text()[-2000:]}")
        time.sleep(0.05)
