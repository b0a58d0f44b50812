"""Local connections are connected with a stand-in of the API server's WebSocket, and WebSockets use the proxy."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from kubernetes.client import ApiClient, Configuration
from websocket import WebSocket

from rljob import port_forwarding
from rljob.errors import ClusterUnreachableError
from rljob.port_forwarding import PortForwarding
from rljob.websockets import open_websocket

SECONDS = 20


class StandInCluster:
    """Opens WebSockets whose other ends are at `peer`."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(SECONDS)

    def websocket(self, _path: str, _query: object) -> WebSocket:
        opened = WebSocket()
        opened.sock, opened.connected = socket.create_connection(self._server.getsockname()), True
        return opened

    def peer(self) -> socket.socket:
        """The other end of the next WebSocket."""
        accepted, _ = self._server.accept()
        accepted.settimeout(SECONDS)
        return accepted

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def cluster() -> Iterator[StandInCluster]:
    cluster = StandInCluster()
    yield cluster
    cluster.close()


@pytest.fixture
def address(cluster: StandInCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """The address of the local port. Only one connection at a time is served."""
    monkeypatch.setattr(port_forwarding, "MAX_CONNECTIONS", 1)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    with PortForwarding(cluster, listener, 8265, lambda _: None) as forwarding:  # type: ignore[arg-type]
        forwarding.use("/pods/head")
        yield address


def test_a_websocket_goes_through_the_proxy_of_the_configuration() -> None:
    """The functions that read it are no public interface of the package `kubernetes`."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        server.settimeout(SECONDS)

        def reject() -> bytes:
            accepted, _ = server.accept()
            with accepted:
                accepted.settimeout(SECONDS)
                request = accepted.recv(1 << 16)
                accepted.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
                return request

        request = pool.submit(reject)
        configuration = Configuration(host="https://kubernetes.example:6443")
        configuration.proxy = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ClusterUnreachableError):
            open_websocket(ApiClient(configuration), "/api/v1/namespaces/a/pods/b/exec", [], "kind", "")
        assert request.result(SECONDS).startswith(b"CONNECT kubernetes.example:6443 HTTP/1.1\r\n")


def read_to_end(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


def test_when_the_browser_closes_a_connection_the_pod_learns_it_and_the_next_one_is_served(
    cluster: StandInCluster, address: tuple[str, int]
) -> None:
    """The server in the pod keeps its side open."""
    for _ in range(2):
        with socket.create_connection(address) as browser:
            browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
            peer = cluster.peer()
            assert peer.recv(1 << 16)
        with peer:
            read_to_end(peer)
