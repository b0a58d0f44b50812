"""What adapters do to log-probabilities in BFloat16, in the trainer and in vLLM."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from safetensors.torch import load_file, save_file

from rljob_api.v1alpha1.model import Lora, LoraSync
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing.gpu.device import DeviceContext
from rljob_testing.models import small_vllm, tiny_models
from rljob_testing.training import engine_updates
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.lora import AdapterSettings
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.weights.sync import sync_weights

LENGTHS = (60,) * 16


@dataclass(frozen=True)
class Effect:
    """How an adapter changes the mean log-probability of given tokens."""

    exact: float
    """In the trainer, in float32."""
    trained: float
    """In the trainer, in BFloat16, which loses a part, because what an adapter adds to an output is rounded."""
    with_adapters: float
    """In vLLM, in BFloat16, with separate adapters."""
    merged: float
    """In vLLM, in BFloat16, with adapters merged into the weights."""
    merge_error: float
    error_of_logits: float
    """In vLLM, with a head in float32."""


def effect_in_16_bits(case: DeviceContext, model: str) -> Effect:
    """The effect of an adapter whose second matrix (`lora_B`) has entries of 1e-4 in the direction of the gradient, as
    after the first update by AdamW. The weights are the same in both precisions."""
    folder = tiny_models.save(model, case.folder / "model")
    tiny_models.copy_tokenizer(folder)
    weights = load_file(folder / tiny_models.WEIGHTS)
    rounded = {name: tensor.bfloat16().float() for name, tensor in weights.items()}
    save_file(rounded, folder / tiny_models.WEIGHTS, {"format": "pt"})
    lora = Lora(rank=32, alpha=64.0, sync=LoraSync.ADAPTER)
    settings = TrainEngineSettings(
        folder, case.device, torch.bfloat16, False, 4096, Optimizer(), adapters=AdapterSettings(lora, 7)
    )
    trained = TrainEngine(settings)
    exact = TrainEngine(replace(settings, compute_dtype=torch.float32))
    vllm = small_vllm.start_engine(
        folder, 1, lora=lora, dtype=torch.bfloat16, has_float32_head=True, device_type=case.device.type
    )
    # Rows of a few tokens only, so that the gradients of all positions have similar directions. With random tokens the
    # effect would be as small as the rounding of log-probabilities.
    drawn = engine_updates.random_batch(LENGTHS)
    rows = [row % 5 + engine_updates.FIRST_TOKEN for row in drawn.tokens.row_tensors()]
    batch = replace(drawn, tokens=RaggedColumn.from_rows(rows))

    def of_vllm() -> float:
        return small_vllm.mean_logprob(vllm, batch)

    def of(engine: TrainEngine) -> float:
        return float(engine.forward(batch, 1.0).logprobs_N.mean())

    sync_weights(trained, vllm, torch.bfloat16, 0)
    before = of(exact), of(trained), of_vllm()
    engine_updates.update(exact, batch)
    with torch.no_grad():
        for (name, tensor), precise in zip(trained.model.named_parameters(), exact.model.parameters(), strict=True):
            if ".lora_B." in name:
                assert precise.grad is not None
                precise.copy_(-1e-4 * precise.grad.sign())
                tensor.copy_(precise)
    sync_weights(trained, vllm, torch.bfloat16, 1, knows_base=True)
    with_adapters = of_vllm()
    merging = AdapterSettings(lora.model_copy(update={"sync": LoraSync.MERGED}), 7)
    trained.settings = replace(settings, adapters=merging)
    merge_error = sync_weights(trained, vllm, torch.bfloat16, 2)
    assert merge_error is not None
    effects = (of(exact) - before[0], of(trained) - before[1], with_adapters - before[2], of_vllm() - before[2])
    return Effect(*effects, merge_error, small_vllm.error_of_logits(vllm, trained))
