"""Confines the process that runs the code of a response. The order of the steps matters: each step removes permissions
that the earlier steps need."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
import sysconfig
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from rljob_trainer.sandbox import landlock, seccomp
from rljob_trainer.sandbox.system_calls import rules

MAX_OPEN_FILES = 32
MAX_FILE_BYTES = 16 << 20
"""The limit of one file. The parent checks the total size of the folder (`watching.py`)."""
SECONDS_TO_SIGKILL = 5
"""Seconds of CPU time between SIGXCPU and SIGKILL. The parent ends the process earlier."""
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522
_MACHINE_FILES = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo"),
    *("/dev/zero", "/dev/urandom", "/dev/random"),
)
"""Shared libraries, time zones and devices without state."""


class _Operation(IntEnum):
    """Operations of prctl."""

    PR_SET_PDEATHSIG = 1
    PR_SET_DUMPABLE = 4
    PR_SET_NO_NEW_PRIVS = 38


@dataclass(frozen=True)
class Limits:
    """The limits of one process."""

    cpu_seconds: int
    memory_bytes: int
    """Address space in addition to what Python has already."""


@dataclass(frozen=True)
class Layers:
    """The optional protections of this machine. Seccomp and resource limits are mandatory."""

    machine: str
    landlock_abi: int
    """0 if the kernel has no Landlock."""

    def describe(self) -> str:
        """For the log."""
        if self.landlock_abi >= 6:
            return f"seccomp, Landlock ABI {self.landlock_abi}, resource limits"
        if self.landlock_abi:
            return (
                f"seccomp, Landlock ABI {self.landlock_abi}, resource limits (signals are limited by seccomp alone, "
                "because Landlock limits them from ABI 6)"
            )
        return (
            "seccomp, resource limits; this kernel has no Landlock, so the code of responses cannot write files, but "
            "can read all files that the trainer's user can read, such as mounted secrets and environment variables "
            "in /proc; use a kernel from 5.13 with Landlock enabled, or keep secrets out of the trainer's pod"
        )


def available_layers() -> Layers | str:
    """Returns the available protections, or why code cannot be confined here."""
    machine = os.uname().machine
    return seccomp.why_unavailable(machine) or Layers(machine, landlock.available_abi())


def readable_files() -> list[str]:
    """The files that Python needs: its libraries, which include installed packages, and those of the machine. Omits
    paths inside another listed folder, because each path costs 0.1 ms per process."""
    library_folder = sysconfig.get_config_var("LIBDIR")
    found = {os.path.realpath(path) for path in (*sys.path, library_folder, *_MACHINE_FILES) if path}
    existing = sorted(path for path in found if os.path.exists(path))
    return [path for path in existing if not any(path.startswith(f"{other}/") for other in existing)]


def confine(layers: Layers, limits: Limits, readable: list[str], folder: Path | None) -> None:
    """Confines this process, which must have one thread. Raises OSError if the kernel rejects a step; then the process
    must end."""
    library = ctypes.CDLL(None, use_errno=True)
    # Makes the OOM killer choose this process first.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    _set_resource_limits(limits)
    _prctl(library, _Operation.PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(library, _Operation.PR_SET_NO_NEW_PRIVS, 1)
    _drop_capabilities(library, layers.machine)
    if layers.landlock_abi:
        landlock.restrict(layers.landlock_abi, readable, folder)
    else:
        make_unreadable(library)
    may_write = folder is not None and layers.landlock_abi > 0
    seccomp.install(layers.machine, rules(layers.machine, os.getpid(), may_write_files=may_write))


def make_unreadable(library: ctypes.CDLL | None = None) -> None:
    """Makes the memory and the environment of this process unreadable for other processes of the same user. This is
    needed only without Landlock: with Landlock, a sandboxed process cannot read those of any process outside."""
    _prctl(library or ctypes.CDLL(None, use_errno=True), _Operation.PR_SET_DUMPABLE, 0)


def _set_resource_limits(limits: Limits) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    address_space = pages * resource.getpagesize() + limits.memory_bytes
    for kind, soft, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES, MAX_OPEN_FILES),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_CPU, limits.cpu_seconds, limits.cpu_seconds + SECONDS_TO_SIGKILL),
        (resource.RLIMIT_AS, address_space, address_space),
    ):
        _, highest = resource.getrlimit(kind)
        if highest != resource.RLIM_INFINITY:
            soft, hard = min(soft, highest), min(hard, highest)
        resource.setrlimit(kind, (soft, hard))


def _drop_capabilities(library: ctypes.CDLL, machine: str) -> None:
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    if library.syscall(_CAPSET[machine], header, bytes(24)):
        raise OSError(ctypes.get_errno(), "capset: the kernel rejected dropping the capabilities")


def _prctl(library: ctypes.CDLL, operation: _Operation, value: int) -> None:
    if library.prctl(operation, *(ctypes.c_ulong(each) for each in (value, 0, 0, 0))):
        raise OSError(ctypes.get_errno(), f"prctl({operation.name}): rejected by the kernel")
