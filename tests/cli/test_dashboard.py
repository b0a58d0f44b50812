"""`rljob dashboard` on a real API server; the stand-in kubelet connects the port of the pod with a server here."""

from __future__ import annotations

import base64
import io
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer

import certifi
import httpx
import pytest
import websocket
from rich.console import Console

from rljob.cluster import ClusterOptions, connect
from rljob.errors import ClusterError
from rljob.polling import Clock
from rljob_api.constants import ANNOTATION_RETRY
from rljob_cli.cluster.dashboard import show_dashboard
from rljob_cli.errors import CliError
from rljob_operator.manifests.naming import secret_name
from rljob_testing.cli.job_cluster import NODE, JobCluster, StandInKubelet
from rljob_testing.local_servers import QuietHandler, free_port, running_http_server

pytestmark = pytest.mark.apiserver

SINCE = "2026-11-27T12:00:00Z"
TOKEN = "0123456789abcdef"
CLUSTER_UID = "11111111-2222-3333-4444-555555555555"
FAILED = {"outcome": "Failed", "reason": "StoppedByUser", "at": SINCE}
RUNNING = {"running": {"startedAt": SINCE}}


@pytest.fixture
def dashboard(kubelet: StandInKubelet) -> Iterator[ThreadingHTTPServer]:
    """A server that answers 401 without the token, and otherwise 1 MB."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            body = b"x" * 1_000_000 if is_known else b"no token"
            self.send_response(200 if is_known else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with running_http_server(server):
        kubelet.ports[8265] = server.server_address[1]
        yield server


def create_head(cluster: JobCluster, attempt: int = 1, *, owner: str = "", secret: str = "") -> None:
    """Creates the head pod of an attempt, which refers to its token's Secret. `owner`, `secret`: UID and name instead
    of those of the attempt."""
    uid = cluster.http.get(f"{cluster.jobs}/small").json()["metadata"]["uid"]
    labels = {"rljob.dev/job-uid": uid, "ray.io/node-type": "head", "ray.io/cluster": f"small-{attempt}"}
    secret = secret or secret_name(f"small-{attempt}", uid, "0123abcd")
    reference = {"secretKeyRef": {"name": secret, "key": "auth_token"}}
    container = {"name": "ray", "image": "x", "env": [{"name": "RAY_AUTH_TOKEN", "valueFrom": reference}]}
    core = f"/api/v1/namespaces/{cluster.namespace}"
    owners = [
        {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": f"small-{attempt}", "uid": owner or CLUSTER_UID}
    ]
    metadata = {"name": f"head-{attempt}", "labels": labels, "ownerReferences": owners}
    pod = {"metadata": metadata, "spec": {"nodeName": NODE}}
    pod["spec"]["containers"] = [container]  # type: ignore[index]
    cluster.http.post(f"{core}/pods", json=pod).raise_for_status()
    status = {"name": "ray", "image": "x", "imageID": "", "ready": True, "restartCount": 0, "state": RUNNING}
    cluster.write_pod_status(f"head-{attempt}", {"phase": "Running", "containerStatuses": [status]})
    data = {"auth_token": base64.b64encode(TOKEN.encode()).decode()}
    cluster.http.post(f"{core}/secrets", json={"metadata": {"name": secret}, "data": data}).raise_for_status()
    known = {"clusterUid": CLUSTER_UID, "started": SINCE}
    attempts = [{"number": number, "cluster": f"small-{number}", **known} for number in range(1, attempt + 1)]
    cluster.write_status("small", {"attempts": attempts})


@dataclass
class Command:
    """Runs the command, and at each of its polls the next of `steps`; then Ctrl-C."""

    cluster: JobCluster
    steps: list[Callable[[], object]] = field(default_factory=list)
    output: io.StringIO = field(default_factory=io.StringIO)

    def run(self, port: int | None = None) -> int:
        console = Console(file=self.output, width=200)
        cluster = connect(ClusterOptions(kubeconfig=self.cluster.kubeconfig))
        return show_dashboard(cluster, "small", port, console, Clock(sleep=self._sleep))

    @property
    def url(self) -> str:
        return str(re.findall(r"http://\S+", self.output.getvalue())[-1])

    def _sleep(self, _: float) -> None:
        if not self.steps:
            raise KeyboardInterrupt
        self.steps.pop(0)()


@pytest.fixture
def command(small: JobCluster) -> Command:
    return Command(small)


def get(url: str, token: str | None = TOKEN) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.get(url, headers=headers, trust_env=False, timeout=10)


@pytest.mark.usefixtures("dashboard")
def test_the_url_and_the_token_lead_to_the_dashboard(command: Command) -> None:
    create_head(command.cluster)

    def visit() -> None:
        assert get(command.url, token=None).status_code == 401
        assert len(get(command.url).content) == 1_000_000

    command.steps = [visit]
    assert command.run() == 0
    assert f"token: {TOKEN}" in command.output.getvalue()
    assert command.url.startswith("http://127.0.0.1:")
    with pytest.raises(httpx.ConnectError):
        get(command.url)


@pytest.mark.usefixtures("dashboard")
def test_a_secret_that_is_not_the_operators_is_not_printed(command: Command) -> None:
    create_head(command.cluster, secret="registry-password")
    assert command.run() == 0
    assert TOKEN not in command.output.getvalue()
    assert "takes its token from registry-password, which is not the operator's Secret" in command.output.getvalue()


def test_a_pod_that_only_has_the_labels_of_a_head_pod_is_none(command: Command) -> None:
    create_head(command.cluster, owner="99999999-2222-3333-4444-555555555555")
    with pytest.raises(CliError, match="has no running head pod"):
        command.run()


def test_a_websocket_has_a_time_limit_of_its_own_and_checks_the_certificate(command: Command) -> None:
    create_head(command.cluster)
    cluster = connect(ClusterOptions(kubeconfig=command.cluster.kubeconfig))
    path, query = f"/api/v1/namespaces/{command.cluster.namespace}/pods/head-1/portforward", [("ports", "8265")]
    opened = cluster.websocket(path, query)
    assert opened.sock is not None
    assert (opened.sock.gettimeout(), websocket.getdefaulttimeout()) == (30.0, None)
    opened.shutdown()  # type: ignore[no-untyped-call]
    text = command.cluster.kubeconfig.read_text()
    # The certificates of public servers.
    command.cluster.kubeconfig.write_text(text.replace(str(command.cluster.server.certificate), certifi.where()))
    cluster = connect(ClusterOptions(kubeconfig=command.cluster.kubeconfig))
    with pytest.raises(ClusterError, match="certificate is not trusted"):
        cluster.websocket(path, query)


@pytest.mark.usefixtures("dashboard")
def test_a_broken_connection_affects_only_itself(command: Command) -> None:
    create_head(command.cluster)

    def break_one() -> None:
        port = int(command.url.rpartition(":")[2])
        for request in (b"", b"GET / HT", b"\x16\x03\x01"):
            with socket.create_connection(("127.0.0.1", port)) as broken:
                broken.sendall(request)
        assert get(command.url).status_code == 200

    command.steps = [break_one]
    port = free_port()
    assert command.run(port) == 0
    assert command.url == f"http://127.0.0.1:{port}"


@pytest.mark.usefixtures("dashboard")
def test_the_same_port_leads_to_the_head_pod_of_the_next_attempt(command: Command, kubelet: StandInKubelet) -> None:
    create_head(command.cluster)

    def check() -> None:
        assert get(command.url).status_code == 200
        assert f"/portForward/{command.cluster.namespace}/head-2" in [path for path, _ in kubelet.asked]

    def without_head() -> None:
        with pytest.raises(httpx.TransportError):
            get(command.url)

    def retry() -> None:
        command.cluster.annotate("small", {ANNOTATION_RETRY: "now"})
        command.cluster.write_status("small", {"result": FAILED})

    command.steps = [
        lambda: command.cluster.delete_pod("head-1"),
        without_head,
        lambda: create_head(command.cluster, attempt=2),
        check,
        lambda: command.cluster.delete_pod("head-2"),
        retry,
        lambda: command.cluster.write_status(
            "small", {"result": {"outcome": "Succeeded", "reason": "Succeeded", "at": SINCE}}
        ),
        lambda: pytest.fail("the command goes on after the job has ended"),
    ]
    assert command.run() == 0
    output = command.output.getvalue()
    assert output.count("dashboard of pod head-1") == 1
    assert output.count("dashboard of pod head-2") == 1
    assert "waiting for the next one" in output
    assert "has ended" in output


def test_a_job_without_a_running_head_is_an_error_with_the_reason(command: Command) -> None:
    with pytest.raises(
        CliError, match="has no running head pod \\(the job has not started\\); see `rljob explain small"
    ):
        command.run()
    command.cluster.write_status("small", {"result": FAILED})
    with pytest.raises(CliError, match="has no running head pod \\(the job has ended"):
        command.run()


@pytest.mark.usefixtures("dashboard")
def test_when_the_job_is_deleted_the_command_ends(command: Command) -> None:
    create_head(command.cluster)
    command.steps = [lambda: command.cluster.delete("small")]
    assert command.run() == 0
    assert "small: was deleted" in command.output.getvalue()


@pytest.mark.usefixtures("dashboard")
def test_a_port_in_use_is_an_error(command: Command) -> None:
    create_head(command.cluster)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CliError, match=f"--port {port}: cannot be used"):
            command.run(port)


@pytest.mark.usefixtures("dashboard")
def test_without_permission_to_read_secrets_the_dashboard_is_open_and_the_message_says_why(
    command: Command,
) -> None:
    create_head(command.cluster)
    rules = [
        {"apiGroups": ["rljob.dev"], "resources": ["rljobs"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
        {"apiGroups": [""], "resources": ["pods/portforward"], "verbs": ["get", "create"]},
    ]
    token = command.cluster.account_token({"metadata": {"name": "visitor"}, "rules": rules})
    text = command.cluster.server.kubeconfig(token=token, namespace=command.cluster.namespace)
    command.cluster.kubeconfig.write_text(text)
    command.steps = [lambda: get(command.url).raise_for_status()]
    assert command.run() == 0
    assert 'cannot read the token (context here: permission denied (secrets "small-1-' in command.output.getvalue()
