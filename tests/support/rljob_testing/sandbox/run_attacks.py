"""Runs all attacks in one sandbox and prints a JSON object: the layers of the sandbox, the result of each attack, and
the number of processes that are left (it must be 0). It imports only the sandbox's modules, so that it also runs in a
pod."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import sys
import tempfile
import time

from rljob_testing.sandbox.attacks import ATTACKS, is_stopped
from rljob_trainer.sandbox.confinement import make_unreadable
from rljob_trainer.sandbox.programs import Mode
from rljob_trainer.sandbox.sandbox import ProgramLimits, Sandbox
from rljob_trainer.sandbox.seccomp import install_program

WITHOUT_LANDLOCK = "--without-landlock"
"""An argument: run as on a kernel without Landlock."""
OLD_LANDLOCK = "--old-landlock"
"""An argument: run as on a kernel before 6.2, whose Landlock does not restrict truncation."""
OLD_ABI = 2
PR_SET_CHILD_SUBREAPER = 36
TARGET_TEXT = "the text of the target"
_ZYGOTE_WITH_OLD_LANDLOCK = f"""#!{sys.executable} -P
import runpy, sys
from rljob_trainer.sandbox import landlock
landlock.available_abi = lambda: {OLD_ABI}
sys.argv = sys.argv[-2:]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


def main() -> None:
    """Runs all attacks with the kernel that the arguments choose, and prints the JSON object."""
    if WITHOUT_LANDLOCK in sys.argv:
        hide_landlock()
    with tempfile.TemporaryDirectory(prefix="rljob-attacks-") as folder:
        os.chmod(folder, 0o777)
        if OLD_LANDLOCK in sys.argv:
            use_old_landlock(folder)
        run_attacks(os.path.join(folder, "target"))


def run_attacks(target: str) -> None:
    """Runs the attacks. `target`: a file that they try to change."""
    adopt_orphans()
    with open(target, "w") as file:
        file.write(TARGET_TEXT)
    os.chmod(target, 0o666)
    sandbox = Sandbox(256 << 20)
    if not sandbox.layers.landlock_abi:
        make_unreadable()
    seen = {}
    for name, attack in ATTACKS.items():
        if attack.needs_landlock and not sandbox.layers.landlock_abi:
            continue
        began = time.monotonic()
        code = attack.code_against(os.getpid(), target)
        run = sandbox.run(Mode.SCRIPT, {"code": code}, b"", ProgramLimits(attack.seconds, 1 << 20))
        output = run.output.decode(errors="replace")[:2000]
        seen[name] = {
            "is_stopped": is_stopped(attack, run.failure, output),
            "output": output,
            "failure": run.failure,
            "seconds": round(time.monotonic() - began, 3),
        }
    # After all attacks, the sandbox must still run a program.
    after = sandbox.run(Mode.SCRIPT, {"code": "print(input())"}, b"fine", ProgramLimits(10.0, 1000))
    sandbox.close()
    with open(target) as file:
        is_unharmed = file.read() == TARGET_TEXT
    print(
        json.dumps(
            {
                "uid": os.getuid(),
                "layers": vars(sandbox.layers),
                "seen": seen,
                "is_target_unharmed": is_unharmed,
                "after": [after.failure, after.output.decode()],
                "num_left": num_children(),
            }
        )
    )


def hide_landlock() -> None:
    """Makes the kernel answer as one without Landlock, for this process and those that it starts."""
    machine = os.uname().machine
    ctypes.CDLL(None).prctl(38, *(ctypes.c_ulong(each) for each in (1, 0, 0, 0)))
    load_number, if_equal, give = (0x20, 0, 0, 0), (0x15, 0, 1, 444), 0x06
    install_program(machine, [load_number, if_equal, (give, 0, 0, 0x50000 | errno.ENOSYS), (give, 0, 0, 0x7FFF0000)])


def use_old_landlock(folder: str) -> None:
    """Makes the zygotes of this process use Landlock as on a kernel with OLD_ABI: they do not request the newer rights.
    A program in `folder` starts them."""
    program = os.path.join(folder, "python")
    with open(program, "w") as file:
        file.write(_ZYGOTE_WITH_OLD_LANDLOCK)
    os.chmod(program, 0o755)
    sys.executable = program


def adopt_orphans() -> None:
    """Makes programs that outlive the zygote children of this process, so that `num_children` counts them."""
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, *(ctypes.c_ulong(each) for each in (1, 0, 0, 0))):
        raise OSError("prctl: the kernel refused PR_SET_CHILD_SUBREAPER")


def num_children() -> int:
    """The number of processes whose parent is this process, with those that have ended and were not reaped."""
    found = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        found += int(fields[1]) == os.getpid()
    return found


if __name__ == "__main__":
    main()
