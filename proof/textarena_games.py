"""Shows that the adapter for TextArena works with the library, which is not part of the test environment.

    python proof/textarena_games.py

Plays games in environment processes of the trainer. A player that halves wins the game of the hidden number; every
rollout of a group begins in one state; two games in one process do not disturb each other's random numbers, although
the library uses the global generator; a game for two players is refused. The exit code is 1 if one of these fails.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rljob_proof.other_packages import folder_with
from rljob_testing.settings import first_in_python_path, inherited_environment
from rljob_trainer.environments.description import ClassSpec
from rljob_trainer.environments.environment_pool import RolloutPlace
from rljob_trainer.environments.environment_process import EnvironmentProcess
from rljob_trainer.environments.probe import Trial, describe_environments
from rljob_trainer.errors import ConfigurationError

PATH = "rljob_trainer.environments.adapters.textarena:TextArena"
NUMBER, TILES = "GuessTheNumber-v0", "2048-v0-mega-easy"
BEGUN = (NUMBER, TILES, "FrozenLake-v0-random", "Sokoban-v0", "Sudoku-v0")
MOVES = ("[up]", "[left]", "[down]", "[right]") * 5
TIMEOUT_SECONDS = 60.0


def main() -> int:
    """Runs the program. The exit code is 1 if something does not hold."""
    with first_in_python_path(folder_with("textarena")), tempfile.TemporaryDirectory() as folder:
        log_file = Path(folder) / "environment.log"
        found = {
            "a group begins in one state, and other groups in others": begins_by_seed(log_file),
            "a player that halves wins": asyncio.run(is_won(log_file)),
            "two games in a process do not disturb each other": asyncio.run(are_separate(log_file)),
            "a game for two players is refused": refused_text("TicTacToe-v0", log_file) is not None,
        }
    for what, holds in found.items():
        print(f"{'met' if holds else 'MISSED'}: {what}")
    return 0 if all(found.values()) else 1


def spec(game: str) -> ClassSpec:
    """The class of a job."""
    return ClassSpec("environment", PATH, {"id": game}, "spec.training.environment.classes[0]")


def begins_by_seed(log_file: Path) -> bool:
    """Whether each game begins equally for equal seeds, and some game differently for another seed. The number that has
    to be guessed is not shown."""
    differ = False
    for game in BEGUN:
        trials = [Trial("environment", {}, seed) for seed in (5, 5, 6)]
        probed = describe_environments(
            [spec(game)],
            variables=inherited_environment(),
            log_file=log_file,
            timeout_seconds=TIMEOUT_SECONDS,
            trials=trials,
        )
        first, again, other = probed.openings
        print(f"{game}: {'equal' if first == again else 'UNEQUAL'} for equal seeds; {len(str(first))} characters")
        if first != again:
            return False
        differ |= first != other
    return differ


def refused_text(game: str, log_file: Path) -> str | None:
    """The message if the game is refused."""
    try:
        describe_environments(
            [spec(game)], variables=inherited_environment(), log_file=log_file, timeout_seconds=TIMEOUT_SECONDS
        )
    except ConfigurationError as error:
        print(error)
        return str(error)
    return None


async def is_won(log_file: Path) -> bool:
    """Whether halving finds the number, for several seeds."""
    process = EnvironmentProcess(
        [spec(NUMBER)], log_file=log_file, variables=inherited_environment(), timeout_seconds=TIMEOUT_SECONDS
    )
    try:
        rewards = [await _halving(RolloutPlace(process, seed), seed) for seed in range(8)]
    finally:
        process.kill()
    print(f"{NUMBER}: rewards {rewards}")
    return rewards == [1.0] * len(rewards)


async def _halving(place: RolloutPlace, seed: int) -> float | dict[str, float]:
    await place.open("environment", {}, seed)
    low, high = 1, 20
    while (said := await _said(place, f"[{(low + high) // 2}]")) is not None:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if re.search("higher", said) else (low, middle - 1)
    return await place.reward()


async def are_separate(log_file: Path) -> bool:
    """Whether a game in which new tiles appear at random says the same alone as beside another game."""
    alone = await _played(log_file, [1])
    together = await _played(log_file, [1, 2])
    print(f"{TILES}: {len(alone[0])} answers")
    return alone[0] == together[0] and together[0] != together[1]


async def _played(log_file: Path, seeds: Sequence[int]) -> list[list[str | None]]:
    """What the games of one process say to the same moves, which are made in turn."""
    process = EnvironmentProcess(
        [spec(TILES)], log_file=log_file, variables=inherited_environment(), timeout_seconds=TIMEOUT_SECONDS
    )
    games = [(RolloutPlace(process, seed), seed, list[str | None]()) for seed in seeds]
    try:
        for place, seed, _ in games:
            await place.open("environment", {}, seed)
        for move in MOVES:
            for place, _, texts in games:
                if not texts or texts[-1] is not None:
                    texts.append(await _said(place, move))
    finally:
        process.kill()
    return [texts for _, _, texts in games]


async def _said(place: RolloutPlace, text: str) -> str | None:
    """What the game says to a turn; None at its end."""
    messages = await place.respond({"role": "assistant", "content": text})
    return None if messages is None else str(messages[0]["content"])


if __name__ == "__main__":
    sys.exit(main())
