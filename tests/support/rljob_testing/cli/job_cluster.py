"""A namespace on a real API server, with jobs, pods and events, and a stand-in kubelet that serves logs, programs and
ports of pods.

No controller runs. Tests write what the operator, the scheduler and the kubelet would write.
"""

from __future__ import annotations

import itertools
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from ruamel.yaml import YAML

from rljob_testing.certificates import self_signed_certificate
from rljob_testing.cli.pod_streams import ServerSocket, serve_port, serve_program
from rljob_testing.cli.rljob_command import SMALL_JOB
from rljob_testing.cluster.api_server import ApiServer
from rljob_testing.cluster.job_requests import JobNamespace
from rljob_testing.local_servers import QuietHandler, running_http_server
from rljob_testing.settings import inherited_environment

NODE = "stand-in"
_NUMBERS = itertools.count(1)
Json = dict[str, object]


@dataclass(frozen=True)
class JobCluster(JobNamespace):
    """A namespace that no other test uses, and a kubeconfig that selects it."""

    kubeconfig: Path

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a process whose `kubectl` and `rljob` commands use this namespace."""
        return inherited_environment() | {"KUBECONFIG": str(self.kubeconfig)}

    def account_token(self, role: Mapping[str, object] | None = None) -> str:
        """Creates a service account called `visitor` and returns a token of it. `role`: a Role to create and to bind to
        it."""
        account, accounts = "visitor", f"/api/v1/namespaces/{self.namespace}/serviceaccounts"
        self.http.post(accounts, json={"metadata": {"name": account}}).raise_for_status()
        if role is not None:
            rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{self.namespace}"
            made = self.http.post(f"{rbac}/roles", params={"fieldValidation": "Strict"}, json=role)
            reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role"}
            binding = {
                "metadata": {"name": account},
                "roleRef": reference | {"name": made.raise_for_status().json()["metadata"]["name"]},
                "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": self.namespace}],
            }
            self.http.post(f"{rbac}/rolebindings", json=binding).raise_for_status()
        answer = self.http.post(f"{accounts}/{account}/token", json={"spec": {"expirationSeconds": 3600}})
        return str(answer.raise_for_status().json()["status"]["token"])

    def create_job(self, job: Mapping[str, object]) -> Json:
        """Creates a job on the API server and returns the stored object."""
        answer = self.http.post(self.jobs, params={"fieldValidation": "Strict"}, json=job)
        assert answer.status_code == 201, answer.text
        return _object(answer.json())

    def create_small_job(self, more: str = "", num_nodes: int = 1) -> Json:
        """Creates the job of SMALL_JOB with this number of nodes. `more`: YAML lines that are added at its end."""
        text = SMALL_JOB.replace("nodes: 1", f"nodes: {num_nodes}") + more
        return self.create_job(YAML(typ="safe", pure=True).load(text))

    def write_status(self, name: str, status: Mapping[str, object]) -> None:
        """Replaces parts of a job's status, as the operator does."""
        params = {"fieldValidation": "Strict"}
        path = f"{self.jobs}/{name}/status"
        answer = self.http.patch(path, params=params, json={"status": status})
        assert answer.status_code == 200, answer.text

    def annotate(self, name: str, annotations: Mapping[str, str]) -> None:
        """Adds annotations to a job."""
        self.change(name, {"metadata": {"annotations": annotations}})

    def create_pod(
        self,
        name: str,
        labels: Mapping[str, str],
        containers: Sequence[str],
        status: Mapping[str, object],
        node: str = NODE,
    ) -> None:
        """Stores a pod on the stand-in node, with the status that a kubelet would report. `node`: empty for a pod that
        the scheduler has not placed."""
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        spec = {"nodeName": node, "containers": [{"name": each, "image": "none"} for each in containers]}
        pod = {"metadata": {"name": name, "labels": dict(labels)}, "spec": spec}
        self.http.post(path, json=pod).raise_for_status()
        self.write_pod_status(name, status)

    def write_pod_status(self, name: str, status: Mapping[str, object]) -> None:
        """Merges these fields into a pod's status."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/status"
        answer = self.http.patch(path, json={"status": status})
        assert answer.status_code == 200, answer.text

    def delete_pod(self, name: str) -> None:
        """Deletes a pod without a grace period."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}"
        self.http.delete(path, params={"gracePeriodSeconds": "0"}).raise_for_status()

    def warn(self, kind: str, name: str, reason: str, message: str, *, count: int, seen: str) -> None:
        """Creates a Warning event about an object."""
        about = {"kind": kind, "name": name, "namespace": self.namespace}
        event = {
            "metadata": {"generateName": "e-"},
            "involvedObject": about,
            "type": "Warning",
            "reason": reason,
            "message": message,
            "count": count,
            "firstTimestamp": seen,
            "lastTimestamp": seen,
        }
        self.http.post(f"/api/v1/namespaces/{self.namespace}/events", json=event).raise_for_status()


