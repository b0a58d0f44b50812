"""Rollouts with real environment processes and an engine whose responses the test chooses: how each rollout ends, what
is asked again, and that nothing is left open."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rljob_testing.environments import class_specs, probe, write_module
from rljob_testing.models import chat_models
from rljob_testing.training.scripted_engine import BROKEN, NEVER, POLICY_VERSION, Prompt, Script, ScriptedEngine
from rljob_trainer.engines.rollout.base import Outcome, SamplingSettings
from rljob_trainer.engines.rollout.loop import EngineLoop
from rljob_trainer.environments.description import EnvironmentDescription
from rljob_trainer.environments.episode import EpisodeRequest, FinishedEpisode, turn_seed
from rljob_trainer.environments.host import EnvironmentHost
from rljob_trainer.environments.settings import EnvironmentSettings, EpisodeLimits
from rljob_trainer.errors import DatasetError, EnvironmentMessageError, WorkerError
from rljob_trainer.models.tokenizer import ChatMessage
from rljob_trainer.rewards.base import RewardStatus
from rljob_trainer.rewards.scorer_environment import scorer_environment

CLASSES = '''
import os, random, time
from pathlib import Path

FOLDER = Path(__file__).parent


def act(what):
    """What the row asks for."""
    if what == "raise":
        raise ValueError("no luck")
    if what == "hang":
        (FOLDER / "hangs").touch()
        time.sleep(600)
    if what == "die":
        os._exit(7)
    if what == "die once" and not (FOLDER / "died").exists():
        (FOLDER / "died").touch()
        os._exit(7)
    return what


class Game:
    """`plan`: what reset, each respond and get_reward do."""

    def reset(self, plan=("begin",), reward=1.0, **row):
        self.seen = random.random()
        self.plan, self.reward, self.messages = list(plan), reward, []
        return act(self.plan.pop(0))

    def respond(self, message):
        self.messages.append(message["content"])
        return act(self.plan.pop(0)) if self.plan else None

    def get_reward(self):
        act(self.reward)
        return {"score": self.reward, "seen": self.seen, "turns": len(self.messages)}

    def close(self):
        raise OSError("close does not work")


class Calculator:
    def reset(self, **row):
        self.sums = []
        return "1 + 2?"

    def add(self, a: int, b: int) -> int:
        """
        Adds two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.sums.append(a + b)
        return a + b

    def fail(self) -> str:
        """Fails."""
        raise KeyError("lost")

    def get_reward(self):
        return len(self.sums)
