"""Fixtures of the end-to-end tests. They share one cluster, which is created if needed, gets our images and chart, and
is deleted at the end.

`KEEP=1` keeps a cluster that was created here. A cluster that existed before is always kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rljob_kind import faults
from rljob_kind.cluster import audit_log as audit_log_file
from rljob_kind.cluster import delete_cluster, make_namespace, make_volume
from rljob_kind.diagnosis import diagnosis
from rljob_kind.installation import NAMESPACE as OPERATOR_NAMESPACE
from rljob_kind.installation import RELEASE, ensure_own_images, install
from rljob_kind.kuberay import bring_up
from rljob_kind.kueue import ensure_kueue, make_priorities, make_queue
from rljob_kind.locking import cluster_lock
from rljob_kind.processes import run
from rljob_kind.progress import Progress
from rljob_kind.settings import cluster_folder, keep_cluster, kubeconfig_file, program_folder
from rljob_testing.cluster.charts import granted_rights
from rljob_testing.cluster.kubectl import Kubectl

NAMESPACE = "rljob-e2e"
STORAGE_CLAIM = "rljob-storage"
PROGRESS = pytest.StashKey[Progress]()
UNDIAGNOSED = pytest.StashKey[bool]()
"""True once the cluster exists, until the first failed set-up has added a diagnosis."""

Right = tuple[str, str, str]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[PROGRESS] = Progress(cluster_folder() / "timings" / "tests.json")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The timeout covers only test functions, because the first fixture may build a cluster for most of an hour. Other
    # fixtures have their own deadlines.
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900, func_only=True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # Failed set-ups get the diagnosis only once: every test with the same fixture fails with it.
    if report.failed and (report.when == "call" or item.config.stash.get(UNDIAGNOSED, False)):
        report.sections += diagnosis(NAMESPACE)
        item.config.stash[UNDIAGNOSED] = False
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.section("stages")
    for stage, seconds in config.stash[PROGRESS].seconds.items():
        terminalreporter.line(f"{seconds:8.1f} s  {stage}")


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config) -> Iterator[None]:
    """A cluster with KubeRay and our operator. Its progress is printed at once, not only when a test fails."""
    progress = pytestconfig.stash[PROGRESS]
    shown = pytestconfig.pluginmanager.getplugin("capturemanager")
    assert shown is not None
    with cluster_lock(progress):
        with shown.global_and_fixture_disabled():
            print(file=sys.stderr)
            is_new = bring_up(progress)
            pytestconfig.stash[UNDIAGNOSED] = True
            install(ensure_own_images(progress), progress)
        yield
        if is_new and not keep_cluster():
            with shown.global_and_fixture_disabled():
                delete_cluster(progress)


@pytest.fixture(scope="session")
def namespace(cluster: None) -> str:
    """A new namespace that admits only restricted pods."""
    make_namespace(NAMESPACE)
    return NAMESPACE


@pytest.fixture(scope="session")
def storage(namespace: str) -> Path:
    """The folder of this machine behind the claim `rljob-storage`."""
    return make_volume(STORAGE_CLAIM, namespace)


@pytest.fixture(scope="session")
def kubeconfig(namespace: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Credentials with the namespace of the tests as default."""
    path = tmp_path_factory.mktemp("cluster") / "kubeconfig"
    path.write_text(kubeconfig_file().read_text())
    run(["kubectl", "config", "set-context", "--current", f"--namespace={namespace}", f"--kubeconfig={path}"])
    return path


@pytest.fixture(scope="session")
def kubectl(namespace: str, kubeconfig: Path, storage: Path) -> Kubectl:
    """kubectl in the namespace of the tests, which has storage for jobs."""
    return Kubectl(program_folder() / "kubectl", kubeconfig, namespace)


@pytest.fixture(scope="session")
def rljob(kubeconfig: Path) -> list[str]:
    """The first part of an `rljob` command line for the cluster."""
    return ["env", f"KUBECONFIG={kubeconfig}", sys.executable, "-m", "rljob_cli"]


@pytest.fixture(scope="session")
def jobs() -> Path:
    """The folder of the job files."""
    return Path(__file__).parent / "jobs"


@pytest.fixture
def kill_operator(cluster: None) -> Callable[[], None]:
    """A function that kills the operator's process and waits until a new one is ready."""
    return faults.kill_operator


@pytest.fixture(scope="session")
def progress(pytestconfig: pytest.Config) -> Progress:
    """Records the seconds of stages, which are printed at the end."""
    return pytestconfig.stash[PROGRESS]


@pytest.fixture(scope="session")
def queue(namespace: str, progress: Progress) -> str:
    """The name of a queue of Kueue with two GPUs; there are the priorities `low` and `high`. Kueue stays for the tests
    that follow, and so does the operator's support of Kueue."""
    ensure_kueue(progress)
    install(ensure_own_images(progress), progress)
    make_priorities(low=1, high=100)
    make_queue("two-gpus", namespace, 2)
    return "two-gpus"


@pytest.fixture(scope="session")
def audit_log(cluster: None) -> Path:
    """The API server's audit log of all service accounts, one JSON object per line."""
    return audit_log_file()


@pytest.fixture(scope="session")
def operator_rights(cluster: None) -> set[Right]:
    """(API group, resource, verb) of everything that the installed chart allows the operator."""
    manifest = run(["helm", "get", "manifest", RELEASE, "--namespace", OPERATOR_NAMESPACE])
    return {
        right
        for document in YAML(typ="safe", pure=True).load_all(manifest)
        if document and document["kind"] in ("Role", "ClusterRole")
        for right in granted_rights(document)
    }
