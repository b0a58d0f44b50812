"""The program of a tracker's process: reads messages from standard input, and calls the tracker's library. Its argument
is the type of the tracker.

The process outlives the trainer by some seconds at most. It notices the end of the trainer, also of a killed one, by
the closed pipe, and then ends the run in the tracker.
"""

from __future__ import annotations

import json
import os
import select
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

from rljob_api.standard_streams import accept_all_characters
from rljob_api.v1alpha1.tracker import TrackerType
from rljob_page.page import PAGE_FILE_NAME, PageOptions, write_page
from rljob_page.run_files import read_files, read_state
from rljob_trainer.trackers.messages import (
    REPORT_PREFIX,
    Begin,
    End,
    MetricsRow,
    Report,
    RunFacts,
    SampleTable,
    decode,
)

NICENESS = 10
"""The trainer and its workers get CPU time first."""
LAST_SECONDS = 30.0
"""The process ends at the latest this long after the pipe from the trainer was closed."""
CRASHED_EXIT_CODE = 1
"""The exit code that the tracker gets if the trainer has sent none, because it was killed."""
MAX_TEXT_CHARS = 500


class TrackerRun(Protocol):
    """The run in a tracker. The methods raise exceptions of the library."""

    stores_page_after_end: bool
    """Whether the page is stored after the end of the run, so that it cannot delay the end."""

    def log_metrics(self, row: MetricsRow) -> None:
        """Stores the metrics of a step."""

    def log_samples(self, table: SampleTable) -> None:
        """Stores the samples of an evaluation."""

    def log_page(self, page: Path) -> None:
        """Stores the page of the run. Called at most once for each attempt."""

    def finish(self, exit_code: int) -> None:
        """Ends the run, and waits until everything is sent."""


def main() -> int:
    """Runs until the last message. Returns 1 if the run could not be started in the tracker."""
    os.nice(NICENESS)
    accept_all_characters()
    messages = take_standard_input()
    threading.Thread(target=end_after_trainer, args=(messages.fileno(),), daemon=True).start()
    start = start_function(TrackerType(sys.argv[1]))
    # If the trainer was killed while it wrote, the last line is cut.
    lines = (line for line in iter(messages.readline, b"") if line.endswith(b"\n"))
    if (first := next(lines, None)) is None:
        # The run was not set up.
        return 0
    begin = decode(first)
    assert isinstance(begin, Begin)
    try:
        run = start(begin, report)
    except Exception as error:
        report("warning", f"{begin.tracker.type}: no data of this attempt is stored: {error_text(error)}")
        return 1
    forward_messages(lines, run, begin)
    return 0


def take_standard_input() -> BinaryIO:
    """Standard input, which processes that the library starts do not inherit."""
    messages = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    return messages


def end_after_trainer(pipe: int) -> None:
    """A thread: ends this process some time after the trainer has closed the pipe, also if the library hangs."""
    poll = select.poll()
    poll.register(pipe, 0)  # Only the end of the pipe is an event.
    poll.poll()
    time.sleep(LAST_SECONDS)
    os._exit(1)


def start_function(kind: TrackerType) -> Callable[[Begin, Report], TrackerRun]:
    """The function that starts a run in trackers of this type. Imports their library, which takes seconds."""
    if kind is TrackerType.WANDB:
        from rljob_trainer.trackers.wandb_run import start_wandb_run

        return start_wandb_run
    from rljob_trainer.trackers.mlflow_run import start_mlflow_run

    return start_mlflow_run


def forward_messages(lines: Iterable[bytes], run: TrackerRun, begin: Begin) -> None:
    """Passes all messages on to the run, and finishes it. What the tracker rejects is left out, with one warning for
    each kind of message."""
    calls, end = Calls(begin.tracker.type), End(CRASHED_EXIT_CODE, sends_page=False)
    for line in lines:
        match message := decode(line):
            case MetricsRow():
                calls.make("metrics", partial(run.log_metrics, message))
            case SampleTable():
                calls.make("samples", partial(run.log_samples, message))
            case End():
                end = message
                break
    ending = [("newest data", partial(run.finish, end.exit_code))]
    if end.sends_page:
        # Once: making it takes much memory for a long run, and W&B keeps every page that it gets.
        ending.insert(len(ending) if run.stores_page_after_end else 0, ("page", partial(log_page, run, begin.facts)))
    for data, call in ending:
        calls.make(data, call)


class Calls:
    """Calls of the tracker's library, whose errors are reported once for each kind of data."""

    def __init__(self, kind: TrackerType) -> None:
        self._kind = kind
        self._reported: set[str] = set()

    def make(self, data: str, call: Callable[[], None]) -> None:
        """Makes the call. `data`: what is missing in the tracker if it fails."""
        try:
            call()
        except Exception as error:
            if data not in self._reported:
                self._reported.add(data)
                report("warning", f"{self._kind}: its {data} may be incomplete: {error_text(error)}")


def log_page(run: TrackerRun, facts: RunFacts) -> None:
    """Writes the page of the run and stores it. Raises PageError, or an exception of the library."""
    files = read_files(Path(facts.run_folder))
    if files.state is None:
        files = replace(files, state=read_state(Path(facts.run_state_file)))
    with tempfile.TemporaryDirectory() as folder:
        run.log_page(write_page(files, PageOptions(output=Path(folder) / PAGE_FILE_NAME)).path)


def report(level: str, text: str) -> None:
    """Sends a line to the trainer's log. `level`: `info` or `warning`."""
    sys.stdout.write(f"{REPORT_PREFIX}{json.dumps([level, text])}\n")
    sys.stdout.flush()


def error_text(error: Exception) -> str:
    """The first lines of the message."""
    return (str(error).strip() or type(error).__name__)[:MAX_TEXT_CHARS]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Without the exit handlers of the libraries, which may wait for a server.
    os._exit(code)
