"""Fixtures: one S3 server for all tests of this folder, and a proxy in front of it that injects faults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rljob_testing.buckets.clients import quick_client
from rljob_testing.buckets.fault_proxy import FaultProxy, fault_proxy
from rljob_testing.buckets.s3_server import S3Server, s3_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server. Each test uses folders of its own in the server's bucket."""
    with s3_server(tmp_path_factory.mktemp("objects")) as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def _client() -> Iterator[None]:
    """Credentials in the environment, only while tests of this folder run."""
    with quick_client():
        yield


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    """A proxy without faults at first."""
    with fault_proxy(server.port) as proxy:
        yield proxy
