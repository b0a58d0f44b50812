"""A run that is stopped and resumed ends, bit for bit, where the uninterrupted run ends."""

from __future__ import annotations

import hashlib
import shutil
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rljob_api.job_file import load_job_file
from rljob_api.v1alpha1.model import Dtype
from rljob_testing.trainer_program import RunTrainer
from rljob_testing.training_runs import Document, LocalRun, function_reward, held_out, small_job
from rljob_trainer.stack_traces import take_stacks, traced_processes

pytestmark = [pytest.mark.ray, pytest.mark.long]

NUM_STEPS = 4
ADAPTIVE = {"type": "Adaptive", "adaptive": {"target": 1.0, "horizon": 10000}}
SECONDS_INTO_STEP = 0.2
"""After the save of a step: the next one is under way."""


REWARD = "def score(prompt, response, answer, row):\n    return float(response == answer)\n"


def job(folder: Path) -> Document:
    """Two workers, so that shards are put together again; steps long enough (512 responses) to be stopped in. The
    reward is beside the job."""
    (folder / "my_rewards.py").write_text(REWARD)
    return small_job(
        num_workers=2,
        rewards=[function_reward("my_rewards:score")],
        batchSize=32,
        rollout={"groupSize": 16},
        optimizer={"warmupSteps": 3},
        algorithm={"kl": {"coefficient": 0.01, "controller": ADAPTIVE}},
        evaluation=held_out(num_prompts=24, every_steps=4),
        steps=NUM_STEPS,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    """Four steps without interruption, except that all processes are asked for their stacks over and over."""
    folder = tmp_path_factory.mktemp("whole")
    run = LocalRun(folder, job(folder))
    roles: Counter[str] = Counter()
    while run.process.poll() is None:
        stacks = take_stacks(traced_processes(run.files.folder), 5)
        roles.update(each.role for each in stacks if each.text)
    assert run.end() == 0, run.output
    # Of two workers and one scorer, in the seconds that four steps take.
    assert roles["controller"] >= 10, roles
    assert min(roles["reward+actor+ref+rollout+hybrid"], roles["scorer"]) >= 3, roles
    return run


@dataclass(frozen=True)
class Interrupted:
    """A run that was stopped after two steps, and its continuation."""

    first: LocalRun
    refused_beside: LocalRun
    refused_after: LocalRun
    stopped_after: int
    checkpoints_of_first: list[str]
    second: LocalRun


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """Ctrl-C in the second step (on a machine that stalls it may be another); then once without --resume, and once
    with it."""
    folder = tmp_path_factory.mktemp("interrupted")
    first = LocalRun(folder, job(folder))
    first.wait_for(lambda: first.files.newest_checkpoint() >= 1)
    time.sleep(SECONDS_INTO_STEP)
    first.process.send_signal(signal.SIGINT)
    beside = LocalRun(folder, job(folder))
    beside.end()
    first.end()
    stopped_after = first.files.state().progress.step
    checkpoints = first.files.checkpoint_names()
    after = LocalRun(folder, job(folder))
    after.end()
    second = LocalRun(folder, job(folder), "--resume")
    second.end()
    return Interrupted(first, beside, after, stopped_after, checkpoints, second)


def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(interrupted: Interrupted) -> None:
    run = interrupted.first
    assert run.process.returncode == 130, run.output
    assert "stopping: the trainer ends its step and saves" in run.output
    assert 1 <= interrupted.stopped_after < NUM_STEPS
    assert f"stopped as asked after step {interrupted.stopped_after}; its checkpoint is complete" in run.output
    assert run.output.endswith("to go on: rljob run job.yaml --resume\n")
    saved = [f"step-{step:08d}.start-0001" for step in range(1, interrupted.stopped_after + 1)]
    assert interrupted.checkpoints_of_first == saved
    assert run.left_behind() == []


def test_a_second_run_at_the_same_time_is_refused(interrupted: Interrupted) -> None:
    run = interrupted.refused_beside
    assert run.process.returncode == 2
    assert f"another run is using it (process {interrupted.first.process.pid})" in run.output


def test_a_second_run_afterwards_needs_resume(interrupted: Interrupted) -> None:
    run = interrupted.refused_after
    assert run.process.returncode == 2
    assert f"holds a run already (step {interrupted.stopped_after} of {NUM_STEPS}, Stopped)" in run.output


def test_the_resumed_run_goes_on_where_the_first_stopped(interrupted: Interrupted) -> None:
    run = interrupted.second
    assert run.process.returncode == 0, run.output
    step = interrupted.stopped_after
    assert f"resumed from step {step} ({interrupted.checkpoints_of_first[-1]})" in run.output
    state = run.files.state()
    assert (state.phase, state.attempt, state.resumed_from_step) == ("Complete", 2, step)
    assert run.files.training_steps() == list(range(1, NUM_STEPS + 1))
    assert (run.files.folder / "plots" / "overview.png").exists()
    assert run.left_behind() == []


def test_what_auto_became_is_written_down(whole: LocalRun, interrupted: Interrupted) -> None:
    """The job leaves the precision open."""
    for run in (whole, interrupted.second):
        resolved = load_job_file(run.files.folder / "resolved.yaml")
        assert resolved.spec.training.model.dtype is Dtype.FLOAT32
        assert "dtype" not in (run.files.folder.parents[1] / "job.yaml").read_text()


def test_both_runs_saw_the_same_prompts_and_gave_the_same_responses(whole: LocalRun, interrupted: Interrupted) -> None:
    for step in range(1, NUM_STEPS + 1):
        expected = whole.files.samples("train", step)
        assert len(expected) == 8
        assert interrupted.second.files.samples("train", step) == expected
    # A cursor that starts again would repeat the first step's prompts.
    first, third = ({row["prompt"] for row in whole.files.samples("train", step)} for step in (1, 3))
    assert not first & third


def test_both_runs_report_the_same_numbers(whole: LocalRun, interrupted: Interrupted) -> None:
    names = ("critic/rewards/mean", "actor/pg_loss", "actor/grad_norm", "actor/lr", "eval/greedy_score")
    for name in (*names, "actor/kl_coefficient"):
        expected = whole.files.series(name)
        assert expected, name
        assert interrupted.second.files.series(name) == expected
    assert len(set(whole.files.series("actor/kl_coefficient"))) == NUM_STEPS


def test_every_save_is_booked_to_its_step(whole: LocalRun) -> None:
    assert [row["step"] for row in whole.files.metrics() if "timing_s/save" in row] == [1, 2, 3, 4]


def test_the_final_weights_are_bitwise_equal(whole: LocalRun, interrupted: Interrupted) -> None:
    assert interrupted.second.files.exported_weights() == whole.files.exported_weights()


def test_the_export_answers_like_the_last_evaluation(whole: LocalRun) -> None:
    expected = whole.files.samples("eval_greedy", NUM_STEPS)
    assert len(expected) == 24
    folder = whole.files.folder / "export"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for row in expected:
        prompt = torch.tensor([tokenizer.encode(row["prompt"])])
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
        answers.append(tokenizer.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True))
    assert answers == [row["response"] for row in expected]


def test_a_damaged_newest_checkpoint_is_passed_over(whole: LocalRun, run_trainer: RunTrainer, cluster: str) -> None:
    """On another Ray than the whole run, which changes nothing either."""
    shutil.copytree(whole.files.folder, run_trainer.files.folder)
    flip_a_byte(run_trainer.files.checkpoints / "step-00000004.start-0001" / "rank-00001.safetensors")
    run = run_trainer(job(run_trainer.folder), cluster, attempt=2)
    assert run.exit_code == 0, run.terminal
    assert "passed over damaged checkpoint step-00000004.start-0001: rank-00001.safetensors" in run.terminal
    assert "resumed from step 3 (step-00000003.start-0001)" in run.terminal
    assert run.files.training_steps() == [1, 2, 3, 4]
    # The last step is done again, and comes out the same.
    assert run.files.exported_weights() == whole.files.exported_weights()
    assert run.files.checkpoint_names() == [
        "step-00000002.start-0001",
        "step-00000003.start-0001",
        "step-00000004.start-0002",
    ]


def flip_a_byte(path: Path) -> None:
    before = hashlib.sha256(path.read_bytes()).digest()
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    assert hashlib.sha256(path.read_bytes()).digest() != before
