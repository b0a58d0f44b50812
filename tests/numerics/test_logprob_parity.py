"""Models are built and called correctly, architecture by architecture, and incorrect results are rejected. The expected
values come from `from_pretrained` with eager attention, on one row at a time.

Legend: T tokens of a row, R response tokens of all rows, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, MistralConfig, PreTrainedConfig, PreTrainedModel

from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing.models import tiny_models
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.engines.train.attention import (
    FLAT_IMPLEMENTATION,
    AttentionPlan,
    choose_attention,
    register_flat_attention,
    use_attention,
)
from rljob_trainer.engines.train.attention_kernels import Kernel, choose_kernel
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.logprob_parity import Logprobs, check_logprob_parity, sample_rows
from rljob_trainer.engines.train.model import build_on_meta, materialize
from rljob_trainer.engines.train.output_head import HeadForm, head_form
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.engines.train.token_batch import TokenBatch
from rljob_trainer.engines.train.token_logprobs import Entropy, TokenDistribution
from rljob_trainer.engines.train.token_model import LogprobRequest, TokenModel
from rljob_trainer.engines.train.weight_loading import load_weights
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.weights.buckets import whole_tensors

CPU = torch.device("cpu")
LENGTHS = {Kernel.PER_ROW: (3, 11, 90), Kernel.PADDED: (20, 30, 26), Kernel.ONE_VIEW: (11, 11)}
"""Number of tokens that are read of each row; one more is predicted."""
FLAT_ROWS = AttentionPlan(True, FLAT_IMPLEMENTATION, "", None)
PADDED_ROWS = AttentionPlan(False, "eager", "as asked for", None)


def random_rows(lengths: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, tiny_models.VOCABULARY, (length + 1,), generator=generator) for length in lengths]


def batch_of(rows: Sequence[Tensor], num_prompt_tokens: int) -> TokenBatch:
    masks = [torch.arange(len(row)) >= num_prompt_tokens for row in rows]
    return TokenBatch(RaggedColumn.from_rows(rows), RaggedColumn.from_rows(masks), {})


def planned(model: nn.Module, rows: Sequence[Tensor], plan: AttentionPlan | None = None) -> TokenDistribution:
    """The result of the engine's module for all tokens but the first of each row, called as planned for the model."""
    module = TokenModel(model, plan or choose_attention(model.config), None)
    micro_batch = batch_of(rows, 1).micro_batch(range(len(rows)), CPU)
    logprobs_N, entropy_N, squares_N = module.columns(micro_batch, LogprobRequest(1.0, Entropy.VALUE))
    assert logprobs_N is not None
    return TokenDistribution(logprobs_N, entropy_N, squares_N)


def planned_logprobs(model: nn.Module, rows: Sequence[Tensor], plan: AttentionPlan | None = None) -> list[Tensor]:
    """[T - 1] of each row."""
    return list(torch.split_with_sizes(planned(model, rows, plan).logprobs_N, [len(row) - 1 for row in rows]))


@torch.no_grad()
def reference_distribution(
    model: PreTrainedModel, rows: Sequence[Tensor], num_prompt_tokens: int, temperature: float
) -> TokenDistribution:
    """The result of a model's own forward, on each row alone."""
    logprobs, entropies = [], []
    for tokens_T in rows:
        logits_TV = model(input_ids=tokens_T[None], use_cache=False).logits[0, num_prompt_tokens - 1 : -1]
        all_TV = (logits_TV / temperature).log_softmax(dim=-1)
        logprobs.append(all_TV.gather(1, tokens_T[num_prompt_tokens:, None])[:, 0])
        entropies.append(-(all_TV.exp() * all_TV).sum(dim=-1))
    return TokenDistribution(torch.cat(logprobs), torch.cat(entropies), None)


def assert_same(found: TokenDistribution, reference: TokenDistribution) -> None:
    """Entropy is that of the whole vocabulary."""
    torch.testing.assert_close(found.logprobs_N, reference.logprobs_N, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropy_N, reference.entropy_N, rtol=0, atol=1e-5)


