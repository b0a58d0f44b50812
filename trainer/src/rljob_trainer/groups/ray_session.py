"""The connection to Ray: joins an existing cluster, or starts a local one and stops it at the end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import RuntimeEnvSetupError

from rljob_trainer.errors import ConfigurationError, ResourceError
from rljob_trainer.groups.liveness import end_watches

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
"""How long to try to reach the cluster's address."""
MAX_STARTS = 3
"""How often to try to start Ray. Its processes must start within 15 s, and the first start on a cold or busy machine
can take longer."""
_SOCKET_PATH_TOO_LONG = "AF_UNIX path length"
"""A part of Ray's error if its temporary folder has a long path, such as a batch system's TMPDIR."""


@dataclass(frozen=True)
class ShippedCode:
    """A folder that is copied to every node of a cluster, without the files that its .gitignore excludes."""

    folder: Path
    excludes: tuple[str, ...] = ()
    """More files that are not copied, as patterns in the syntax of .gitignore."""


@contextmanager
def ray_session(
    address: str | None, num_cpus: int, num_gpus: int, shipped: ShippedCode | None = None
) -> Iterator[None]:
    """Connects to the cluster at `address`, which gets a copy of the `shipped` code; disconnects at the end. If
    `address` is None or empty, starts a local cluster that declares `num_cpus` and `num_gpus`, and stops it at the end.

    Raises ConfigurationError if the code cannot be copied or the path of Ray's temporary folder is too long,
    ResourceError if Ray cannot be reached or started (ports, memory, disk), and KeyboardInterrupt if SIGTERM arrives
    while Ray connects or starts."""
    try:
        with _kept_signal_handler():
            if address:
                _connect(address, shipped)
            else:
                _start(num_cpus, num_gpus)
        yield
    finally:
        # Also after a failed `ray.init`, which does not close the connections that it has already opened. The next
        # session of this process would read nodes and placement groups from the wrong cluster.
        end_watches()
        ray.shutdown()


def check_connected(what: str) -> None:
    """Raises ResourceError if the connection to Ray is closed. `what` begins the message. Without this check Ray would
    join or start another cluster."""
    if not ray.is_initialized():
        raise ResourceError(f"{what}: the connection to Ray is closed; make calls within `ray_session`")


def cluster_resources() -> dict[str, float]:
    """Returns the total resources of all living nodes, by Ray's names. They are declared numbers: a node
    may have fewer GPUs than it declares."""
    return dict(ray.cluster_resources())


def _connect(address: str, shipped: ShippedCode | None) -> None:
    runtime_env = None
    if shipped is not None:
        runtime_env = {"working_dir": str(shipped.folder), "excludes": list(shipped.excludes)}
    try:
        _check_reachable(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=runtime_env)
    except RuntimeEnvSetupError as error:
        if shipped is None:
            raise
        raise ConfigurationError(
            f"{shipped.folder}: cannot copy this folder to the cluster ({_one_line(error)}); keep the code in a folder "
            "without large files, or list them in its .gitignore"
        ) from error
    except Exception as error:
        raise ResourceError(
            f"RAY_ADDRESS: cannot connect to a Ray cluster at {address} ({_one_line(error)}); check the address, the "
            "network, and that both sides have the same Ray version and token"
        ) from error


def _check_reachable(address: str) -> None:
    """Raises OSError if no process listens at `address` within CONNECT_SECONDS. Ray itself would wait for minutes.
    Checks only addresses of the form `host:port`."""
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdecimal():
        return
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
        else:
            return


def _start(num_cpus: int, num_gpus: int) -> None:
    """Starts a local cluster, with retries. If a start fails, Ray raises a bare Exception and leaves the processes of
    this start running, so they are killed here."""
    for start in range(1, MAX_STARTS + 1):
        children_before = _children()
        try:
            ray.init(
                # Without this, Ray would join another user's cluster on this machine.
                address="local",
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except Exception as error:
            for pid in _children() - children_before:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            if _SOCKET_PATH_TOO_LONG in str(error):
                raise ConfigurationError(
                    "Ray: the path of its temporary folder is too long, because the path of a socket in it may have at "
                    f"most 107 characters ({_one_line(error)}); export RAY_TMPDIR with a shorter path, such as "
                    "RAY_TMPDIR=/tmp"
                ) from error
            if start == MAX_STARTS:
                is_file_error = isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError)
                raise ResourceError(
                    f"Ray: could not be started on this machine in {MAX_STARTS} attempts ({_one_line(error)}); check "
                    + (
                        "that HOME and the temporary folder can be written (Ray keeps a token in HOME/.ray)"
                        if is_file_error
                        else "free memory, CPU load, and disk space in /tmp/ray and /dev/shm"
                    )
                ) from error
            log.warning("Ray did not start (%s); retrying", _one_line(error))
        else:
            return


@contextmanager
def _kept_signal_handler() -> Iterator[None]:
    """Restores the SIGTERM handler after the block. In the block, Ray installs its own handler, which would later end
    the process without saving."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        # SIGTERM has arrived in the block, and Ray's handler has raised this.
        raise KeyboardInterrupt from error
    finally:
        signal.signal(signal.SIGTERM, handler)


def _children() -> set[int]:
    """Returns the process ids of this process's children; empty if /proc does not list them."""
    with suppress(OSError):
        tasks = Path("/proc/self/task").glob("*/children")
        return {int(pid) for task in tasks for pid in task.read_text().split()}
    return set()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
