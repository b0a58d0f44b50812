"""Rollouts of environments: TRL's classes run unchanged, and rollouts that share a process are independent."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from rljob_testing.environments import call, class_specs, probe, process_ids, processes_for, run, write_module
from rljob_trainer.environments.environment_pool import ToolResult
from rljob_trainer.environments.failures import EnvironmentCodeError, EnvironmentLostError
from rljob_trainer.environments.probe import Trial
from rljob_trainer.environments.random_states import RandomStates

CLASSES = '''
import asyncio, random, sys
from pathlib import Path
import numpy

FOLDER = Path(__file__).parent


class Counter:
    """As in TRL's documentation: a tool, and a reward that reads the state."""

    def __init__(self):
        self.counter = 0

    def reset(self, **kwargs):
        self.counter = 0
        return None

    def increment(self, step: int) -> int:
        """
        Increases the counter.

        Args:
            step: The number to add.

        Returns:
            The value of the counter.
        """
        self.counter += step
        return self.counter

    def _secret(self):
        raise AssertionError

    @property
    def value(self):
        raise AssertionError("properties are not evaluated")


class Guess:
    """A game whose `reset` returns an observation and whose `step` is a tool."""

    def reset(self, target, **kwargs) -> str:
        self.target, self.reward = int(target), 0.0
        return f" Guess a number. {sorted(kwargs)}"

    def step(self, guess: int) -> str:
        """
        Makes a guess.

        Args:
            guess: The guessed number.
        """
        if self.reward:
            raise ValueError("Game over.")
        self.reward = float(guess == self.target)
        return "right" if self.reward else ("higher" if guess < self.target else "lower")

    def get_reward(self):
        return {"right": self.reward, "half": numpy.float32(0.5)}


class Browser:
    """Async methods, and one that starts an event loop of its own."""

    both = None

    async def reset(self, prompt, **kwargs):
        await asyncio.sleep(0)
        return [{"role": "user", "content": prompt}]

    async def fetch(self, url: str) -> str:
        """
        Fetches a page.

        Args:
            url: The address.
        """
        # Waits until a second call has begun.
        if Browser.both is None:
            Browser.both = asyncio.Event()
        else:
            Browser.both.set()
        await Browser.both.wait()
        return f"page {url}"

    def search(self, text: str) -> str:
        """
        Searches.

        Args:
            text: The words.
        """
        async def found():
            await asyncio.sleep(0)
            return text.upper()
        return asyncio.run(found())

    async def get_reward(self) -> float:
        return 0.25


class Talker:
    reusable = True
    num_made = 0

    def __init__(self):
        Talker.num_made += 1
        self.num_rollouts = 0

    def reset(self, seed=None, **row):
        self.num_rollouts += 1
        return f"{Talker.num_made} {self.num_rollouts} {seed}"

    def respond(self, message):
        what = message["content"]
        if what == "raise":
            raise OSError("no")
        if what == "unreachable":
            raise ConnectionRefusedError("service")
        return {
            "end": None,
            "one": {"role": "tool", "content": "x"},
            "two": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
            "wrong": [{"role": "user"}],
            "number": 3,
            "half": "\\ud800",
            "huge": "x" * (2 << 20),
        }.get(what, what)


class Dice:
    """Random numbers of `random` and NumPy."""

    def reset(self, **row):
        self.numbers = []
        self.throw()

    def throw(self) -> list:
        """Throws."""
        self.numbers += [random.random(), float(numpy.random.rand())]
        return self.numbers

    async def slow(self) -> list:
        """Throws several times, also in a task and in a timer."""
        async def later():
            await asyncio.sleep(0)
            self.throw()

        self.throw()
        await asyncio.sleep(0)
        self.throw()
        await asyncio.gather(later())
        thrown = asyncio.Event()
        asyncio.get_running_loop().call_later(0.01, lambda: thrown.set() if self.throw() else None)
        await thrown.wait()
        return self.throw()


