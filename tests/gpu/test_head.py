"""Logits in float32 (`headDtype: Float32`): on a GPU by the product of 16-bit matrices whose result has 32 bits."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rljob_testing.gpu.device import DeviceContext
from rljob_testing.models import tiny_models
from rljob_testing.training import engine_updates
from rljob_trainer.engines.rollout.hf_engine import HfEngine, HfSettings
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.token_logprobs import OutputHead, token_distribution

NUM_TOKENS, NUM_VOCABULARY, HIDDEN_SIZE = 1_500, 2_000, 256


def test_logits_in_float32_are_those_of_16_bit_inputs(case: DeviceContext) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_ND, weight_VD, bias_V = (
        (0.3 * torch.randn(*shape, generator=generator)).to(case.device, torch.bfloat16)
        for shape in ((NUM_TOKENS, HIDDEN_SIZE), (NUM_VOCABULARY, HIDDEN_SIZE), (NUM_VOCABULARY,))
    )
    targets_N = torch.randint(0, NUM_VOCABULARY, (NUM_TOKENS,), generator=generator).to(case.device)
    logits_NV = hidden_ND.double() @ weight_VD.double().T + bias_V.double()
    right_N = logits_NV.log_softmax(dim=-1).gather(1, targets_N[:, None])[:, 0]
    for whole_bytes in (0, 1 << 40):
        head = OutputHead(weight_VD, bias_V, is_float32=True)
        found = token_distribution(hidden_ND, targets_N, head, tile_bytes=1 << 22, whole_bytes=whole_bytes)
        error = float((found.logprobs_N.double() - right_N).abs().max())
        assert case.note(f"error, {'whole' if whole_bytes else 'tiles'}", error) < 1e-4


def test_both_engines_have_a_float32_head(case: DeviceContext) -> None:
    """Log-probabilities are those of the engine's own hidden states in BFloat16."""
    folder, batch = tiny_models.save("qwen3", case.folder / "model"), engine_updates.random_batch((60,))
    tiny_models.copy_tokenizer(folder)
    settings = engine_updates.engine_settings(folder, case.device, torch.bfloat16)
    trained = TrainEngine(replace(settings, has_float32_head=True))
    decoded: list[Tensor] = []
    trained.model.language_model.get_decoder().register_forward_hook(
        lambda _, __, output: decoded.append(output.last_hidden_state.detach())
    )
    found_N = trained.forward(batch, 1.0).logprobs_N
    weight_VD = engine_updates.plain_model(folder).lm_head.weight.detach().bfloat16()
    tokens_T = batch.tokens.row_tensors()[0]
    hidden_ND = decoded[-1][0, engine_updates.PROMPT_LENGTH - 1 : len(tokens_T) - 1].cpu()
    right_NV = (hidden_ND.double() @ weight_VD.double().T).log_softmax(dim=-1)
    right_N = right_NV.gather(1, tokens_T[engine_updates.PROMPT_LENGTH :, None])[:, 0]
    error = float((found_N.cpu().double() - right_N).abs().max())
    assert case.note("error, trainer", error) < 1e-4

    model = HfEngine(HfSettings(folder, case.device, torch.bfloat16, 1, has_float32_head=True)).model
    tokens_1T = tokens_T[None].to(case.device)
    with torch.no_grad():
        hidden_TD = model.get_decoder()(tokens_1T).last_hidden_state[0]
        logits_TV = model(tokens_1T).logits[0]
    exact_TV = hidden_TD.double() @ model.get_output_embeddings().weight.double().T
    error = float((logits_TV.double() - exact_TV).detach().abs().max())
    assert case.note("error of logits, transformers engine", error) < 1e-4
