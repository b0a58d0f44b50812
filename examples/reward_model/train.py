"""Trains a reward model for the quickstart's task, on pairs of a right answer and one with a mistake.

    python examples/reward_model/train.py --output runs/reward-model
    rljob run examples/reward_model/ppo.yaml

The loss is the Bradley-Terry loss, -log sigmoid(score of the right answer - score of the wrong answer), plus a small
term that keeps scores near 0 (Eisenstein et al. 2023, arXiv 2312.09244, appendix A). The result is a folder with a
`Qwen3ForSequenceClassification` of transformers with one label, the same format that TRL's RewardTrainer writes.

Legend: B number of pairs in a batch.
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
"""Coefficient of the term that keeps scores near 0: the mean of (sum of the two scores of a pair) squared."""


def main() -> None:
    """Trains the reward model and saves it."""
    parser = argparse.ArgumentParser(description="Trains a reward model for the task of the quickstart.")
    parser.add_argument("--output", type=Path, required=True, help="folder in which the model is saved")
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
    """Returns prompt and answer of every row of a file of the quickstart's data."""
    lines = (json.loads(line) for line in (ASSETS / file).read_text().splitlines())
    return [(line["prompt"], line["answer"]) for line in lines]


def with_mistake(draw: random.Random, prompt: str, answer: str) -> tuple[str, str, str]:
    """Returns the prompt, the right answer and a wrong one.

    The wrong answer is the right one with a digit changed, removed or added, or with two digits swapped; or it is the
    prompt's digits in their order, or random digits.
    """
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
    """Returns the scores of the right answers and of the wrong ones, [B] each.

    Each text ends with the end token, as responses do in a training.
    """
    texts = [prompt + right for prompt, right, _ in pairs] + [prompt + wrong for prompt, _, wrong in pairs]
    rows = [[*token_ids, tokenizer.eos_token_id] for token_ids in tokenizer(texts)["input_ids"]]
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    found = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    return found[: len(pairs)], found[len(pairs) :]


@torch.no_grad()
def accuracy(model: PreTrainedModel, tokenizer: AutoTokenizer, held_out: Sequence[tuple[str, str]]) -> float:
    """Returns the fraction of held-out pairs in which the right answer has the higher score."""
    draw = random.Random(0)
    right_B, wrong_B = scores(model, tokenizer, [with_mistake(draw, *row) for row in held_out])
    return float((right_B > wrong_B).float().mean())


if __name__ == "__main__":
    main()
