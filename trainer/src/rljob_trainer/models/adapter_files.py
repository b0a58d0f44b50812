"""Writes adapters as a folder in peft's format, which `PeftModel.from_pretrained` and vLLM can load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save

from rljob_api.v1alpha1.model import Lora, Model

WEIGHTS_FILE = "adapter_model.safetensors"
LORA_A_SUFFIX = ".lora_A.weight"
"""Ends the names of the first of an adapter's two matrices."""


def write_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], lora: Lora, base_model: Model | None) -> None:
    """Writes weights and configuration into `folder`, which must exist. `tensors`: the adapters, by their names in
    peft's file. `base_model`: the model to which they belong; without it the configuration names no model. Raises
    OSError."""
    from peft import LoraConfig

    layers = {name.removesuffix(LORA_A_SUFFIX).rpartition(".")[2] for name in tensors if name.endswith(LORA_A_SUFFIX)}
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_model.source if base_model else None,
        revision=base_model.revision if base_model else None,
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # used as a number
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets or sorted(layers)),
        bias="none",
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    # `save_file` would create a file that other users cannot read.
    (folder / WEIGHTS_FILE).write_bytes(save(dict(tensors), metadata={"format": "pt"}))
