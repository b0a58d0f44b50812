"""A program that takes the commands of `nsys` which a run uses, and writes a report of what it was asked for.

It responds like nsys 2022.4: `start` and `stop` need a session that `launch` has begun, and `cancel` does not work."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def install(folder: Path) -> Path:
    """Installs the program as `nsys` in a new folder, which also gets a file per session. Returns the folder."""
    folder.mkdir(parents=True)
    program = folder / "nsys"
    # -I and -S: it runs in processes whose PYTHONPATH has the trainer, and starts in milliseconds.
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {__file__} {folder} "$@"\n')
    program.chmod(0o755)
    return folder


def sessions(folder: Path) -> list[str]:
    """The sessions that were begun, in the order of their names."""
    return sorted(path.stem for path in folder.glob("*.session"))


def main() -> int:
    """Runs one command. Returns its exit code; `launch` becomes the program that it starts."""
    folder, command, arguments = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    options = dict(each.removeprefix("--").split("=", 1) for each in arguments if each.startswith("--"))
    if command == "launch":
        num_options = next(index for index, each in enumerate(arguments) if not each.startswith("--"))
        state = {"launched": arguments, "started": None}
        (folder / f"{options['session-new']}.session").write_text(json.dumps(state))
        os.execv(arguments[num_options], arguments[num_options:])
    file = folder / f"{options['session']}.session"
    if not file.exists():
        print("No such session")
        return 1
    state = json.loads(file.read_text())
    if command not in ("start", "stop") or (command == "start") != (state["started"] is None):
        print(f"Operation {command} is not implemented or not possible now")
        return 1
    started = arguments if command == "start" else None
    if command == "stop":
        output = dict(each.removeprefix("--").split("=", 1) for each in state["started"])["output"]
        Path(output).write_text(json.dumps(state))
    file.write_text(json.dumps({**state, "started": started}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