class Strange:
    def reset(self, **row):
        self.closed = FOLDER / "closed"

    def raises(self) -> str:
        """Raises."""
        raise KeyError("lost")

    def exits(self) -> str:
        """Raises SystemExit."""
        sys.exit(3)

    def unhashable(self) -> dict:
        """Returns."""
        return {"a": [{1, 2}]}

    def huge(self) -> str:
        """Returns."""
        return "x" * (2 << 20)

    def odd(self) -> str:
        """Returns half of a character."""
        return "\\ud83d"

    def unprintable(self) -> object:
        """Returns."""
        class Odd:
            def __str__(self):
                raise RuntimeError("no text")
        return Odd()

    def stops(self) -> int:
        """Raises StopIteration."""
        return next(iter([]))

    def close(self):
        self.closed.write_text("yes")
        raise RuntimeError("close fails")
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("environments")
    write_module(made, CLASSES)
    return made


def test_environments_of_trl_run_unchanged(folder: Path) -> None:
    async def rollouts() -> None:
        async with processes_for(folder, "Counter", "Guess", "Browser", rollouts_per_process=4, max_rollouts=4) as pool:
            async with pool.place() as counter, pool.place() as game:
                assert await counter.open("Counter", {"prompt": "p"}, 0) is None
                row = {"prompt": "p", "target": 7, "environment": "Guess"}
                assert await game.open("Guess", row, 0) == " Guess a number. ['prompt']"
                results = await counter.call_tools([call("increment", step=2), call("increment", step=3)])
                assert results == [ToolResult("2", False), ToolResult("5", False)]
                calls = [call("step", guess=3), call("step", guess=7), call("step", guess=7)]
                assert await game.call_tools(calls) == [
                    ToolResult("higher", False),
                    ToolResult("right", False),
                    ToolResult("{'error': 'Game over.'}", True),
                ]
                assert await game.reward() == {"right": 1.0, "half": 0.5}
            async with pool.place() as first, pool.place() as second:
                assert await first.open("Browser", {"prompt": "p"}, 0) == [{"role": "user", "content": "p"}]
                await second.open("Browser", {"prompt": "q"}, 0)
                both = first.call_tools([call("fetch", url="a"), call("search", text="b")])
                pages = await asyncio.gather(both, second.call_tools([call("fetch", url="c")]))
                assert [[each.text for each in page] for page in pages] == [["page a", "B"], ["page c"]]
                assert await first.reward() == 0.25
            assert len(process_ids(pool)) == 1

    run(rollouts())


def test_mistakes_in_tool_calls_are_texts_for_the_model(folder: Path) -> None:
    async def rollout() -> None:
        async with processes_for(folder, "Strange") as pool, pool.place() as place:
            await place.open("Strange", {}, 0)
            calls = [call(name) for name in ("raises", "exits", "unhashable", "huge", "odd", "unprintable", "stops")]
            results = await place.call_tools([*calls, call("reset"), call("odd", x=1), call("_x")])
            assert [result.is_error for result in results] == [True, True, False, True, False, *[True] * 5]
            raised, exited, unhashable, huge, odd, unprintable, _, special, arguments, private = results
            assert raised.text == str({"error": "'lost'"})
            assert exited.text == "{'error': '3'}"
            assert unhashable.text == "{'a': [{1, 2}]}"
            assert "2097152 characters" in huge.text
            assert odd.text == "\\ud83d"
            assert "no text" in unprintable.text
            assert special.text == "{'error': 'Tool reset not found.'}"
            assert "unexpected keyword argument 'x'" in arguments.text
            assert "not found" in private.text
        # Closed in the background; the next rollout gets the same process and its place afterwards.
        async with processes_for(folder, "Strange") as pool:
            for _ in range(2):
                async with pool.place() as place:
                    await place.open("Strange", {}, 0)
            async with pool.place() as place:
                assert (folder / "closed").read_text() == "yes"
            assert "close fails" in (folder / "logs" / "environment-0.log").read_text()

    run(rollout())


