"""Real runs of the smallest model: as processes, or in the test's process, which saves seconds of imports and allows a
test to replace parts. Reads what a run wrote, and finds the processes that it started."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypedDict, cast

import pytest
from pydantic import JsonValue

from rljob_api.constants import ENV_RUN_FOLDER, RUN_STATE_FILE_NAME
from rljob_api.contract_documents import TrainerJob, dump_job
from rljob_api.job_file import load_job_file
from rljob_api.run_state import RunState
from rljob_testing.process_tree import Process, descendants, is_alive, processes_with_variable
from rljob_testing.settings import inherited_environment, inherited_python_path
from rljob_trainer.__main__ import main

Document = dict[str, JsonValue]

ASSETS = "package://rljob_trainer/assets/sort_digits"
WATCH_SECONDS = 0.2
END_SECONDS = 480.0


def small_job(
    *, num_workers: int = 1, roles: Document | None = None, checkpoint: Document | None = None, **training: JsonValue
) -> Document:
    """A job with four steps of 4 prompts x 4 responses, and a checkpoint after each step.

    `training` is merged into spec.training, with the names of the job file: mappings are merged, everything else is
    replaced.
    """
    base: Document = {
        "model": {"source": f"{ASSETS}/model"},
        "dataset": {"type": "File", "file": {"path": f"{ASSETS}/train.jsonl"}, "maxPromptTokens": 8},
        "rewards": [function_reward("rljob_trainer.rewards.exact_match:exact_match")],
        "optimizer": {"learningRate": 3.0e-4},
        "rollout": {"engine": "HuggingFace", "groupSize": 4, "maxNewTokens": 8},
        "loggers": ["Console"],
        "steps": 4,
        "batchSize": 4,
    }
    spec: Document = {
        "pools": [{"name": "main", "nodes": 1, "gpusPerNode": num_workers}],
        "training": merged(base, training),
        "roles": roles or {},
        "checkpoint": merged({"everySteps": 1, "keep": 3, "exportDtype": "Float32"}, checkpoint or {}),
    }
    return {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "small"}, "spec": spec}


def function_reward(path: str, **fields: JsonValue) -> Document:
    """An entry of `rewards` that is scored in one process."""
    return {"type": "Function", "function": {"path": path}, "numProcesses": 1, **fields}


def held_out(num_prompts: int, every_steps: int) -> Document:
    """An evaluation with the held-out rows of the quickstart."""
    dataset: Document = {"type": "File", "file": {"path": f"{ASSETS}/held_out.jsonl"}, "maxPromptTokens": 8}
    return {"dataset": dataset, "numPrompts": num_prompts, "everySteps": every_steps}


def merged(base: Document, changes: Document) -> Document:
    """`base` with `changes`; nested mappings are merged. A mapping in place of a list changes each entry."""
    result = dict(base)
    for name, value in changes.items():
        old = result.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            result[name] = merged(old, value)
        elif isinstance(old, list) and isinstance(value, dict):
            result[name] = [merged(each, value) if isinstance(each, dict) else each for each in old]
        else:
            result[name] = value
    return result


class TokenLists(TypedDict):
    """The lists of a conversation in `tokens/`, with a value per token."""

    text: list[str]
    isSampled: list[bool]
    isTrained: list[bool]
    rolloutLogprob: list[float | None]
    trainerLogprob: list[float | None]
    age: list[int | None]
    advantage: list[float | None]


class RecordedConversation(TypedDict):
    """A conversation in `tokens/`."""

    kind: str
    group: int
    prompt: str
    score: float | None
    outcome: str
    tokens: TokenLists
    omittedPromptTokens: int
    omittedTokens: int


class RecordedTokens(TypedDict):
    """A file in `tokens/`."""

    version: int
    step: int
    conversations: list[RecordedConversation]


@dataclass(frozen=True)
class RunFiles:
    """The files that a run has written."""

    folder: Path

    @property
    def checkpoints(self) -> Path:
        """The checkpoint folder of a local run."""
        return self.folder / "checkpoints"

    def metrics(self) -> list[dict[str, float]]:
        """The complete rows of metrics.jsonl."""
        return cast(list[dict[str, float]], json_lines(self.folder / "metrics.jsonl"))

    def training_steps(self) -> list[int]:
        """Steps that have a training row, in the order of the file."""
        return [int(row["step"]) for row in self.metrics() if "actor/lr" in row]

    def series(self, name: str) -> list[float]:
        """The values of one metric, over the rows that have it."""
        return [row[name] for row in self.metrics() if name in row]

    def samples(self, kind: str, step: int) -> list[dict[str, str]]:
        """Rows of samples.jsonl of one kind and step."""
        rows = cast(list[dict[str, str]], json_lines(self.folder / "samples.jsonl"))
        return [row for row in rows if row["kind"] == kind and int(row["step"]) == step]

    def tokens(self, name: str) -> RecordedTokens:
        """The content of a file in `tokens/`, `training` or `evaluation`."""
        return cast(RecordedTokens, json.loads((self.folder / "tokens" / f"{name}.json").read_text()))

    def state(self) -> RunState:
        """The current run state, which must exist."""
        return RunState.from_wire(json.loads((self.folder / RUN_STATE_FILE_NAME).read_text()))

    def newest_checkpoint(self) -> int:
        """The step of the newest checkpoint in the run state; 0 if there is none yet."""
        has_begun = (self.folder / RUN_STATE_FILE_NAME).exists()
        checkpoint = self.state().checkpoint if has_begun else None
        return checkpoint.step if checkpoint else 0

    def checkpoint_names(self) -> list[str]:
        """Names of complete and incomplete checkpoint folders, oldest first."""
        return sorted(path.name for path in self.checkpoints.glob("step-*"))

    def exported_weights(self) -> bytes:
        """The bytes of the exported weights file."""
        return (self.folder / "export" / "model.safetensors").read_bytes()


def json_lines(path: Path) -> list[Document]:
    """The complete lines of a JSON Lines file that may still grow; none if it does not exist."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


