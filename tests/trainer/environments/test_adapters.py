"""The adapters for other libraries: states as text, actions from text, rewards, seeds and missing packages."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from rljob_testing.messages import Mentions
from rljob_testing.settings import inherited_environment
from rljob_trainer.environments.adapters.gymnasium import Gymnasium
from rljob_trainer.environments.adapters.reasoning_gym import ReasoningGym
from rljob_trainer.environments.adapters.skyrl_gym import SkyRLGym
from rljob_trainer.environments.description import ClassSpec, load_class
from rljob_trainer.environments.probe import ProbeResult, Trial, describe_environments
from rljob_trainer.errors import ConfigurationError

DIRECTIONS = ("left", "down", "right", "up")
ADAPTERS = "rljob_trainer.environments.adapters"
WHERE = "spec.training.environment.classes[0]"


def turn(text: str) -> dict[str, str]:
    """A turn of the policy."""
    return {"role": "assistant", "content": text}


def spec(path: str, **arguments: object) -> ClassSpec:
    """A class of a job."""
    return ClassSpec("environment", f"{ADAPTERS}.{path}", arguments, WHERE)


def described(of: ClassSpec, tmp_path: Path, rows: Mapping[int, Mapping[str, object]]) -> ProbeResult:
    """What a process of the trainer finds out about a class, and how it begins a rollout for each seed and its row."""
    return describe_environments(
        [of],
        variables=inherited_environment(),
        log_file=tmp_path / "environment.log",
        timeout_seconds=60,
        trials=[Trial(of.name, row, seed) for seed, row in rows.items()],
    )


def frozen_lake(**arguments: object) -> Gymnasium:
    """A lake without chance: the start is at the top left, the goal at the bottom right."""
    return Gymnasium("FrozenLake-v1", config={"is_slippery": False}, **arguments)  # type: ignore[arg-type]


def test_gymnasium_shows_states_as_text_and_sums_the_rewards() -> None:
    lake = frozen_lake(actions=DIRECTIONS, instructions="Walk from S to G.")
    assert lake.reset(seed=1) == ("Walk from S to G.\n[S red]FFF\nFHFH\nFFFH\nHFFG\nActions: left, down, right, up.")
    assert lake.respond(turn("I go right")) == "(Right)\nS[F red]FF\nFHFH\nFFFH\nHFFG"
    for step in ("right", "down", "down", "down"):
        assert lake.respond(turn(step)) is not None
        assert lake.get_reward() == 0
    assert lake.respond(turn("right")) is None
    assert lake.get_reward() == 1
    lake.reset(seed=1)
    assert lake.get_reward() == 0
    lake.close()


@pytest.mark.parametrize(
    "text", ["RIGHT", "left or right", "<think>left</think> right", "Not 1 but 2", "1 2", "down. Right!"]
)
def test_the_last_action_of_a_turn_counts(text: str) -> None:
    lake = frozen_lake(actions=DIRECTIONS)
    lake.reset(seed=1)
    assert str(lake.respond(turn(text))).startswith("(Right)")


@pytest.mark.parametrize("text", ["", "rightwards", "4", "-1", "right, no: 7", "<think>right", "１"])
def test_a_turn_without_an_action_changes_nothing_and_is_explained(text: str) -> None:
    lake = frozen_lake(actions=DIRECTIONS)
    lake.reset(seed=1)
    assert lake.respond(turn(text)) == "There is no action in your answer. Actions: left, down, right, up."
    assert str(lake.respond(turn("down"))).startswith("(Down)\nSFFF\n[F red]HFH")


def test_gymnasium_ends_at_a_time_limit_and_shows_observations_without_a_picture() -> None:
    cards = Gymnasium("Blackjack-v1")
    assert cards.reset(seed=3) == "(7, 10, 0)\nActions: 0, 1."
    assert cards.respond(turn("0")) is None  # the player stops
    assert cards.get_reward() in (-1, 0, 1)
    short = Gymnasium("Taxi-v4", config={"max_episode_steps": 2})
    assert "[R blue]: |[  yellow]: :G|" in short.reset(seed=3)
    assert short.respond(turn("4")) is not None
    assert short.respond(turn("4")) is None
    assert short.get_reward() == -20  # no passenger is here


@pytest.mark.parametrize(
    ("arguments", "mentioned"),
    [
        ({"id": "Pendulum-v1"}, ("Pendulum-v1", "Box", "only environments with numbered actions")),
        ({"id": "Blackjack-v1", "actions": ["stop"]}, ("`actions` must have 2 names", "seen: 1")),
        ({"id": "FrozenLake-v99"}, ("FrozenLake",)),
        ({"id": "FrozenLake-v1", "config": {"depth": 3}}, ("depth",)),
        ({}, ("classes[0].arguments", "'id'")),
    ],
)
def test_wrong_arguments_of_gymnasium_are_an_error_before_a_device_is_taken(
    arguments: dict[str, object], mentioned: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        described(spec("gymnasium:Gymnasium", **arguments), tmp_path, {})
    assert str(caught.value) == Mentions(WHERE, *mentioned)


def test_a_group_begins_in_one_state_and_other_groups_in_others(tmp_path: Path) -> None:
    """All rollouts of a group get the group's seed; here each class begins twice with one seed."""
    for of in (
        spec("gymnasium:Gymnasium", id="Taxi-v4"),
        spec("reasoning_gym:ReasoningGym", task="chain_sum", config={"max_terms": 3}),
    ):
        found = described(of, tmp_path, {7: {}, 8: {}})
        again = described(of, tmp_path, {8: {}, 7: {}})
        assert found.openings == again.openings[::-1]
        assert found.openings[0] != found.openings[1]
        [description] = found.descriptions
        assert description.tool_names == ()
        assert description.has_respond
        assert description.has_reward


