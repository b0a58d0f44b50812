"""One API server for all tests here, with the generated CRD installed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from rljob_api.crdgen.manifest import custom_resource_definition
from rljob_testing.apiserver import ApiServer, running_apiserver

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
DISCOVERY = "/apis/rljob.dev/v1alpha1"


@pytest.fixture(scope="session")
def apiserver() -> Iterator[ApiServer]:
    """A running API server without any CRD of ours."""
    with running_apiserver() as server:
        yield server


@pytest.fixture(scope="session")
def api(apiserver: ApiServer) -> httpx.Client:
    """A client of the server, once the CRD is established and served."""
    answer = apiserver.http.post(CRDS, params={"fieldValidation": "Strict"}, json=custom_resource_definition())
    assert answer.status_code == 201, answer.text
    deadline = time.monotonic() + 30
    while apiserver.http.get(DISCOVERY).status_code != 200:
        assert time.monotonic() < deadline, "the CRD is not served after 30 s"
        time.sleep(0.1)
    return apiserver.http


@pytest.fixture(scope="session")
def apiserver_with_classes(apiserver: ApiServer) -> httpx.Client:
    """A client, once there are the classes of pods that random jobs name: others would be refused."""
    priority = {"metadata": {"name": "high"}, "value": 1}
    runtime = {"metadata": {"name": "nvidia"}, "handler": "nvidia"}
    apiserver.http.post("/apis/scheduling.k8s.io/v1/priorityclasses", json=priority).raise_for_status()
    apiserver.http.post("/apis/node.k8s.io/v1/runtimeclasses", json=runtime).raise_for_status()
    return apiserver.http