class LocalRun:
    """One `rljob run job.yaml`, started in `folder` and watched until it ends."""

    def __init__(self, folder: Path, job: Document, *arguments: str, **variables: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # JSON is valid YAML.
        (folder / "job.yaml").write_text(json.dumps(job))
        self.files = RunFiles(folder / "runs" / "small")
        self.seen: set[Process] = set()
        self._output_file = folder / f"output-{time.monotonic_ns()}.txt"
        own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        environment = {**inherited_environment(), **own, **variables}
        with self._output_file.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rljob_cli", "run", "job.yaml", *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    @property
    def output(self) -> str:
        """The output so far."""
        return self._output_file.read_text()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until the condition holds. Fails if the run ends first."""
        deadline = time.monotonic() + END_SECONDS
        while not condition():
            assert self.process.poll() is None, (
                f"the run ended early with exit code {self.process.returncode}:\n{self.output}"
            )
            if time.monotonic() > deadline:
                self._give_up()
            time.sleep(0.02)

    def end(self) -> int:
        """Waits for the end and returns the exit code."""
        try:
            code = self.process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._give_up()
        self._watcher.join()
        return code

    def processes_of_run(self) -> set[Process]:
        """Living processes whose environment contains the folder of the run."""
        return processes_with_variable(ENV_RUN_FOLDER, str(self.files.folder))

    def leftover_processes(self) -> list[Process]:
        """Processes of the run that are still alive after it ended."""
        return [*self.processes_of_run(), *(process for process in self.seen if is_alive(process))]

    def _give_up(self) -> NoReturn:
        output = self.output
        for _ in range(2):
            self.process.terminate()
            time.sleep(1)
        self.process.wait()
        raise AssertionError(f"the run did not end within {END_SECONDS:.0f} s:\n{output}")

    def _watch(self) -> None:
        while self.process.poll() is None:
            self.seen |= descendants(self.process.pid)
            time.sleep(WATCH_SECONDS)


SUPPORT_FOLDER = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """A run that has ended."""

    exit_code: int
    terminal: str
    files: RunFiles


class RunTrainer:
    """Runs `python -m rljob_trainer` to its end, as the operator starts it. Relative paths of the job refer to
    `folder`, which is also on the PYTHONPATH of workers and rewards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, job: Document, ray_address: str | None, *, attempt: int = 1, **variables: str) -> Ended:
        """Runs one attempt; `variables` are added to its environment."""
        environment = self._environment(job, ray_address, attempt) | variables
        terminal = io.StringIO()
        captured = (redirect_stdout(terminal), redirect_stderr(terminal))
        with pytest.MonkeyPatch.context() as patch, captured[0], captured[1], _own_signals():
            for name, value in environment.items():
                patch.setenv(name, value)
            # As Python does at its start, from PYTHONPATH.
            patch.syspath_prepend(str(self.folder))
            code = main()
        return Ended(code, terminal.getvalue(), self.files)

    def start(self, job: Document, ray_address: str | None, **variables: str) -> subprocess.Popen[str]:
        """Starts the first attempt as a process; `variables` are added to its environment."""
        return subprocess.Popen(
            [sys.executable, "-m", "rljob_trainer"],
            env=inherited_environment() | self._environment(job, ray_address, attempt=1) | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def files(self) -> RunFiles:
        """The files of the run."""
        return RunFiles(self.folder / "run")

    def _environment(self, job: Document, ray_address: str | None, attempt: int) -> dict[str, str]:
        job_file = self.folder / "job.yaml"
        job_file.write_text(json.dumps(job))
        return {
            "RLJOB_SPEC": dump_job(TrainerJob(name="small", spec=load_job_file(job_file).spec)),
            "RLJOB_RUN_FOLDER": str(self.files.folder),
            "RLJOB_ATTEMPT": str(attempt),
            "RLJOB_JOB_FOLDER": str(self.folder),
            "RLJOB_DEVICE": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(self.folder), str(SUPPORT_FOLDER), *inherited_python_path()]),
            # Else a local cluster would turn Ray's authentication on in this process, and later tests could not use
            # their cluster, which has none.
            **({"RAY_ADDRESS": ray_address} if ray_address else {"RAY_AUTH_MODE": "disabled"}),
        }


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restores pytest's signal handlers and logging, which the trainer replaces in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    logger = logging.getLogger("rljob_trainer")
    propagates, log_handlers = logger.propagate, list(logger.handlers)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        logger.propagate, logger.handlers[:] = propagates, log_handlers
