"""One process of a check: `python -m rljob_testing.gpu.engine_process FUNCTION NAME RESULT DEVICE RANK RANKS PORT
THREADS JOINS`. Writes its result to the file RESULT; the exit code is 1 if the check failed."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from rljob_testing.gpu.device import DeviceContext
from rljob_testing.gpu.results import Outcome, result_of
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.process_group import join_process_group


def main() -> NoReturn:
    """Runs the check on one rank and ends this process."""
    function, name, result_file, device_type = sys.argv[1:5]
    rank, num_ranks, port, num_threads, joins = map(int, sys.argv[5:10])
    context = WorkerContext(rank, num_ranks, rank, 0, "127.0.0.1", port, device_type, num_threads, rank)
    folder = Path(result_file).parent

    def check(notes: dict[str, float]) -> None:
        if joins:
            join_process_group(context)
        loaded(function)(DeviceContext(context, folder, notes))

    result = result_of(name, check)
    Path(result_file).write_text(json.dumps(asdict(result)))
    print(result.text(), flush=True)
    # Skips the unloading of libraries, which may hang or crash.
    os._exit(1 if result.outcome is Outcome.FAILED else 0)


def loaded(function: str) -> Callable[[DeviceContext], None]:
    """Imports the function of a check."""
    module, _, name = function.partition(":")
    full_name = module if "." in module else f"{__package__}.{module}"
    found: Callable[[DeviceContext], None] = getattr(importlib.import_module(full_name), name)
    return found


if __name__ == "__main__":
    main()
