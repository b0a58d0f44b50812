"""Converts GGUF, llama.cpp's quantized one-file format, to a plain Hugging Face folder with float32 weights.

transformers can load such a file as a model only with the accelerate library, and refuses to save this model, because
the model is marked as quantized. So only the file reader of transformers is used here, and a plain model gets the
weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


class _Contents(TypedDict):
    """The part of the file reader's result that is used here."""

    tensors: dict[str, torch.Tensor]
    """Tensors by their names in the plain model."""


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer into `folder`.

    The quantized weights are dequantized. Raises ValueError for a model type that transformers cannot read from GGUF,
    and for a file with missing weights.
    """
    source, name = str(gguf_file.parent), gguf_file.name
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, gguf_file=name), dtype=torch.float32)
    contents = cast(
        _Contents,
        load_gguf_checkpoint(str(gguf_file), return_tensors=True, model_to_load=model, torch_dtype=torch.float32),
    )
    missing = set(model.load_state_dict(contents["tensors"], strict=False).missing_keys)
    missing -= set(model.all_tied_weights_keys)
    if missing:
        raise ValueError(f"{gguf_file} has no weights for: {', '.join(sorted(missing))}")
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
