"""Builds the model of a training engine: sharded, with its weights, and with checked log-probabilities."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rljob_trainer.engines.process_group import max_over_all_ranks
from rljob_trainer.engines.train.kernels import apply_kernels, errors_about_kernels, fused_kernels
from rljob_trainer.engines.train.layout import LayoutMeshes, ParallelLayout
from rljob_trainer.engines.train.logprob_parity import check_logprob_parity
from rljob_trainer.engines.train.lora import draw_adapters
from rljob_trainer.engines.train.model import materialize
from rljob_trainer.engines.train.output_head import Head
from rljob_trainer.engines.train.sequence_parallel import SequenceRanks
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.engines.train.sharded_model import sharded_model
from rljob_trainer.engines.train.token_batch import batch_of_rows
from rljob_trainer.engines.train.token_model import NAME_PREFIX, LogprobRequest, TokenModel, ValueRequest
from rljob_trainer.engines.train.weight_loading import load_weights

log = logging.getLogger(__name__)


def built_model(settings: TrainEngineSettings, layout: ParallelLayout, meshes: LayoutMeshes) -> TokenModel:
    """Collective. The sharded model with its weights, in the mode of its later passes. Raises ConfigurationError if the
    folder has no usable model, or if the engine does not compute the model's log-probabilities correctly (see
    `logprob_parity`)."""
    # The check of log-probabilities always runs in float32, later passes in the compute dtype.
    model = sharded_model(settings, layout, meshes.parameters, torch.float32)
    materialize(model, settings.device)
    language_model = model.language_model
    assert isinstance(language_model, PreTrainedModel)
    load_weights(model, language_model, settings.model_folder, NAME_PREFIX, settings.head)
    if settings.adapters is not None:
        draw_adapters(language_model.named_parameters(), settings.adapters.seed)
    model.eval()
    with errors_about_kernels(settings.kernels):
        check_logprob_parity(
            language_model,
            partial(_transformers_logprobs, model, settings),
            partial(_engine_logprobs, model, settings, meshes.sequence_ranks),
            partial(max_over_all_ranks, device=settings.device),
        )
    if model.router is not None:
        log.info(
            "the routers' auxiliary loss is added with coefficient %g, as the model's configuration requests; it "
            "needs one more forward pass per update",
            model.router.coefficient,
        )
    if model.attention.reason:
        log.info("attention: the rows of this model are padded, because %s", model.attention.reason)
    # The check has left parameters gathered. The optimizer must get the shards.
    model.reshard()  # type: ignore[operator]
    if settings.compute_dtype != torch.float32:
        checked = model
        model = sharded_model(settings, layout, meshes.parameters, settings.compute_dtype)
        # The new model takes over the shards of the checked one; nothing is allocated twice.
        model.load_state_dict(checked.state_dict(), assign=True)
        materialize(model, settings.device)
        model.language_model.tie_weights()  # type: ignore[operator]
    apply_kernels(model.language_model, settings.kernels)
    model.train(settings.optimizer is not None)
    return model


@torch.no_grad()
def _transformers_logprobs(model: TokenModel, settings: TrainEngineSettings, rows: Sequence[Tensor]) -> list[Tensor]:
    """The log-probabilities (or values) by the module's own forward pass, for the check of `logprob_parity`."""
    on_device = [row.to(settings.device) for row in rows]
    has_logprobs = settings.head is Head.TOKENS
    method = TokenModel.transformers_logprobs if has_logprobs else TokenModel.transformers_values
    return [each.cpu() for each in model(partial(method, rows=on_device))]


@torch.no_grad()
def _engine_logprobs(
    model: TokenModel, settings: TrainEngineSettings, sequence_ranks: SequenceRanks | None, rows: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The log-probabilities (or values) of the same tokens by the engine."""
    batch = batch_of_rows(rows)
    micro_batch = batch.micro_batch(range(len(rows)), settings.device, sequence_ranks)
    request = LogprobRequest(1.0) if settings.head is Head.TOKENS else ValueRequest(by_probe=True)
    # In the mode of later passes, because some models use random numbers in training mode.
    model.train(settings.optimizer is not None)
    with fused_kernels(model.language_model, settings.kernels):
        found_N, *_ = model(partial(TokenModel.columns, micro_batch=micro_batch, request=request))
    model.eval()
    return torch.split_with_sizes(found_N.cpu(), batch.response_lengths)
