"""Creates the start model of guess-letter.yaml: a tiny Qwen3 that plays, but seldom finds the letter.

It imitates players who guess any letter that is still possible. One in four reads the feedback correctly, the others
read it backwards: after `<` (the hidden letter is earlier) they guess a later letter. Nobody halves the range. So
reinforcement learning has to find out which way to read the feedback, and then a better way to search.

    PYTHONPATH=examples python examples/guess_letter/make.py trainer/src/rljob_trainer/assets/guess_letter/model
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from guess_letter import LETTERS, NUM_GUESSES
from imitation import Part, imitate, make_tokenizer, save

PROMPT = "a-z:"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""A message is its text; a turn of the model is its text and the end token."""
SHARE_OF_CORRECT_READERS = 0.25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    tokenizer = make_tokenizer([*LETTERS, *"-:<>?"], CHAT_TEMPLATE)
    model = imitate(
        tokenizer,
        lambda _: play(generator),
        steps=arguments.steps,
        batch_size=128,
        learning_rate=3e-3,
        seed=arguments.seed,
    )
    save(model, tokenizer, arguments.folder)


def play(generator: random.Random) -> list[Part]:
    """Returns one game."""
    letter = generator.choice(LETTERS)
    reads_correctly = generator.random() < SHARE_OF_CORRECT_READERS
    possible = list(LETTERS)
    game: list[Part] = [(PROMPT, False)]
    for number in range(NUM_GUESSES):
        # A player who reads the feedback backwards may be left without a possible letter.
        guess = generator.choice(possible or LETTERS)
        game.append((guess, True))
        if guess == letter or number == NUM_GUESSES - 1:
            break
        is_earlier = letter < guess
        game.append(("<" if is_earlier else ">", False))
        believes_earlier = is_earlier == reads_correctly
        possible = [each for each in possible if (each < guess if believes_earlier else each > guess)]
    return game


if __name__ == "__main__":
    main()
