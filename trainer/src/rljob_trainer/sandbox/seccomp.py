"""Installs a seccomp filter in this process: a program for the kernel (BPF) that decides about every system call."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

from rljob_trainer.sandbox.system_calls import Condition, Rule

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* of the machines that are supported. Both are little-endian."""
SECCOMP_NUMBERS = {"x86_64": 317, "aarch64": 277}
"""The number of the system call seccomp."""
X32_BIT = 0x40000000
"""The bit that is set in the numbers of system calls of the x32 ABI of x86-64. Without a check of this bit, the filter
could mistake such a call for another one."""

_SET_MODE_FILTER, _GET_ACTION_AVAILABLE = 1, 2
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _AND, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16
"""Offsets in the kernel's `struct seccomp_data`."""

Instruction = tuple[int, int, int, int]
"""Code, instructions to skip if true and if false, and operand."""


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def why_unavailable(machine: str) -> str | None:
    """Why this machine cannot install filters; None if it can."""
    if machine not in ARCHITECTURES:
        return f"the machine is {machine}; only {' and '.join(ARCHITECTURES)} are supported"
    action = ctypes.c_uint32(_KILL_PROCESS)
    if _seccomp(machine, _GET_ACTION_AVAILABLE, ctypes.byref(action)):
        return f"the kernel refuses seccomp ({os.strerror(ctypes.get_errno())})"
    return None


def install(machine: str, rules: Sequence[Rule]) -> None:
    """Installs the filter for this thread and the threads that it starts. It cannot be removed. PR_SET_NO_NEW_PRIVS
    must be set. Raises OSError."""
    install_program(machine, filter_program(machine, rules))


def install_program(machine: str, instructions: Sequence[Instruction]) -> None:
    """Installs any filter; see `install`."""
    code = b"".join(struct.pack("=HBBI", *each) for each in instructions)
    program = _Program(len(instructions), code)
    if _seccomp(machine, _SET_MODE_FILTER, ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "seccomp: the kernel rejected the filter")


def filter_program(machine: str, rules: Sequence[Rule]) -> list[Instruction]:
    """The filter. A call of another architecture ends the process; a call without a rule fails with EPERM."""
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_IF_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
    ]
    if machine == "x86_64":
        program += [(_IF_AT_LEAST, 0, 1, X32_BIT), _fail(errno.EPERM)]
    for rule in rules:
        checks = [step for condition in rule.conditions for step in _check(condition, rule.error)]
        program += [(_IF_EQUAL, 0, len(checks) + 1, rule.number), *checks, (_RETURN, 0, 0, _ALLOW)]
    return [*program, _fail(errno.EPERM)]


def _check(condition: Condition, error: int) -> list[Instruction]:
    """The instructions that make the call fail with this error, unless the condition holds."""
    load = [
        (_LOAD, 0, 0, _ARGUMENTS_OFFSET + 8 * condition.argument),
        (_AND, 0, 0, condition.mask),
    ]
    num_values = len(condition.values)
    if condition.is_exclusion:
        compare = [(_IF_EQUAL, num_values - 1 - index, 0, value) for index, value in enumerate(condition.values)]
        # If no value is equal, the error is skipped.
        return [*load, *compare[:-1], (_IF_EQUAL, 0, 1, condition.values[-1]), _fail(error)]
    compare = [(_IF_EQUAL, num_values - index, 0, value) for index, value in enumerate(condition.values)]
    return [*load, *compare, _fail(error)]


def _fail(error: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | error)


def _seccomp(machine: str, operation: int, argument: object) -> int:
    result: int = ctypes.CDLL(None, use_errno=True).syscall(SECCOMP_NUMBERS[machine], operation, 0, argument)
    return result
