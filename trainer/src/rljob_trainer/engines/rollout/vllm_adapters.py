"""Which layers of vLLM's model get LoRA adapters: exactly those that the trainer has adapted."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from vllm.model_executor.layers.fused_moe import layer as fused_moe

OTHER_NAMES = {"shared_expert_gate": "expert_gate"}
"""Layers that are part of two modules of vLLM's model, and their names in the second one."""


@contextmanager
def adapters_of_the_trainer() -> Iterator[None]:
    """A workaround for vLLM 0.32.0 while an engine with adapters is built in this block: experts get the kernels that
    they have without adapters, because only other layers have adapters here. Symptom without this: on CPUs the first
    pass fails, because vLLM chooses a Triton kernel."""
    make_config = fused_moe.FusedMoEConfig

    def without_adapters(**fields: object) -> object:
        return make_config(**{**fields, "is_lora_enabled": False})

    fused_moe.FusedMoEConfig = without_adapters
    try:
        yield
    finally:
        fused_moe.FusedMoEConfig = make_config


def names_in_vllm(targets: Collection[str]) -> list[str]:
    """The last parts of the names of the layers that have adapters, for vLLM. vLLM puts a layer with adapters into both
    of its modules only if both names are targets. Symptom without this: adapters of Qwen2's `shared_expert_gate` have
    no effect, because the shared expert calls the layer by the other name."""
    return [*targets, *(OTHER_NAMES[each] for each in targets if each in OTHER_NAMES)]
