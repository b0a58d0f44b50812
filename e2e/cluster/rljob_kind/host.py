"""Prepares the machine: a Docker daemon that can run kind's nodes, and a Docker command line with BuildKit.

A running daemon is used as it is. Otherwise, as root on Debian, Docker is installed and started from here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from rljob_kind.errors import CommandError, KindError
from rljob_kind.processes import run, run_logged, succeeds
from rljob_kind.progress import Progress
from rljob_kind.settings import cluster_folder, command_environment, data_folder, program_folder, search_path

DAEMON_START_SECONDS = 60.0
CAP_SYS_RESOURCE = 24
LAST_CLI_WITH_OWN_BUILDKIT = 22
"""Later versions of the command line need the buildx plugin for BuildKit."""
RUNTIME_NAME = "within-bounds"


def ensure_host(progress: Progress) -> None:
    """Makes `docker` work. Raises KindError that says what is missing if it cannot."""
    if not _daemon_answers():
        with progress.stage("docker daemon"):
            _install_packages(progress)
            _start_daemon()
    _link_docker()


def ensure_packages(programs: dict[str, str], progress: Progress) -> None:
    """Installs the Debian package of each program (program -> package) that is not on PATH.

    Raises KindError if it cannot.
    """
    missing = sorted({package for program, package in programs.items() if _find(program) is None})
    if not missing:
        return
    if os.geteuid() != 0 or _find("apt-get") is None:
        raise KindError(f"host: missing packages: {' '.join(missing)}; install them, or run this as root on Debian")
    progress.say(f"Debian packages: {' '.join(missing)}")
    logs = cluster_folder() / "logs"
    run_logged(["apt-get", "update", "-qq"], logs / "apt-update.log")
    quiet = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-y", "-qq", "--no-install-recommends"]
    run_logged([*quiet, *missing], logs / "apt-install.log")


def check_free_disk(needed_gib: float, purpose: str) -> None:
    """Raises KindError if the file system of Docker's data, or of the cache, has less free space."""
    root = Path(run(["docker", "info", "--format", "{{.DockerRootDir}}"]).strip())
    for folder in (root, cluster_folder()):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free_gib = shutil.disk_usage(existing).free / 2**30
        if free_gib < needed_gib:
            raise KindError(
                f"host: {purpose} needs {needed_gib:.0f} GiB free in {folder}, which has {free_gib:.1f} GiB; free "
                f"some (docker system prune; {cluster_folder()} while no cluster runs), or set RLJOB_CACHE elsewhere"
            )


def stop_daemon() -> None:
    """Stops the Docker daemon if it was started from here."""
    pid_file = _daemon_folder() / "dockerd.pid"
    if not pid_file.is_file():
        return
    pid = int(pid_file.read_text())
    if Path(f"/proc/{pid}/comm").is_file() and Path(f"/proc/{pid}/comm").read_text().strip() == "dockerd":
        run(["kill", str(pid)])
        deadline = time.monotonic() + DAEMON_START_SECONDS
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.2)
    pid_file.unlink(missing_ok=True)


def _daemon_answers() -> bool:
    return succeeds(["docker", "version", "--format", "{{.Server.Version}}"], timeout_seconds=30)


def _install_packages(progress: Progress) -> None:
    ensure_packages({"dockerd": "docker.io", "iptables": "iptables", "runc": "runc"}, progress)


def _start_daemon() -> None:
    """Starts dockerd in its own session, so that it outlives this process."""
    if os.geteuid() != 0:
        raise KindError("host: no Docker daemon answers; start one, or run this as root on Debian to have one started")
    if succeeds(["docker", "version"], timeout_seconds=30):  # The package's own service may have started it.
        return
    folder = _daemon_folder()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "dockerd.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            ["dockerd", "--config-file", str(_daemon_configuration(folder))],
            env=command_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    (folder / "dockerd.pid").write_text(str(process.pid))
    deadline = time.monotonic() + DAEMON_START_SECONDS
    while not _daemon_answers():
        if process.poll() is not None or time.monotonic() > deadline:
            raise CommandError(["dockerd"], process.poll() or 0, log.read_text(errors="replace"))
        time.sleep(0.5)


def _daemon_configuration(folder: Path) -> Path:
    """dockerd's configuration. It uses our runtime only if kind's privileged containers could not start otherwise."""
    configuration: dict[str, object] = {"log-driver": "json-file", "log-opts": {"max-size": "20m", "max-file": "2"}}
    if not _has_capability(CAP_SYS_RESOURCE):
        # A copy, because the daemon outlives this checkout.
        runtime = shutil.copy2(data_folder() / "runtime" / "runc-within-bounds", folder)
        configuration |= {"runtimes": {RUNTIME_NAME: {"path": str(runtime)}}, "default-runtime": RUNTIME_NAME}
    path = folder / "daemon.json"
    path.write_text(json.dumps(configuration, indent=2))
    return path


def _has_capability(number: int) -> bool:
    """Whether this machine's processes can have the capability (it is in the bounding set)."""
    found = re.search(r"^CapBnd:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    return found is None or bool(int(found[1], 16) >> number & 1)


def _link_docker() -> None:
    """Links the first `docker` on PATH that can use BuildKit. There may be several, and not all can."""
    candidates = [folder / "docker" for folder in search_path() if (folder / "docker").exists()]
    usable = next((path for path in candidates if path.parent != program_folder() and _can_build(path)), None)
    if usable is None:
        raise KindError("host: no docker command line with BuildKit on PATH; install docker-buildx (or docker.io)")
    program_folder().mkdir(parents=True, exist_ok=True)
    link = program_folder() / "docker"
    if not link.is_symlink() or link.readlink() != usable:
        link.unlink(missing_ok=True)
        link.symlink_to(usable)


def _can_build(docker: Path) -> bool:
    if succeeds([str(docker), "buildx", "version"], timeout_seconds=30):
        return True
    version = run([str(docker), "version", "--format", "{{.Client.Version}}"], timeout_seconds=30)
    return int(version.split(".")[0]) <= LAST_CLI_WITH_OWN_BUILDKIT


def _find(program: str) -> str | None:
    """Like `which`, but also searches the folders of administrators' programs."""
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")


def _daemon_folder() -> Path:
    return cluster_folder() / "docker"
