"""Helm, and one API server for all tests here that need one."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from rljob_testing.cluster import charts
from rljob_testing.cluster.api_server import ApiServer, running_apiserver
from rljob_testing.cluster.go_programs import ensure_program

JOB_NAMESPACES = ("team-a", "team-b", "others")


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> charts.Helm:
    """Helm without a cluster."""
    return charts.Helm(ensure_program("helm"), tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def server() -> Iterator[ApiServer]:
    """A running API server with the namespaces that the tests use."""
    with running_apiserver() as server:
        for name in (charts.NAMESPACE, *JOB_NAMESPACES):
            namespace = {"metadata": {"name": name, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
            server.http.post("/api/v1/namespaces", json=namespace).raise_for_status()
        yield server


@pytest.fixture(scope="session")
def http(server: ApiServer) -> httpx.Client:
    """An administrator's client of the server."""
    return server.http
