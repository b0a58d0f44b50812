"""Models are built and called rightly, architecture by architecture, and what would be wrong is refused.

What is right is said by `from_pretrained` with eager attention, on one row at a time.

Legend: B rows, T tokens of the longest, N tokens of all, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, MistralConfig, PreTrainedModel

from rljob_testing.tiny_models import ARCHITECTURES, FLAT, VOCABULARY, save_tiny_model, tiny_model
from rljob_trainer.engines.train.acceptance import Logprobs, check_acceptance, sample_rows
from rljob_trainer.engines.train.attention import (
    FLAT_IMPLEMENTATION,
    choose_attention,
    register_flat_attention,
    use_attention,
)
from rljob_trainer.engines.train.attention_kernels import FlatRows, Kernel, choose_kernel
from rljob_trainer.engines.train.model import build_on_meta, load_weights, materialize, transformer_layers
from rljob_trainer.engines.train.output_head import HeadForm, head_form, logits_of, output_head_of
from rljob_trainer.errors import ConfigurationError

CPU = torch.device("cpu")
LENGTHS = {Kernel.PER_ROW: (3, 11, 90), Kernel.PADDED: (20, 30, 26), Kernel.ONE_VIEW: (11, 11)}
FUSED_EXPERTS = ("qwen2_moe", "gpt_oss", "qwen3_next")
"""Their files have other names than their parameters."""


def random_rows(lengths: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]


def flat_logprobs_NV(model: nn.Module, rows: Sequence[Tensor]) -> Tensor:
    """As the engine does it: log-probabilities of the whole vocabulary after each token."""
    where = FlatRows([len(row) for row in rows], CPU)
    hidden_1ND = model.get_decoder()(  # type: ignore[operator]
        input_ids=torch.cat(list(rows))[None], position_ids=where.position_ids_1N, use_cache=False, flat_rows=where
    ).last_hidden_state
    return logits_of(hidden_1ND[0], *output_head_of(model)).log_softmax(dim=-1)


def padded_logprobs_NV(model: nn.Module, rows: Sequence[Tensor]) -> Tensor:
    """Likewise, filled up on the right."""
    tokens_BT = pad_sequence(list(rows), batch_first=True)
    hidden_BTD = model.get_decoder()(input_ids=tokens_BT, use_cache=False).last_hidden_state  # type: ignore[operator]
    logprobs_BTV = logits_of(hidden_BTD, *output_head_of(model)).log_softmax(dim=-1)
    return torch.cat([logprobs_TV[: len(row)] for logprobs_TV, row in zip(logprobs_BTV, rows, strict=True)])


def own_logprobs_NV(model: nn.Module, rows: Sequence[Tensor]) -> Tensor:
    """The model's own forward on each row alone."""
    logits = [model(input_ids=row[None], use_cache=False).logits[0] for row in rows]
    return torch.cat(logits).log_softmax(dim=-1)


def planned_logprobs_NV(model: nn.Module, rows: Sequence[Tensor]) -> Tensor:
    is_flat = choose_attention(model.config).is_flat
    return (flat_logprobs_NV if is_flat else padded_logprobs_NV)(model, rows)


