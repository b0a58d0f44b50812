"""A real kube-apiserver with its etcd, for the length of a test session.

No controllers, no kubelets: objects are stored, validated, defaulted and served exactly as on a cluster, and nothing
acts on them. Everything lives in a temporary folder and on loopback ports.
"""

from __future__ import annotations

import secrets
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from rljob_testing.go_programs import BuildError, ensure_program
from rljob_testing.settings import kubebuilder_assets

START_DEADLINE_SECONDS = 60.0
STOP_DEADLINE_SECONDS = 10.0


class ServerError(Exception):
    """A server did not start."""


@dataclass(frozen=True)
class ApiServer:
    """A running API server and the credentials of a cluster administrator."""

    url: str
    token: str
    certificate: Path
    """The server's own certificate, which is also the one to trust."""
    http: httpx.Client
    """Sends the token and trusts the certificate; paths are relative to `url`."""


@contextmanager
def running_apiserver() -> Iterator[ApiServer]:
    """Starts etcd and kube-apiserver, yields when the server is ready, stops both.

    The programs come from KUBEBUILDER_ASSETS if that is set, else they are built (and cached). Raises BuildError or
    ServerError, with the end of the server's log.
    """
    etcd, apiserver = _program("etcd"), _program("kube-apiserver")
    started = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rljob-apiserver-")))
        etcd_port, peer_port, port = _free_ports(3)
        etcd_url = f"http://127.0.0.1:{etcd_port}"
        stack.enter_context(_running(_etcd_command(etcd, folder, etcd_url, peer_port), folder / "etcd.log"))
        token = secrets.token_hex(16)
        command = _apiserver_command(apiserver, folder, etcd_url, port, token)
        process = stack.enter_context(_running(command, folder / "kube-apiserver.log"))
        http = stack.enter_context(_ready_client(process, folder, f"https://127.0.0.1:{port}", token))
        seconds = time.monotonic() - started
        print(f"[rljob tests] kube-apiserver ready after {seconds:.1f} s on port {port}", file=sys.stderr, flush=True)
        yield ApiServer(url=str(http.base_url), token=token, certificate=_certificate(folder), http=http)


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
        # Without the controller that makes the default service account, this plugin would refuse every pod.
        "--disable-admission-plugins=ServiceAccount",
        "--service-cluster-ip-range=10.0.0.0/24",
    ]


def _certificate(folder: Path) -> Path:
    """Where the server writes the certificate that it signs for itself."""
    return folder / "certificates" / "apiserver.crt"


@contextmanager
def _ready_client(process: subprocess.Popen[bytes], folder: Path, url: str, token: str) -> Iterator[httpx.Client]:
    """Waits until the server says that it is ready."""
    deadline = time.monotonic() + START_DEADLINE_SECONDS
    log = folder / "kube-apiserver.log"
    while not _certificate(folder).is_file():
        _check_alive(process, log, deadline)
        time.sleep(0.1)
    context = ssl.create_default_context(cafile=str(_certificate(folder)))
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=url, headers=headers, verify=context, timeout=30.0, trust_env=False) as http:
        while True:
            _check_alive(process, log, deadline)
            try:
                if http.get("/readyz").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        yield http


def _check_alive(process: subprocess.Popen[bytes], log: Path, deadline: float) -> None:
    if process.poll() is not None or time.monotonic() > deadline:
        raise ServerError(f"kube-apiserver: not ready (exit code {process.returncode}): {log.read_text()[-4000:]}")


@contextmanager
def _running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child process that is stopped, and killed if it does not stop, when the context ends."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; held together while choosing, so that they differ."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
