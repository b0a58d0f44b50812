"""A real kube-apiserver with etcd for the length of a test session, and watches that wake a waiting test.

No controllers and no kubelets run: objects are stored, validated, defaulted and served exactly as on a cluster, and
nothing acts on them. All files are in a temporary folder, and all ports are on the loopback interface.
"""

from __future__ import annotations

import json
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from rljob_testing.cluster.go_programs import BuildError, ensure_program
from rljob_testing.local_servers import free_ports, shut_down
from rljob_testing.process_tree import signal_when_parent_dies
from rljob_testing.settings import kubebuilder_assets

START_DEADLINE_SECONDS = 60.0
STOP_DEADLINE_SECONDS = 10.0
WATCH_AGAIN_SECONDS = 0.2
"""Pause before a watch is restarted. A watch ends when the server stops or its resource is not served."""
EVERYWHERE = ""
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class ServerError(Exception):
    """A server did not start."""


@dataclass(frozen=True)
class ApiServer:
    """A running API server and the credentials of a cluster administrator."""

    url: str
    token: str
    certificate: Path
    """The server's own certificate, which is also the one that clients trust."""
    http: httpx.Client
    """Client that sends the token and trusts the certificate. Paths are relative to `url`; a patch is a merge patch."""
    program: Program
    """The server process. A test may stop and restart it; stored objects stay."""
    store_url: str
    """URL of etcd, which also accepts JSON (below `/v3/kv`)."""

    def kubeconfig(self, *, url: str | None = None, token: str | None = None, namespace: str = "default") -> str:
        """A kubeconfig (text) for an administrator of this server. Arguments replace its values."""
        return kubeconfig_text(url or self.url, self.certificate, token or self.token, namespace)


def kubeconfig_text(url: str, certificate: Path | None, token: str, namespace: str = "default") -> str:
    """A kubeconfig (text) with one context, `here`, written as JSON. `certificate`: None for plain HTTP."""
    trusted = {"certificate-authority": str(certificate)} if certificate is not None else {}
    context = {"cluster": "here", "user": "me", "namespace": namespace}
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": url, **trusted}}],
            "contexts": [{"name": "here", "context": context}],
            "users": [{"name": "me", "user": {"token": token}}],
        }
    )


@contextmanager
def running_apiserver(*arguments: str) -> Iterator[ApiServer]:
    """Starts etcd and kube-apiserver with additional arguments, yields when the server is ready, stops both.

    The programs come from KUBEBUILDER_ASSETS if that is set, else they are built (and cached). Raises BuildError or
    ServerError, with the end of the server's log.
    """
    etcd, apiserver = _program("etcd"), _program("kube-apiserver")
    started = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rljob-apiserver-")))
        etcd_port, peer_port, port = free_ports(3)
        etcd_url = f"http://127.0.0.1:{etcd_port}"
        store = Program(_etcd_command(etcd, folder, etcd_url, peer_port), folder / "etcd.log")
        stack.callback(store.stop)
        store.start()
        token = secrets.token_hex(16)
        command = _apiserver_command(apiserver, folder, etcd_url, port, token)
        program = Program([*command, *arguments], folder / "kube-apiserver.log")
        stack.callback(program.stop)
        program.start()
        http = stack.enter_context(_client(program, folder, f"https://127.0.0.1:{port}", token))
        wait_until_ready(program, http)
        seconds = time.monotonic() - started
        print(f"[rljob tests] kube-apiserver ready after {seconds:.1f} s on port {port}", file=sys.stderr, flush=True)
        yield ApiServer(
            url=str(http.base_url),
            token=token,
            certificate=_certificate(folder),
            http=http,
            program=program,
            store_url=etcd_url,
        )


def _program(name: str) -> Path:
    assets = kubebuilder_assets()
    if assets is None:
        return ensure_program(name)
    if not (assets / name).is_file():
        raise BuildError(f"KUBEBUILDER_ASSETS: {assets} has no {name}; unset it to build the program instead")
    return assets / name


def _etcd_command(program: Path, folder: Path, url: str, peer_port: int) -> list[str]:
    return [
        str(program),
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
        "--unsafe-no-fsync",
    ]


def _apiserver_command(program: Path, folder: Path, etcd_url: str, port: int, token: str) -> list[str]:
    (folder / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
    key = folder / "service-accounts.key"
    key.write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
    )
    return [
        str(program),
        f"--etcd-servers={etcd_url}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={folder / 'certificates'}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        # Without the controller that creates the default service account, this plugin would reject every pod.
        "--disable-admission-plugins=ServiceAccount",
        "--service-cluster-ip-range=10.0.0.0/24",
    ]


def _certificate(folder: Path) -> Path:
    """Path at which the server writes its self-signed certificate."""
    return folder / "certificates" / "apiserver.crt"


