"""Shows that an unchanged program of verifiers 0.4 can be the agent of a job with an environment of type Session.

    python proof/verifiers_session.py [--steps 2] [--folder FOLDER]

verifiers runs in an environment of its own (proof/other_packages/verifiers.txt), because it needs other versions than
the trainer. `run`, the agent's function, starts proof/other_packages/verifiers_letters.py there, a game of several
turns, with the endpoint and the key of the session. The exit code is 1 if the turns or the rewards that the trainer has
are not those of verifiers' traces, or if the rollouts of a group did not get one letter.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from rljob_proof.agent_programs import Session, reward_of_program

PROGRAM = Path(__file__).parent / "other_packages" / "verifiers_letters.py"
NUM_GUESSES, GROUP_SIZE, BATCH_SIZE = 6, 4, 2
"""The sizes give 8 rollouts in a step, all of which samples.jsonl has."""
VARIABLES = ("SSL_CERT_FILE", "UV_DEFAULT_INDEX")
"""What uv needs to install the program that verifiers starts."""


def run(session: Session, row: Mapping[str, object], python: str, episodes: str) -> float:
    """Runs one episode of verifiers, and returns the reward of its trace. `episodes`: a file for what it printed."""
    del row
    return reward_of_program(session, python, PROGRAM, [str(session.seed), str(NUM_GUESSES)], episodes)


def main() -> int:
    """Runs the program. The exit code is 1 if something does not hold."""
    # Imported here, because the processes of agents import this module for `run`.
    from rljob_proof.other_packages import python_with
    from rljob_proof.runs import REPOSITORY, runs_in

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "proof" / "verifiers-session")
    options = parser.parse_args()
    python, episodes_file = python_with("verifiers"), options.folder.resolve() / "episodes.jsonl"
    with runs_in(options.folder) as runs:
        files = runs.completed("letters", job(python, episodes_file, options.steps))
    episodes = [json.loads(line) for line in episodes_file.read_text().splitlines()]
    samples = [json.loads(line) for line in (files.folder / "samples.jsonl").read_text().splitlines()]
    letters = {(episode["seed"], episode["letter"]) for episode in episodes}
    found = {
        "turns and rewards are those of the traces": Counter(map(of_episode, episodes))
        == Counter(map(of_sample, samples)),
        "the policy has several turns": any(len(episode["guesses"]) > 1 for episode in episodes),
        "every rollout ends by itself": all(sample["outcome"] == "COMPLETED" for sample in samples),
        "the rollouts of a group have one letter": len(letters) == options.steps * BATCH_SIZE,
    }
    for what, holds in found.items():
        print(f"{'met' if holds else 'MISSED'}: {what}")
    print(f"{len(episodes)} episodes with {sum(len(episode['guesses']) for episode in episodes)} turns")
    return 0 if all(found.values()) else 1


def of_episode(episode: Mapping[str, object]) -> tuple[tuple[str, ...], float]:
    """The guesses and the reward that verifiers has."""
    guesses, reward = episode["guesses"], episode["reward"]
    assert isinstance(guesses, list)
    assert isinstance(reward, int | float)
    return tuple(map(str, guesses)), float(reward)


def of_sample(sample: Mapping[str, object]) -> tuple[tuple[str, ...], float]:
    """The turns and the reward that the trainer has."""
    messages, score = sample["messages"], sample["score"]
    assert isinstance(messages, list)
    assert isinstance(score, int | float)
    return tuple(str(each["content"]).strip() for each in messages if each["role"] == "assistant"), float(score)


def job(python: Path, episodes: Path, num_steps: int) -> dict[str, JsonValue]:
    """The job: the start model of the example guess_letter, whose environment is the agent."""
    agent: JsonValue = {
        "path": "verifiers_session:run",
        "arguments": {"python": str(python), "episodes": str(episodes)},
    }
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "verifiers"},
        "spec": {
            "pools": [{"name": "main", "nodes": 1, "gpusPerNode": 1}],
            "env": [{"name": name, "value": os.environ[name]} for name in VARIABLES if name in os.environ],
            "training": {
                "model": {"source": "package://rljob_trainer/assets/guess_letter/model", "dtype": "Float32"},
                "environment": {
                    "type": "Session",
                    "session": agent,
                    "maxTurns": NUM_GUESSES,
                    "maxTurnTokens": 4,
                    "maxContextTokens": 48,
                },
                "rewards": [],
                "algorithm": {"type": "GRPO"},
                "optimizer": {"learningRate": 1.0e-3},
                # Each episode starts two programs, so few run at the same time.
                "rollout": {"groupSize": GROUP_SIZE, "maxNewTokens": 24, "maxNumSequences": 2},
                "steps": num_steps,
                "batchSize": BATCH_SIZE,
            },
            "checkpoint": {"everySteps": num_steps, "storage": {"persistentVolumeClaim": "rljob-storage"}},
        },
    }


if __name__ == "__main__":
    sys.exit(main())
