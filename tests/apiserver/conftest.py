"""One API server for all tests here, with the generated CRD installed."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from rljob_api.crdgen.manifest import custom_resource_definition
from rljob_testing.cluster.api_server import ApiServer, install_definition, running_apiserver


@pytest.fixture(scope="session")
def apiserver() -> Iterator[ApiServer]:
    """A running API server without any CRD of ours."""
    with running_apiserver() as server:
        yield server


@pytest.fixture(scope="session")
def api(apiserver: ApiServer) -> httpx.Client:
    """A client of the server, once the CRD is established and served."""
    install_definition(apiserver.http, custom_resource_definition())
    return apiserver.http


@pytest.fixture(scope="session")
def apiserver_with_classes(apiserver: ApiServer) -> httpx.Client:
    """A client, once the classes of pods exist that random jobs name: pods of other classes would be rejected."""
    priority = {"metadata": {"name": "high"}, "value": 1}
    runtime = {"metadata": {"name": "nvidia"}, "handler": "nvidia"}
    apiserver.http.post("/apis/scheduling.k8s.io/v1/priorityclasses", json=priority).raise_for_status()
    apiserver.http.post("/apis/node.k8s.io/v1/runtimeclasses", json=runtime).raise_for_status()
    return apiserver.http
