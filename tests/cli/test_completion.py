"""Completion in a shell: commands, options, and names of jobs on the cluster, or silently nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rljob_cli import completion
from rljob_cli.__main__ import complete_for_kubectl, main_of_kubectl
from rljob_testing.cli.job_cluster import JobCluster
from rljob_testing.local_servers import running_http_server
from rljob_testing.messages import Mentions

pytestmark = pytest.mark.apiserver

Rljob = Callable[..., tuple[int, str, str]]
Complete = Callable[[str], list[str]]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit that a slow machine does not exceed."""
    monkeypatch.setattr(completion, "_MAX_SECONDS", 60.0)


@pytest.fixture
def complete(rljob: Rljob, monkeypatch: pytest.MonkeyPatch) -> Complete:
    """The completions of the last word of a command line in bash."""

    def completions(line: str) -> list[str]:
        monkeypatch.setenv("_RLJOB_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        code, output, errors = rljob()
        assert (code, errors) == (0, "")
        return output.split()

    return completions


def test_names_of_jobs_are_completed_from_the_cluster(small: JobCluster, complete: Complete) -> None:
    small.create_job(small.job("small") | {"metadata": {"name": "another"}, "status": None})
    for command in ("status", "logs", "explain", "wait", "delete", "stop"):
        assert complete(f"rljob {command} ") == ["another", "small"]
    assert complete("rljob status sm") == ["small"]
    assert complete("rljob delete small ") == ["another"]
    assert complete(f"rljob status --namespace {small.namespace} --context here sm") == ["small"]
    assert complete("rljob status --namespace other ") == []


def test_commands_and_options_are_completed(complete: Complete) -> None:
    assert complete("rljob sta") == ["status"]
    assert "--previous" in complete("rljob logs small --pre")


def test_completion_does_not_import_the_schema() -> None:
    """The schema takes as long to import as everything else together."""
    program = "import sys, rljob.cluster, rljob_cli.__main__; print('rljob_api.v1alpha1' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


def test_without_a_usable_cluster_nothing_is_completed(
    complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert complete("rljob status sm") == []
    (tmp_path / "wrong").write_text("contexts: 3")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "wrong"))
    assert complete("rljob status sm") == []


def test_a_cluster_that_does_not_respond_is_not_waited_for(
    small: JobCluster, complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()

    class Hangs(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_over.wait(60)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hangs)
    with running_http_server(server):
        url = f"http://127.0.0.1:{server.server_address[1]}"
        (tmp_path / "hangs").write_text(small.server.kubeconfig(url=url, namespace=small.namespace))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "hangs"))
        monkeypatch.setattr(completion, "_MAX_SECONDS", 0.1)
        began = time.monotonic()
        assert complete("rljob status sm") == []
        # Far below the time limit of a request, which is 30 seconds.
        assert time.monotonic() - began < 20
        is_over.set()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_program(rljob: Rljob, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))
    code, program, errors = rljob("--show-completion")
    assert (code, errors) == (0, "")
    assert "_RLJOB_COMPLETE" in program
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=program, text=True, check=True)


def test_kubectl_completes_with_the_plugin(
    small: JobCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """kubectl starts the program `kubectl_complete-rljob` with the typed words, and reads lines and a number."""
    monkeypatch.setenv("KUBECONFIG", str(small.kubeconfig))
    for name in ("_RLJOB_COMPLETE", "_TYPER_COMPLETE_ARGS", "_TYPER_COMPLETE_FISH_ACTION"):
        monkeypatch.setenv(name, "")
    for words, expected in ((["status", ""], "small"), (["status", "sm"], "small"), (["sta"], "status")):
        monkeypatch.setattr("sys.argv", ["kubectl_complete-rljob", *words])
        complete_for_kubectl()
        *found, directive = capsys.readouterr().out.splitlines()
        assert ([line.partition("\t")[0] for line in found], directive) == ([expected], ":4")


def test_kubectl_has_its_own_completion(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["kubectl-rljob", "--show-completion"])
    with pytest.raises(SystemExit) as ended:
        main_of_kubectl()
    output = capsys.readouterr()
    assert (ended.value.code, output.out) == (2, "")
    assert output.err == Mentions("error: --show-completion", "kubectl completion", "kubectl_complete-rljob")
