"""The system calls that sandboxed code may make. All others fail with EPERM.

This is an allow list, because a deny list would miss the new system calls of later kernels. Python programs that
compute, read files and start threads need no other calls. None of the calls starts a process: `clone` is allowed only
with the flags of a thread, and `fork`, `vfork` and `execve` are not in the list. The numbers are those of x86-64 and of
aarch64 (None: that machine does not have the call).
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterable
from dataclasses import dataclass

ALLOWED: dict[str, tuple[int, int | None]] = {
    # Reading and writing open files.
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "lseek": (8, 62),
    "close": (3, 57),
    "ftruncate": (77, 46),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    # Finding files. Landlock decides which of them can be read.
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "stat": (4, None),
    "lstat": (6, None),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "getdents64": (217, 61),
    "umask": (95, 166),
    # Memory and threads.
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "mprotect": (10, 226),
    "madvise": (28, 233),
    "brk": (12, 214),
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "set_tid_address": (218, 96),
    "membarrier": (324, 283),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "exit": (60, 93),
    "exit_group": (231, 94),
    # Time and signals of this process.
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    "alarm": (37, None),
    "pause": (34, None),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    # Facts about this process and the machine.
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getpgid": (121, 155),
    "getpgrp": (111, None),
    "getsid": (124, 156),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getgroups": (115, 158),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getrusage": (98, 165),
    "getrlimit": (97, 163),
    "times": (100, 153),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "getrandom": (318, 278),
}
"""Calls that are allowed with any arguments, by name: the numbers of x86-64 and aarch64."""

NUMBERS_WITH_CONDITIONS: dict[str, tuple[int, int | None]] = {
    "open": (2, None),
    "openat": (257, 56),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "prlimit64": (302, 261),
    "prctl": (157, 167),
    "clone": (56, 220),
    "clone3": (435, 435),
}

_ACCESS_MODE, _CREATE, _TRUNCATE = 0o3, 0o100, 0o1000
"""O_ACCMODE, O_CREAT and O_TRUNC."""
_UNNAMED_FILE = 0o20000000
"""The bit of O_TMPFILE, which creates a file without a name. The size of the folder would not include such a file."""
_THREAD_FLAGS = 0x100 | 0x800 | 0x10000
"""CLONE_VM, CLONE_SIGHAND and CLONE_THREAD: a thread of this process."""
_NO_THREAD_FLAGS = 0x2000 | 0x4000 | 0x8000 | 0x20000 | 0x800000 | 0x7E000000
"""CLONE_PTRACE, CLONE_VFORK, CLONE_PARENT, CLONE_UNTRACED and all CLONE_NEW*."""
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL and F_DUPFD_CLOEXEC. F_SETOWN and F_SETSIG would send signals to other
processes."""
_IOCTL_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5450, 0x5451)
"""TCGETS and TIOCGWINSZ (is it a terminal?), FIONREAD, FIONCLEX and FIOCLEX."""
_PRCTL_COMMANDS = (15, 16)
"""PR_SET_NAME and PR_GET_NAME."""
_LIMITS_BY_SIGKILL = (0, 15)
"""RLIMIT_CPU and RLIMIT_RTTIME: the kernel sends SIGKILL at these limits. If code could lower them, its end could not
be distinguished from that of code that the kernel kills because memory ran out."""


@dataclass(frozen=True)
class Condition:
    """Requires that the low 32 bits of an argument, with a mask, are one of some values; with `is_exclusion`, none of
    them. The kernel reads only the low 32 bits of the arguments that have conditions here."""

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    is_exclusion: bool = False


@dataclass(frozen=True)
class Rule:
    """A system call that is allowed if all conditions hold; otherwise it fails with `error`."""

    number: int
    conditions: tuple[Condition, ...] = ()
    error: int = errno.EPERM


def rules(machine: str, pid: int, *, may_write_files: bool) -> list[Rule]:
    """The rules for the process `pid` on this machine (`x86_64` or `aarch64`), the most frequent calls first.

    Args:
        may_write_files: whether files can be opened for writing. True if Landlock decides where.
    """
    column = ("x86_64", "aarch64").index(machine)
    not_sigkill = (signal.SIGKILL,)
    conditions: dict[str, tuple[Condition, ...]] = {
        "open": _open_conditions(1, may_write_files=may_write_files),
        "openat": _open_conditions(2, may_write_files=may_write_files),
        "fcntl": (Condition(1, _FCNTL_COMMANDS),),
        "ioctl": (Condition(1, _IOCTL_COMMANDS),),
        # Signals to itself, as `os.abort` sends them. SIGKILL is excluded, because the parent reads SIGKILL as out of
        # memory.
        "kill": (Condition(0, (pid,)), Condition(1, not_sigkill, is_exclusion=True)),
        "tgkill": (Condition(0, (pid,)), Condition(2, not_sigkill, is_exclusion=True)),
        "prlimit64": (Condition(0, (0, pid)), Condition(1, _LIMITS_BY_SIGKILL, is_exclusion=True)),
        "prctl": (Condition(0, _PRCTL_COMMANDS),),
        "clone": (Condition(0, (_THREAD_FLAGS,), _THREAD_FLAGS | _NO_THREAD_FLAGS),),
    }
    plain = [Rule(number) for number in _numbers(ALLOWED.values(), column)]
    special = [
        Rule(number, conditions[name])
        for name, numbers in NUMBERS_WITH_CONDITIONS.items()
        if name in conditions and (number := numbers[column]) is not None
    ]
    # The flags of clone3 are in memory, where a filter cannot read them. With ENOSYS, glibc falls back to clone.
    never = Condition(0, ())
    clone3 = NUMBERS_WITH_CONDITIONS["clone3"][column]
    assert clone3 is not None
    return [*plain, *special, Rule(clone3, (never,), errno.ENOSYS)]


def _open_conditions(flags: int, *, may_write_files: bool) -> tuple[Condition, ...]:
    """The conditions of a call whose argument number `flags` has the flags of `open`.

    Landlock before ABI 3 does not restrict truncation. It checks whether a file may be written only if the access mode
    is O_WRONLY or O_RDWR, and O_TRUNC also truncates a file with O_RDONLY, and with the access mode 3."""
    if not may_write_files:
        return (Condition(flags, (0,), _UNNAMED_FILE | _ACCESS_MODE | _CREATE | _TRUNCATE),)
    return (
        Condition(flags, (0,), _UNNAMED_FILE),
        Condition(flags, (_ACCESS_MODE,), _ACCESS_MODE, is_exclusion=True),
        Condition(flags, (_TRUNCATE,), _TRUNCATE | _ACCESS_MODE, is_exclusion=True),
    )


def _numbers(numbers: Iterable[tuple[int, int | None]], column: int) -> list[int]:
    return [number for each in numbers if (number := each[column]) is not None]
