"""One update of the training engine on random rows, and the same with transformers and PyTorch only: float32 on the
host, one row at a time, eager attention.

Legend: T tokens of a row, R response tokens of all rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.model import Lora
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_testing.models import tiny_models
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.lora import AdapterSettings
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.engines.train.token_batch import MicroBatch, TokenBatch
from rljob_trainer.engines.train.token_logprobs import TokenDistribution
from rljob_trainer.workers.actor import ActorSettings, ActorWorker
from rljob_trainer.workers.columns import (
    ADVANTAGES,
    IS_TRAINED,
    POLICY_VERSIONS,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    TOKENS,
)

LENGTHS = (40, 7, 25, 64, 12, 33, 58, 19)
PROMPT_LENGTH = 3
FIRST_TOKEN = 3
"""Lower token ids are special tokens."""


@dataclass(frozen=True)
class Update:
    """The mean negative log-probability of a mini-batch and its gradients, on the host."""

    loss: float
    gradients: dict[str, Tensor]


def random_batch(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> TokenBatch:
    """Random rows whose first PROMPT_LENGTH tokens are the prompt."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(FIRST_TOKEN, tiny_models.VOCABULARY, (length,), generator=generator) for length in lengths]
    masks = [torch.arange(length) >= PROMPT_LENGTH for length in lengths]
    return TokenBatch(RaggedColumn.from_rows(rows), RaggedColumn.from_rows(masks), {})


def engine_settings(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    max_tokens: int = 4096,
    optimizer: Optimizer | None = None,
    *,
    gradient_checkpointing: bool = False,
) -> TrainEngineSettings:
    """Settings of a model in training."""
    return TrainEngineSettings(
        folder, device, dtype, gradient_checkpointing, max_tokens, Optimizer() if optimizer is None else optimizer
    )


def update(engine: TrainEngine, batch: TokenBatch) -> Update:
    """Runs an update of the engine up to the gradients, which stay in the engine."""
    losses: list[Tensor] = []
    num_tokens = sum(batch.response_lengths)

    def loss(_: MicroBatch, distribution: TokenDistribution) -> Tensor:
        part = -distribution.logprobs_N.sum() / num_tokens
        losses.append(part.detach())
        return part

    engine.forward_backward(batch, loss, 1.0)
    return Update(float(torch.stack(losses).sum()), gradients_of(engine))


def gradients_of(engine: TrainEngine) -> dict[str, Tensor]:
    """Copies of the gradients, on the host."""
    return {
        name.removeprefix("language_model."): whole_on_host(parameter.grad)
        for name, parameter in engine.model.named_parameters()
        if parameter.grad is not None
    }


def state_of(engine: TrainEngine) -> dict[str, Tensor]:
    """Copies of weights and moments, on the host."""
    return {name: whole_on_host(tensor) for name, tensor in (*engine.named_shards(), *engine.named_optimizer_state())}


def whole_on_host(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor on the host."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def plain_model(
    folder: Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The model loaded by `from_pretrained` with eager attention."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype)
    return model.to(device).eval()


def plain_logprobs_N(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Log-probabilities of the batch's response tokens, on the host, [R]."""
    return torch.cat([_row_logprobs(model, tokens_T) for tokens_T in batch.tokens.row_tensors()]).cpu()


def plain_update(model: PreTrainedModel, batch: TokenBatch) -> Update:
    """The expected result of `update`."""
    num_tokens, total = sum(batch.response_lengths), 0.0
    for tokens_T in batch.tokens.row_tensors():
        loss = -_row_logprobs(model, tokens_T).sum() / num_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return Update(
        total, {name: whole_on_host(each.grad) for name, each in model.named_parameters() if each.grad is not None}
    )


def _row_logprobs(model: PreTrainedModel, tokens_T: Tensor) -> Tensor:
    tokens_T = tokens_T.to(model.device)
    logits_TV = model(input_ids=tokens_T[None], use_cache=False).logits[0, PROMPT_LENGTH - 1 : -1].float()
    logprobs_TV: Tensor = logits_TV.log_softmax(dim=-1)
    return logprobs_TV.gather(1, tokens_T[PROMPT_LENGTH:, None])[:, 0]


def build_actor(
    model: Path,
    context: WorkerContext,
    dtype: torch.dtype = torch.float32,
    optimizer: Optimizer | None = None,
    lora: Lora | None = None,
) -> ActorWorker:
    """Builds an actor for rows of LENGTHS, with two updates per step. Collective."""
    chosen = Optimizer(learning_rate=1e-3) if optimizer is None else optimizer
    engine = engine_settings(model, context.device, dtype, optimizer=chosen)
    if lora is not None:
        engine = replace(engine, adapters=AdapterSettings(lora, 7))
    return grpo_actor(context, engine, chosen, max(LENGTHS), len(LENGTHS) // 2)


def grpo_actor(
    context: WorkerContext,
    engine: TrainEngineSettings,
    optimizer: Optimizer,
    max_new_tokens: int,
    mini_batch_rows: int,
    *,
    group_size: int = 2,
    num_steps: int = 10,
) -> ActorWorker:
    """Builds an actor that trains with GRPO at temperature 1. Collective."""
    return ActorWorker(
        context,
        ActorSettings(
            engine=engine,
            algorithm=resolve_algorithm(Algorithm()),
            optimizer=optimizer,
            temperature=1.0,
            max_new_tokens=max_new_tokens,
            group_size=group_size,
            samples_all_tokens=True,
            num_steps=num_steps,
            num_epochs_per_batch=1,
            mini_batch_rows=mini_batch_rows,
        ),
    )


def random_rollout(
    num_tokens: int, seed: int, lengths: Sequence[int] = LENGTHS, prompt_lengths: Sequence[int] | None = None
) -> DataProto:
    """Random columns that an update needs; token ids are below `num_tokens`. Prompts have PROMPT_LENGTH tokens unless
    their lengths are given."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [PROMPT_LENGTH] * len(lengths) if prompt_lengths is None else prompt_lengths
    rows = [torch.randint(FIRST_TOKEN, num_tokens, (length,), generator=generator) for length in lengths]
    masks = [torch.arange(length) >= prompt for length, prompt in zip(lengths, prompts, strict=True)]
    logprobs = [
        -5 * torch.rand(length, generator=generator) * mask for length, mask in zip(lengths, masks, strict=True)
    ]
    return DataProto(
        {
            ADVANTAGES: torch.randn(len(lengths), generator=generator),
            IS_TRAINED: torch.ones(len(lengths), dtype=torch.bool),
        },
        ragged={
            TOKENS: RaggedColumn.from_rows(rows),
            RESPONSE_MASK: RaggedColumn.from_rows(masks),
            ROLLOUT_LOGPROBS: RaggedColumn.from_rows(logprobs),
            POLICY_VERSIONS: RaggedColumn.from_rows([mask.int() - 1 for mask in masks]),
        },
    )