def from_pretrained(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    return model.eval()


@torch.no_grad()
def accept(model: nn.Module, engine: Logprobs | None = None) -> None:
    own = TokenModel(model, choose_attention(model.config), None).transformers_logprobs
    check_logprob_parity(
        model, own, engine or (lambda rows: planned_logprobs(model, rows)), lambda difference: difference
    )


def loaded(folder: Path) -> nn.Module:
    """The model as the engine builds it."""
    model = build_on_meta(folder)
    materialize(model, CPU)
    # Sharded modules stay tied when memory is allocated; others do not.
    model.tie_weights()  # type: ignore[operator]
    assert isinstance(model, PreTrainedModel)
    load_weights(model, model, folder, "")
    return model.eval()


def gradients(logprobs: Sequence[Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Gradients of a weighted mean of the rows' log-probabilities, over all parameters of each part of the model."""
    logprobs_N = torch.cat(list(logprobs))
    loss = (logprobs_N * torch.linspace(-1, 1, len(logprobs_N))).mean()
    found = torch.autograd.grad(loss, list(model.parameters()))
    parts: dict[str, list[Tensor]] = {"attention": [], "others": []}
    for (name, _), each in zip(model.named_parameters(), found, strict=True):
        parts["attention" if "attn" in name or "attention" in name else "others"].append(each.flatten())
    return {part: torch.cat(each) for part, each in parts.items()}


def assert_same_buffers(model: nn.Module, reference: PreTrainedModel) -> None:
    torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()), rtol=0, atol=0)


@pytest.mark.parametrize("name", tiny_models.ARCHITECTURES)
def test_a_loaded_model_equals_that_of_from_pretrained(name: str, tmp_path: Path) -> None:
    folder = tiny_models.save(name, tmp_path)
    reference = from_pretrained(folder)
    model = loaded(folder)
    assert_same_buffers(model, reference)
    for kernel, lengths in LENGTHS.items():
        assert choose_kernel(lengths, 2, (32, 32), torch.float32, "cpu", None) is kernel
        rows = random_rows(lengths)
        with torch.no_grad():
            found = planned(model, rows)
        assert_same(found, reference_distribution(reference, rows, num_prompt_tokens=1, temperature=1.0))
    accept(model)


@pytest.mark.parametrize("name", tiny_models.FLAT)
def test_flat_and_padded_rows_have_the_gradient_of_the_models_own_forward(name: str) -> None:
    model = tiny_models.make(name)
    rows = random_rows(LENGTHS[Kernel.PER_ROW])
    reference = gradients(TokenModel(model, PADDED_ROWS, None).transformers_logprobs(rows), model)
    padded = gradients(planned_logprobs(model, rows, PADDED_ROWS), model)
    use_flat_attention(model)
    flat = gradients(planned_logprobs(model, rows, FLAT_ROWS), model)
    for part, gradient in reference.items():
        assert gradient.norm() > 1e-3
        for found in (padded, flat):
            assert (found[part] - gradient).norm() < 1e-5 * gradient.norm()


def use_flat_attention(model: nn.Module) -> None:
    register_flat_attention()
    use_attention(model, FLAT_IMPLEMENTATION)


def test_memory_for_a_model_is_allocated_without_drawing_random_weights(tmp_path: Path) -> None:
    model = build_on_meta(tiny_models.save("gemma3", tmp_path))
    before = torch.get_rng_state()
    materialize(model, CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_buffer_without_a_value_is_rejected(tmp_path: Path) -> None:
    model = build_on_meta(tiny_models.save("llama", tmp_path))
    model.model.norm.register_buffer("scale", torch.ones(3, device="meta"), persistent=False)  # type: ignore[union-attr]
    with pytest.raises(ConfigurationError, match=r"buffer 'model\.norm\.scale'"):
        materialize(model, CPU)


def test_recomputed_activations_know_their_rows() -> None:
    model = tiny_models.make("qwen3")
    use_flat_attention(model)
    rows = random_rows(LENGTHS[Kernel.PER_ROW])
    reference = gradients(planned_logprobs(model, rows), model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    found = gradients(planned_logprobs(model, rows), model)
    torch.testing.assert_close(found, reference, rtol=0, atol=0)


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
def test_the_form_of_a_head_matches_a_case_by_hand(model_type: str, fields: dict[str, float], form: HeadForm) -> None:
    assert head_form(AutoConfig.for_model(model_type, **fields)) == form


def rejected(model_type: str, build: Callable[[], object]) -> float:
    """The difference that the error names."""
    with pytest.raises(ConfigurationError) as caught:
        build()
    message = str(caught.value)
    assert f"'{model_type}' models: its log-probabilities" in message
    return float(message.partition("by up to ")[2].partition(",")[0])


def test_rows_that_attend_to_each_other_are_rejected() -> None:
    model = tiny_models.make("qwen3_next")
    use_flat_attention(model)
    assert rejected("qwen3_next", lambda: accept(model, lambda rows: planned_logprobs(model, rows, FLAT_ROWS))) > 0.1


def test_an_ignored_window_is_detected_even_if_it_is_longer_than_the_rows() -> None:
    model = AutoModelForCausalLM.from_config(long_window(), dtype=torch.float32, attn_implementation="eager").eval()
    model.load_state_dict(tiny_models.make("mistral").state_dict())
    use_flat_attention(model)
    accept(model)

    def ignoring(rows: Sequence[Tensor]) -> list[Tensor]:
        window, model.config.sliding_window = model.config.sliding_window, None
        found = planned_logprobs(model, rows)
        model.config.sliding_window = window
        return found

    assert rejected("mistral", lambda: accept(model, ignoring)) > 0.1
    assert model.config.sliding_window == 100
    assert max(map(len, sample_rows(model.config))) < 100


def long_window() -> MistralConfig:
    config = tiny_models.ARCHITECTURES["mistral"]()
    config.sliding_window = 100
    assert isinstance(config, MistralConfig)
    return config


def test_logprobs_that_are_not_finite_are_rejected_on_every_rank() -> None:
    model = tiny_models.make("llama")
    own = TokenModel(model, choose_attention(model.config), None).transformers_logprobs

    def spoiled(rows: Sequence[Tensor]) -> list[Tensor]:
        first, *others = own(rows)
        return [first * math.nan, *others]

    with pytest.raises(ConfigurationError, match="'llama' model are not finite"):
        accept(model, spoiled)
    with pytest.raises(ConfigurationError, match=r"by up to 3\.0e-01, more than 1e-04"):
        check_logprob_parity(model, own, own, lambda difference: max(difference, 0.3))


def test_a_model_that_cannot_be_called_is_rejected() -> None:
    def missing(_: Sequence[Tensor]) -> list[Tensor]:
        raise AttributeError("no last_hidden_state")

    with pytest.raises(ConfigurationError, match=r"cannot call a 'llama' model \(AttributeError: no last_hidden"):
        accept(tiny_models.make("llama"), missing)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(28, "No space left on device"),
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.distributed.DistBackendError("NCCL error"),
        RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:122] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_memory_storage_or_collectives_does_not_reject_a_model(error: Exception) -> None:
    def failing(_: Sequence[Tensor]) -> list[Tensor]:
        raise error

    with pytest.raises(type(error)) as raised:
        accept(tiny_models.make("llama"), failing)
    assert raised.value is error


def test_a_model_that_mixes_devices_is_rejected() -> None:
    def mixing(_: Sequence[Tensor]) -> list[Tensor]:
        raise RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu")

    with pytest.raises(ConfigurationError, match="cannot call a 'llama' model"):
        accept(tiny_models.make("llama"), mixing)


def test_positions_have_other_names_in_some_models() -> None:
    assert max(len(row) for row in sample_rows(GPT2Config(n_positions=11))) == 11


def test_sample_rows_avoid_special_tokens_and_missing_positions() -> None:
    config = tiny_models.ARCHITECTURES["llama"]()
    config.eos_token_id = list(range(2, tiny_models.VOCABULARY - 1))
    config.max_position_embeddings = 20
    rows = sample_rows(config)
    assert [len(row) for row in rows] == [5, 17, 20]
    assert {int(token) for row in rows for token in row} == {tiny_models.VOCABULARY - 1}


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def engine_of(folder: Path, compute_dtype: torch.dtype = torch.float32) -> TrainEngine:
    return TrainEngine(TrainEngineSettings(folder, CPU, compute_dtype, False, 100, Optimizer()))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3", "phi", "cohere", "granite", "qwen2_moe", "qwen3_moe", "mixtral", "gpt_neox"]
)
def test_an_engine_gives_the_distribution_of_from_pretrained(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_models.save(name, tmp_path / "model")
    reference = from_pretrained(folder)
    with caplog.at_level(logging.INFO):
        engine = engine_of(folder)
    padded = "attention: the rows of this model are padded, because its attention is soft-capped"
    assert [each for each in caplog.messages if each.startswith("attention:")] == ([padded] if name == "gemma2" else [])
    assert all(isinstance(parameter, DTensor) for parameter in engine.model.parameters())
    assert_same_buffers(engine.model.language_model, reference)
    # Several micro-batches of 100 tokens, padded or not.
    rows = random_rows((30, 90, 20, 3, 26, 60, 11))
    found = engine.forward(batch_of(rows, num_prompt_tokens=3), 0.7, Entropy.VALUE)
    assert_same(found, reference_distribution(reference, rows, num_prompt_tokens=3, temperature=0.7))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["gemma3", "qwen3 tied", "phi", "qwen3_moe"])
def test_a_half_precision_engine_reuses_the_accepted_buffers(name: str, tmp_path: Path) -> None:
    """It is built a second time, and buffers that no file holds are filled in beside existing weights."""
    folder = tiny_models.save(name, tmp_path / "model")
    reference = from_pretrained(folder)
    engine = engine_of(folder, torch.bfloat16)
    assert_same_buffers(engine.model.language_model, reference)
    weights = {name: whole.detach() for name, whole in whole_tensors(engine.named_shards(), torch.float32)}
    expected = dict(reference.named_parameters())
    assert weights.keys() >= expected.keys()
    for weight, value in expected.items():
        assert torch.equal(weights[weight], value), weight
    rows = random_rows((30, 20))
    exact = reference_distribution(reference, rows, num_prompt_tokens=3, temperature=1.0).logprobs_N
    found = engine.forward(batch_of(rows, num_prompt_tokens=3), 1.0).logprobs_N
    assert 0 < float((found - exact).abs().mean()) < 0.1


def with_sdpa(config: PreTrainedConfig) -> AttentionPlan:
    return replace(choose_attention(config), implementation="sdpa")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("what", "spoiled"),
    [("output_head.SOFT_CAPS", ()), ("model.choose_attention", with_sdpa)],
    ids=["head", "attention"],
)
def test_an_engine_without_a_soft_cap_is_rejected(
    what: str, spoiled: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A soft cap of the head, as if no configuration named it so; and one of attention, which sdpa ignores silently."""
    folder = tiny_models.save("gemma2", tmp_path / "model")
    monkeypatch.setattr(f"rljob_trainer.engines.train.{what}", spoiled)
    assert rejected("gemma2", lambda: engine_of(folder)) > 0.1
