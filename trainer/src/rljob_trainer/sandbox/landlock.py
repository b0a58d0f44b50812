"""Restricts the files that this process can open, with Landlock, a security module of Linux from 5.13."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_WRITE_FILE, _READ_FILE, _READ_DIR, _MAKE_FILE, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 8, 1 << 14
_NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of kinds of file access, by ABI. Later ABIs have the same number as ABI 5."""
_ALL_TCP = 1 | 2
"""Bind and connect (ABI 4)."""
_ALL_SCOPES = 1 | 2
"""Abstract UNIX sockets and signals (ABI 6): both only within the sandbox."""


def available_abi() -> int:
    """The version of Landlock's interface that the kernel has; 0 if it has none."""
    return max(0, _call(_CREATE_RULESET, None, 0, 1))


def restrict(abi: int, readable: Sequence[str], folder: Path | None) -> None:
    """Restricts this process permanently: it can only read files in `readable`, and read, create and write files in
    `folder`; it can also write to `/dev/null`. It cannot remove or rename files, so all files that it has written are
    in the folder, and their sizes can be added up. PR_SET_NO_NEW_PRIVS must be set. Raises OSError."""
    all_rights = (1 << _NUM_FILE_RIGHTS[min(abi, 5)]) - 1
    fields = (all_rights, _ALL_TCP if abi >= 4 else 0, _ALL_SCOPES if abi >= 6 else 0)
    num_fields = 1 + (abi >= 4) + (abi >= 6)
    ruleset = _checked(_CREATE_RULESET, struct.pack(f"={num_fields}Q", *fields[:num_fields]), 8 * num_fields, 0)
    writing = (_WRITE_FILE | _TRUNCATE) & all_rights
    for path in readable:
        _allow(ruleset, path, _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0))
    _allow(ruleset, "/dev/null", _READ_FILE | writing)
    if folder is not None:
        _allow(ruleset, str(folder), _READ_FILE | _READ_DIR | _MAKE_FILE | writing)
    _checked(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    _checked(_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, descriptor), 0)
    os.close(descriptor)


def _checked(number: int, *arguments: int | bytes) -> int:
    result = _call(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "Landlock: the kernel rejected the restriction")
    return result


def _call(number: int, *arguments: int | bytes | None) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    result: int = library.syscall(
        number, *(ctypes.c_long(each) if isinstance(each, int) else each for each in arguments)
    )
    return result