'''
END = "<|im_end|>"
SAMPLING = SamplingSettings(1.0, 1.0, 0, 400, ())
LIMITS = EpisodeLimits(max_turns=8, max_context_tokens=4000, max_turn_tokens=None, max_seconds=120.0, retries=2)
SECONDS = 60.0
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>' + END


@dataclass(frozen=True)
class Described:
    """A folder with the module and a model, and what the classes offer."""

    folder: Path
    by_name: Mapping[str, EnvironmentDescription]


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Described:
    folder = tmp_path_factory.mktemp("environments")
    write_module(folder, CLASSES)
    template = chat_models.HERMES.replace("THINKING", "").replace("BEGINNING", "")
    chat_models.save(
        folder / "model",
        template,
        eos_token=END,
        are_special=False,
        response_template=chat_models.HERMES_RESPONSES,
    )
    found = probe(folder, *class_specs("Game", "Calculator")).descriptions
    return Described(folder, {each.name: each for each in found})


@dataclass
class Running:
    """A host with its engine."""

    host: EnvironmentHost
    engine: ScriptedEngine
    loop: EngineLoop

    def take_all(self) -> dict[int, FinishedEpisode]:
        """The rollouts by number, when all have ended."""
        end, found = time.monotonic() + SECONDS, list[FinishedEpisode]()
        while self.host.num_open:
            assert time.monotonic() < end
            found += self.host.take(1.0)
        found += self.host.take(0.0)
        by_number = {each.number: each for each in found}
        assert len(by_number) == len(found)
        return by_number

    def run(self, *requests: EpisodeRequest) -> list[FinishedEpisode]:
        """The rollouts in the order of the requests."""
        self.host.submit(requests)
        found = self.take_all()
        return [found[request.number] for request in requests]

    def assert_nothing_is_open(self) -> None:
        self.host._in_thread(self._until_closed())
        self.loop.wait_until_idle()
        assert self.host.num_open == 0
        assert not self.engine.open
        assert not self.loop._inbox
        assert not self.host._engine._futures
        assert not self.host._tasks

    async def _until_closed(self) -> None:
        """Waits until the environments have closed and all places are free."""
        await asyncio.wait_for(asyncio.gather(*self.host._processes._closing), SECONDS)
        await asyncio.sleep(0)
        assert all(each.num_rollouts == 0 for each in self.host._processes._processes)


Start = Callable[..., Running]


@pytest.fixture
def folder(described: Described) -> Path:
    for name in ("hangs", "died"):
        (described.folder / name).unlink(missing_ok=True)
    return described.folder


@pytest.fixture
def start(described: Described, folder: Path) -> Iterator[Start]:
    hosts = list[EnvironmentHost]()

    def begin(
        script: Script,
        *names: str,
        max_open: int = 8,
        rollouts_per_process: int = 1,
        timeout_seconds: float = 60.0,
        **limits: object,
    ) -> Running:
        names = names or ("Game",)
        settings = EnvironmentSettings(
            classes=tuple(class_specs(*names)),
            descriptions=tuple(described.by_name[name] for name in names),
            limits=replace(LIMITS, **limits),  # type: ignore[arg-type]
            max_open=max_open,
            rollouts_per_process=rollouts_per_process,
            timeout_seconds=timeout_seconds,
            tool_parser=None,
            starts_new_rows=False,
            may_rewrite=False,
            model_folder=folder / "model",
            log_folder=folder / "logs",
            environment=scorer_environment(os.environ, [], [folder]),
        )
        engine = ScriptedEngine(folder / "model", script)
        loop = EngineLoop(engine, stall_seconds=SECONDS)
        hosts.append(EnvironmentHost(loop, settings, 0))
        return Running(hosts[-1], engine, loop)

    yield begin
    for host in hosts:
        process_ids = host._processes.process_ids()
        host.close()
        assert not [each for each in process_ids if Path(f"/proc/{each}").exists() and not is_zombie(each)]


def is_zombie(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def request(
    number: int = 0,
    *plan: str,
    messages: Sequence[ChatMessage] | None = None,
    sampling: SamplingSettings = SAMPLING,
    environment_seed: int = 5,
    **row: object,
) -> EpisodeRequest:
    if plan:
        row["plan"] = list(plan)
    return EpisodeRequest(
        number, None if messages is None else tuple(messages), row, sampling, 100 + number, environment_seed
    )


def turns(*texts: str) -> Script:
    """A policy with these turns."""
    return lambda prompt: texts[prompt.turn] if texts[prompt.turn] in (NEVER, BROKEN) else texts[prompt.turn] + END


def say(prompt: Prompt) -> str:
    return f"turn {prompt.turn}{END}"


def check_rows(running: Running, request: EpisodeRequest, episode: FinishedEpisode) -> None:
    """The row is exactly what the engine saw and sampled in the last attempt."""
    assert episode.transcript is not None
    [row] = episode.transcript.rows
    response = list(row.token_ids[row.num_prompt_tokens :])
    assert len(response) == len(row.mask) == len(row.logprobs) == len(row.policy_versions)
    requests = {each.request_id: each for each in running.engine.requests}
    for turn in range(episode.transcript.num_turns):
        prompt = requests[f"{request.number}/{turn}"].prompt_token_ids
        sampled = running.engine.sequences[f"{request.number}/{turn}"]
        end = len(prompt) + len(sampled.token_ids)
        assert row.token_ids[:end] == (*prompt, *sampled.token_ids)
        place = slice(len(prompt) - row.num_prompt_tokens, end - row.num_prompt_tokens)
        assert set(row.mask[place]) == {True}
        assert tuple(row.logprobs[place]) == sampled.logprobs
        assert set(row.policy_versions[place]) == {POLICY_VERSION}
    num_sampled = sum(
        len(running.engine.sequences[f"{request.number}/{turn}"].token_ids)
        for turn in range(episode.transcript.num_turns)
    )
    assert sum(row.mask) == sum(each < 0 for each in row.logprobs) == num_sampled


@pytest.mark.parametrize(
    ("limits", "outcome", "num_turns", "num_seen"),
    [
        ({}, Outcome.COMPLETED, 3, 3),
        ({"max_turns": 2}, Outcome.MAX_TURNS, 2, 2),
        ({"max_turns": 3}, Outcome.COMPLETED, 3, 3),
        ({"max_turn_tokens": 3}, Outcome.MAX_TOKENS, 1, 0),
        # Prompt, turn and message have 20, 7 and 21 tokens, together 20 + 7 + 21 + 7 + 21 = 76 before the third turn.
        ({"max_context_tokens": 76}, Outcome.CONTEXT_FULL, 2, 2),
        ({"max_context_tokens": 78}, Outcome.CONTEXT_FULL, 3, 2),
        ({"max_context_tokens": 83}, Outcome.COMPLETED, 3, 3),
        ({"max_new_tokens": 14}, Outcome.MAX_TOKENS, 2, 2),
        ({"max_new_tokens": 20}, Outcome.MAX_TOKENS, 3, 2),
        ({"max_new_tokens": 21}, Outcome.COMPLETED, 3, 3),
    ],
)
def test_how_a_rollout_ends(
    start: Start, limits: dict[str, int], outcome: Outcome, num_turns: int, num_seen: int
) -> None:
    """`num_seen`: turns that the environment has seen. A turn that was cut off is not shown to it."""
    sampling = replace(SAMPLING, max_new_tokens=limits.pop("max_new_tokens", 400))
    running = start(say, **limits)
    asked = request(0, "a", "b", "c", sampling=sampling)
    [episode] = running.run(asked)
    assert episode.transcript is not None
    assert (episode.outcome, episode.transcript.num_turns) == (outcome, num_turns)
    assert isinstance(episode.reward.value, Mapping)
    assert episode.reward.value["turns"] == num_seen
    check_rows(running, asked, episode)
    [row] = episode.transcript.rows
    assert sum(row.mask) <= sampling.max_new_tokens
    assert len(row.token_ids) <= limits.get("max_context_tokens", len(row.token_ids))
    running.assert_nothing_is_open()


def test_the_conversation_is_complete(start: Start) -> None:
    running = start(say)
    messages: list[ChatMessage] = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Now: "}]
    [episode] = running.run(request(0, "a", "b", messages=messages))
    assert episode.transcript is not None
    assert list(episode.transcript.messages) == [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "Now: a"},
        {"role": "assistant", "content": "turn 0"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "turn 1"},
    ]
    row, decode = episode.transcript.rows[0], running.engine.tokenizer.decode
    text = decode(row.token_ids, skip_special_tokens=False)
    assert episode.transcript.prompt_text + episode.transcript.response_text + END == text
    assert episode.transcript.last_turn == "turn 1"
    assert messages[1]["content"] == "Now: "


def test_tools_are_called_and_wrong_calls_come_back_as_text(start: Start) -> None:
    script = turns(
        CALL.format("add", '{"a": 1, "b": 2}').removesuffix(END),
        CALL.format("subtract", "{}").removesuffix(END),
        CALL.format("fail", "{}").removesuffix(END),
        "<tool_call>\n{nothing}\n</tool_call>",
        CALL.format("add", '{"a": 3}').removesuffix(END),
        "The sum is 3.",
    )
    running = start(script, "Calculator")
    asked = request(0)
    [episode] = running.run(asked)
    assert episode.transcript is not None
    assert (episode.outcome, episode.reward.value) == (Outcome.COMPLETED, 1)
    answers = [
        (each["role"], str(each["content"])) for each in episode.transcript.messages if each["role"] != "assistant"
    ]
    roles, texts = zip(*answers, strict=True)
    assert roles == ("user", "tool", "tool", "tool", "user", "tool")
    assert texts[1] == "3"
    for text, part in zip(texts[2:], ("subtract not found", "lost", "cannot be read", "'b'"), strict=True):
        assert part in text
    assert (episode.counts.num_tool_calls, episode.counts.num_tool_errors) == (5, 4)
    check_rows(running, asked, episode)


def test_a_broken_call_in_the_last_turn_is_a_parse_error(start: Start) -> None:
    running = start(turns("<tool_call>{", "<tool_call>{"), "Calculator", max_turns=2)
    [episode] = running.run(request(0))
    assert (episode.outcome, episode.reward.value) == (Outcome.PARSE_ERROR, 0)
    assert (episode.counts.num_tool_calls, episode.counts.num_tool_errors) == (2, 2)


@pytest.mark.parametrize("turn", [0, 1])
def test_a_turn_that_is_generated_too_long_is_dropped(start: Start, turn: int) -> None:
    """The environment still gives a reward for what came before."""
    running = start(turns(*["first"] * turn, NEVER), max_seconds=0.5)
    asked = request(0, "a", "b")
    [episode] = running.run(asked)
    assert (episode.outcome, episode.reward.status) == (Outcome.TIME_LIMIT, RewardStatus.OK)
    assert isinstance(episode.reward.value, Mapping)
    assert episode.reward.value["turns"] == turn
    assert episode.transcript is not None
    assert episode.transcript.num_turns == turn
    assert running.engine.aborted == [f"0/{turn}"]
    check_rows(running, asked, episode)
    running.assert_nothing_is_open()


@pytest.mark.parametrize("plan", [("a", "hang"), ("a", "b", "hang")])
def test_a_call_of_the_environment_that_hangs_gives_no_reward(start: Start, plan: tuple[str, ...]) -> None:
    running = start(say, timeout_seconds=0.5)
    asked = request(0, *plan)
    [episode] = running.run(asked)
    assert (episode.outcome, episode.reward.status) == (Outcome.TIME_LIMIT, RewardStatus.TIMEOUT)
    assert episode.reward.value is None
    assert "respond took longer than 0.5 s" in episode.reward.detail
    check_rows(running, asked, episode)
    running.assert_nothing_is_open()


def test_a_reward_that_hangs_is_missing(start: Start) -> None:
    running = start(say, timeout_seconds=0.5)
    [episode] = running.run(request(0, "a", reward="hang"))
    assert (episode.outcome, episode.reward.status) == (Outcome.COMPLETED, RewardStatus.TIMEOUT)
    assert "get_reward took longer" in episode.reward.detail


@pytest.mark.parametrize(
    ("row", "method", "outcome"),
    [
        ({"plan": ["raise"]}, "reset", Outcome.INFRASTRUCTURE),
        ({"plan": [7]}, "reset", Outcome.INFRASTRUCTURE),
        ({"plan": [[]]}, "reset", Outcome.INFRASTRUCTURE),
        ({"plan": [[{"role": "assistant", "content": "mine"}]]}, "reset", Outcome.INFRASTRUCTURE),
        ({"plan": ["a", "raise"]}, "respond", Outcome.COMPLETED),
        ({"plan": ["a", 7.5]}, "respond", Outcome.COMPLETED),
        ({"plan": ["a", [{"role": "assistant", "content": "mine"}]]}, "respond", Outcome.COMPLETED),
        ({"plan": ["a"], "reward": "raise"}, "get_reward", Outcome.COMPLETED),
        ({"plan": ["a"], "reward": "garbage"}, "get_reward", Outcome.COMPLETED),
        ({"plan": ["a"], "reward": float("nan")}, "get_reward", Outcome.COMPLETED),
    ],
)
def test_an_environment_that_raises_or_returns_garbage_gives_no_reward(
    start: Start, row: dict[str, object], method: str, outcome: Outcome
) -> None:
    running = start(say)
    [episode] = running.run(replace(request(0), row=row))
    assert (episode.outcome, episode.reward.status, episode.reward.value) == (outcome, RewardStatus.ERROR, None)
    assert episode.reward.detail.startswith(method), episode.reward.detail
    assert (episode.transcript is None) is (outcome is Outcome.INFRASTRUCTURE)
    running.assert_nothing_is_open()


def test_a_process_that_dies_is_replaced_and_the_rollout_begins_again(start: Start) -> None:
    running = start(say)
    asked = request(0, "a", "b", "die once")
    [episode] = running.run(asked)
    assert (episode.outcome, episode.reward.status) == (Outcome.COMPLETED, RewardStatus.OK)
    assert [each.request_id for each in running.engine.requests] == ["0/0", "0/1", "0/0", "0/1", "0/2"]
    first, second = running.engine.requests[:2], running.engine.requests[2:4]
    assert first == second
    check_rows(running, asked, episode)


@pytest.mark.parametrize("retries", [0, 2])
def test_a_rollout_whose_process_always_dies_is_lost(start: Start, retries: int) -> None:
    running = start(say, retries=retries)
    died, well = running.run(request(0, "a", "die"), request(1, "a"))
    assert (died.outcome, died.transcript) == (Outcome.INFRASTRUCTURE, None)
    assert well.outcome is Outcome.COMPLETED
    assert sum(each.request_id == "0/0" for each in running.engine.requests) == 1 + retries
    running.assert_nothing_is_open()


def test_a_reset_that_hangs_is_tried_again(start: Start) -> None:
    running = start(say, timeout_seconds=0.5, retries=1)
    [episode] = running.run(request(0, "hang"))
    assert (episode.outcome, episode.transcript) == (Outcome.INFRASTRUCTURE, None)
    running.assert_nothing_is_open()


def test_a_turn_that_the_engine_cannot_complete_begins_the_rollout_again(start: Start) -> None:
    """With the same seeds and a fresh environment."""
    failures = iter([BROKEN])
    running = start(lambda prompt: next(failures, say(prompt)) if prompt.turn == 1 else say(prompt))
    asked = request(0, "a", "b")
    [episode] = running.run(asked)
    assert episode.outcome is Outcome.COMPLETED
    assert [each.request_id for each in running.engine.requests] == ["0/0", "0/1", "0/0", "0/1"]
    assert running.engine.requests[:2] == running.engine.requests[2:]
    [other] = start(say).run(asked)
    assert (other.transcript, other.reward) == (episode.transcript, episode.reward)
    check_rows(running, asked, episode)


def test_turns_have_different_seeds_and_a_group_has_one_environment(start: Start) -> None:
    running = start(say)
    first, second, other = running.run(
        request(0, "a", "b", "c"), request(1, "a", "b", "c"), request(2, "a", "b", "c", environment_seed=6)
    )
    seeds = {each.request_id: each.seed for each in running.engine.requests}
    assert [seeds[f"{number}/0"] for number in range(3)] == [100, 101, 102]
    assert len(set(seeds.values())) == 9
    assert seeds["1/2"] == turn_seed(101, 2)
    seen = [each.reward.value["seen"] for each in (first, second, other) if isinstance(each.reward.value, Mapping)]
    assert seen[0] == seen[1] != seen[2]


def test_all_turns_have_the_settings_of_the_request(start: Start) -> None:
    running = start(say, max_turn_tokens=50)
    greedy = SamplingSettings(0.0, 1.0, 0, 60, ("stop",))
    running.run(request(0, "a", "b", sampling=greedy))
    assert [each.sampling for each in running.engine.requests] == [
        replace(greedy, max_new_tokens=50),
        replace(greedy, max_new_tokens=50),
    ]


def test_the_row_chooses_the_class(start: Start) -> None:
    running = start(say, "Game", "Calculator")
    game, calculator = running.run(
        request(0, "a", "b", environment="Game"), request(1, environment="Calculator", plan="is not read")
    )
    assert isinstance(game.reward.value, Mapping)
    assert calculator.reward.value == 0
    assert "add" not in running.engine.tokenizer.decode(running.engine.requests[0].prompt_token_ids)


@pytest.mark.parametrize("name", ["Chess", None, 7])
def test_a_row_without_a_known_class_fails_the_run(start: Start, name: object) -> None:
    running = start(say, "Game", "Calculator")
    running.host.submit([request(0, environment=name)])
    with pytest.raises(DatasetError, match="the column 'environment' of a row must name one of Game, Calculator"):
        running.host.take(SECONDS)


@pytest.mark.parametrize(
    ("asked", "limits", "error", "text"),
    [
        (replace(request(0), row={"plan": [None]}), {}, EnvironmentMessageError, "the row has no prompt"),
        (request(0, "a" * 100), {"max_context_tokens": 100}, DatasetError, r"maxContextTokens \(100\): the prompt"),
    ],
)
def test_a_rollout_that_cannot_begin_fails_the_run(
    start: Start, asked: EpisodeRequest, limits: dict[str, object], error: type[Exception], text: str
) -> None:
    """Also while others are open."""
    running = start(lambda _: NEVER, **limits)
    running.host.submit([request(1, "a"), asked])
    for _ in range(2):
        with pytest.raises(error, match=text):
            running.host.take(SECONDS)
    running.host.abort()
    running.assert_nothing_is_open()


def test_an_error_of_the_engine_ends_the_wait(start: Start) -> None:
    running = start(lambda _: NEVER)
    running.host.submit([request(0, "a"), request(1, "a")])
    assert running.engine.has_request.wait(SECONDS)
    running.engine.step_error = ValueError("out of paper")
    with pytest.raises(WorkerError, match="out of paper"):
        running.host.take(SECONDS)
    running.host.abort()
    assert running.host.num_open == 0


def test_take_returns_what_has_ended(start: Start) -> None:
    running = start(lambda prompt: say(prompt) if "quick" in prompt.text else NEVER)
    running.host.submit([request(0, "quick"), request(1, "slow")])
    end, found = time.monotonic() + SECONDS, list[FinishedEpisode]()
    while not found:
        assert time.monotonic() < end
        found = running.host.take(0.01)
    assert [each.number for each in found] == [0]
    assert running.host.num_open == 1
    running.host.abort()
    assert running.host.take(SECONDS) == []


@pytest.mark.parametrize("state", ["not begun", "loading", "generating", "in reset", "in respond", "ended"])
@pytest.mark.parametrize("rollouts_per_process", [1, 4])
def test_abort_leaves_nothing_open(start: Start, folder: Path, state: str, rollouts_per_process: int) -> None:
    """And the processes can be used again."""
    running = start(
        lambda prompt: NEVER if "never" in prompt.text else say(prompt),
        max_open=4,
        rollouts_per_process=rollouts_per_process,
    )
    if state != "loading":
        running.run(request(100, "a"))
    plan = {"generating": ("never",), "in reset": ("hang",), "in respond": ("a", "hang")}.get(state, ("a", "b"))
    # More than have a place.
    running.host.submit([request(number, *plan) for number in range(6)])
    if state.startswith("in "):
        wait_for((folder / "hangs").exists)
    elif state == "generating":
        wait_for(lambda: len(running.engine.open) == 4)
    elif state == "ended":
        wait_for(lambda: running.host.num_open == 0)
    running.host.abort()
    running.assert_nothing_is_open()
    assert running.host.take(0.0) == []
    assert [each.outcome for each in running.run(*(request(200 + n, "a", "b") for n in range(6)))] == [
        Outcome.COMPLETED
    ] * 6
    running.assert_nothing_is_open()
    assert len(running.host._processes.process_ids()) <= 4 // rollouts_per_process


def test_close_ends_open_rollouts(start: Start) -> None:
    running = start(lambda _: NEVER, rollouts_per_process=2)
    running.host.submit([request(number, "a") for number in range(20)])
    wait_for(lambda: len(running.engine.open) == 8)
    # The fixture closes the host, and looks for processes.


def wait_for(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_message_that_the_template_rejects_is_an_error_of_the_environment(start: Start, folder: Path) -> None:
    template = Path(folder / "model" / "chat_template.jinja")
    before = template.read_text()
    template.write_text("{% if messages[-1].content == 'b' %}{{ raise_exception('no b') }}{% endif %}" + before)
    try:
        [episode] = start(say).run(request(0, "a", "b"))
    finally:
        template.write_text(before)
    assert (episode.outcome, episode.reward.status) == (Outcome.COMPLETED, RewardStatus.ERROR)
    assert "roles user" in episode.reward.detail
    assert "no b" in episode.reward.detail


def test_many_rollouts_wait_for_few_places(start: Start) -> None:
    """All begin as coroutines at once, but only as many as have a place use a process or the engine."""
    most_open = 0

    def script(prompt: Prompt) -> str:
        nonlocal most_open
        most_open = max(most_open, len(running.engine.open) + 1)
        return say(prompt)

    running = start(script, max_open=8, rollouts_per_process=4)
    episodes = running.run(*(request(number, "a", "b") for number in range(300)))
    assert {each.outcome for each in episodes} == {Outcome.COMPLETED}
    assert 4 < most_open <= 8
    assert len(running.host._processes.process_ids()) <= 2
    running.assert_nothing_is_open()
