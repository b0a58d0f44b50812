"""Our trainer as a contender of the training step: `rljob run` on a job file, as a user starts it. Its times are read
from its run folder; between its turns it waits in its evaluation (see `step_reward`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rljob_bench.parts_of_steps import PartsOfSteps
from rljob_bench.peer_process import python_path
from rljob_bench.step_case import (
    GROUP_SIZE,
    LEARNING_RATE,
    NEW_TOKENS,
    NUM_PROMPTS,
    PROMPT_TOKENS,
    CaseFolder,
)
from rljob_bench.step_reward import TURNS_COLUMN, released_file, waiting_file

PACKAGES = ("crds/src", "cli/src", "operator/src", "trainer/src")
UNREACHABLE_STEPS = 1_000_000
START_SECONDS = 600.0
TURN_SECONDS = 1800.0
STOP_SECONDS = 120.0
POLL_SECONDS = 0.02
MAX_TIMELINES = 16
NUM_LAST_LINES = 40
WARM_UP_STEPS = 1
"""Steps at the beginning of every turn that do not count, because everything was idle before."""
METRICS = {
    "step": "timing_s/step",
    "rollout": "timing_s/rollout",
    "generate": "timing_s/generate",
    "weight sync": "timing_s/weight_sync",
    "reward": "timing_s/reward",
    "update": "timing_s/update_actor",
}
"""Metrics with the seconds of a step's parts. `generate` and `weight sync` are measured in the worker, the others in
the controller. `rollout` contains `generate`."""
UPDATE_SPANS = ("forward", "backward", "forward_backward", "optimizer_step")
"""Names of the worker's spans in an update. Not every version has all of them."""
BETWEEN_STEPS = "between steps"


class OursError(Exception):
    """Our trainer failed; the message has the end of its output."""


@dataclass(frozen=True)
class OurDetails:
    """Settings of the job that differ from the defaults."""

    rollout: Mapping[str, object] = field(default_factory=dict)
    """Additional settings of the job's `rollout` block."""
    training: Mapping[str, object] = field(default_factory=dict)
    """Additional fields of spec.training."""
    num_workers: Mapping[str, int] = field(default_factory=lambda: {"main": 1})
    """Number of workers by pool; the first pool is the actor's."""
    roles: Mapping[str, object] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    """Additional options of `rljob run`."""
    max_prompt_tokens: int = PROMPT_TOKENS
    """No prompt of the datasets has more."""
    response_tokens: int = NEW_TOKENS
    """Number of sampled tokens of every response, which is checked."""


