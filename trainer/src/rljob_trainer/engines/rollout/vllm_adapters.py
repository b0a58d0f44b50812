"""Which layers of vLLM's model get LoRA adapters: exactly those that the trainer has adapted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.model_manager import LoRAModelManager
from vllm.model_executor.layers.fused_moe import layer as fused_moe


@contextmanager
def adapters_of_the_trainer() -> Iterator[None]:
    """Two workarounds for vLLM 0.32.0 while an engine with adapters is built in this block.

    1. Experts get the kernels that they have without adapters, because only other layers have adapters here. Symptom
    without this: on CPUs the first pass fails, because vLLM chooses a Triton kernel.

    2. A layer that is part of two modules gets its adapter in both. Symptom without this: adapters of Qwen2's
    `shared_expert_gate` have no effect, because the shared expert calls the layer by another name."""
    make_config, create = fused_moe.FusedMoEConfig, LoRAModelManager._create_lora_modules

    def without_adapters(**fields: object) -> object:
        return make_config(**{**fields, "is_lora_enabled": False})

    def created(manager: LoRAModelManager) -> None:
        create(manager)
        _adapt_under_all_names(manager.model)

    fused_moe.FusedMoEConfig = without_adapters
    LoRAModelManager._create_lora_modules = created
    try:
        yield
    finally:
        fused_moe.FusedMoEConfig = make_config
        LoRAModelManager._create_lora_modules = create


def _adapt_under_all_names(model: torch.nn.Module) -> None:
    """Replaces layers that have adapters under another name by the layers with adapters."""
    adapted = {id(each.base_layer): each for each in model.modules() if isinstance(each, BaseLayerWithLoRA)}
    for module in list(model.modules()):
        if not isinstance(module, BaseLayerWithLoRA):
            for name, child in list(module.named_children()):
                if id(child) in adapted:
                    setattr(module, name, adapted[id(child)])
