"""Everything that keeps a command from its cluster is reported in one line with advice, never as a traceback."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from kubernetes.config import incluster_config

from rljob import settings
from rljob_testing.cli.job_cluster import JobCluster
from rljob_testing.cluster.api_server import ApiServer
from rljob_testing.messages import Mentions

pytestmark = pytest.mark.apiserver

Rljob = Callable[..., tuple[int, str, str]]


def assert_one_line(errors: str, *parts: str) -> None:
    assert errors == Mentions(*parts)
    assert errors.count("\n") == 1


def test_without_a_crd_the_operator_is_reported_as_not_installed(
    bare_apiserver: ApiServer, rljob: Rljob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A group that no server here ever serves stands for a cluster without the operator: the tests share one server.
    monkeypatch.setattr("rljob.cluster.API_PATH", "/apis/not-installed.dev/v1alpha1")
    file = tmp_path / "kubeconfig"
    file.write_text(bare_apiserver.kubeconfig())
    code, _, errors = rljob("list", "--kubeconfig", str(file))
    assert code == 2
    assert_one_line(errors, "error: context here:", "RLJobs", "install", "docs/install.md", "--context")


def test_a_missing_kubeconfig_is_reported_with_the_paths_searched(
    rljob: Rljob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/a:{tmp_path}/b")
    code, _, errors = rljob("status", "small")
    assert code == 2
    assert_one_line(errors, "error:", "kubeconfig", f"{tmp_path}/a", f"{tmp_path}/b", "--kubeconfig", "KUBECONFIG")


def test_a_kubeconfig_may_come_from_a_pipe(rljob: Rljob, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(KUBECONFIG.replace("SERVER", "foo"),))
    writer.start()
    code, _, errors = rljob("list", "--kubeconfig", str(pipe))
    writer.join()
    assert code == 2
    assert_one_line(errors, f"error: {pipe}:", "PLUGIN")


def test_an_unknown_home_folder_is_no_crash(rljob: Rljob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "~no-such-user/config")
    code, _, errors = rljob("list")
    assert code == 2
    assert_one_line(errors, "error:", "kubeconfig", "~no-such-user/config")


@pytest.mark.usefixtures("job_cluster")
def test_a_named_kubeconfig_must_exist(rljob: Rljob, tmp_path: Path) -> None:
    code, _, errors = rljob("status", "small", "--kubeconfig", str(tmp_path / "other"))
    assert code == 2
    assert_one_line(errors, f"error: --kubeconfig {tmp_path}/other:", "no such file")


@pytest.mark.parametrize("text", ["", "a: [", "{}", "clusters: 3\ncontexts: 4\n", "contexts: []\n"])
def test_an_invalid_kubeconfig_is_reported_in_one_line(
    rljob: Rljob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    file = tmp_path / "config"
    file.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(file))
    code, output, errors = rljob("status", "small")
    assert (code, output) == (2, "")
    assert_one_line(errors, f"error: {file}:", "invalid", "--kubeconfig")


KUBECONFIG = """
apiVersion: v1
current-context: here
contexts: [{name: here, context: {cluster: one, user: me}}]
clusters: [{name: one, cluster: {server: "SERVER"}}]
users: [{name: me, user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: PLUGIN, args: [ARGUMENT]}}}]
"""


@pytest.mark.parametrize("server", ["foo", "foo:6443", "http://127.0.0.1:99999", "https://:6443", "ftp://127.0.0.1"])
def test_a_server_that_is_no_url_is_reported(
    rljob: Rljob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    file = tmp_path / "config"
    file.write_text(KUBECONFIG.replace("SERVER", server).partition("users:")[0] + "users: [{name: me, user: {}}]\n")
    monkeypatch.setenv("KUBECONFIG", str(file))
    code, output, errors = rljob("list")
    assert (code, output) == (2, "")
    assert_one_line(errors, f"error: {file}:", "server", f"seen: '{server}'", "https://10.0.0.1:6443")


@pytest.mark.parametrize(
    ("plugin", "argument", "reason"),
    [
        ("no-such-plugin", "x", "No such file or directory: 'no-such-plugin'"),
        ("sh", "-c 'echo please log in >&2; exit 3'", "please log in"),
        ("echo", "{}", "missing key"),
    ],
)
def test_a_credential_plugin_that_fails_is_reported_instead_of_a_request_without_credentials(
    rljob: Rljob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugin: str, argument: str, reason: str
) -> None:
    script = tmp_path / "plugin.sh"
    script.write_text(f"#!/bin/sh\n{plugin} {argument}\n")
    script.chmod(0o755)
    command = plugin if plugin == "no-such-plugin" else str(script)
    text = KUBECONFIG.replace("SERVER", "https://127.0.0.1:1").replace("PLUGIN", command).replace("ARGUMENT", "x")
    file = tmp_path / "config"
    file.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(file))
    code, output, errors = rljob("list")
    assert (code, output) == (2, "")
    assert_one_line(errors, f"error: {file}:", "credentials", reason, "log in")


def test_a_missing_context_is_reported_with_the_existing_ones(job_cluster: JobCluster, rljob: Rljob) -> None:
    code, _, errors = rljob("status", "small", "--context", "there")
    assert code == 2
    assert_one_line(errors, f"error: {job_cluster.kubeconfig}:", "context", "there", "here")


def test_several_kubeconfigs_are_merged_and_any_context_can_be_named(
    job_cluster: JobCluster, rljob: Rljob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "first"
    text = job_cluster.server.kubeconfig(url="https://127.0.0.1:1", token="none")
    first.write_text(text.replace('"here"', '"elsewhere"').replace('"me"', '"nobody"'))
    monkeypatch.setenv("KUBECONFIG", f"{first}:{job_cluster.kubeconfig}:{tmp_path}/none")
    code, _, errors = rljob("list", "--context", "here")
    assert (code, errors) == (0, Mentions("no jobs", job_cluster.namespace))


def test_a_server_that_does_not_listen_is_reported(
    apiserver: ApiServer, rljob: Rljob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        file = tmp_path / "config"
        file.write_text(apiserver.kubeconfig(url=f"https://127.0.0.1:{port}"))
        monkeypatch.setenv("KUBECONFIG", str(file))
        code, _, errors = rljob("explain", "small")
        of_view, _, errors_of_view = rljob("view", "small")
    words = "context here:", "no usable response from the API server", "Connection refused"
    assert (code, of_view) == (75, 75)
    assert_one_line(errors, *words)
    assert_one_line(errors_of_view, "error: small: no such folder", *words)


def test_an_untrusted_certificate_is_reported(
    apiserver: ApiServer, rljob: Rljob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config"
    text = apiserver.kubeconfig()
    file.write_text(text.replace(f'"certificate-authority": "{apiserver.certificate}"', '"tls-server-name": "other"'))
    monkeypatch.setenv("KUBECONFIG", str(file))
    code, _, errors = rljob("list")
    assert code == 2
    assert_one_line(
        errors,
        "error: context here:",
        "certificate",
        "CERTIFICATE_VERIFY_FAILED",
        "certificate-authority",
        "server",
        "kubeconfig",
    )


@pytest.mark.parametrize("command", ["delete", "status", "logs", "explain", "suspend", "resume", "stop", "retry"])
def test_an_invalid_name_is_rejected_before_any_request(job_cluster: JobCluster, rljob: Rljob, command: str) -> None:
    job_cluster.create_small_job()
    for name in ("", ".", "..", "a/b", "%2e", "Small", "-a", "a" * 254):
        code, output, errors = rljob(command, "--", name)
        assert (code, output) == (2, "")
        assert_one_line(errors, "error: NAME:", repr(name), "Kubernetes name")
        code, _, errors = rljob(command, "--namespace", name, "small")
        assert code == 2
        assert_one_line(errors, "error: --namespace:", repr(name), "Kubernetes name")
    assert "small" in rljob("list")[1]


def test_output_that_cannot_be_written_is_reported(job_cluster: JobCluster) -> None:
    job_cluster.create_small_job()
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "rljob_cli", "list"],
            env=job_cluster.environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (ended.returncode, ended.stderr) == (1, Mentions("error:", "output", "No space left on device"))
    assert ended.stderr.count("\n") == 1


def test_an_invalid_token_is_reported(
    apiserver: ApiServer, rljob: Rljob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config"
    file.write_text(apiserver.kubeconfig(token="expired"))
    monkeypatch.setenv("KUBECONFIG", str(file))
    code, _, errors = rljob("list")
    assert code == 2
    assert_one_line(errors, "error: context here:", "API server", "credentials", "log in")


def test_a_forbidden_request_shows_the_message_of_the_server(job_cluster: JobCluster, rljob: Rljob) -> None:
    token = job_cluster.account_token()
    job_cluster.kubeconfig.write_text(job_cluster.server.kubeconfig(token=token, namespace=job_cluster.namespace))
    code, _, errors = rljob("status", "small")
    assert code == 2
    message = (
        f'rljobs.rljob.dev "small" is forbidden: User "system:serviceaccount:{job_cluster.namespace}:visitor" cannot'
        f' get resource "rljobs" in API group "rljob.dev" in the namespace "{job_cluster.namespace}"'
    )
    assert_one_line(errors, "error: context here:", "permission", message, "role", "docs/install.md")


def test_explain_works_without_permission_to_read_events(job_cluster: JobCluster, rljob: Rljob) -> None:
    job_cluster.create_small_job()
    rules = [{"apiGroups": ["rljob.dev"], "resources": ["rljobs"], "verbs": ["get"]}]
    token = job_cluster.account_token({"metadata": {"name": "reader"}, "rules": rules})
    job_cluster.kubeconfig.write_text(job_cluster.server.kubeconfig(token=token, namespace=job_cluster.namespace))
    code, output, errors = rljob("explain", "small")
    assert (code, errors) == (0, "")
    assert output == Mentions("operator", "Pods and events", "permission", "pods is forbidden: User")


def test_a_server_that_is_no_api_server_is_reported(
    rljob: Rljob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "apis/rljob.dev/v1alpha1/namespaces/default").mkdir(parents=True)
    (tmp_path / "apis/rljob.dev/v1alpha1/namespaces/default/rljobs").write_text("<html>welcome</html>")
    pages = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), pages) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        file = tmp_path / "config"
        cluster = {"name": "c", "cluster": {"server": url}}
        context = {"name": "web", "context": {"cluster": "c"}}
        file.write_text(json.dumps({"current-context": "web", "clusters": [cluster], "contexts": [context]}))
        monkeypatch.setenv("KUBECONFIG", str(file))
        code, _, errors = rljob("list")
        server.shutdown()
    assert code == 2
    assert errors.splitlines()[-1] == Mentions(
        "error: context web:", url, "Kubernetes API server", "`server`", "kubeconfig"
    )


def test_the_service_account_and_namespace_of_a_pod_are_used(
    job_cluster: JobCluster, rljob: Rljob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, port = job_cluster.server.url.removeprefix("https://").split(":")
    (tmp_path / "token").write_text(job_cluster.server.token)
    (tmp_path / "namespace").write_text(job_cluster.namespace)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    monkeypatch.setattr(settings, "_SERVICE_ACCOUNT_NAMESPACE", tmp_path / "namespace")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(job_cluster.server.certificate))
    assert rljob("list") == (0, "", Mentions("no jobs", job_cluster.namespace))
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "gone"))
    code, _, errors = rljob("list")
    assert code == 2
    assert_one_line(errors, "error:", "service account", "Service token file does not exist.", "token", "--kubeconfig")
