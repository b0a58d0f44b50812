"""The operator as a process, as in its pod: environment variables, a kubeconfig with a service account's token, probes,
signals.

Importing the operator takes longer than a small job, so each process is forked from one that has imported it. Its
pauses are those on a cluster, or shorter ones.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Self
from urllib.parse import urlsplit

import httpx
from kubernetes.aio.config import incluster_config

from rljob_operator.__main__ import main
from rljob_operator.handlers import operator_process
from rljob_testing.cluster.api_server import ApiServer, kubeconfig_text
from rljob_testing.local_servers import free_ports
from rljob_testing.process_tree import signal_when_parent_dies
from rljob_testing.running_clock import clock_in
from rljob_testing.settings import first_in_python_path, inherited_environment, replace_environment

OPERATOR_NAMESPACE = "rljob-system"
ACCOUNT = "rljob-operator"
LEASE = "rljob-operator"
LEASE_PATH = f"/apis/coordination.k8s.io/v1/namespaces/{OPERATOR_NAMESPACE}/leases/{LEASE}"
KEY = b"0123456789abcdef0123456789abcdef"
START_SECONDS = 60.0
ANSWER_SECONDS = 60.0
"""Timeout of requests to an operator's pages. Only an operator that hangs exceeds it."""
QUICK: Mapping[str, float] = dict.fromkeys(
    (
        *("RAY_POLL_SECONDS", "POD_POLL_SECONDS", "PASS_PAUSE_SECONDS", "AFTER_EFFECT_SECONDS"),
        *("GROUPS_SECONDS", "NODES_SECONDS", "NAME_TAKEN_SECONDS", "POLICY_SECONDS"),
        *("SHORT_SILENCE_SECONDS", "RUN_STATE_SECONDS"),
        "EXPLANATION_SECONDS",
        *("FIRST_DELAY_SECONDS", "FIRST_PAUSE_SECONDS", "LONGEST_PAUSE_SECONDS"),
        *("INCOMPLETE_SECONDS", "FIRST_FAILURE_SECONDS", "AFTER_FAILURE_SECONDS"),
    ),
    4.0,
)
"""Pauses between polls and after failures, and the factor by which tests that are not about them shorten them. Time
limits keep their values, because a busy machine would exceed shorter ones."""
LONG_LEASE: Mapping[str, float] = dict.fromkeys(("LEASE_SECONDS", "RENEW_DEADLINE_SECONDS"), 0.1)
"""Ten times the normal lease times, for tests that do not wait for a lease to expire: a pause of the machine then does
not cost a leader its lease."""
RBAC = "/apis/rbac.authorization.k8s.io/v1"
RULES: Sequence[Mapping[str, Sequence[str]]] = (
    {"apiGroups": ["rljob.dev"], "resources": ["rljobs"], "verbs": ["get", "list", "watch", "delete"]},
    {"apiGroups": ["rljob.dev"], "resources": ["rljobs/status"], "verbs": ["patch"]},
    {"apiGroups": ["ray.io"], "resources": ["rayclusters"], "verbs": ["get", "list", "watch", "create", "delete"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["list"]},
    {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create"]},
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
    {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": ["list", "create", "patch"]},
)
"""All rights of the operator in the namespaces of jobs, without Kueue."""
QUEUE_RULES: Sequence[Mapping[str, Sequence[str]]] = (
    {"apiGroups": ["kueue.x-k8s.io"], "resources": ["workloads"], "verbs": ["list", "watch"]},
)
"""Its rights with the chart's value `kueue.enabled`."""
LEASE_RULES: Sequence[Mapping[str, Sequence[str]]] = (
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]},
)
NODE_LEASE_RULES: Sequence[Mapping[str, Sequence[str]]] = (
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get"]},
)
"""Its rights in the namespace in which kubelets renew their leases."""
NODE_LEASES = "kube-node-lease"


def prepare_account(server: ApiServer) -> str:
    """Creates the operator's namespace, service account and role, and returns a token of the account."""
    http = server.http
    _create(http, "/api/v1/namespaces", {"metadata": {"name": OPERATOR_NAMESPACE}})
    accounts = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/serviceaccounts"
    _create(http, accounts, {"metadata": {"name": ACCOUNT}})
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": OPERATOR_NAMESPACE}
    _bind(http, f"{RBAC}/clusterroles", f"{RBAC}/clusterrolebindings", "ClusterRole", ACCOUNT, RULES, subject)
    queues = f"{ACCOUNT}-queues"
    _bind(http, f"{RBAC}/clusterroles", f"{RBAC}/clusterrolebindings", "ClusterRole", queues, QUEUE_RULES, subject)
    there = f"{RBAC}/namespaces/{OPERATOR_NAMESPACE}"
    _bind(http, f"{there}/roles", f"{there}/rolebindings", "Role", f"{ACCOUNT}-lease", LEASE_RULES, subject)
    _create(http, "/api/v1/namespaces", {"metadata": {"name": NODE_LEASES}})
    there = f"{RBAC}/namespaces/{NODE_LEASES}"
    _bind(http, f"{there}/roles", f"{there}/rolebindings", "Role", f"{ACCOUNT}-nodes", NODE_LEASE_RULES, subject)
    return account_token(http)


def account_token(http: httpx.Client, secret: str | None = None) -> str:
    """A token of the operator's service account. `secret`: the token becomes invalid when this Secret is deleted."""
    spec: dict[str, object] = {"expirationSeconds": 7200}
    if secret is not None:
        spec["boundObjectRef"] = {"kind": "Secret", "apiVersion": "v1", "name": secret}
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    account = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/serviceaccounts/{ACCOUNT}"
    answer = http.post(f"{account}/token", json=request)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["status"]["token"])


