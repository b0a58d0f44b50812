"""The table of `known_models`: the numbers of each model's `config.json` on the Hugging Face hub.

One row stands for a size; the names of its versions (`-Instruct`, `-Base`) stand in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class KnownRow:
    """Models of one size. Heads are those of queries, and of keys and values."""

    names: str
    """On the hub, separated by spaces; `{}` stands for each of `versions`."""
    model_type: str
    layers: int
    hidden: int
    heads: tuple[int, int]
    mlp: int
    vocabulary: int
    positions: int
    ties_head: bool = False
    head_size: int | None = None
    """Hidden size over heads when unset."""
    versions: tuple[str, ...] = ("",)
    other: Mapping[str, int] = field(default_factory=dict)
    """Further keys of the `config.json`."""

    def config(self) -> dict[str, object]:
        """As in a `config.json`."""
        heads, kv_heads = self.heads
        return {
            "model_type": self.model_type,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": self.head_size or self.hidden // heads,
            "intermediate_size": self.mlp,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": self.ties_head,
            **self.other,
        }

    def all_names(self) -> tuple[str, ...]:
        """Each name with each version."""
        return tuple(name.format(version) for name in self.names.split() for version in self.versions)


_CHAT = ("", "-Instruct")
_BASE = ("", "-Base")
_QWEN3_VOCABULARY = 151_936
_QWEN25_LARGE_VOCABULARY = 152_064
_LLAMA3_VOCABULARY = 128_256


def _qwen3(size: str, layers: int, hidden: int, heads: int, mlp: int, *, ties_head: bool) -> KnownRow:
    return KnownRow(
        f"Qwen/Qwen3-{size}{{}}",
        "qwen3",
        layers,
        hidden,
        (heads, 8),
        mlp,
        _QWEN3_VOCABULARY,
        40_960,
        ties_head,
        128,
        (*_BASE, "-Instruct-2507", "-Thinking-2507") if size == "4B" else _BASE,
    )


def _qwen3_moe(size: str, layers: int, hidden: int, heads: int, mlp: int, expert: int) -> KnownRow:
    return KnownRow(
        f"Qwen/Qwen3-{size}{{}}",
        "qwen3_moe",
        layers,
        hidden,
        (heads, 4),
        mlp,
        _QWEN3_VOCABULARY,
        40_960,
        False,
        128,
        (*_BASE, "-Instruct-2507", "-Thinking-2507"),
        {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert},
    )


def _qwen2(
    names: str, layers: int, hidden: int, heads: tuple[int, int], mlp: int, *, is_small: bool = False
) -> KnownRow:
    vocabulary = _QWEN3_VOCABULARY if is_small else _QWEN25_LARGE_VOCABULARY
    return KnownRow(names, "qwen2", layers, hidden, heads, mlp, vocabulary, 32_768, is_small, None, _CHAT)


def _llama3(names: str, layers: int, hidden: int, heads: int, mlp: int, *, ties_head: bool = False) -> KnownRow:
    return KnownRow(
        names, "llama", layers, hidden, (heads, 8), mlp, _LLAMA3_VOCABULARY, 131_072, ties_head, versions=_CHAT
    )


def _mistral(names: str, layers: int, hidden: int, mlp: int, vocabulary: int, positions: int) -> KnownRow:
    return KnownRow(names, "mistral", layers, hidden, (32, 8), mlp, vocabulary, positions, head_size=128)


def _gemma2(size: str, layers: int, hidden: int, heads: tuple[int, int], mlp: int, head_size: int = 256) -> KnownRow:
    return KnownRow(
        f"google/gemma-2-{size}{{}}",
        "gemma2",
        layers,
        hidden,
        heads,
        mlp,
        256_000,
        8192,
        True,
        head_size,
        ("", "-it"),
        {"sliding_window": 4096},
    )


def _gemma3(size: str, layers: int, hidden: int, heads: tuple[int, int], mlp: int, head_size: int = 256) -> KnownRow:
    is_text = size in ("270m", "1b")
    return KnownRow(
        f"google/gemma-3-{size}{{}}",
        "gemma3_text",
        layers,
        hidden,
        heads,
        mlp,
        262_144 if is_text else 262_208,
        32_768 if is_text else 131_072,
        True,
        head_size,
        ("", "-it") if size == "270m" else ("-pt", "-it"),
        {"sliding_window": 512 if is_text else 1024},
    )


def _smollm2(size: str, layers: int, hidden: int, heads: tuple[int, int], mlp: int) -> KnownRow:
    return KnownRow(
        f"HuggingFaceTB/SmolLM2-{size}{{}}",
        "llama",
        layers,
        hidden,
        heads,
        mlp,
        49_152,
        8192,
        True,
        versions=_CHAT,
    )


def _olmo2(names: str, layers: int, hidden: int, heads: tuple[int, int], mlp: int) -> KnownRow:
    return KnownRow(
        names, "olmo2", layers, hidden, heads, mlp, 100_352, 4096, versions=("", "-SFT", "-DPO", "-Instruct")
    )


def _gpt2(name: str, layers: int, hidden: int, heads: int) -> KnownRow:
    names = f"{name} openai-community/{name}"
    return KnownRow(names, "gpt2", layers, hidden, (heads, heads), 4 * hidden, 50_257, 1024, True)


_DEEPSEEK_V3_LATENT = {
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DEEPSEEK_V2_LITE_LATENT = {
    **{key: value for key, value in _DEEPSEEK_V3_LATENT.items() if key != "q_lora_rank"},
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_R1 = "deepseek-ai/DeepSeek-R1-Distill"

KNOWN_ROWS: tuple[KnownRow, ...] = (
    _qwen3("0.6B", 28, 1024, 16, 3072, ties_head=True),
    _qwen3("1.7B", 28, 2048, 16, 6144, ties_head=True),
    _qwen3("4B", 36, 2560, 32, 9728, ties_head=True),
    _qwen3("8B", 36, 4096, 32, 12_288, ties_head=False),
    _qwen3("14B", 40, 5120, 40, 17_408, ties_head=False),
    _qwen3("32B", 64, 5120, 64, 25_600, ties_head=False),
    _qwen3_moe("30B-A3B", 48, 2048, 32, 6144, 768),
    _qwen3_moe("235B-A22B", 94, 4096, 64, 12_288, 1536),
    KnownRow(
        "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B",
        "qwen3",
        36,
        4096,
        (32, 8),
        12_288,
        _QWEN3_VOCABULARY,
        131_072,
        head_size=128,
    ),
    _qwen2("Qwen/Qwen2.5-0.5B{} Qwen/Qwen2.5-Coder-0.5B{} Qwen/Qwen2-0.5B{}", 24, 896, (14, 2), 4864, is_small=True),
    _qwen2(
        "Qwen/Qwen2.5-1.5B{} Qwen/Qwen2.5-Math-1.5B{} Qwen/Qwen2.5-Coder-1.5B{} Qwen/Qwen2-1.5B{}",
        28,
        1536,
        (12, 2),
        8960,
        is_small=True,
    ),
    _qwen2("Qwen/Qwen2.5-3B{} Qwen/Qwen2.5-Coder-3B{}", 36, 2048, (16, 2), 11_008, is_small=True),
    _qwen2(
        f"Qwen/Qwen2.5-7B{{}} Qwen/Qwen2.5-Math-7B{{}} Qwen/Qwen2.5-Coder-7B{{}} Qwen/Qwen2-7B{{}} {_R1}-Qwen-7B",
        28,
        3584,
        (28, 4),
        18_944,
    ),
    _qwen2(f"Qwen/Qwen2.5-14B{{}} Qwen/Qwen2.5-Coder-14B{{}} {_R1}-Qwen-14B", 48, 5120, (40, 8), 13_824),
    _qwen2(f"Qwen/Qwen2.5-32B{{}} Qwen/Qwen2.5-Coder-32B{{}} Qwen/QwQ-32B {_R1}-Qwen-32B", 64, 5120, (40, 8), 27_648),
    _qwen2("Qwen/Qwen2.5-72B{} Qwen/Qwen2.5-Math-72B{} Qwen/Qwen2-72B{}", 80, 8192, (64, 8), 29_568),
    KnownRow(f"{_R1}-Qwen-1.5B", "qwen2", 28, 1536, (12, 2), 8960, _QWEN3_VOCABULARY, 131_072),
    KnownRow(
        "Qwen/Qwen1.5-MoE-A2.7B{}",
        "qwen2_moe",
        24,
        2048,
        (16, 16),
        5632,
        _QWEN3_VOCABULARY,
        8192,
        versions=("", "-Chat"),
        other={
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
        },
    ),
    _llama3("meta-llama/Llama-3.2-1B{}", 16, 2048, 32, 8192, ties_head=True),
    _llama3("meta-llama/Llama-3.2-3B{}", 28, 3072, 24, 8192, ties_head=True),
    _llama3(
        f"meta-llama/Llama-3.1-8B{{}} meta-llama/Meta-Llama-3.1-8B{{}} meta-llama/Meta-Llama-3-8B{{}} {_R1}-Llama-8B",
        32,
        4096,
        32,
        14_336,
    ),
    _llama3(
        "meta-llama/Llama-3.1-70B{} meta-llama/Meta-Llama-3.1-70B{} meta-llama/Meta-Llama-3-70B{}"
        f" meta-llama/Llama-3.3-70B{{}} {_R1}-Llama-70B",
        80,
        8192,
        64,
        28_672,
    ),
    _llama3("meta-llama/Llama-3.1-405B{} meta-llama/Meta-Llama-3.1-405B{}", 126, 16_384, 128, 53_248),
    KnownRow("meta-llama/Llama-2-7b{}hf", "llama", 32, 4096, (32, 32), 11_008, 32_000, 4096, versions=("-", "-chat-")),
    KnownRow("meta-llama/Llama-2-13b{}hf", "llama", 40, 5120, (40, 40), 13_824, 32_000, 4096, versions=("-", "-chat-")),
    KnownRow("meta-llama/Llama-2-70b{}hf", "llama", 80, 8192, (64, 8), 28_672, 32_000, 4096, versions=("-", "-chat-")),
    KnownRow(
        "mistralai/Mistral-7B{}-v0.1",
        "mistral",
        32,
        4096,
        (32, 8),
        14_336,
        32_000,
        32_768,
        versions=_CHAT,
        other={"sliding_window": 4096},
    ),
    _mistral("mistralai/Mistral-7B-Instruct-v0.2", 32, 4096, 14_336, 32_000, 32_768),
    _mistral("mistralai/Mistral-7B-v0.3 mistralai/Mistral-7B-Instruct-v0.3", 32, 4096, 14_336, 32_768, 32_768),
    _mistral(
        "mistralai/Mistral-Nemo-Base-2407 mistralai/Mistral-Nemo-Instruct-2407", 40, 5120, 14_336, 131_072, 131_072
    ),
    _mistral(
        "mistralai/Mistral-Small-24B-Base-2501 mistralai/Mistral-Small-24B-Instruct-2501",
        40,
        5120,
        32_768,
        131_072,
        32_768,
    ),
    KnownRow(
        "mistralai/Mixtral-8x7B{}-v0.1",
        "mixtral",
        32,
        4096,
        (32, 8),
        14_336,
        32_000,
        32_768,
        versions=_CHAT,
        other={"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    _gemma2("2b", 26, 2304, (8, 4), 9216),
    _gemma2("9b", 42, 3584, (16, 8), 14_336),
    _gemma2("27b", 46, 4608, (32, 16), 36_864, 128),
    _gemma3("270m", 18, 640, (4, 1), 2048),
    _gemma3("1b", 26, 1152, (4, 1), 6912),
    _gemma3("4b", 34, 2560, (8, 4), 10_240),
    _gemma3("12b", 48, 3840, (16, 8), 15_360),
    _gemma3("27b", 62, 5376, (32, 16), 21_504, 128),
    _smollm2("135M", 30, 576, (9, 3), 1536),
    _smollm2("360M", 32, 960, (15, 5), 2560),
    _smollm2("1.7B", 24, 2048, (32, 32), 8192),
    KnownRow(
        "HuggingFaceTB/SmolLM3-3B{}",
        "smollm3",
        36,
        2048,
        (16, 4),
        11_008,
        _LLAMA3_VOCABULARY,
        65_536,
        True,
        versions=_BASE,
    ),
    _olmo2("allenai/OLMo-2-0425-1B{}", 16, 2048, (16, 16), 8192),
    _olmo2("allenai/OLMo-2-1124-7B{}", 32, 4096, (32, 32), 11_008),
    _olmo2("allenai/OLMo-2-1124-13B{}", 40, 5120, (40, 40), 13_824),
    _olmo2("allenai/OLMo-2-0325-32B{}", 64, 5120, (40, 8), 27_648),
    KnownRow("microsoft/phi-2", "phi", 32, 2560, (32, 32), 10_240, 51_200, 2048),
    KnownRow(
        "microsoft/Phi-3-mini-4k-instruct microsoft/Phi-3-mini-128k-instruct microsoft/Phi-3.5-mini-instruct",
        "phi3",
        32,
        3072,
        (32, 32),
        8192,
        32_064,
        131_072,
    ),
    KnownRow(
        "microsoft/Phi-3-medium-4k-instruct microsoft/Phi-3-medium-128k-instruct",
        "phi3",
        40,
        5120,
        (40, 10),
        17_920,
        32_064,
        131_072,
    ),
    KnownRow("microsoft/phi-4 microsoft/Phi-4-reasoning", "phi3", 40, 5120, (40, 10), 17_920, 100_352, 16_384),
    KnownRow("microsoft/Phi-4-mini-instruct", "phi3", 32, 3072, (24, 8), 8192, 200_064, 131_072, True),
    KnownRow(
        "deepseek-ai/deepseek-llm-7b{} deepseek-ai/deepseek-math-7b{}",
        "llama",
        30,
        4096,
        (32, 32),
        11_008,
        102_400,
        4096,
        versions=("-base", "-chat", "-instruct", "-rl"),
    ),
    KnownRow(
        "deepseek-ai/DeepSeek-V3 deepseek-ai/DeepSeek-V3-Base deepseek-ai/DeepSeek-R1 deepseek-ai/DeepSeek-R1-Zero",
        "deepseek_v3",
        61,
        7168,
        (128, 128),
        18_432,
        129_280,
        163_840,
        other=_DEEPSEEK_V3_LATENT,
    ),
    KnownRow(
        "deepseek-ai/DeepSeek-V2-Lite{}",
        "deepseek_v2",
        27,
        2048,
        (16, 16),
        10_944,
        102_400,
        163_840,
        versions=("", "-Chat"),
        other=_DEEPSEEK_V2_LITE_LATENT,
    ),
    _gpt2("gpt2", 12, 768, 12),
    _gpt2("gpt2-medium", 24, 1024, 16),
    _gpt2("gpt2-large", 36, 1280, 20),
    _gpt2("gpt2-xl", 48, 1600, 25),
)