class OurTraining:
    """A running `rljob run`. End it with `close`.

    A turn has a warm-up step, the steps that count, and a step whose timeline is written, which does not count either.
    """

    def __init__(
        self, tree: Path, case: CaseFolder, dtype: str, num_steps: int, folder: Path, details: OurDetails
    ) -> None:
        """`tree`: a checkout whose packages run with the libraries of this environment. Raises OursError if the run
        does not start."""
        self.folder = folder
        self._num_steps = num_steps
        self._response_tokens = details.response_tokens
        self._parts = PartsOfSteps()
        self._turns = folder / "turns"
        self._run = folder / "run"
        self._num_turns = 0
        self._log_file = folder / "rljob.log"
        self._turns.mkdir(parents=True)
        job = folder / "job.yaml"
        job.write_text(json.dumps(self._job(tree, case, dtype, details)))
        packages = os.pathsep.join([*(str(tree / each) for each in PACKAGES), python_path()])
        environment = {**os.environ, "PYTHONPATH": packages}
        with self._log_file.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rljob_cli", "run", str(job), "--run-folder", str(self._run), *details.options],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                start_new_session=True,
            )
        begin = time.perf_counter()
        try:
            self._wait_for(lambda: waiting_file(self._turns, 0).exists(), START_SECONDS)
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.perf_counter() - begin
        """Seconds until the first step could begin."""

    def turn(self) -> list[float]:
        """Seconds of the steps that count, each from the end of the previous step to its own end."""
        released_file(self._turns, self._num_turns).touch()
        self._num_turns += 1
        self._wait_for(lambda: waiting_file(self._turns, self._num_turns).exists(), TURN_SECONDS)
        rows = self._steps()[-self._steps_per_turn :]
        assert len(rows) == self._steps_per_turn, f"{len(rows)} steps:\n{self._end_of_log()}"
        lengths = {row["response_length/mean"] for row in rows}
        assert lengths == {self._response_tokens}, f"response lengths {lengths}, not {self._response_tokens}"
        moments = [row["wall_time"] for row in rows]
        seconds = [moments[i] - moments[i - 1] for i in range(WARM_UP_STEPS, WARM_UP_STEPS + self._num_steps)]
        parts: list[Mapping[str, float]] = []
        for row, each in zip(rows[WARM_UP_STEPS:-1], seconds, strict=True):
            metrics = {name: row[metric] for name, metric in METRICS.items() if metric in row}
            parts.append({**metrics, BETWEEN_STEPS: each - metrics["step"]})
        timeline = self._run / "timelines" / f"step-{int(rows[-1]['step']):06d}.json"
        if timeline.exists():
            parts.append(span_seconds(timeline, UPDATE_SPANS))
        self._parts.add_turn(parts)
        return seconds

    def median(self, name: str) -> float | None:
        """Median seconds of a part of a step (METRICS, UPDATE_SPANS, BETWEEN_STEPS); None if it was not measured."""
        return self._parts.median([name])

    @property
    def timelines(self) -> list[Path]:
        """Timelines of the last step of each turn. The warm-up turn is left out unless it is the only one."""
        found = sorted((self._run / "timelines").glob("step-*.json"))
        return found[1:] or found

    def close(self) -> None:
        """Asks the run to stop and waits until it has; kills it after a timeout."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            released_file(self._turns, self._num_turns).touch()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGINT)
                self._process.wait()

    @property
    def _steps_per_turn(self) -> int:
        return WARM_UP_STEPS + self._num_steps + 1

    def _job(self, tree: Path, case: CaseFolder, dtype: str, details: OurDetails) -> dict[str, object]:
        """The job file; fields that it does not contain have their defaults."""
        held_out = self.folder / "held_out.jsonl"
        # One row per worker, so that no row is repeated; the first row waits for the next turn.
        num_workers = next(iter(details.num_workers.values()))
        rows = [json.loads(line) for line in case.prompts.read_text().splitlines()[-num_workers:]]
        rows[0][TURNS_COLUMN] = str(self._turns)
        held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
        timeline_steps = [self._steps_per_turn * turn for turn in range(1, MAX_TIMELINES + 1)]
        return {
            "apiVersion": "rljob.dev/v1alpha1",
            "kind": "RLJob",
            "metadata": {"name": "training-step"},
            "spec": {
                "pools": [
                    {"name": name, "nodes": 1, "gpusPerNode": count} for name, count in details.num_workers.items()
                ],
                "roles": details.roles,
                "training": {
                    "model": {"source": str(case.model), "dtype": dtype},
                    "dataset": _file_dataset(case.prompts, details.max_prompt_tokens) | {"shuffle": False},
                    **_rewards(tree),
                    "optimizer": {"learningRate": LEARNING_RATE},
                    "rollout": {"groupSize": GROUP_SIZE, "maxNewTokens": NEW_TOKENS, **details.rollout},
                    "evaluations": [
                        {
                            "dataset": _file_dataset(held_out, details.max_prompt_tokens),
                            "everySteps": self._steps_per_turn,
                            "numSamples": 0,
                        }
                    ],
                    "steps": UNREACHABLE_STEPS,
                    "batchSize": NUM_PROMPTS,
                    "timelineSteps": timeline_steps,
                    **details.training,
                },
                "checkpoint": {"everySteps": UNREACHABLE_STEPS, "exportHuggingFace": "Never"},
            },
        }

    def _steps(self) -> list[dict[str, float]]:
        lines = (self._run / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if METRICS["step"] in row]

    def _wait_for(self, is_there: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_there():
            if self._process.poll() is not None:
                raise OursError(f"rljob run exited with code {self._process.returncode}:\n{self._end_of_log()}")
            if time.monotonic() > deadline:
                raise OursError(f"rljob run does not make progress:\n{self._end_of_log()}")
            time.sleep(POLL_SECONDS)

    def _end_of_log(self) -> str:
        """The end of the log, read now because the log is deleted when the program ends."""
        return "\n".join(self._log_file.read_text(errors="replace").splitlines()[-NUM_LAST_LINES:])


def span_seconds(timeline: Path, names: Sequence[str]) -> dict[str, float]:
    """Seconds in the spans with these names, added over all processes, from the timeline of one step."""
    seconds: dict[str, float] = {}
    for event in json.loads(timeline.read_text())["traceEvents"]:
        if event["ph"] == "X" and event["name"] in names:
            seconds[event["name"]] = seconds.get(event["name"], 0.0) + 1e-6 * event["dur"]
    return seconds


def _rewards(tree: Path) -> dict[str, object]:
    """The rewards in the form of that checkout: earlier versions support only one reward."""
    reward = {
        "type": "Function",
        "function": {"path": "rljob_bench.step_reward:score"},
        "timeoutSeconds": 86_400,
    }
    knows_many = "rewards:" in (tree / "crds/src/rljob_api/v1alpha1/training.py").read_text()
    return {"rewards": [reward]} if knows_many else {"reward": reward}


def _file_dataset(path: Path, max_prompt_tokens: int) -> dict[str, object]:
    return {"type": "File", "file": {"path": str(path)}, "maxPromptTokens": max_prompt_tokens}