def test_respond_gives_messages_or_the_end(folder: Path) -> None:
    async def said(what: str) -> object:
        return await place.respond({"role": "assistant", "content": what})

    async def rollout() -> None:
        nonlocal place
        async with processes_for(folder, "Talker") as pool:
            async with pool.place() as place:
                # The seed is passed because `reset` names it; a column of this name comes first.
                assert await place.open("Talker", {}, 5) == "1 1 5"
                assert await said("hello") == [{"role": "user", "content": "hello"}]
                assert await said("one") == [{"role": "tool", "content": "x"}]
                assert await said("two") == [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
                assert await said("half") == [{"role": "user", "content": "\\ud800"}]
                assert await said("end") is None
            async with pool.place() as place:
                assert await place.open("Talker", {"seed": None}, 5) == "1 2 5"
            async with pool.place() as place:
                assert await place.open("Talker", {"seed": 9}, 5) == "1 3 9"
                with pytest.raises(EnvironmentCodeError, match=r"(?s)respond raised OSError: no\n  File .*games.py"):
                    await said("raise")
            async with pool.place() as place:
                # An object that has failed is not used again.
                assert await place.open("Talker", {}, 5) == "2 1 5"
                for wrong, text in (("wrong", "role"), ("number", "return a string"), ("huge", "2097152 characters")):
                    with pytest.raises(EnvironmentCodeError, match=f"respond returned .*{text}"):
                        await said(wrong)
                with pytest.raises(EnvironmentLostError, match="ConnectionRefusedError"):
                    await said("unreachable")

    place = None  # type: ignore[assignment]
    run(rollout())


def test_rollouts_that_share_a_process_have_their_own_random_numbers(folder: Path) -> None:
    async def thrown(rollouts_per_process: int, is_at_once: bool) -> list[str]:
        async def rollout(seed: int) -> str:
            async with pool.place() as place:
                await place.open("Dice", {}, seed)
                await place.call_tools([call("throw"), call("slow")])
                [result] = await place.call_tools([call("slow")])
                return result.text

        async with processes_for(
            folder, "Dice", rollouts_per_process=rollouts_per_process, max_rollouts=rollouts_per_process
        ) as pool:
            if is_at_once:
                return list(await asyncio.gather(*map(rollout, (1, 2, 1))))
            return [await rollout(seed) for seed in (1, 2, 1)]

    alone, together = run(thrown(1, is_at_once=False)), run(thrown(3, is_at_once=True))
    assert alone == together
    assert alone[0] == alone[2] != alone[1]


def test_random_states_of_ended_rollouts_are_not_kept() -> None:
    states = RandomStates()
    for rollout in (1, 2):
        states.seed(rollout, 7)
    states.forget(1)
    # Code that the first rollout has left behind.
    states.switch_to(1)
    random.random()
    states.switch_to(2)
    assert random.random() == random.Random(7).random()
    assert not states._kept


def test_a_trial_begins_a_rollout(folder: Path) -> None:
    specs = class_specs("Counter", "Guess", "Talker")
    found = probe(folder, *specs, trials=(Trial("Guess", {"target": 3}, 1), Trial("Talker", {}, 4)))
    assert found.openings == (" Guess a number. []", "2 1 4")
    counter, guess, talker = found.descriptions
    assert [each.tool_names for each in found.descriptions] == [("increment",), ("step",), ()]
    [tool] = counter.tools
    assert tool["function"] == {
        "name": "increment",
        "description": "Increases the counter.",
        "parameters": {
            "type": "object",
            "properties": {"step": {"type": "integer", "description": "The number to add."}},
            "required": ["step"],
        },
        "return": {"type": "integer", "description": "The value of the counter."},
    }
    assert (counter.has_reward, guess.has_reward) == (False, True)
    assert (counter.has_respond, talker.has_respond) == (False, True)
