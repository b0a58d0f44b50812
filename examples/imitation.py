"""Makes the start models of the examples with environments: tiny models that imitate conversations of simple players.

Reinforcement learning can only strengthen what a model does sometimes. So the start model first imitates players that
follow the rules of the conversation, but seldom reach the goal. The programs `make.py` of `guess_letter` and
`calculator` say how their players behave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, EOS = "<pad>", "<eos>"
VOCABULARY_SIZE = 64
NOT_TRAINED = -100
"""Label of tokens that do not contribute to the loss."""

Part = tuple[str, bool]
"""A text of a conversation, and whether it is a turn of the model. The end token follows each turn."""


def make_tokenizer(
    symbols: Sequence[str], chat_template: str, response_template: dict[str, object] | None = None
) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token for each symbol. A symbol is usually one character. Unused ids get names, too,
    so that every id can be decoded."""
    used = [PAD, EOS, *symbols]
    names = used + [f"<unused{index}>" for index in range(VOCABULARY_SIZE - len(used))]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(symbol, normalized=False) for symbol in symbols if len(symbol) > 1])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=PAD)
    made.chat_template = chat_template
    made.response_template = response_template
    return made


def imitate(
    tokenizer: PreTrainedTokenizerFast,
    play: Callable[[float], Sequence[Part]],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
) -> Qwen3ForCausalLM:
    """Trains a model of 119 thousand parameters on conversations.

    Args:
        play: Returns a new conversation. Its argument is the finished fraction of the training, from 0 to 1.
    """
    torch.manual_seed(seed)
    # A second thread costs more than it helps with matrices of this size.
    torch.set_num_threads(1)
    tokens_of = lru_cache(maxsize=100_000)(partial(tokenizer.encode, add_special_tokens=False))
    model = Qwen3ForCausalLM(
        Qwen3Config(
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
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 5 * (1 - step / steps)))
    for step in range(steps):
        rows = [encode(tokens_of, play(step / steps)) for _ in range(batch_size)]
        width = max(len(tokens) for tokens, _ in rows)
        tokens_BT = torch.tensor([tokens + [tokenizer.pad_token_id] * (width - len(tokens)) for tokens, _ in rows])
        labels_BT = torch.tensor([labels + [NOT_TRAINED] * (width - len(labels)) for _, labels in rows])
        loss = model(input_ids=tokens_BT, labels=labels_BT).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 250 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return model


def encode(tokens_of: Callable[[str], list[int]], conversation: Sequence[Part]) -> tuple[list[int], list[int]]:
    """Returns the tokens of a conversation, and their labels: only turns of the model and their ends are trained."""
    tokens: list[int] = []
    labels: list[int] = []
    for text, is_turn in conversation:
        part = tokens_of(text + EOS if is_turn else text)
        tokens += part
        labels += part if is_turn else [NOT_TRAINED] * len(part)
    return tokens, labels


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Saves the model with 16-bit weights."""
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters in {folder}")
