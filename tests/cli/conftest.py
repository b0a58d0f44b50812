"""Fixtures: a folder with a job file and the stand-in trainer, a namespace on a real API server, and the command run in
this process."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rljob.polling import Clock
from rljob.results import pod_file_server
from rljob_api.crdgen.manifest import custom_resource_definition
from rljob_cli.__main__ import main
from rljob_cli.cluster import results, view_job
from rljob_testing.cli.job_cluster import JobCluster, StandInKubelet, new_namespace, running_kubelet
from rljob_testing.cli.job_results import ATTEMPT, PODS, STORAGE, create_claim, short_sleep
from rljob_testing.cli.pod_runner import PodRunner, running_pods
from rljob_testing.cli.rljob_command import SMALL_JOB, JobFolder
from rljob_testing.cluster.api_server import ApiServer, install_definition, running_apiserver

Rljob = Callable[..., tuple[int, str, str]]


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """Writes a file with a job named `small`."""
    file = tmp_path / "job.yaml"
    file.write_text(SMALL_JOB)
    return file


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides this user's profiles, caches and network from the command."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def workplace(job_file: Path, tmp_path: Path) -> JobFolder:
    """An empty workplace."""
    package = tmp_path / "code" / "rljob_trainer"
    package.mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "stand_in_trainer.py", package / "__main__.py")
    (package / "__init__.py").touch()
    return JobFolder(job_file.parent)


@pytest.fixture
def wait_for() -> Callable[[Callable[[], bool]], None]:
    """Waits until a condition holds, for at most four minutes: starting Ray on a busy machine takes one."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 240
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true in 240 s"
            time.sleep(0.02)

    return wait


@pytest.fixture(scope="session")
def bare_apiserver() -> Iterator[ApiServer]:
    """One API server for all tests here; it has the CRD only after the fixture `apiserver` was used."""
    with running_apiserver() as server:
        yield server


@pytest.fixture(scope="session")
def apiserver(bare_apiserver: ApiServer) -> ApiServer:
    """The API server with the CRD."""
    install_definition(bare_apiserver.http, custom_resource_definition())
    return bare_apiserver


@pytest.fixture(scope="session")
def kubelet(apiserver: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandInKubelet]:
    """The node that all pods of these tests run on."""
    with running_kubelet(apiserver, tmp_path_factory.mktemp("kubelet")) as kubelet:
        yield kubelet


@pytest.fixture
def job_cluster(apiserver: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobCluster:
    """An empty namespace; commands find a kubeconfig that names it."""
    cluster = new_namespace(apiserver, tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    return cluster


@pytest.fixture
def rljob(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rljob:
    """Runs `rljob ARGUMENTS` in this process, as a user without planner profiles. Returns exit code, standard output
    and standard error."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rljob", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return code, output.out, output.err

    return run


@pytest.fixture
def small(job_cluster: JobCluster) -> JobCluster:
    """A namespace with one job, named `small`, that no operator has reconciled."""
    job_cluster.create_small_job()
    return job_cluster


@pytest.fixture
def job(job_cluster: JobCluster) -> JobCluster:
    """A namespace with a job that has run."""
    job_cluster.create_small_job(STORAGE)
    job_cluster.write_status("small", {"attempts": [ATTEMPT], "pods": PODS})
    return job_cluster


@pytest.fixture
def access_mode() -> str:
    return "ReadWriteMany"


@pytest.fixture
def claim(job: JobCluster, kubelet: StandInKubelet, tmp_path: Path, access_mode: str) -> Iterator[Path]:
    """The folder of the job in its claim."""
    create_claim(job, modes=(access_mode,))
    folder = tmp_path / "claim"
    (folder / "run" / "export").mkdir(parents=True)
    (folder / "run" / "export" / "model.safetensors").write_bytes(os.urandom(1_000_000))
    (folder / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    kubelet.mounts["/rljob/storage"] = folder
    kubelet.environment["RLJOB_PROGRAM"] = Path(pod_file_server.__file__).read_text()
    yield folder
    kubelet.break_after.clear()


@pytest.fixture
def pods(job: JobCluster) -> Iterator[PodRunner]:
    with running_pods(job) as runner:
        yield runner


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short pauses between requests, and a cache folder of the test's own."""
    for module in (results, view_job):
        monkeypatch.setattr(module, "Clock", lambda: Clock(sleep=short_sleep))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def default_hangup() -> Iterator[None]:
    """Programs start with the default action for SIGHUP, also if the tests themselves run under `nohup`, which ignores
    it. A Python handler is reset when another program is executed."""
    former = signal.signal(signal.SIGHUP, lambda *_: None)
    yield
    signal.signal(signal.SIGHUP, former)
