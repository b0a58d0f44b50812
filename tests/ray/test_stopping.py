"""Signals that a cluster sends, at awkward moments."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from rljob_testing.messages import Mentions
from rljob_testing.training import training_runs
from rljob_trainer.checkpoints.fencing import announce_start

pytestmark = [pytest.mark.ray]


def test_sigterm_finishes_the_step_and_saves(run_trainer: training_runs.RunTrainer, cluster: str) -> None:
    # Ray installs its own handler for SIGTERM, the signal that a pod gets; ours must be the one in effect.
    job = training_runs.small_job(steps=1000, checkpoint={"everySteps": 1000})
    process = run_trainer.start(job, cluster)
    while not run_trainer.files.training_steps():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    state = run_trainer.files.state()
    assert state.phase == "Stopped"
    assert state.checkpoint is not None
    assert state.checkpoint.step == state.progress.step == run_trainer.files.training_steps()[-1] < 1000
    assert output == Mentions(f"stopped as requested after step {state.progress.step}", "checkpoint")


@pytest.mark.long
def test_a_stop_while_ray_starts_exits_at_once(tmp_path: Path) -> None:
    run = training_runs.LocalRun(tmp_path, training_runs.small_job())
    run.wait_for(lambda: "Ray: starting" in run.output)
    time.sleep(1)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.output
    assert run.output == Mentions("stopped immediately", "without saving")
    assert "Traceback" not in run.output
    assert run.files.state().phase == "Stopped"
    assert run.leftover_processes() == []
    # There is nothing to resume from, so the advice is the same command.
    assert run.output.endswith(": rljob run job.yaml\n")


STOPPING_REWARD = """
import os
import signal
from pathlib import Path

HERE = Path(__file__).parent
TRAINER = {process_id}


def score(prompt, response, answer, row):
    in_step, in_evaluation = HERE / "stopped-in-step", HERE / "stopped-in-evaluation"
    if prompt.startswith("2") and not in_step.exists():
        in_step.touch()
        os.kill(TRAINER, signal.SIGTERM)
        raise RuntimeError("what the reward had started was ended")
    if prompt.startswith("3") and in_step.exists() and not in_evaluation.exists():
        in_evaluation.touch()
        os.kill(TRAINER, signal.SIGTERM)
        return -1.0
    return sum(character.isdigit() for character in response) / 8
"""


def stopping_job(folder: Path) -> training_runs.Document:
    """Four steps; the prompts of every second step begin with 2, the held-out ones with 3."""
    folder.mkdir(exist_ok=True)
    (folder / "stopping_reward.py").write_text(STOPPING_REWARD.format(process_id=os.getpid()))
    for name, digits in (("rows", "11112222"), ("held_out", "33")):
        lines = [json.dumps({"prompt": f"{digit}{index}>", "answer": digit}) for index, digit in enumerate(digits)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    held_out: training_runs.Document = {"type": "File", "file": {"path": "held_out.jsonl"}}
    return training_runs.small_job(
        rewards=[training_runs.function_reward("stopping_reward:score")],
        dataset={"file": {"path": "rows.jsonl"}, "shuffle": False},
        evaluations=[{"dataset": held_out, "numPrompts": 2, "everySteps": 1}],
    )


@pytest.mark.long
def test_a_stop_while_scoring_affects_neither_the_step_nor_the_evaluation(tmp_path: Path, cluster: str) -> None:
    # Ray's stop also signals the processes that a reward has started, so their output cannot be trusted afterwards.
    whole = training_runs.RunTrainer(tmp_path / "whole")
    job = stopping_job(whole.folder)
    for name in ("stopped-in-step", "stopped-in-evaluation"):
        (whole.folder / name).touch()
    assert whole(job, cluster).exit_code == 0

    stopped = training_runs.RunTrainer(tmp_path / "stopped")
    job = stopping_job(stopped.folder)
    first = stopped(job, cluster, attempt=1)
    assert first.exit_code == 130, first.terminal
    assert (first.files.state().progress.step, first.files.newest_checkpoint()) == (1, 1)
    second = stopped(job, cluster, attempt=2)
    assert second.exit_code == 130, second.terminal
    assert (second.files.state().progress.step, second.files.newest_checkpoint()) == (2, 2)
    last = stopped(job, cluster, attempt=3)
    assert last.exit_code == 0, last.terminal
    for name in ("critic/rewards/mean", "actor/pg_loss", "eval/heldout/greedy"):
        assert len(whole.files.series(name)) >= 4
        assert last.files.series(name) == whole.files.series(name), name
    assert last.files.exported_weights() == whole.files.exported_weights()


@pytest.mark.long
def test_a_stopped_step_continues_with_its_finished_groups(tmp_path: Path, cluster: str) -> None:
    """Two engines, without rounds and with dynamic load balancing. The first attempt is stopped when the responses of
    the second step are scored."""
    run = training_runs.RunTrainer(tmp_path)
    job = training_runs.merged(
        stopping_job(tmp_path),
        {
            "spec": {
                "pools": [{"name": "main", "nodes": 1, "gpusPerNode": 2}],
                "checkpoint": {"keepFinishedGroups": True},
                "training": {
                    "algorithm": {
                        "type": "DAPO",
                        "dynamicSampling": {"refill": "Continuous", "maxRounds": 1, "onMaxRounds": "TrainOnFewer"},
                    },
                    "rollout": {"loadBalancing": "Dynamic"},
                },
            }
        },
    )
    (tmp_path / "stopped-in-evaluation").touch()
    first = run(job, cluster, attempt=1)
    assert first.exit_code == 130, first.terminal
    assert (first.files.state().progress.step, first.files.newest_checkpoint()) == (1, 1)
    [kept] = re.findall(r"saved the (\d) finished groups of step 2", first.terminal)
    second = run(job, cluster, attempt=2)
    assert second.exit_code == 0, second.terminal
    assert f"using {kept} finished groups of the last attempt" in second.terminal
    assert second.files.training_steps() == [1, 2, 3, 4]
    assert not list(tmp_path.rglob("finished-groups.json"))


def test_a_start_that_was_replaced_by_a_newer_one_does_nothing(tmp_path: Path) -> None:
    run_trainer = training_runs.RunTrainer(tmp_path)
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    announce_start(checkpoints, 1_767_225_601)
    late = run_trainer(training_runs.small_job(), None, RLJOB_START_NUMBER="1767225600")
    assert late.exit_code == 75, late.terminal
    assert late.terminal == Mentions("start 1767225600", "checkpoints")
    again = run_trainer(training_runs.small_job(), None, RLJOB_START_NUMBER="1767225601")
    assert again.exit_code == 75, again.terminal
    assert again.terminal == Mentions("start 1767225601", "already announced")
