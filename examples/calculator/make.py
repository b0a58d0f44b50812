"""Creates the start model and the data of calculator.yaml: a tiny Qwen3 that calls a calculator without a plan.

It imitates players who add any two of the numbers that they see (the numbers of the task and earlier results), and who
after a random number of calls answer with any number that they see. Half of them use no number twice. Few of their
answers are right. Towards the end of the imitation they answer earlier, so that an answer without a call becomes the
most frequent beginning. So reinforcement learning has to find the plan: add two numbers, add the third one to the
result, and answer with that.

Tasks have three numbers from 10 to 39 with different first digits. They are split by the numbers without their order,
so no held-out task is a reordering of a training task.

    PYTHONPATH=examples python examples/calculator/make.py trainer/src/rljob_trainer/assets/calculator
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

from imitation import EOS, Part, imitate, make_tokenizer, save

TOOL = "add"
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.values() | first }}={% endfor %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""The names of the tools, and then the messages. A call is the tool's only argument and an equals sign."""
RESPONSE_TEMPLATE: dict[str, object] = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"\Z",
    "fields": {
        "tool_calls": {
            "open_pattern": rf"(?P<expression>[\w+]+)=(?:{EOS})?\Z",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": TOOL, "arguments": {"expression": "{expression}"}},
            },
        },
        "content": {},
    },
}
"""A turn that ends with an equals sign is a call of the tool; any other turn is the answer. Nothing of the prompt
belongs to the turn."""
NUM_TURNS = 4
ANSWER_SHARE, LATE_ANSWER_SHARE = 0.35, 0.6
"""Probability that a player answers in a turn, and the same in the last fifth of the imitation."""
NUM_TRAIN_ROWS, NUM_HELD_OUT_ROWS = 2000, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=2500)
    # Not every seed has learned to copy the numbers after this many steps.
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    train, held_out = split_tasks(generator)
    write_rows(arguments.folder / "train.jsonl", train[:NUM_TRAIN_ROWS])
    write_rows(arguments.folder / "held_out.jsonl", held_out[:NUM_HELD_OUT_ROWS])
    tokenizer = make_tokenizer([*"0123456789+=:?", TOOL], CHAT_TEMPLATE, RESPONSE_TEMPLATE)
    model = imitate(
        tokenizer,
        lambda finished: play(
            generator.choice(train), LATE_ANSWER_SHARE if finished >= 0.8 else ANSWER_SHARE, generator
        ),
        steps=arguments.steps,
        batch_size=64,
        learning_rate=3e-3,
        seed=arguments.seed,
    )
    save(model, tokenizer, arguments.folder / "model")


def split_tasks(generator: random.Random) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Returns all tasks, shuffled and split into training and held-out tasks. A hash of the sorted numbers chooses
    about a fifth of them."""
    tasks = [
        order
        for numbers in itertools.product(range(10, 20), range(20, 30), range(30, 40))
        for order in itertools.permutations(numbers)
    ]
    generator.shuffle(tasks)
    train: list[tuple[int, ...]] = []
    held_out: list[tuple[int, ...]] = []
    for task in tasks:
        key = hashlib.sha256(str(sorted(task)).encode()).digest()[0]
        (held_out if key % 5 == 0 else train).append(task)
    return train, held_out


def write_rows(path: Path, tasks: Sequence[tuple[int, ...]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"numbers": task}) + "\n" for task in tasks))


def play(numbers: tuple[int, ...], answer_share: float, generator: random.Random) -> list[Part]:
    """Returns the conversation about one task."""
    conversation: list[Part] = [(TOOL + "+".join(map(str, numbers)) + ":", False)]
    uses_numbers_once = generator.random() < 0.5
    visible = list(numbers)
    for turn in range(NUM_TURNS):
        if turn == NUM_TURNS - 1 or len(visible) < 2 or generator.random() < answer_share:
            conversation.append((str(generator.choice(visible)), True))
            break
        first, second = generator.sample(visible, 2)
        if uses_numbers_once:
            visible.remove(first)
            visible.remove(second)
        visible.append(first + second)
        conversation += [(f"{first}+{second}=", True), (str(first + second), False)]
    return conversation


if __name__ == "__main__":
    main()