@dataclass(frozen=True)
class OperatorSetup:
    """The settings that all operator processes of a test share."""

    folder: Path
    server_url: str
    certificate: Path | None
    """The API server's certificate; None for plain HTTP."""
    token: str
    dashboard_url: str
    namespaces: Sequence[str]
    environment: Mapping[str, str]
    """Additional environment variables."""
    account: Path | None = None
    """A folder with `token` and `ca.crt`, as a pod has it for its service account; None to use a kubeconfig."""
    shorter: Mapping[str, float] = field(default_factory=dict)
    """Constants of the operator's modules, and the factor by which they are divided in these processes."""
    clock: Path | None = None
    """The file of the RunningClock that these processes use as their clock; None for the machine's clock."""

    def connection(self) -> Mapping[str, str]:
        """The environment variables that select the API server."""
        if self.account is None:
            # For plain HTTP no certificate authorities are needed; loading those of the machine takes half of the
            # start-up time.
            trusted = {"SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": os.devnull} if self.certificate is None else {}
            return {"KUBECONFIG": str(self.kubeconfig()), **trusted}
        server = urlsplit(self.server_url)
        return {"KUBERNETES_SERVICE_HOST": str(server.hostname), "KUBERNETES_SERVICE_PORT": str(server.port)}

    def kubeconfig(self) -> Path:
        """A kubeconfig file with the account's token."""
        path = self.folder / "kubeconfig.json"
        path.write_text(kubeconfig_text(self.server_url, self.certificate, self.token))
        return path


