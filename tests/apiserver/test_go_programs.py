"""The builder of Go programs: builds once, keeps the result, reports errors. Go itself is a stand-in here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rljob_testing.cluster import go_programs

GO = """\
#!/bin/sh
case "$1" in
  env) echo go1.26.0 ;;
  build)
    echo build >> "$STAND_IN_LOG"
    sleep 0.3
    [ -z "$STAND_IN_FAILS" ] || { echo "no such module" >&2; exit 3; }
    while [ "$1" != -o ]; do shift; done
    echo binary > "$2" ;;
esac
"""


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with one line per build; Go is a script that writes it."""
    (tmp_path / "bin").mkdir()
    go = tmp_path / "bin" / "go"
    go.write_text(GO)
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("RLJOB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "builds"))
    return tmp_path / "builds"


def test_a_program_is_built_once(builds: Path) -> None:
    binary = go_programs.ensure_program("etcd")
    assert binary.read_text() == "binary\n"
    assert go_programs.ensure_program("etcd") == binary
    assert builds.read_text() == "build\n"


def test_two_processes_build_once(builds: Path) -> None:
    program = "from rljob_testing.cluster.go_programs import ensure_program; print(ensure_program('etcd'))"
    support = Path(go_programs.__file__).parents[2]
    command = [sys.executable, "-c", program]
    running = [subprocess.Popen(command, cwd=support, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {process.communicate(timeout=60)[0] for process in running}
    assert len(printed) == 1
    assert builds.read_text() == "build\n"


def test_a_failed_build_reports_the_cause_and_leaves_no_result(builds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_FAILS", "yes")
    with pytest.raises(go_programs.BuildError, match=r"go build in .*: exit code 3: no such module"):
        go_programs.ensure_program("etcd")
    monkeypatch.delenv("STAND_IN_FAILS")
    assert go_programs.ensure_program("etcd").is_file()
    assert builds.read_text() == "build\nbuild\n"


def test_a_kubernetes_program_replaces_its_staging_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = tmp_path / "go.mod"
    upstream.write_text("require (\n\tk8s.io/api v0.0.0\n\tk8s.io/utils v0.0.0-20250604170112-4c0f3b243397\n)\n")

    def answered(_go: Path, _arguments: list[str], _folder: Path) -> str:
        return f'{{"GoMod": "{upstream}"}}'

    monkeypatch.setattr(go_programs, "_run_go", answered)
    text = go_programs._module_text(go_programs.PROGRAMS["kube-apiserver"], Path("go"), tmp_path)
    assert text.splitlines() == [
        "module rljob.dev/build/kube-apiserver",
        "go 1.26.0",
        "require k8s.io/kubernetes v1.34.4",
        "tool k8s.io/kubernetes/cmd/kube-apiserver",
        "replace k8s.io/api => k8s.io/api v0.34.4",
    ]


def test_a_local_program_is_rebuilt_when_its_source_changes(builds: Path, tmp_path: Path) -> None:
    source = tmp_path / "main.go"
    source.write_text("package main\n")
    first = go_programs.ensure_local_program("pause", source)
    assert go_programs.ensure_local_program("pause", source) == first
    source.write_text("package main\n\nfunc main() {}\n")
    assert go_programs.ensure_local_program("pause", source) != first
    assert builds.read_text() == "build\nbuild\n"


def test_programs_of_one_release_report_the_same_version() -> None:
    for name in ("kubelet", "kubeadm", "kube-proxy"):
        flags = go_programs.PROGRAMS[name].linker_flags()
        assert "-X k8s.io/component-base/version.gitVersion=v1.34.4" in flags
        assert "-X k8s.io/client-go/pkg/version.gitMinor=34" in flags
