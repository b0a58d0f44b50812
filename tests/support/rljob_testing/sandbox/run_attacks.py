"""Runs all attacks in one sandbox and prints a JSON object: the layers of the sandbox, and for each attack what was
seen. It needs only the sandbox's modules, so that it also runs in a pod. Afterwards there must be no process left, and
the process that runs it must be unharmed."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import sys
import time

from rljob_testing.sandbox.attacks import ATTACKS, is_stopped
from rljob_trainer.sandbox.confinement import make_unreadable
from rljob_trainer.sandbox.programs import Mode
from rljob_trainer.sandbox.sandbox import ProgramLimits, Sandbox
from rljob_trainer.sandbox.seccomp import install_program

WITHOUT_LANDLOCK = "--without-landlock"
"""An argument: run as on a kernel without Landlock."""


def main() -> None:
    """Prints the object, and what is left."""
    if WITHOUT_LANDLOCK in sys.argv:
        hide_landlock()
    sandbox = Sandbox(256 << 20)
    if not sandbox.layers.landlock_abi:
        make_unreadable()
    seen = {}
    for name, attack in ATTACKS.items():
        if attack.needs_landlock and not sandbox.layers.landlock_abi:
            continue
        began = time.monotonic()
        run = sandbox.run(
            Mode.SCRIPT, {"code": attack.code_against(os.getpid())}, b"", ProgramLimits(attack.seconds, 1 << 20)
        )
        output = run.output.decode(errors="replace")[:2000]
        seen[name] = {
            "is_stopped": is_stopped(attack, run.failure, output),
            "output": output,
            "failure": run.failure,
            "seconds": round(time.monotonic() - began, 3),
        }
    # A program runs as ever after all of these.
    after = sandbox.run(Mode.SCRIPT, {"code": "print(input())"}, b"fine", ProgramLimits(10.0, 1000))
    sandbox.close()
    print(
        json.dumps(
            {
                "uid": os.getuid(),
                "layers": vars(sandbox.layers),
                "seen": seen,
                "after": [after.failure, after.output.decode()],
                "num_left": _num_processes_of(os.getpid()),
            }
        )
    )


def hide_landlock() -> None:
    """Makes the kernel answer as one without Landlock, for this process and those that it starts."""
    machine = os.uname().machine
    ctypes.CDLL(None).prctl(38, *(ctypes.c_ulong(each) for each in (1, 0, 0, 0)))
    load_number, if_equal, give = (0x20, 0, 0, 0), (0x15, 0, 1, 444), 0x06
    install_program(machine, [load_number, if_equal, (give, 0, 0, 0x50000 | errno.ENOSYS), (give, 0, 0, 0x7FFF0000)])


def _num_processes_of(parent: int) -> int:
    """The number of processes whose parent or session leader is this process."""
    found = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        found += int(fields[1]) == parent
    return found


if __name__ == "__main__":
    main()
