"""Dumps the stack traces of every process of a running trainer: `python -m rljob_trainer.pod.dump_stacks`, started as
another Ray job on the same Ray cluster, on the driver's node.

Writes one file per process, `stacks-<pod>-<role>-<process id>.txt`, into the attempt's log folder. Prints the innermost
frame of each process's main thread. The last line is JSON: all that is known of the processes, except for the traces
themselves. This also works while the trainer's Python code hangs (see `stack_traces`). The output names every process,
node and storage that does not respond in time."""

from __future__ import annotations

import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO

from rljob_api.standard_streams import accept_all_characters
from rljob_trainer.attempt_logs import attempt_folder, newest_attempt
from rljob_trainer.settings import pod_and_node, read_pod_settings
from rljob_trainer.stack_traces import take_stacks, traced_processes

TOTAL_SECONDS = 20.0
"""Time limit of the whole program."""
HERE_SECONDS = 5.0
"""Time limit for the processes of this node."""
WRITE_SECONDS = 4.0
"""Part of TOTAL_SECONDS that is reserved for writing files."""
OTHER_NODES = "rljob_trainer.groups.stacks_of_nodes"
"""The program that gets the stack traces of the other nodes. It runs in a separate process, because it uses Ray, which
may hang, too."""

ProcessStacks = Mapping[str, object]
"""One process with its stack traces, under the keys of the JSON output."""


def main() -> int:
    """The exit code is 0 if any process of the trainer was found."""
    accept_all_characters()
    deadline = time.monotonic() + TOTAL_SECONDS
    settings = read_pod_settings()
    if settings.run_folder is None:
        print("dump_stacks: RLJOB_RUN_FOLDER is not set; set it to the run folder of the trainer", file=sys.stderr)
        return 1
    lines: queue.Queue[str | None] = queue.Queue()
    others = subprocess.Popen(
        [sys.executable, "-m", OTHER_NODES, str(settings.run_folder)], stdout=subprocess.PIPE, text=True
    )
    assert others.stdout is not None
    threading.Thread(target=_read_lines, args=(others.stdout, lines), daemon=True).start()
    found = stacks_here(settings.run_folder)
    more, silent = _from_other_nodes(lines, deadline - WRITE_SECONDS)
    others.kill()
    known = {_identity(each) for each in found}
    # Several Ray nodes on one machine see each other's processes.
    found += [each for each in more if _identity(each) not in known]
    for each in found:
        print(f"{named(each)}: {each['innermostFrame']}", flush=True)
    for each in silent:
        print(f"node {each['node']}: {each['reason']}", flush=True)
    summary: dict[str, object] = {"processes": [_without_text(each) for each in found], "silentNodes": silent}
    written = _written_in_time(settings.run_folder, settings.attempt, found, deadline)
    print(json.dumps(summary | written), flush=True)
    # os._exit does not wait for the writer thread, which may hang in the storage.
    os._exit(0 if found else 1)


def stacks_here(run_folder: Path) -> list[ProcessStacks]:
    """Takes the stack traces of the run's processes in this pod; without pods, of the run's processes on this
    machine."""
    pod, node = pod_and_node()
    location = {"pod": pod, "node": node, "host": socket.gethostname()}
    taken = take_stacks(traced_processes(run_folder), HERE_SECONDS)
    return [location | {_camel(name): value for name, value in asdict(each).items()} for each in taken]


def named(found: ProcessStacks) -> str:
    """Returns a process's name for messages, such as `actor rank 0, process 12 on small-1-main-0`."""
    rank = "" if found["rank"] is None else f" rank {found['rank']}"
    return f"{found['role']}{rank}, process {found['processId']} on {found['pod'] or found['host']}"


def write_stacks(folder: Path, found: Iterable[ProcessStacks]) -> None:
    """Writes the stack traces of each process into a file of their own. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in found:
        state = f"state {each['state']}" + (f", waits in {each['waitChannel']}" if each["waitChannel"] else "")
        head = f"{named(each)}\n{each['title']}\n{state}\n{each['innermostFrame']}\n\n"
        (folder / file_name(each)).write_text(f"{head}{each['text']}", encoding="utf-8", errors="backslashreplace")


def file_name(found: ProcessStacks) -> str:
    """Returns the name of the file with a process's stack traces."""
    parts = (found["pod"] or found["host"], found["role"], found["processId"])
    return "-".join(["stacks", *(re.sub(r"[^\w.+-]", "_", str(part)) for part in parts)]) + ".txt"


def _written_in_time(
    run_folder: Path, attempt: int | None, found: Iterable[ProcessStacks], deadline: float
) -> dict[str, object]:
    """Writes the files. Returns `folder` and `error`, one of which is None: the folder of the files, or the error if
    the storage fails or does not respond by the deadline."""
    result: dict[str, object] = {"folder": None, "error": "the storage of the run folder did not respond in time"}

    def write() -> None:
        folder = attempt_folder(run_folder, attempt or newest_attempt(run_folder) or 1)
        try:
            write_stacks(folder, found)
        except OSError as error:
            result["error"] = f"{folder}: cannot write the stacks ({error})"
        else:
            result.update(folder=str(folder), error=None)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(max(0.0, deadline - time.monotonic()))
    return dict(result)


def _read_lines(output: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in output:
        lines.put(line)
    lines.put(None)


def _from_other_nodes(
    lines: queue.Queue[str | None], deadline: float
) -> tuple[list[ProcessStacks], list[dict[str, str]]]:
    """Reads the output of OTHER_NODES. Returns the processes of the other nodes, and the nodes whose processes are not
    known, with the reason."""
    found: list[ProcessStacks] = []
    silent: list[dict[str, str]] = []
    expected: list[str] | None = None
    answered: set[str] = set()
    while expected is None or answered < set(expected):
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if line is None:
            break
        if not line.startswith("{"):
            continue
        message = json.loads(line)
        if "nodes" in message:
            expected = message["nodes"]
        else:
            answered.add(message["node"])
            found += message.get("processes", [])
            silent += [{"node": message["node"], "reason": message["reason"]}] if "reason" in message else []
    if expected is None:
        silent.append({"node": "others", "reason": "Ray did not list the nodes in time"})
    silent += [{"node": node, "reason": "did not respond in time"} for node in sorted(set(expected or ()) - answered)]
    return found, silent


def _identity(found: ProcessStacks) -> tuple[object, ...]:
    return found["pod"], found["host"], found["processId"]


def _without_text(found: ProcessStacks) -> ProcessStacks:
    return {name: value for name, value in found.items() if name != "text"} | {"file": file_name(found)}


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


if __name__ == "__main__":
    sys.exit(main())
