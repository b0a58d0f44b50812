"""Attention over flat rows against a slow implementation in float64, and which models use it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from transformers import LlamaConfig, Phi3Config, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rljob_testing.models import tiny_models
from rljob_trainer.engines.train.attention import (
    FLAT_IMPLEMENTATION,
    PADDED_TYPES,
    choose_attention,
    register_flat_attention,
    use_attention,
)
from rljob_trainer.engines.train.attention_kernels import (
    MAX_WIDENED_TOKENS,
    FlatRows,
    Kernel,
    attend,
    choose_kernel,
)
from rljob_trainer.errors import ConfigurationError

CPU = torch.device("cpu")
NUM_HEADS, NUM_KEY_HEADS, SIZE, VALUE_SIZE = 4, 2, 8, 6
RAGGED, EQUAL = (1, 9, 4, 12), (5, 5, 5)


def slow_row(query_HTD: Tensor, key_HTD: Tensor, value_HTE: Tensor, scale: float, window: int | None) -> Tensor:
    """One row, token by token: [H, T, E]."""
    outputs = []
    for position in range(query_HTD.shape[1]):
        first = 0 if window is None else max(0, position - window + 1)
        scores_HS = scale * (query_HTD[:, position, None] * key_HTD[:, first : position + 1]).sum(dim=-1)
        weights_HS = scores_HS.exp() / scores_HS.exp().sum(dim=-1, keepdim=True)
        outputs.append((weights_HS[..., None] * value_HTE[:, first : position + 1]).sum(dim=1))
    return torch.stack(outputs, dim=1)


def slow_rows(
    query_1HND: Tensor, key_1KND: Tensor, value_1KNE: Tensor, lengths: Sequence[int], scale: float, window: int | None
) -> Tensor:
    """All rows, [1, N, H, E]: query head h uses key head h // 2."""
    repeated = [tensor[0].repeat_interleave(NUM_HEADS // NUM_KEY_HEADS, dim=0) for tensor in (key_1KND, value_1KNE)]
    rows, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        rows.append(slow_row(query_1HND[0, :, part], repeated[0][:, part], repeated[1][:, part], scale, window))
        start += length
    return torch.cat(rows, dim=1).transpose(0, 1)[None]


def inputs(num_tokens: int, value_size: int = VALUE_SIZE) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as a model makes them: [1, N, heads, size], viewed as [1, heads, N, size]."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((NUM_HEADS, SIZE), (NUM_KEY_HEADS, SIZE), (NUM_KEY_HEADS, value_size))
    query_1HND, key_1KND, value_1KNE = (
        torch.randn((1, num_tokens, *shape), generator=generator, dtype=torch.float64).transpose(1, 2).requires_grad_()
        for shape in shapes
    )
    return query_1HND, key_1KND, value_1KNE


def outputs_and_gradients(output_1MHE: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, output_1MHE.numel(), dtype=output_1MHE.dtype).view(output_1MHE.shape)
    return [output_1MHE, *torch.autograd.grad((output_1MHE * weights).sum(), tensors)]


@pytest.mark.parametrize("num_tokens", [9, MAX_WIDENED_TOKENS, MAX_WIDENED_TOKENS + 1])
def test_attention_of_short_16_bit_rows_is_computed_in_float32(num_tokens: int) -> None:
    rows = FlatRows((num_tokens,) * 2, CPU)
    tensors = [each.detach().bfloat16().requires_grad_() for each in inputs(rows.num_tokens, SIZE)]
    wide = [each.detach().float().requires_grad_() for each in tensors]
    output, wide_output = (
        attend(Kernel.ONE_VIEW, query_1HND, key_1KND, value_1KNE, rows, None, None)
        for query_1HND, key_1KND, value_1KNE in (tensors, wide)
    )
    slope = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = [output, *torch.autograd.grad(output, tensors, slope)]
    expected = [wide_output, *torch.autograd.grad(wide_output, wide, slope.float())]
    assert [each.dtype for each in found] == [torch.bfloat16] * 4
    is_equal = [torch.equal(mine, other.bfloat16()) for mine, other in zip(found, expected, strict=True)]
    assert is_equal == [num_tokens <= MAX_WIDENED_TOKENS] * 4


@pytest.mark.parametrize("window", [None, 1, 4, 20])
@pytest.mark.parametrize(
    ("kernel", "lengths"),
    [
        (Kernel.PER_ROW, RAGGED),
        (Kernel.PADDED, RAGGED),
        (Kernel.ONE_VIEW, EQUAL),
        (Kernel.PER_ROW, EQUAL),
        (Kernel.ONE_VIEW, (7,)),
    ],
)
def test_each_kernel_and_its_gradients_match_the_slow_implementation(
    kernel: Kernel, lengths: tuple[int, ...], window: int | None
) -> None:
    tensors = inputs(sum(lengths))
    found = attend(kernel, *tensors, FlatRows(lengths, CPU), 0.3, window)
    slow_outputs = slow_rows(*tensors, lengths, 0.3, window)
    for one, other in zip(
        outputs_and_gradients(found, tensors), outputs_and_gradients(slow_outputs, tensors), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_the_usual_scale_is_one_over_the_root_of_the_head_size() -> None:
    tensors = inputs(sum(RAGGED))
    found = attend(Kernel.PER_ROW, *tensors, FlatRows(RAGGED, CPU), None, None)
    torch.testing.assert_close(found, slow_rows(*tensors, RAGGED, 1 / math.sqrt(SIZE), None))


@pytest.mark.parametrize("takes_fewer_key_heads", [True, False])
@pytest.mark.parametrize("window", [None, 4])
def test_the_variable_length_kernel_gets_the_same_arguments(
    monkeypatch: pytest.MonkeyPatch, window: int | None, takes_fewer_key_heads: bool
) -> None:
    """The kernel needs a GPU; here it is replaced by what its documentation says, in both forms of its arguments."""

    def documented(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
    ) -> Tensor:
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert cu_seq_q.tolist() == cu_seq_k.tolist() == [0, 1, 10, 14, 26]
        assert (max_q, max_k) == (12, 12)
        assert scale is not None
        assert window_size[1] == 0, "causal"
        assert enable_gqa == (key.shape[1] != NUM_HEADS)
        # A window of W to the left covers W earlier tokens and the token itself.
        seen = None if window_size[0] == -1 else window_size[0] + 1
        step = 1 if enable_gqa else NUM_HEADS // NUM_KEY_HEADS
        query_1HND, key_1KND, value_1KND = (
            tensor.transpose(0, 1)[None] for tensor in (query, key[:, ::step], value[:, ::step])
        )
        return slow_rows(query_1HND, key_1KND, value_1KND, RAGGED, scale, seen)[0]

    def earlier(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        assert query.shape == key.shape == value.shape
        return documented(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)

    monkeypatch.setattr(varlen, "varlen_attn", documented if takes_fewer_key_heads else earlier)
    tensors = inputs(sum(RAGGED), SIZE)
    found = attend(Kernel.VARIABLE_LENGTH, *tensors, FlatRows(RAGGED, CPU), 0.3, window)
    torch.testing.assert_close(found, slow_rows(*tensors, RAGGED, 0.3, window))


def chosen(lengths: Sequence[int], **changes: object) -> Kernel:
    usual: dict[str, object] = {
        "num_heads": 4,
        "head_sizes": (64, 64),
        "dtype": torch.float32,
        "device_type": "cpu",
        "capability": None,
    }
    return choose_kernel(lengths, **(usual | changes))  # type: ignore[arg-type]


def test_rows_of_equal_length_are_one_view_and_short_ones_of_similar_length_are_padded() -> None:
    assert chosen((48, 48)) is Kernel.ONE_VIEW
    assert chosen((800,)) is Kernel.ONE_VIEW
    # (48 * 48 - (48 * 48 + 40 * 40) / 2) * 4 * 64 = 90,112 more products per row
    assert chosen((40, 48)) is Kernel.PADDED
    # (100 * 100 - (100 * 100 + 80 * 80) / 2) * 4 * 64 = 460,800
    assert chosen((80, 100)) is Kernel.PER_ROW
    # the same with a quarter of the heads: 115,200
    assert chosen((80, 100), num_heads=1) is Kernel.PADDED


def test_the_variable_length_kernel_is_for_half_precision_on_cuda() -> None:
    cuda: dict[str, object] = {"dtype": torch.bfloat16, "device_type": "cuda", "capability": (9, 0)}
    assert chosen((5, 700), **cuda) is Kernel.VARIABLE_LENGTH
    assert chosen((48, 48), **cuda) is Kernel.VARIABLE_LENGTH
    assert chosen((5, 700), **cuda | {"dtype": torch.float16}) is Kernel.VARIABLE_LENGTH
    for reason in (
        {"dtype": torch.float32},
        {"device_type": "cpu", "capability": None},
        {"capability": (7, 5)},
        {"head_sizes": (512, 512)},
        {"head_sizes": (36, 36)},
        {"head_sizes": (192, 128)},
    ):
        assert chosen((5, 700), **cuda | reason) is Kernel.PER_ROW


def test_flat_rows_match_a_case_by_hand() -> None:
    rows = FlatRows((2, 1, 3), CPU)
    assert (rows.num_tokens, rows.longest) == (6, 3)
    assert rows.position_ids_1M.tolist() == [[0, 1, 0, 0, 1, 2]]
    assert rows.cumulative_lengths.tolist() == [0, 2, 3, 6]
    assert rows.padding_BT.tolist() == [0, 1, 1, 2, 2, 2, 3, 4, 5]
    assert rows.unpadding_M.tolist() == [0, 1, 3, 6, 7, 8]
    with pytest.raises(ValueError, match=r"\(lengths \[2, 0\]\)"):
        FlatRows((2, 0), CPU)


@pytest.mark.parametrize("name", tiny_models.ARCHITECTURES)
def test_supported_architectures_get_flat_rows(name: str) -> None:
    plan = choose_attention(tiny_models.ARCHITECTURES[name]())
    reasons = {
        "gemma2": ("eager", "its attention is soft-capped"),
        "gpt_oss": ("eager", "its attention is not torch's scaled dot product"),
        "nemotron": ("sdpa", "its layers do not know where rows begin"),
        "qwen3_next": ("sdpa", "it has layers of type linear_attention"),
    }
    assert plan.is_flat == (name in tiny_models.FLAT)
    assert (plan.implementation, plan.reason) == reasons.get(name, (FLAT_IMPLEMENTATION, ""))


def test_types_that_need_padding_are_known_to_transformers() -> None:
    assert PADDED_TYPES.keys() <= MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (LlamaConfig(), None),
        (LlamaConfig(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}), None),
        (
            LlamaConfig(
                max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
            ),
            64,
        ),
        (
            Phi3Config(
                max_position_embeddings=512,
                original_max_position_embeddings=128,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 128,
                    "short_factor": [1.0] * 48,
                    "long_factor": [2.0] * 48,
                },
            ),
            128,
        ),
    ],
)
def test_frequencies_that_depend_on_the_longest_row_limit_the_rows(config: PreTrainedConfig, limit: int | None) -> None:
    assert choose_attention(config).max_row_tokens == limit


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gemma2", r"Gemma2Attention .*flat rows \(softcap\)"),
        ("gpt_oss", r"GptOssAttention .*flat rows \(s_aux\)"),
        ("nemotron", r"NemotronAttention .*where rows begin"),
    ],
)
def test_flat_rows_are_rejected_by_layers_that_need_more(name: str, message: str) -> None:
    model = tiny_models.make(name)
    register_flat_attention()
    use_attention(model, FLAT_IMPLEMENTATION)
    rows = FlatRows((2, 3), CPU)
    with pytest.raises(ConfigurationError, match=message):
        model(
            input_ids=torch.full((1, 5), 7),
            position_ids=rows.position_ids_1M,
            use_cache=False,
            flat_rows=rows,
        )
