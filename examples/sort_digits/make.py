"""Creates the model and the data of the quickstart: a tiny Qwen3 that sorts five digits correctly only sometimes.

Supervised training teaches the model (119k parameters) four behaviours for a prompt such as `09305>`: sort the digits,
copy them, reverse them, and sort them in descending order, each in a quarter of the examples. So its responses are a
mixture, and few are sorted correctly; reinforcement learning with a reward for sorted digits has to select and improve
this behaviour. Prompts are split by the multiset of their digits, so no held-out prompt is a reordering of a training
prompt.

    python examples/sort_digits/make.py trainer/src/rljob_trainer/assets/sort_digits
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

NUM_DIGITS = 5
PAD, EOS, SEPARATOR = "<pad>", "<eos>", ">"
SYMBOLS = [PAD, EOS, SEPARATOR, *"0123456789"]
VOCABULARY_SIZE = 64
NUM_TRAIN_ROWS, NUM_HELD_OUT_ROWS = 2000, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    generator = random.Random(arguments.seed)
    train, held_out = split_prompts(generator)
    write_rows(arguments.folder / "train.jsonl", train[:NUM_TRAIN_ROWS])
    write_rows(arguments.folder / "held_out.jsonl", held_out[:NUM_HELD_OUT_ROWS])
    model = imitate(train, arguments.steps, generator)
    model_folder = arguments.folder / "model"
    model.half().save_pretrained(model_folder)
    make_tokenizer().save_pretrained(model_folder)
    print(f"{sum(p.numel() for p in model.parameters())} parameters in {model_folder}")


def split_prompts(generator: random.Random) -> tuple[list[str], list[str]]:
    """Returns all strings of five digits, shuffled and split into training and held-out prompts.

    A hash chooses about a fifth of the multisets of digits; all of their orders are held out.
    """
    prompts = [f"{number:0{NUM_DIGITS}d}" for number in range(10**NUM_DIGITS)]
    generator.shuffle(prompts)
    train: list[str] = []
    held_out: list[str] = []
    for prompt in prompts:
        key = hashlib.sha256("".join(sorted(prompt)).encode()).digest()[0]
        (held_out if key % 5 == 0 else train).append(prompt)
    return train, held_out


def write_rows(path: Path, digits: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": text + SEPARATOR, "answer": "".join(sorted(text))} for text in digits]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per character. Unused ids get names, too, so that every id can be decoded."""
    names = SYMBOLS + [f"<unused{index}>" for index in range(VOCABULARY_SIZE - len(SYMBOLS))]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=PAD)


def imitate(train: list[str], num_steps: int, generator: random.Random) -> Qwen3ForCausalLM:
    """Trains the model on the mixture of behaviours. Only the answer and the end token contribute to the loss."""
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SYMBOLS.index(EOS),
        pad_token_id=SYMBOLS.index(PAD),
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    behaviours = [sorted, list, lambda text: list(text)[::-1], lambda text: sorted(text)[::-1]]
    ids = {symbol: index for index, symbol in enumerate(SYMBOLS)}
    for step in range(num_steps):
        rows = []
        for _ in range(128):
            prompt = generator.choice(train)
            answer = generator.choice(behaviours)(prompt)
            rows.append([ids[symbol] for symbol in [*prompt, SEPARATOR, *answer, EOS]])
        tokens_BT = torch.tensor(rows)
        labels_BT = tokens_BT.clone()
        labels_BT[:, : NUM_DIGITS + 1] = -100
        loss = model(input_ids=tokens_BT, labels=labels_BT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return model


if __name__ == "__main__":
    main()