def test_reasoning_gym_scores_the_last_of_several_attempts() -> None:
    task = ReasoningGym("chain_sum", config={"min_terms": 2, "max_terms": 2}, attempts=3)
    question = task.reset(seed=5)
    assert question is not None
    assert "+" in question or "-" in question
    right = str(task._entry["answer"])
    assert task.respond(turn("I do not know")) == (
        "Your answer 'I do not know' is not right. Attempts left: 2. Answer again."
    )
    assert task.respond(turn(f"<answer>{right}</answer>")) is None
    assert task.get_reward() == 1
    task.reset(seed=5)
    assert task.get_reward() == 0
    assert [task.respond(turn("no")) is None for _ in range(3)] == [False, False, True]
    single = ReasoningGym("chain_sum")
    single.reset(seed=5)
    assert single.respond(turn("no")) is None


def test_reasoning_gym_takes_the_question_of_a_row() -> None:
    rows = ReasoningGym("chain_sum")
    row = {"question": "What is 3 + 4?", "answer": "7", "metadata": {"source_dataset": "chain_sum"}}
    assert rows.reset(seed=1, **row) is None  # the prompt of the row is the question
    assert rows.respond(turn("7")) is None
    assert rows.get_reward() == 1


def test_settings_that_a_task_rejects_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        described(spec("reasoning_gym:ReasoningGym", task="chain_sums"), tmp_path, {})
    assert str(caught.value) == Mentions(WHERE, "no task 'chain_sums'", "did you mean", "chain_sum")


def test_skyrl_gym_gets_the_row_and_its_rewards_are_summed(tmp_path: Path) -> None:
    row = {
        "prompt": [{"role": "user", "content": "What is 3 x 4?"}],
        "reward_spec": {"ground_truth": "12"},
        "max_turns": 3,
    }
    found = described(spec("skyrl_gym:SkyRLGym", id="gsm8k_multi_turn"), tmp_path, {1: row})
    assert found.openings == (row["prompt"],)
    environment = SkyRLGym("gsm8k_multi_turn")
    environment.reset(**row)
    [answer] = environment.respond(turn("It may be #### 13")) or []
    assert answer["role"] == "user"
    assert answer["content"] == Mentions("#### ANSWER")
    assert environment.respond(turn("#### 12")) is None
    assert environment.get_reward() == pytest.approx(0.2 / 3 + 1)
    environment.close()


COUNTING = """
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class Count(BaseTextEnv):
    def __init__(self, env_config, extras):
        super().__init__()
        self.limit = env_config.limit

    def init(self, prompt):
        return [{"role": "system", "content": f"Count to {self.limit}."}, *prompt], {}

    def step(self, action):
        self.turns += 1
        right = action == str(self.turns)
        said = [{"role": "user", "content": "Go on."}]
        return BaseTextEnvStepOutput(observations=said, reward=float(right), done=self.turns == self.limit, metadata={})
"""


def test_skyrl_gym_runs_a_class_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_counting.py").write_text(COUNTING)
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = SkyRLGym("count", entry_point="my_counting:Count", config={"limit": 3})
    assert environment.reset(prompt="Begin.") == [
        {"role": "system", "content": "Count to 3."},
        {"role": "user", "content": "Begin."},
    ]
    assert environment.respond(turn("1")) == [{"role": "user", "content": "Go on."}]
    assert environment.respond(turn("1")) is not None
    assert environment.respond(turn("3")) is None
    assert environment.get_reward() == 2


@pytest.mark.parametrize(
    ("path", "package", "extra"),
    [
        ("gymnasium:Gymnasium", "gymnasium", "gymnasium"),
        ("skyrl_gym:SkyRLGym", "skyrl_gym", "skyrl-gym"),
        ("textarena:TextArena", "textarena", "textarena"),
    ],
)
def test_a_missing_package_is_an_error_that_names_the_extra(
    path: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"{ADAPTERS}.{path.partition(':')[0]}", raising=False)
    with pytest.raises(ConfigurationError) as caught:
        load_class(spec(path))
    assert str(caught.value) == Mentions(
        f"{WHERE}.path", f"the package {extra} is not installed", f"install the trainer's extra `{extra}`"
    )
