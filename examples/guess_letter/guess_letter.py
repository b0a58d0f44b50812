"""A game for training.environment: the model guesses a hidden letter. The class needs no import from RLJob."""

import random

LETTERS = "abcdefghijklmnopqrstuvwxyz"
NUM_GUESSES = 6


class GuessLetter:
    """A game of at most six guesses. The answer to a guess is `<` if the hidden letter comes earlier in the alphabet,
    `>` if it comes later, and `?` if the guess was not a letter."""

    def reset(self) -> str:
        """Hides a letter and returns the first message."""
        # `random` has the same seed in all rollouts of a group, so they have the same hidden letter.
        self.letter = random.choice(LETTERS)
        self.num_guesses = 0
        self.is_found = False
        return "a-z:"

    def respond(self, message: dict[str, str]) -> str | None:
        """Returns the answer to a guess, or None at the end of the game."""
        guess = message["content"]
        self.num_guesses += 1
        self.is_found = guess == self.letter
        # The game ends itself after the last guess, so the outcome is COMPLETED, not MAX_TURNS.
        if self.is_found or self.num_guesses == NUM_GUESSES:
            return None
        return self._feedback(guess) if len(guess) == 1 and guess in LETTERS else "?"

    def get_reward(self) -> float:
        """Returns 1 if the letter was found."""
        return float(self.is_found)

    def _feedback(self, guess: str) -> str:
        return "<" if self.letter < guess else ">"