@contextmanager
def _client(program: Program, folder: Path, url: str, token: str) -> Iterator[httpx.Client]:
    """A client that trusts the server. Waits for the certificate: its file exists before it has content."""
    deadline = time.monotonic() + START_DEADLINE_SECONDS
    while not _certificate(folder).is_file() or not _certificate(folder).stat().st_size:
        program.check(deadline)
        time.sleep(0.1)
    context = ssl.create_default_context(cafile=str(_certificate(folder)))
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=url, headers=headers, verify=context, timeout=30.0, trust_env=False) as http:
        http.event_hooks["request"] = [_make_merge_patch]
        yield http


def _make_merge_patch(request: httpx.Request) -> None:
    """Makes a patch without its own content type a merge patch, the only type that the server accepts as plain JSON."""
    if request.method == "PATCH" and request.headers["Content-Type"] == "application/json":
        request.headers["Content-Type"] = "application/merge-patch+json"


def wait_until_ready(program: Program, http: httpx.Client) -> None:
    """Waits until `/readyz` succeeds. Raises ServerError."""
    deadline = time.monotonic() + START_DEADLINE_SECONDS
    while True:
        program.check(deadline)
        try:
            if http.get("/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)


def install_definition(http: httpx.Client, definition: Mapping[str, Any]) -> None:
    """Creates a CustomResourceDefinition if it does not exist, and waits until its resource is served."""
    answer = http.post(DEFINITIONS, params={"fieldValidation": "Strict"}, json=definition)
    assert answer.status_code in (201, 409), answer.text
    spec = definition["spec"]
    path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
    deadline = time.monotonic() + START_DEADLINE_SECONDS
    while http.get(path).status_code != 200:
        assert time.monotonic() < deadline, f"{path} is not served after {START_DEADLINE_SECONDS:g} s"
        time.sleep(0.05)


def create_namespace(server: ApiServer) -> str:
    """Creates a namespace with a new name and returns the name."""
    answer = server.http.post("/api/v1/namespaces", json={"metadata": {"generateName": "jobs-"}})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["metadata"]["name"])


class Program:
    """A server process that writes to a log file and can be restarted."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process without waiting for anything."""
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._log.parent,
                preexec_fn=signal_when_parent_dies(signal.SIGKILL),
            )

    def stop(self) -> None:
        """Terminates the process, and kills it if it does not end in time."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """Kills the process at once; clients see their connections break."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def check(self, deadline: float) -> None:
        """Raises ServerError with the end of the log if the process has ended or `deadline` (time.monotonic) has
        passed."""
        exit_code = self._process.poll() if self._process is not None else None
        if exit_code is not None or time.monotonic() > deadline:
            name = Path(self._command[0]).name
            raise ServerError(f"{name}: not ready (exit code {exit_code}): {self._log.read_text()[-4000:]}")


class ObjectChanges:
    """Watches all objects below some API paths and wakes waiting threads at each change, so that nobody polls.

    Only the owner calls `watch` and `stop`; any thread may call the other methods.
    """

    def __init__(self, http: httpx.Client, paths: Sequence[str]) -> None:
        self._http = http
        self._changed = threading.Condition()
        self._numbers: Counter[str] = Counter()
        self._sockets: dict[str, socket.socket] = {}
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._watch, args=(path,), daemon=True) for path in paths]

    def watch(self) -> None:
        """Starts the watches without waiting for them."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends all watches. A server that stops would wait for them."""
        self._stopped.set()
        for each in list(self._sockets.values()):
            shut_down(each)
        self.notify(EVERYWHERE)

    def notify(self, namespace: str) -> None:
        """Records a change in a namespace and wakes all waiting threads."""
        with self._changed:
            self._numbers.update({namespace, EVERYWHERE})
            self._changed.notify_all()

    def count(self, namespace: str) -> int:
        """Number of changes until now, in a namespace or EVERYWHERE."""
        with self._changed:
            return self._numbers[namespace]

    def wait(self, namespace: str, number: int, seconds: float) -> None:
        """Waits until there were more than `number` changes, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._numbers[namespace] > number, seconds)

    def _watch(self, path: str) -> None:
        query = {**httpx.URL(path).params, "watch": "1"}
        while not self._stopped.is_set():
            with (
                suppress(httpx.HTTPError),
                self._http.stream("GET", path, params=query, timeout=httpx.Timeout(30.0, read=None)) as answer,
            ):
                self._sockets[path] = answer.extensions["network_stream"].get_extra_info("socket")
                for line in answer.iter_lines():
                    if answer.status_code != 200 or self._stopped.is_set():
                        break
                    self.notify(json.loads(line)["object"].get("metadata", {}).get("namespace", EVERYWHERE))
            self._stopped.wait(WATCH_AGAIN_SECONDS)
