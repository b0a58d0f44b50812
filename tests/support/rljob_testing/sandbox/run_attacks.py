"""Runs all attacks in one sandbox and prints a JSON object: the layers of the sandbox, and for each attack what was
seen. It needs only the sandbox's modules, so that it also runs in a pod. Afterwards there must be no process left, and
the process that runs it must be unharmed."""

from __future__ import annotations

import json
import os
import time

from rljob_testing.sandbox.attacks import ATTACKS, is_stopped
from rljob_trainer.sandbox.programs import Mode
from rljob_trainer.sandbox.sandbox import ProgramLimits, Sandbox


def main() -> None:
    """Prints the object, and what is left."""
    os.environ["CANARY"] = "secret"
    sandbox = Sandbox(256 << 20)
    seen = {}
    for name, attack in ATTACKS.items():
        if attack.needs_landlock and not sandbox.layers.landlock_abi:
            continue
        began = time.monotonic()
        run = sandbox.run(Mode.SCRIPT, {"code": attack.code}, b"", ProgramLimits(attack.seconds, 1 << 20))
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
