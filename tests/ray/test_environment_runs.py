"""Whole runs with an environment that fails in every way, and one that is stopped and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import pytest
from pydantic import JsonValue

from rljob_api.constants import ENV_RUN_FOLDER
from rljob_testing.process_tree import processes_with_variable
from rljob_testing.training import training_runs
from rljob_trainer.environments.environment_process import PROGRAM

pytestmark = [pytest.mark.ray, pytest.mark.long]

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
ENVIRONMENTS = '''
import os, random, resource, signal, time
from pathlib import Path


class Faulty:
    """Does what the row says when it gets the first turn."""

    def reset(self, number, fault, **row):
        self.fault, self.digit = fault, random.randrange(10)
        if fault == "raises in reset":
            raise KeyError("no board")
        return f"{number}{self.digit}>"

    def respond(self, message):
        fault, self.fault = self.fault, ""
        if fault == "hangs":
            time.sleep(3600)
        if fault == "dies":
            os._exit(7)
        if fault == "leaks":
            resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))
            try:
                kept = [bytearray(1 << 24) for _ in range(1 << 20)]
            except MemoryError:
                # As the kernel does when memory runs out.
                os.kill(os.getpid(), signal.SIGKILL)
        if fault == "forks" and os.fork() == 0:
            time.sleep(3600)
        if fault == "garbage":
            return {"role": "user"}
        if fault == "late":
            time.sleep(0.7)
        if fault == "raises":
            raise ValueError("no luck")
        return "1>" if fault else None

    def get_reward(self):
        return self.digit / 10

    def close(self):
        raise OSError("cannot close")


class Echo:
    """Three turns. Stops the trainer once, in the second turn of a rollout of the third step."""

    def __init__(self, process_id):
        self.process_id = process_id

    def reset(self, step, **row):
        self.step, self.digit, self.turns, self.hits = step, random.randrange(10), 0, 0
        return f"{self.digit}>"

    def respond(self, message):
        self.turns += 1
        flag = Path(__file__).with_name("stopped")
        if self.step == 3 and self.turns == 2 and not flag.exists():
            flag.touch()
            os.kill(self.process_id, signal.SIGTERM)
            time.sleep(600)
        self.hits += str(self.digit) in message["content"]
        return None if self.turns == 3 else f"{self.digit}>"

    def get_reward(self):
        return self.hits / 3


class Draw:
    """Two turns. The score is the sum of the digits that the policy writes, and always 0 if the first digit of the
    prompt is above 4."""

    def __init__(self, log, seconds=0.0):
        self.log, self.seconds = log, seconds

    def reset(self):
        self.turns, self.sum = 0, 0
        return self._next()

    def respond(self, message):
        time.sleep(self.seconds)
        self.turns += 1
        self.sum += sum(int(each) for each in message["content"] if each.isdigit())
        return None if self.turns == 2 else self._next()

    def get_reward(self):
        return self.sum / 50 if self.first[0] < "5" else 0

    def _next(self):
        self.digits = "".join(random.choices("0123456789", k=4))
        if not self.turns:
            self.first = self.digits
            with open(self.log, "a") as log:
                print(f"{self.digits}>", file=log)
        return f"{self.digits}>"
'''
FAULTS = ("late", "hangs", "dies", "garbage", "forks", "leaks", "raises", "raises in reset")
"""Four in each of two steps."""


ROWS: training_runs.Document = {"type": "File", "file": {"path": "rows.jsonl"}, "shuffle": False, "maxPromptTokens": 8}


def job(folder: Path, name: str, rows: Sequence[Mapping[str, JsonValue]], **training: object) -> training_runs.Document:
    """A job with this class and this dataset; without a dataset if there are no rows."""
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "my_games.py").write_text(ENVIRONMENTS)
    with_template(folder / "model")
    base = training_runs.small_job()
    spec = base["spec"]
    assert isinstance(spec, dict)
    found = spec["training"]
    assert isinstance(found, dict)
    del found["dataset"], found["rewards"]
    changes = {
        "model": {"source": "./model"},
        **({"dataset": ROWS} if rows else {}),
        "environment": {"type": "Class", "classes": [{"path": f"my_games:{name}"}], "maxContextTokens": 64},
        "rollout": {"maxNewTokens": 24},
    }
    spec["training"] = training_runs.merged(training_runs.merged(found, changes), training)  # type: ignore[arg-type]
    return base


def with_template(folder: Path) -> None:
    """Copies the quickstart's model, and gives it a chat template."""
    shutil.copytree(str(files("rljob_trainer") / "assets" / "sort_digits" / "model"), folder, dirs_exist_ok=True)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))


SCORED, NO_SCORE = "scored", "no score"


