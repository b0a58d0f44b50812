"""Games of the `textarena` library for one player."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_trainer.environments.adapters.missing_package import MissingPackageError
from rljob_trainer.rewards.final_message import final_message

try:
    import textarena
except ModuleNotFoundError as error:
    raise MissingPackageError("textarena", "textarena") from error


class TextArena:
    """The policy reads what the game says, and writes a move into each turn. The reward is that of the game; 0 if the
    rollout ends before the game. Games with words need the data of NLTK."""

    def __init__(self, id: str, config: Mapping[str, object] | None = None) -> None:
        """
        Args:
            id: Name of the game, for example `GuessTheNumber-v0`.
            config: Keyword arguments of `textarena.make`.
        """
        self._game = textarena.make(id, **dict(config or {}))
        self._inner = self._game
        while isinstance(self._inner, textarena.Wrapper):
            self._inner = self._inner.env
        try:
            self._game.reset(num_players=1, seed=0)
        except AssertionError as error:
            raise ValueError(f"{id} is a game for several players ({error}); choose a game for one player") from error

    def reset(self, seed: int, **row: object) -> str:
        """Begins the game of this seed."""
        del row
        self._game.reset(num_players=1, seed=int(seed))
        return self._news()

    def respond(self, message: Mapping[str, str]) -> str | None:
        """Makes a move. The game itself explains a move that it cannot read."""
        is_done, _ = self._game.step(final_message(message["content"]))
        return None if is_done else self._news()

    def get_reward(self) -> float:
        """The reward of the only player."""
        rewards, _ = self._game.close()
        return float((rewards or {}).get(0, 0.0))

    def _news(self) -> str:
        """What the game has said since the last turn. Its wrappers would repeat the whole conversation."""
        observations: list[tuple[int, str, object]] = self._inner.get_observation()[1]
        return "\n".join(text for sender, text, _ in observations if sender == textarena.GAME_ID).strip()