def of_next_tokens(logprobs_NV: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
    """What `check_acceptance` compares."""
    parts = torch.split_with_sizes(logprobs_NV, [len(row) for row in rows])
    return [part_TV[:-1].gather(1, row[1:, None])[:, 0] for part_TV, row in zip(parts, rows, strict=True)]


@torch.no_grad()
def accept(model: nn.Module, engine: Logprobs | None = None) -> None:
    def planned(rows: Sequence[Tensor]) -> list[Tensor]:
        return of_next_tokens(planned_logprobs_NV(model, rows), rows)

    def own(rows: Sequence[Tensor]) -> list[Tensor]:
        return of_next_tokens(own_logprobs_NV(model, rows), rows)

    check_acceptance(model, own, engine or planned, lambda difference: difference)


def loaded(folder: Path) -> nn.Module:
    """As the engine builds it."""
    model = build_on_meta(folder)
    materialize(model, CPU)
    # Sharded modules stay tied when they are given memory; others do not.
    model.tie_weights()  # type: ignore[operator]
    load_weights(model, folder, "")
    return model.eval()


def gradients(logprobs_NV: Tensor, rows: Sequence[Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Of a weighted mean of the rows' log-probabilities, over all parameters of each part of the model."""
    logprobs_N = torch.cat(of_next_tokens(logprobs_NV, rows))
    loss = (logprobs_N * torch.linspace(-1, 1, len(logprobs_N))).mean()
    found = torch.autograd.grad(loss, list(model.parameters()))
    parts: dict[str, list[Tensor]] = {"attention": [], "others": []}
    for (name, _), each in zip(model.named_parameters(), found, strict=True):
        parts["attention" if "attn" in name else "others"].append(each.flatten())
    return {part: torch.cat(each) for part, each in parts.items()}


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in FUSED_EXPERTS])
def test_a_loaded_model_is_that_of_from_pretrained(name: str, tmp_path: Path) -> None:
    folder = save_tiny_model(name, tmp_path)
    right = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    model = loaded(folder)
    buffers = dict(right.named_buffers())
    assert buffers.keys() == dict(model.named_buffers()).keys()
    for buffer, value in model.named_buffers():
        assert torch.equal(value, buffers[buffer]), buffer
    with torch.no_grad():
        for kernel, lengths in LENGTHS.items():
            assert choose_kernel(lengths, 2, (32, 32), torch.float32, "cpu", None) is kernel
            rows = random_rows(lengths)
            expected_NV = own_logprobs_NV(right, rows)
            torch.testing.assert_close(planned_logprobs_NV(model, rows), expected_NV, rtol=1e-6, atol=1e-5)
    accept(model)


@pytest.mark.parametrize("name", FLAT)
def test_flat_and_padded_rows_have_the_same_gradient(name: str) -> None:
    model = tiny_model(name)
    rows = random_rows(LENGTHS[Kernel.PER_ROW])
    right = gradients(padded_logprobs_NV(model, rows), rows, model)
    use_flat_attention(model)
    for part, found in gradients(flat_logprobs_NV(model, rows), rows, model).items():
        assert right[part].norm() > 1e-3
        assert (found - right[part]).norm() < 1e-5 * right[part].norm()


def use_flat_attention(model: nn.Module) -> None:
    register_flat_attention()
    use_attention(model, FLAT_IMPLEMENTATION)


def test_memory_for_a_model_is_given_without_drawing_random_weights(tmp_path: Path) -> None:
    model = build_on_meta(save_tiny_model("gemma3", tmp_path))
    before = torch.get_rng_state()
    materialize(model, CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_buffer_that_nothing_fills_is_refused(tmp_path: Path) -> None:
    model = build_on_meta(save_tiny_model("llama", tmp_path))
    model.model.norm.register_buffer("scale", torch.ones(3, device="meta"), persistent=False)  # type: ignore[union-attr]
    with pytest.raises(ConfigurationError, match=r"does not say how buffer 'model\.norm\.scale' is filled"):
        materialize(model, CPU)


def test_recomputed_activations_know_their_rows() -> None:
    model = tiny_model("qwen3")
    use_flat_attention(model)
    rows = random_rows(LENGTHS[Kernel.PER_ROW])
    right = gradients(flat_logprobs_NV(model, rows), rows, model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    found = gradients(flat_logprobs_NV(model, rows), rows, model)
    torch.testing.assert_close(found, right, rtol=0, atol=0)


@pytest.mark.parametrize("name", FUSED_EXPERTS)
def test_models_with_experts_are_accepted(name: str) -> None:
    model = tiny_model(name)
    register_flat_attention()
    use_attention(model, choose_attention(model.config).implementation)
    accept(model)
    assert model.config._attn_implementation == choose_attention(model.config).implementation


@pytest.mark.parametrize(
    ("model_type", "fields", "form"),
    [
        ("llama", {}, HeadForm(1.0, None)),
        ("granite", {"logits_scaling": 8.0}, HeadForm(0.125, None)),
        ("hyperclovax", {"logits_scaling": 8.0}, HeadForm(8.0, None)),
        ("cohere", {"logit_scale": 0.25}, HeadForm(0.25, None)),
        ("falcon_h1", {"lm_head_multiplier": 0.5}, HeadForm(0.5, None)),
        ("gemma2", {"final_logit_softcapping": 30.0}, HeadForm(1.0, 30.0)),
        ("nanochat", {"final_logit_softcapping": 15.0}, HeadForm(1.0, 15.0)),
    ],
)
def test_the_form_of_a_head_by_hand(model_type: str, fields: dict[str, float], form: HeadForm) -> None:
    assert head_form(AutoConfig.for_model(model_type, **fields)) == form


def refused(model: nn.Module, engine: Logprobs) -> float:
    """The difference that the refusal names."""
    with pytest.raises(ConfigurationError) as caught:
        accept(model, engine)
    message = str(caught.value)
    assert f"log-probabilities of a '{model.config.model_type}' model" in message  # type: ignore[union-attr]
    return float(message.partition("by up to ")[2].partition(",")[0])


def test_a_head_without_its_soft_cap_is_refused() -> None:
    model = tiny_model("gemma2")

    def uncapped(rows: Sequence[Tensor]) -> list[Tensor]:
        tokens_BT = pad_sequence(list(rows), batch_first=True)
        hidden_BTD = model.get_decoder()(input_ids=tokens_BT, use_cache=False).last_hidden_state
        head, form = output_head_of(model)
        assert form == HeadForm(1.0, 2.0)
        logprobs_BTV = logits_of(hidden_BTD, head, HeadForm(1.0, None)).log_softmax(dim=-1)
        return of_next_tokens(torch.cat([each[: len(row)] for each, row in zip(logprobs_BTV, rows, strict=True)]), rows)

    assert refused(model, uncapped) > 0.1


def test_attention_without_its_soft_cap_is_refused() -> None:
    model = tiny_model("gemma2")
    use_attention(model, "sdpa")
    assert refused(model, lambda rows: of_next_tokens(padded_logprobs_NV(model, rows), rows)) > 0.1


def test_rows_that_see_each_other_are_refused() -> None:
    model = tiny_model("qwen3_next")
    use_flat_attention(model)
    assert refused(model, lambda rows: of_next_tokens(flat_logprobs_NV(model, rows), rows)) > 0.1


def test_a_window_that_is_ignored_is_seen_even_if_it_is_longer_than_the_rows() -> None:
    model = AutoModelForCausalLM.from_config(long_window(), dtype=torch.float32, attn_implementation="eager").eval()
    model.load_state_dict(tiny_model("mistral").state_dict())
    use_flat_attention(model)
    accept(model)

    def ignoring(rows: Sequence[Tensor]) -> list[Tensor]:
        window, model.config.sliding_window = model.config.sliding_window, None
        found = of_next_tokens(flat_logprobs_NV(model, rows), rows)
        model.config.sliding_window = window
        return found

    assert refused(model, ignoring) > 0.1
    assert model.config.sliding_window == 100
    assert max(map(len, sample_rows(model.config))) < 100


def long_window() -> MistralConfig:
    config = ARCHITECTURES["mistral"]()
    config.sliding_window = 100
    assert isinstance(config, MistralConfig)
    return config


def test_what_is_no_number_is_refused_and_so_is_what_another_rank_refuses() -> None:
    model = tiny_model("llama")

    def own(rows: Sequence[Tensor]) -> list[Tensor]:
        return of_next_tokens(own_logprobs_NV(model, rows), rows)

    def spoiled(rows: Sequence[Tensor]) -> list[Tensor]:
        first, *others = own(rows)
        return [first * math.nan, *others]

    assert refused(model, spoiled) == math.inf
    with pytest.raises(ConfigurationError, match=r"by up to 3\.0e-01, more than 1e-04\)"):
        check_acceptance(model, own, own, lambda difference: max(difference, 0.3))


def test_sample_rows_avoid_special_tokens_and_positions_that_do_not_exist() -> None:
    config = ARCHITECTURES["llama"]()
    config.eos_token_id = list(range(2, VOCABULARY - 1))
    config.max_position_embeddings = 20
    rows = sample_rows(config)
    assert [len(row) for row in rows] == [5, 17, 20]
    assert {int(token) for row in rows for token in row} == {VOCABULARY - 1}


class Root(nn.Module):
    """Whatever needs whole parameters runs within the forward of the sharded root."""

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, rows: Sequence[Tensor], is_own: bool) -> tuple[Tensor, ...]:
        logprobs_NV = (own_logprobs_NV if is_own else planned_logprobs_NV)(self.language_model, rows)
        return tuple(of_next_tokens(logprobs_NV, rows))


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["gemma3", "gemma2", "phi"])
@torch.no_grad()
def test_a_sharded_model_is_accepted(name: str, tmp_path: Path) -> None:
    folder = save_tiny_model(name, tmp_path / name)
    model = Root(build_on_meta(folder))
    for layer in transformer_layers(model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    materialize(model, CPU)
    load_weights(model, folder, "language_model.")
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    model.eval()
    check_acceptance(
        model.language_model, partial(model, is_own=True), partial(model, is_own=False), lambda worst: worst
    )
    right: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = dict(model.language_model.named_buffers())
    torch.testing.assert_close(found, dict(right.named_buffers()), rtol=0, atol=0)
