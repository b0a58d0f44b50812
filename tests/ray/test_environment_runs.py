"""Whole runs with an environment that fails in every way, and one that is stopped and resumed."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest

from rljob_api.constants import ENV_RUN_FOLDER
from rljob_testing.process_tree import processes_with_variable
from rljob_testing.training import training_runs

pytestmark = [pytest.mark.ray]

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
ENVIRONMENTS = '''
import os, random, resource, signal, time


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
            resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))
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
    """Three turns."""

    def reset(self, **row):
        self.digit, self.turns, self.hits = random.randrange(10), 0, 0
        return f"{self.digit}>"

    def respond(self, message):
        self.turns += 1
        self.hits += str(self.digit) in message["content"]
        return None if self.turns == 3 else f"{self.digit}>"

    def get_reward(self):
        return self.hits / 3
'''
FAULTS = ("", "late", "forks", "hangs", "dies", "leaks", "garbage", "raises", "raises in reset")


def job(folder: Path, name: str, **training: object) -> training_runs.Document:
    """A job with this class."""
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


def test_no_fault_of_an_environment_hangs_the_run_or_becomes_a_score(
    run_trainer: training_runs.RunTrainer, cluster: str, tmp_path: Path
) -> None:
    rows = [json.dumps({"number": number, "fault": fault}) for number, fault in enumerate(FAULTS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    faulty = job(
        tmp_path,
        "Faulty",
        dataset={"type": "File", "file": {"path": "rows.jsonl"}, "shuffle": False},
        environment={"timeoutSeconds": 3.0, "retries": 1},
        rewards=[{"type": "Environment", "onError": "Exclude", "onTimeout": "Exclude"}],
        maxFailureRate=1.0,
        batchSize=9,
        rollout={"groupSize": 2},
        steps=1,
    )
    run = run_trainer(faulty, cluster)
    assert run.exit_code == 0, run.terminal
    seen: dict[str, set[tuple[str, str, bool]]] = {}
    for sample in run.files.samples("train", 1):
        statuses = sample["statuses"]
        assert isinstance(statuses, dict)
        print(sample)
    print(run.files.metrics())
    print({fault: seen.get(fault) for fault in FAULTS})
    print(run.terminal[-3000:])
    assert not processes_with_variable(ENV_RUN_FOLDER, str(run.files.folder))
    assert 0


def test_a_run_that_is_stopped_in_a_rollout_continues_as_if_it_had_not_been(tmp_path: Path, cluster: str) -> None:
    pass
