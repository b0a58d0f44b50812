"""The auxiliary loss of routers and the load of experts equal those of the model's own class, whatever the
micro-batches.

Legend: T tokens of the longest row, N tokens of all rows, L layers, E experts.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5_MoeConfig,
    JetMoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rljob_testing import compare
from rljob_testing.models import tiny_models
from rljob_testing.training import recorders, replays
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.router import AuxiliaryLoss, auxiliary_loss_settings
from rljob_trainer.engines.train.token_batch import TokenBatch
from rljob_trainer.engines.train.token_model import NAME_PREFIX
from rljob_trainer.observability.metrics import EXPERT_LOAD_MAX, EXPERT_LOAD_MEAN, EXPERTS_UNUSED, ROUTER_LOSS

COEFFICIENT, NUM_CHOSEN, NUM_EXPERTS = 0.7, 2, 6
LENGTHS = (9, 4, 13, 6, 7)


def model_in(folder: Path, *, has_loss: bool = True) -> Path:
    torch.manual_seed(4)
    config = Qwen3MoeConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=NUM_CHOSEN,
        output_router_logits=has_loss,
        router_aux_loss_coef=COEFFICIENT,
        initializer_range=0.3,
        bos_token_id=None,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 24, (length,), generator=generator) for length in LENGTHS]


def batch() -> TokenBatch:
    """All tokens but the first are responses; the model reads all but the last."""
    tokens = RaggedColumn.from_rows(rows())
    masks = [torch.arange(length) > 0 for length in LENGTHS]
    return TokenBatch(tokens, RaggedColumn.from_rows(masks), {})


def plain(folder: Path) -> tuple[PreTrainedModel, Tensor, list[Tensor]]:
    """The model with its gradient, its auxiliary loss, and its routers' logits of all tokens that are read."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    read = [row[:-1] for row in rows()]
    tokens_BT = pad_sequence(read, batch_first=True)
    mask_BT = pad_sequence([torch.ones(len(row)) for row in read], batch_first=True)
    output = model(input_ids=tokens_BT, attention_mask=mask_BT, output_router_logits=True, use_cache=False)
    targets_N = torch.cat([row[1:] for row in rows()])
    logprobs_NV = output.logits.log_softmax(dim=-1)[mask_BT.bool()]
    logprobs_N = logprobs_NV.gather(1, targets_N[:, None])[:, 0]
    aux = output.aux_loss
    torch.autograd.backward(-logprobs_N.mean() + (COEFFICIENT * aux if model.config.output_router_logits else 0.0))
    logits = [each.view(*mask_BT.shape, -1)[mask_BT.bool()].detach() for each in output.router_logits]
    return model, aux.detach(), logits


def engine_gradient(replay: replays.Replay) -> tuple[dict[str, Tensor], dict[str, float]]:
    engine = TrainEngine(replay.engine_settings(1))
    num_tokens = sum(LENGTHS) - len(LENGTHS)
    with recorders.recorded_gradients(engine) as gradients:
        engine.forward_backward(batch(), lambda _, found: -found.logprobs_N.sum() / num_tokens, 1.0)
        engine.optimizer_step(1e-3)
    return gradients[0], engine.take_routing()


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_the_auxiliary_loss_equals_that_of_the_models_class(tmp_path: Path, is_checkpointed: bool) -> None:
    folder = model_in(tmp_path)
    model, aux, logits = plain(folder)
    expected_gradients = {
        NAME_PREFIX + name: each.grad for name, each in model.named_parameters() if each.grad is not None
    }
    for max_tokens in (4096, 20):
        replay = replays.Replay(
            model=folder, max_tokens_per_micro_batch=max_tokens, gradient_checkpointing=is_checkpointed
        )
        found, metrics = engine_gradient(replay)
        assert compare.relative_difference(found, expected_gradients) < compare.RELATIVE
        assert metrics[ROUTER_LOSS] == pytest.approx(float(aux), rel=1e-5)
        counts_LE = torch.stack(
            [torch.bincount(each.topk(NUM_CHOSEN).indices.flatten(), minlength=NUM_EXPERTS) for each in logits]
        ).double()
        loads_L = counts_LE.amax(dim=1) / counts_LE.mean(dim=1)
        assert metrics[EXPERT_LOAD_MEAN] == pytest.approx(float(loads_L.mean()))
        assert metrics[EXPERT_LOAD_MAX] == pytest.approx(float(loads_L.max()))
        assert metrics[EXPERTS_UNUSED] == pytest.approx(float((counts_LE == 0).double().mean()))


@pytest.mark.usefixtures("context")
def test_no_auxiliary_loss_is_added_if_the_configuration_has_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = model_in(tmp_path, has_loss=False)
    model, _, _ = plain(folder)
    expected_gradients = {
        NAME_PREFIX + name: each.grad for name, each in model.named_parameters() if each.grad is not None
    }
    found, metrics = engine_gradient(replays.Replay(model=folder))
    assert compare.relative_difference(found, expected_gradients) < compare.RELATIVE
    assert ROUTER_LOSS not in metrics
    assert metrics[EXPERT_LOAD_MAX] > 1
    assert "auxiliary" not in caplog.text


@pytest.mark.usefixtures("context")
def test_expert_load_counts_the_tokens_of_each_expert(tmp_path: Path) -> None:
    """DeepSeek V3 selects with a bias added to its logits, and within groups."""
    torch.manual_seed(4)
    model = tiny_models.make("deepseek_v3")
    biases = {name: each for name, each in model.named_buffers() if name.endswith("e_score_correction_bias")}
    for each in biases.values():
        each.copy_(torch.randn(each.shape))
    model.save_pretrained(tmp_path)
    chosen: list[Tensor] = []
    experts = [each for name, each in model.named_modules() if name.endswith(".experts")]
    num_experts = len(next(iter(biases.values())))
    for each in experts:
        each.register_forward_pre_hook(lambda _module, given: chosen.append(given[1].flatten()))
    with torch.no_grad():
        for row in rows():
            model(input_ids=row[None, :-1], use_cache=False)
    assert len(chosen) == len(experts) * len(LENGTHS) > 0
    counts_LE = torch.stack(
        [
            torch.bincount(torch.cat(chosen[layer :: len(experts)]), minlength=num_experts)
            for layer in range(len(experts))
        ]
    ).double()
    _, metrics = engine_gradient(
        replays.Replay(model=tmp_path, gradient_checkpointing=True, max_tokens_per_micro_batch=20)
    )
    assert metrics[EXPERT_LOAD_MAX] == pytest.approx(float((counts_LE.amax(dim=1) / counts_LE.mean(dim=1)).max()))
    assert metrics[EXPERTS_UNUSED] == pytest.approx(float((counts_LE == 0).double().mean()))
    assert ROUTER_LOSS not in metrics


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Ernie4_5_MoeConfig(output_router_logits=True, router_aux_loss_coef=0.2, moe_k=3), AuxiliaryLoss(3, 0.2)),
        (Ernie4_5_MoeConfig(output_router_logits=False), None),
        (JetMoeConfig(output_router_logits=True, aux_loss_coef=0.3, num_experts_per_tok=2), AuxiliaryLoss(2, 0.3)),
        (Qwen3MoeConfig(output_router_logits=True, router_aux_loss_coef=0.0), None),
    ],
)
def test_configuration_fields_are_known_under_all_their_names(
    config: PreTrainedConfig, expected: AuxiliaryLoss | None
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert auxiliary_loss_settings(model) == expected
