"""Trains a reward model on pairs of answers to the quick start's task: the right one, and one with a mistake.

    python examples/reward_model/train.py --output runs/reward-model
    rljob run examples/reward_model/ppo.yaml

The loss is that of Bradley and Terry: -log sigmoid(score of the right answer - score of the wrong one), with a small
term that keeps scores around 0 (Eisenstein et al. 2023, arXiv 2312.09244, appendix A). What is saved is a folder of
transformers' `Qwen3ForSequenceClassification` with one label, such as TRL's RewardTrainer writes, too.

Legend: B pairs of a batch, L tokens of the longest row.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

ASSETS = Path(str(files("rljob_trainer"))) / "assets" / "sort_digits"
DIGITS = "0123456789"
CENTERING = 0.01
"""Coefficient of the mean squared sum of a pair's scores."""


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description="A reward model for the quick start's task.")
    parser.add_argument("--output", type=Path, required=True, help="folder for the model")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--pairs", type=int, default=128, help="pairs per step")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    draw = random.Random(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "model")
    model = AutoModelForSequenceClassification.from_pretrained(ASSETS / "model", num_labels=1, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=options.steps, pct_start=0.1)
    training, held_out = rows("train.jsonl"), rows("held_out.jsonl")
    for step in range(1, options.steps + 1):
        pairs = [with_mistake(draw, *draw.choice(training)) for _ in range(options.pairs)]
        right_B, wrong_B = scores(model, tokenizer, pairs)
        loss = -logsigmoid(right_B - wrong_B).mean() + CENTERING * (right_B + wrong_B).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if step % 250 == 0 or step == options.steps:
            print(f"step {step}: loss {float(loss.detach()):.3f}, held out {accuracy(model, tokenizer, held_out):.3f}")
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    print(f"saved in {options.output}")


def rows(file: str) -> list[tuple[str, str]]:
    """Prompts and answers."""
    lines = (json.loads(line) for line in (ASSETS / file).read_text().splitlines())
    return [(line["prompt"], line["answer"]) for line in lines]


def with_mistake(draw: random.Random, prompt: str, answer: str) -> tuple[str, str, str]:
    """Prompt, answer and another text of digits: with a digit changed, left out or added, two of them swapped, the
    prompt's own order, or any digits."""
    digits, wrong = list(answer), answer
    while wrong == answer:
        place, other = draw.randrange(len(digits)), draw.randrange(len(digits))
        match draw.randrange(7):
            case 0:
                changed = [*digits[:place], draw.choice(DIGITS), *digits[place + 1 :]]
            case 1:
                changed = sorted([*digits[:place], draw.choice(DIGITS), *digits[place + 1 :]])
            case 2:
                changed = digits[:place] + digits[place + 1 :]
            case 3:
                changed = [*digits[:place], draw.choice(DIGITS), *digits[place:]]
            case 4:
                changed = digits.copy()
                changed[place], changed[other] = changed[other], changed[place]
            case 5:
                changed = list(prompt.removesuffix(">"))
            case _:
                changed = draw.choices(DIGITS, k=draw.randint(1, 7))
        wrong = "".join(changed)
    return prompt, answer, wrong


def scores(
    model: PreTrainedModel, tokenizer: AutoTokenizer, pairs: Sequence[tuple[str, str, str]]
) -> tuple[Tensor, Tensor]:
    """[B] each: of the right answers and of the others. Texts end as responses do, with the end token."""
    texts = [prompt + right for prompt, right, _ in pairs] + [prompt + wrong for prompt, _, wrong in pairs]
    rows = [[*token_ids, tokenizer.eos_token_id] for token_ids in tokenizer(texts)["input_ids"]]
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    found = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    return found[: len(pairs)], found[len(pairs) :]


@torch.no_grad()
def accuracy(model: PreTrainedModel, tokenizer: AutoTokenizer, held_out: Sequence[tuple[str, str]]) -> float:
    """Of pairs with held-out prompts, the part in which the right answer has the higher score."""
    draw = random.Random(0)
    right_B, wrong_B = scores(model, tokenizer, [with_mistake(draw, *row) for row in held_out])
    return float((right_B > wrong_B).float().mean())


if __name__ == "__main__":
    main()
