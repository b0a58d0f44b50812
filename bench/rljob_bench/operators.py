"""Operators and their stand-ins as processes: ours, from this or another checkout, and KubeRay's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
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
    server: ApiServer,
    folder: Path,
    dashboards: str,
    checkout: Path = REPOSITORY,
    settings: Mapping[str, str] | None = None,
) -> Iterator[int]:
    """Runs our operator from a checkout for all namespaces until the end of the context. Yields its process id.
    `settings`: more environment variables."""
    folder.mkdir(parents=True, exist_ok=True)
    token = forked_operator.prepare_account(server)
    setup = forked_operator.OperatorSetup(
        folder, server.url, server.certificate, token, dashboards, [], dict(settings or {})
    )
    described = OperatorProcess(setup)
    sources = os.pathsep.join(str(checkout / each / "src") for each in ("crds", "operator"))
    environment = dict(described.environment) | {"PYTHONPATH": sources}
    with (
        (folder / "operator.log").open("ab") as log,
        _process([sys.executable, "-m", "rljob_operator"], environment, log) as process,
    ):
        _wait_until_answered(process, f"http://127.0.0.1:{described.health_port}/healthz", folder / "operator.log")
        yield process.pid


@contextmanager
def ray_stand_in(server: ApiServer, folder: Path) -> Iterator[str]:
    """Runs `rljob_bench.ray_stand_in` until the end of the context. Yields the URL template of the dashboards."""
    [port] = free_ports(1)
    connection = {"url": server.url, "token": server.token, "certificate": str(server.certificate)}
    with (
        (folder / "stand-in.log").open("wb") as log,
        _process(
            [sys.executable, "-m", "rljob_bench.ray_stand_in", str(port)], _our_paths(), log, connection
        ) as process,
    ):
        _wait_until_answered(process, f"http://127.0.0.1:{port}/-/-/-", folder / "stand-in.log", 401)
        yield f"http://127.0.0.1:{port}/{{namespace}}/{{cluster}}"


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


def peak_mib(process_id: int) -> float:
    """The largest resident memory of a process so far, in MiB."""
    return _memory_mib(process_id, "VmHWM")


def resident_mib(process_id: int) -> float:
    """The resident memory of a process now, in MiB."""
    return _memory_mib(process_id, "VmRSS")


def _memory_mib(process_id: int, field: str) -> float:
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def _our_paths() -> dict[str, str]:
    """The environment with this process's folders of Python modules."""
    return {**inherited_environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@contextmanager
def _process(
    command: list[str], environment: dict[str, str], log: Any, document: object = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`document`: JSON for the process's standard input."""
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT)
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(document).encode())
        process.stdin.close()
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_answered(process: subprocess.Popen[bytes], url: str, log: Path, status: int = 200) -> None:
    deadline = time.monotonic() + SERVED_SECONDS
    while True:
        try:
            # Without certificates, because loading them takes long.
            if httpx.get(url, timeout=5, trust_env=False, verify=False).status_code == status:
                return
        except httpx.TransportError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError(f"{url} does not respond; the log {log} ends with: {log.read_text()[-2000:]}")
        time.sleep(0.05)
