"""Fixtures: one API server for all tests of the operator, with stand-ins for KubeRay and for Ray's dashboards. The
operator's processes have the permissions of its service account only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rljob_api.crdgen.manifest import custom_resource_definition
from rljob_testing.cluster.api_server import ApiServer, install_definition, running_apiserver
from rljob_testing.operator import forked_operator
from rljob_testing.operator.api_proxy import ApiProxy, running_proxy
from rljob_testing.operator.forked_operator import OperatorProcess
from rljob_testing.operator.kuberay_stand_in import KubeRayStandIn, install_ray_cluster_resource, kuberay_stand_in
from rljob_testing.operator.ray_dashboard_stand_in import RayDashboardStandIn, ray_dashboard_stand_in
from rljob_testing.operator.testbed import Testbed, new_testbed


@pytest.fixture(scope="session")
def bare_server() -> Iterator[ApiServer]:
    """An API server with the resource RLJob."""
    with running_apiserver() as server:
        install_definition(server.http, custom_resource_definition())
        yield server


@pytest.fixture(scope="session")
def server(bare_server: ApiServer) -> ApiServer:
    """An API server with the resources RLJob and RayCluster."""
    install_ray_cluster_resource(bare_server.http)
    return bare_server


@pytest.fixture(scope="session")
def account_token(bare_server: ApiServer) -> str:
    """A token of the operator's service account."""
    return forked_operator.prepare_account(bare_server)


@pytest.fixture(scope="session")
def kuberay(bare_server: ApiServer) -> Iterator[KubeRayStandIn]:
    """The stand-in for KubeRay, active in all namespaces."""
    with kuberay_stand_in(bare_server) as stand_in:
        yield stand_in


@pytest.fixture(scope="session")
def dashboards(bare_server: ApiServer) -> Iterator[RayDashboardStandIn]:
    """The stand-in for the dashboards of all clusters."""
    with ray_dashboard_stand_in(bare_server) as stand_in:
        yield stand_in


@pytest.fixture
def testbed(
    server: ApiServer,
    kuberay: KubeRayStandIn,
    dashboards: RayDashboardStandIn,
    account_token: str,
    tmp_path: Path,
) -> Testbed:
    """A namespace without an operator; operators that are started there use short pauses."""
    return new_testbed(server, kuberay, dashboards, account_token, tmp_path)


@pytest.fixture(scope="module")
def module_testbed(
    server: ApiServer,
    kuberay: KubeRayStandIn,
    dashboards: RayDashboardStandIn,
    account_token: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Testbed:
    """The same, shared by all tests of a module."""
    return new_testbed(server, kuberay, dashboards, account_token, tmp_path_factory.mktemp("operator"))


@pytest.fixture
def proxy(testbed: Testbed) -> Iterator[ApiProxy]:
    """A proxy before the API server; `testbed.with_server_url(proxy.url)` makes operators use it."""
    with running_proxy(testbed.server) as proxy:
        yield proxy


@pytest.fixture
def operator(testbed: Testbed) -> Iterator[OperatorProcess]:
    """A running operator for that namespace."""
    with testbed.operator().running() as process:
        yield process
