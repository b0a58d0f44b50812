"""The table of well-known models gives their published numbers of parameters."""

from __future__ import annotations

import pytest

from rljob_planner.known_models import known_configs, known_model, similar_names

# Written from memory, not fetched; tied tensors count once. All digits agree with sums over layers, widths and heads,
# so it is unlikely that both are wrong.
KNOWN_COUNTS = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b-pt": 999_885_952,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "allenai/OLMo-2-0425-1B": 1_484_916_736,
    "allenai/OLMo-2-1124-13B": 13_716_198_400,
    "allenai/OLMo-2-0325-32B": 32_234_279_936,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/Phi-3-medium-4k-instruct": 13_960_238_080,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "deepseek-ai/deepseek-llm-7b-base": 6_910_365_696,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "Qwen/Qwen1.5-MoE-A2.7B": 14_315_784_192,
}


@pytest.mark.parametrize("name", KNOWN_COUNTS)
def test_models_have_their_published_number_of_parameters(name: str) -> None:
    shape = known_model(name)
    assert shape is not None
    assert shape.num_parameters == KNOWN_COUNTS[name]


def test_deepseek_v3_has_them_without_router_biases() -> None:
    shape = known_model("deepseek-ai/DeepSeek-V3")
    assert shape is not None
    # The hub counts the routers' biases: one per expert in 58 layers.
    assert shape.num_parameters == 671_026_419_200 - 58 * 256


@pytest.mark.parametrize(("name", "billions"), [("Qwen/Qwen3-30B-A3B", 3.04), ("Qwen/Qwen3-235B-A22B", 21.6)])
def test_a_token_uses_few_of_the_weights_of_a_mixture_of_experts(name: str, billions: float) -> None:
    shape = known_model(name)
    assert shape is not None
    assert shape.matmul_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_every_row_gives_a_shape() -> None:
    names = [name for name, _ in known_configs().values()]
    assert len(names) == len({name.lower() for name in names})
    for name in names:
        shape = known_model(name)
        assert shape is not None
        assert shape.name == name


def test_variants_share_a_shape_and_case_does_not_matter() -> None:
    base, chat = known_model("Qwen/Qwen2.5-7B"), known_model("qwen/qwen2.5-7b-instruct")
    assert base is not None
    assert chat is not None
    assert chat.num_parameters == base.num_parameters
    assert chat.name == "Qwen/Qwen2.5-7B-Instruct"


def test_an_unknown_name_gets_similar_names() -> None:
    assert known_model("Qwen/Qwen3-9B") is None
    assert similar_names("qwen3-8b")[0] == "Qwen/Qwen3-8B"
    assert similar_names("Qwen/Qwen3-8")[0] == "Qwen/Qwen3-8B"
    assert similar_names("me/mine") == []