class OperatorProcess:
    """One operator process. `name` is its pod's name; a second process with that name is the same pod after a
    restart."""

    def __init__(self, setup: OperatorSetup, name: str = "operator-0") -> None:
        keys = setup.folder / "token-keys"
        keys.mkdir(exist_ok=True)
        if not (keys / "key").exists():
            (keys / "key").write_bytes(KEY)
        self.health_port, self.metrics_port = free_ports(2)
        self.log_path = setup.folder / f"{name}.log"
        self.environment = (
            {key: value for key, value in inherited_environment().items() if not key.startswith("KUBE")}
            | dict(setup.connection())
            | {
                "RLJOB_OPERATOR_NAMESPACES": ",".join(setup.namespaces),
                "RLJOB_OPERATOR_TRAINER_IMAGE": "example/trainer:1",
                "RLJOB_OPERATOR_RAY_VERSION": "2.60.0",
                "RLJOB_OPERATOR_TOKEN_KEYS_FOLDER": str(keys),
                "RLJOB_OPERATOR_POD_NAME": name,
                "RLJOB_OPERATOR_POD_NAMESPACE": OPERATOR_NAMESPACE,
                "RLJOB_OPERATOR_POD_LABELS": "app.kubernetes.io/name=rljob-operator",
                "RLJOB_OPERATOR_LEASE_NAME": LEASE,
                "RLJOB_OPERATOR_LEADER_ELECTION": "false",
                "RLJOB_OPERATOR_DASHBOARD_URL": setup.dashboard_url,
                "RLJOB_OPERATOR_HEALTH_PORT": str(self.health_port),
                "RLJOB_OPERATOR_METRICS_PORT": str(self.metrics_port),
                "RLJOB_OPERATOR_LOG_LEVEL": "info",
            }
            | dict(setup.environment)
        )
        self._setup = setup
        self._process: ForkServerProcess | None = None

    def start(self) -> None:
        """Starts the process without waiting."""
        life = (self.environment, self.log_path, self._setup)
        self._process = _context().Process(target=_live, args=life, daemon=True)
        self._process.start()

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Starts the process, waits until it is healthy, and kills it at the end of the context."""
        try:
            self.start()
            self.wait_until_healthy()
            yield self
        finally:
            self.kill()

    def wait_until_healthy(self) -> None:
        """Waits until the probes succeed."""
        deadline = time.monotonic() + START_SECONDS
        while self.probe("/healthz") != 200:
            assert self.exit_code() is None, f"the operator exited with code {self.exit_code()}: {self.log()}"
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def probe(self, path: str) -> int:
        """HTTP status of a probe; 0 if the process does not respond."""
        try:
            return self._page(self.health_port, path).status_code
        except httpx.TransportError:
            return 0

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = self._page(self.metrics_port, "/metrics").text
        lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def pages(self) -> Sequence[str]:
        """The probes and the metrics, as text."""
        paths = ((self.health_port, "/healthz"), (self.health_port, "/readyz"), (self.metrics_port, "/metrics"))
        return [self._page(port, path).text for port, path in paths]

    def kill(self) -> None:
        """Sends SIGKILL: the process cannot clean up."""
        process = self._process
        if process is not None:
            process.kill()
            process.join()

    def pause(self) -> None:
        """Sends SIGSTOP: the process stands still, and its connections stay open."""
        self._signal(signal.SIGSTOP)

    def unpause(self) -> None:
        """Sends SIGCONT after `pause`."""
        self._signal(signal.SIGCONT)

    def terminate(self, deadline_seconds: float = 60.0) -> int:
        """Sends SIGTERM and returns the exit code."""
        assert self._process is not None
        self._process.terminate()
        self._process.join(deadline_seconds)
        assert self._process.exitcode is not None, (
            f"the operator did not exit within {deadline_seconds} s: {self.log()}"
        )
        return self._process.exitcode

    def _page(self, port: int, path: str) -> httpx.Response:
        # Without TLS verification, because the client would first load all certificate authorities of the machine.
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=ANSWER_SECONDS, trust_env=False, verify=False)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def is_running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.is_alive()

    def exit_code(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.exitcode if self._process is not None else None

    def log(self) -> str:
        """The log of all processes with this name."""
        return self.log_path.read_text() if self.log_path.exists() else ""


@functools.cache
def _context() -> ForkServerContext:
    """A fork server that has imported the operator and this module, so that the forked processes import nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rljob_operator.__main__", __name__])
    # Python 3.11: its sys.path has only the entries of any new process.
    with first_in_python_path(Path(__file__).parents[2]):
        forkserver.ensure_running()
    return context


def _live(environment: Mapping[str, str], log: Path, setup: OperatorSetup) -> None:
    """Runs the operator in a forked process."""
    signal_when_parent_dies(signal.SIGKILL)()
    threading.Thread(target=_end_with_the_tests, daemon=True).start()
    # Garbage collection would copy all shared pages of imported modules into this process.
    gc.freeze()
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    replace_environment(environment)
    if setup.account is not None:
        # The paths at which the kubelet puts these files in every pod.
        incluster_config.SERVICE_TOKEN_FILENAME = str(setup.account / "token")
        incluster_config.SERVICE_CERT_FILENAME = str(setup.account / "ca.crt")
    for name, times in setup.shorter.items():
        _shorten(name, times)
    if setup.clock is not None:
        vars(operator_process)["time"] = SimpleNamespace(monotonic=clock_in(setup.clock))
    sys.exit(main())


def _end_with_the_tests() -> None:
    """Ends this process when the test run is killed; the fork server lives as long as its children."""
    tests = multiprocessing.parent_process()
    assert tests is not None
    tests.join()
    os._exit(1)


def _shorten(name: str, times: float) -> None:
    """Divides a constant in every module of the operator that has it."""
    modules = [vars(module) for path, module in sys.modules.items() if path.startswith("rljob_operator.")]
    having = [module for module in modules if name in module]
    assert having, f"no module of the operator has a constant {name}"
    for module in having:
        module[name] = type(module[name])(module[name] / times)


def _create(http: httpx.Client, path: str, body: Mapping[str, object]) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code in (201, 409), answer.text


def _bind(
    http: httpx.Client,
    roles: str,
    bindings: str,
    kind: str,
    name: str,
    rules: Sequence[Mapping[str, Sequence[str]]],
    subject: Mapping[str, str],
) -> None:
    _create(http, roles, {"metadata": {"name": name}, "rules": list(rules)})
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name}
    _create(http, bindings, {"metadata": {"name": name}, "roleRef": reference, "subjects": [subject]})