def new_namespace(server: ApiServer, folder: Path) -> JobCluster:
    """Creates a namespace, and a kubeconfig for it in `folder`."""
    name = f"team-{next(_NUMBERS)}"
    server.http.post("/api/v1/namespaces", json={"metadata": {"name": name}}).raise_for_status()
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(server.kubeconfig(namespace=name))
    return JobCluster(server, name, kubeconfig)


@dataclass
class StandInKubelet:
    """Serves container logs to the API server, which passes them on."""

    logs: dict[str, list[bytes]] = field(default_factory=dict)
    """Log text by `namespace/pod/container`, in the pieces in which it is sent."""
    asked: list[tuple[str, dict[str, list[str]]]] = field(default_factory=list)
    """Path and query of every request, in order."""
    more: threading.Event = field(default_factory=threading.Event)
    """A request with `follow` gets the last piece only when this event is set."""
    mounts: dict[str, Path] = field(default_factory=dict)
    """The folder of this machine for a path in all pods: programs get it instead in their arguments."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of programs, beside those of this process."""
    break_after: list[int] = field(default_factory=list)
    """The next programs lose their connection after so many bytes of output."""
    ports: dict[int, int] = field(default_factory=dict)
    """The port of this machine for a port of all pods."""

    def serve_stream(self, handler: BaseHTTPRequestHandler, path: str, query: Mapping[str, list[str]]) -> None:
        """Runs a program, or connects a port."""
        stream = ServerSocket(handler)
        if path.startswith("/exec/"):
            command = [str(self.mounts.get(part, part)) for part in query["command"]]
            serve_program(stream, command, self.environment, self.break_after.pop(0) if self.break_after else None)
        else:
            port = int(query["port"][0])
            serve_port(stream, port, self.ports[port])


@contextmanager
def running_kubelet(server: ApiServer, folder: Path) -> Iterator[StandInKubelet]:
    """Registers a node whose kubelet is an HTTPS server in this process."""
    kubelet = StandInKubelet()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # The API server of these tests trusts any kubelet.
    context.load_cert_chain(self_signed_certificate(folder / "kubelet.pem", NODE))
    http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(kubelet))
    http.socket = context.wrap_socket(http.socket, server_side=True)
    with running_http_server(http):
        _announce_node(server, http.server_address[1])
        try:
            yield kubelet
        finally:
            kubelet.more.set()


def _announce_node(server: ApiServer, port: int) -> None:
    server.http.post("/api/v1/nodes", json={"metadata": {"name": NODE}}).raise_for_status()
    status = {
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
    }
    server.http.patch(f"/api/v1/nodes/{NODE}/status", json={"status": status}).raise_for_status()


def _handler(kubelet: StandInKubelet) -> type[BaseHTTPRequestHandler]:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            query = parse_qs(url.query)
            kubelet.asked.append((url.path, query))
            if self.headers.get("Upgrade", "").lower() == "websocket":
                kubelet.serve_stream(self, url.path, query)
                return
            pieces = kubelet.logs.get(url.path.removeprefix("/containerLogs/"))
            if pieces is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for number, piece in enumerate(pieces, start=1):
                if query.get("follow") == ["true"] and number == len(pieces):
                    kubelet.more.wait(30)
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")

    return Handler


def _object(value: object) -> Json:
    assert isinstance(value, dict), value
    return value
