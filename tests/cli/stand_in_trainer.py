"""A small program that replaces the trainer: it keeps the contract of `rljob_api.constants` and trains nothing. With
it, tests of `rljob run` see what the trainer receives, stop it, and make it fail, in a fraction of a second. Copied to
`<code folder>/rljob_trainer/__main__.py`, it is found before the real trainer. The variable `STAND_IN` says what it
does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from rljob_api import constants
from rljob_api.contract_documents import TrainerJob, dump_run_state, load_job
from rljob_api.run_state import Alarm, RunPhase, RunState
from rljob_api.v1alpha1.status import CheckpointStatus, Progress

STOPS: list[int] = []
ALARM = Alarm(reason="ResponsesCutOff", value=0.75, message="75 % were truncated", since_step=1, step=1)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def report(
    job: TrainerJob, step: int, phase: RunPhase, checkpoint: CheckpointStatus | None = None, resumed_from: int = 0
) -> None:
    state = RunState(
        contract_version=constants.CONTRACT_VERSION,
        job_name=job.name,
        attempt=int(os.environ[constants.ENV_ATTEMPT]),
        phase=phase,
        progress=Progress(step=step, total_steps=job.spec.training.steps, eval_score=0.5, updated_at=now()),
        checkpoint=checkpoint,
        resumed_from_step=resumed_from or None,
        alarms=(ALARM,) if step else None,
        written_at=now(),
    )
    Path(os.environ[constants.ENV_RUN_STATE_FILE]).write_text(dump_run_state(state))


def save(step: int) -> CheckpointStatus:
    folder = Path(os.environ[constants.ENV_CHECKPOINT_FOLDER]) / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    return CheckpointStatus(step=step, uri=folder.as_uri(), digest="none", saved_at=now())


def first_step() -> int:
    saved = Path(os.environ[constants.ENV_CHECKPOINT_FOLDER]).glob("step-*")
    return max((int(folder.name.removeprefix("step-")) for folder in saved), default=0)


def main() -> int:
    mode = os.environ.get("STAND_IN", "finish")
    job = load_job(os.environ[constants.ENV_SPEC])
    run_folder = Path(os.environ[constants.ENV_RUN_FOLDER])
    environment = {
        name: value for name, value in os.environ.items() if name.startswith("RLJOB_") or name == "PYTHONPATH"
    }
    environment["RAY_ADDRESS"] = os.environ.get("RAY_ADDRESS", "unset")
    (run_folder / f"environment-{environment[constants.ENV_ATTEMPT]}.json").write_text(json.dumps(environment))
    signal.signal(signal.SIGINT, lambda number, _frame: STOPS.append(number))
    signal.signal(signal.SIGTERM, lambda number, _frame: STOPS.append(number))
    if mode == "orphan":
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        (run_folder / "orphan.pid").write_text(str(sleeper.pid))
    first = first_step()
    if mode == "starting":
        saved = save(first) if first else None
        report(job, first, RunPhase.STARTING, saved, first)
        while not STOPS:
            time.sleep(0.02)
        report(job, first, RunPhase.STOPPED, saved, first)
        return constants.ExitCode.INTERRUPTED
    if mode.startswith("exit-"):
        return int(mode.removeprefix("exit-"))
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    for step in range(first + 1, job.spec.training.steps + 1):
        ignores_stop = mode == "deaf" or (mode == "deaf-later" and step == 2)
        report(job, step, RunPhase.RUNNING, save(1) if ignores_stop and step == 2 else None)
        with (run_folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "wall_time": 0.0, "critic/rewards/mean": 0.5}) + "\n")
        if mode == "lost":
            return constants.ExitCode.INFRASTRUCTURE
        while mode == "wait" or ignores_stop:
            if STOPS and mode == "wait":
                report(job, step, RunPhase.STOPPED, save(step))
                return constants.ExitCode.INTERRUPTED
            time.sleep(0.02)
    report(job, job.spec.training.steps, RunPhase.COMPLETE, save(job.spec.training.steps))
    return constants.ExitCode.SUCCESS


if __name__ == "__main__":
    sys.exit(main())