def test_no_fault_of_an_environment_hangs_the_run_or_becomes_a_score(
    run_trainer: training_runs.RunTrainer, cluster: str, tmp_path: Path
) -> None:
    faulty = job(
        tmp_path,
        "Faulty",
        [{"number": number, "fault": fault} for number, fault in enumerate(FAULTS)],
        environment={"timeoutSeconds": 3.0, "retries": 1},
        rewards=[{"type": "Environment", "onError": "Exclude", "onTimeout": "Exclude"}],
        maxFailureRate=1.0,
        rollout={"groupSize": 2, "stop": ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]},
        steps=2,
    )
    run = run_trainer(faulty, cluster)
    assert run.exit_code == 0, run.terminal
    seen = {}
    for step in (1, 2):
        samples = run.files.samples("train", step)
        assert len(samples) == 8
        for number, sample in enumerate(samples):
            fault = FAULTS[4 * (step - 1) + number // 2]
            scored = NO_SCORE if sample["score"] is None else SCORED
            seen.setdefault(fault, set()).add((sample["outcome"], dict(sample["statuses"])["score"], scored))
    assert seen == {
        "late": {("COMPLETED", "OK", SCORED)},
        "hangs": {("TIME_LIMIT", "TIMEOUT", NO_SCORE)},
        "dies": {("ERROR", "DIED", NO_SCORE)},
        "garbage": {("ERROR", "ERROR", NO_SCORE)},
        "forks": {("COMPLETED", "OK", SCORED)},
        "leaks": {("INFRASTRUCTURE", "OK", NO_SCORE)},
        "raises": {("ERROR", "ERROR", NO_SCORE)},
        "raises in reset": {("INFRASTRUCTURE", "ERROR", NO_SCORE)},
    }
    for name, fractions in (
        ("outcome/completed_fraction", [0.25, 0.25]),
        ("outcome/error_fraction", [0.5, 0.25]),
        ("outcome/time_limit_fraction", [0.25, 0.0]),
        ("outcome/infrastructure_fraction", [0.0, 0.5]),
        ("outcome/excluded_fraction", [0.75, 0.75]),
        ("reward/score/timeout_rate", [0.25, 0.0]),
        ("reward/score/died_rate", [0.25, 0.0]),
        ("reward/score/error_rate", [0.25, 0.5]),
        ("actor/trained_fraction", [0.25, 0.25]),
    ):
        assert run.files.series(name) == fractions, name
    logs = "\n".join(path.read_text() for path in (run.files.folder / "logs").rglob("environment-*.log"))
    assert "OSError: cannot close" in logs
    assert not processes_with_variable(ENV_RUN_FOLDER, str(run.files.folder))


def draw_job(folder: Path, *, num_workers: int = 1, **training: object) -> training_runs.Document:
    """A job without a dataset whose class writes the first message of each rollout into the file `opened`."""
    arguments = {"log": str(folder / "opened")}
    environment = {"classes": [{"path": "my_games:Draw", "arguments": arguments}], "rolloutsPerProcess": 4}
    document = training_runs.merged(
        job(folder, "Draw", (), environment=environment, steps=2),
        {"spec": {"training": training}},  # type: ignore[dict-item]
    )
    pools: training_runs.Document = {"spec": {"pools": [{"name": "main", "nodes": 1, "gpusPerNode": num_workers}]}}
    return training_runs.merged(document, pools)


def opened(folder: Path) -> Counter[str]:
    """The number of rollouts by their first message, without the rollout of the check at the start."""
    return Counter((folder / "opened").read_text().split()[1:])


def test_evaluations_without_a_dataset_have_the_same_seeds_and_training_has_others(
    run_trainer: training_runs.RunTrainer, cluster: str, tmp_path: Path
) -> None:
    document = draw_job(
        tmp_path, algorithm={"type": "RLOO"}, evaluations=[{"numPrompts": 4, "everySteps": 1, "numSamples": 1}]
    )
    run = run_trainer(document, cluster)
    assert run.exit_code == 0, run.terminal
    held_out = [sample["prompt"] for sample in run.files.samples("eval_greedy", 0)]
    assert len(set(held_out)) == 4
    for step in range(3):
        for kind in ("eval_greedy", "eval_sampled"):
            samples = run.files.samples(kind, step)
            assert [sample["prompt"] for sample in samples] == held_out
            assert [sample["group"] for sample in samples] == [0, 1, 2, 3]
    recorded = run.files.tokens("evaluation")
    assert recorded["step"] == 2
    assert [(each["kind"], each["group"], each["prompt"]) for each in recorded["conversations"]] == [
        (kind, group, prompt) for kind in ("eval_greedy", "eval_sampled") for group, prompt in enumerate(held_out)
    ]
    for conversation in recorded["conversations"]:
        assert any(conversation["tokens"]["isSampled"])
        assert not any(conversation["tokens"]["isTrained"])
    trained = {each: number for each, number in opened(tmp_path).items() if each not in held_out}
    # Two steps with four groups of four.
    assert list(trained.values()) == [4] * 8
    assert all(value > 0 for value in run.files.series("actor/grad_norm"))


def test_greedy_rollouts_on_two_workers_begin_as_their_group(
    run_trainer: training_runs.RunTrainer, cluster: str, tmp_path: Path
) -> None:
    document = draw_job(tmp_path, num_workers=2, algorithm={"type": "ReMax"}, rollout={"groupSize": 2})
    run = run_trainer(document, cluster)
    assert run.exit_code == 0, run.terminal
    # Two steps with four groups of two, and a greedy rollout for each.
    assert list(opened(tmp_path).values()) == [3] * 8
    assert len(run.files.series("actor/grad_norm")) == 2


@pytest.mark.parametrize("refill", ["Round", "Continuous"])
def test_dynamic_sampling_replaces_groups_of_an_environment_with_equal_scores(
    run_trainer: training_runs.RunTrainer, cluster: str, tmp_path: Path, refill: str
) -> None:
    sampling = {"refill": refill, "maxRounds": 8, "onMaxRounds": "TrainOnFewer"}
    document = draw_job(tmp_path, algorithm={"type": "DAPO", "dynamicSampling": sampling})
    run = run_trainer(document, cluster)
    assert run.exit_code == 0, run.terminal
    assert max(run.files.series("dynamic_sampling/prompts")) > 4
    assert min(run.files.series("dynamic_sampling/kept_fraction")) < 1
    assert run.files.series("actor/trained_fraction") == [1.0, 1.0]
    # With Continuous, rollouts of a group that is not needed any more may not have begun.
    assert set(opened(tmp_path).values()) <= ({4} if refill == "Round" else {1, 2, 3, 4})


def test_ctrl_c_leaves_no_process_of_an_environment(tmp_path: Path) -> None:
    document = draw_job(tmp_path, steps=1000)
    classes = [{"path": "my_games:Draw", "arguments": {"log": str(tmp_path / "opened"), "seconds": 0.1}}]
    document = training_runs.merged(document, {"spec": {"training": {"environment": {"classes": classes}}}})  # type: ignore[dict-item]
    run = training_runs.LocalRun(tmp_path, document)
    run.wait_for(lambda: bool(run.files.training_steps()))
    programs = [each for each in run.processes_of_run() if PROGRAM in each.title]
    assert len(programs) >= 2
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.output
    assert run.leftover_processes() == []


@pytest.mark.parametrize("keeps_groups", [False, True])
def test_a_run_that_is_stopped_in_a_rollout_continues_as_if_it_had_not_been(
    tmp_path: Path, cluster: str, keeps_groups: bool
) -> None:
    """Seeds decide turns and environments. Which turns the engine decodes together depends on when the environments
    answer, so log-probabilities differ by rounding."""
    whole, stopped = (training_runs.RunTrainer(tmp_path / name) for name in ("whole", "stopped"))
    for run in (whole, stopped):
        run.folder.mkdir()
        (run.folder / "held_out.jsonl").write_text("\n".join(json.dumps({"step": -row}) for row in range(4)))
        echo = job(
            run.folder,
            "Echo",
            [{"step": row // 4 + 1} for row in range(16)],
            environment={
                "maxTurns": 4,
                "classes": [{"path": "my_games:Echo", "arguments": {"process_id": os.getpid()}}],
            },
            evaluations=[
                {
                    "numPrompts": 4,
                    "everySteps": 2,
                    "dataset": {"type": "File", "file": {"path": "held_out.jsonl"}, "maxPromptTokens": 8},
                }
            ],
        )
        if run is whole:
            (run.folder / "stopped").touch()
            ended = run(echo, cluster)
            assert ended.exit_code == 0, ended.terminal
            continue
        echo = training_runs.merged(echo, {"spec": {"checkpoint": {"keepFinishedGroups": keeps_groups}}})
        first = run(echo, cluster)
        assert first.exit_code == 130, first.terminal
        assert (first.files.state().progress.step, first.files.newest_checkpoint()) == (2, 2)
        last = run(echo, cluster, attempt=2)
        assert last.exit_code == 0, last.terminal
    for name in (
        "critic/rewards/mean",
        "actor/pg_loss",
        "actor/grad_norm",
        "environment/turns/mean",
        "eval/heldout/greedy",
    ):
        assert len(whole.files.series(name)) >= 2, name
        assert stopped.files.series(name) == pytest.approx(whole.files.series(name), rel=1e-4, abs=1e-6), name
    for step in range(1, 5):
        assert stopped.files.samples("train", step) == whole.files.samples("train", step)
