"""Rollouts with real environment processes and an engine whose responses a test chooses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rljob_testing.training.scripted_engine import BROKEN, NEVER, POLICY_VERSION, Prompt, Script, ScriptedEngine
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.engines.rollout.loop import EngineLoop
from rljob_trainer.environments.description import EnvironmentDescription
from rljob_trainer.environments.episode import EpisodeRequest, FinishedEpisode
from rljob_trainer.environments.host import EnvironmentHost
from rljob_trainer.environments.settings import EpisodeLimits
from rljob_trainer.models.tokenizer import ChatMessage

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


class Chat:
    """A game without a reward."""

    def reset(self, plan, **row):
        self.plan = list(plan)
        return act(self.plan.pop(0))

    def respond(self, message):
        return act(self.plan.pop(0)) if self.plan else None


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


@dataclass
class Running:
    """A host with its engine."""

    host: EnvironmentHost
    engine: ScriptedEngine
    loop: EngineLoop

    @property
    def num_open(self) -> int:
        """The number of rollouts that have not ended."""
        return self.host._num_open

    def take_all(self) -> dict[int, FinishedEpisode]:
        """The rollouts by number, when all have ended."""
        end, found = time.monotonic() + SECONDS, list[FinishedEpisode]()
        while self.num_open:
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
        assert self.num_open == 0
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
    assert len(row.turns) == episode.transcript.num_turns
    requests = {each.request_id: each for each in running.engine.requests}
    for turn, trained in enumerate(row.turns):
        prompt = requests[f"{request.number}/{turn}"].prompt_token_ids
        sampled = running.engine.sequences[f"{request.number}/{turn}"]
        end = len(prompt) + len(sampled.token_ids)
        assert row.token_ids[:end] == (*prompt, *sampled.token_ids)
        assert (trained.start, trained.logprobs) == (len(prompt), sampled.logprobs)
        assert trained.policy_versions == (POLICY_VERSION,) * len(sampled.token_ids)


def wait_for(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.005)
