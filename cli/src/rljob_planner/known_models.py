"""Shapes of well-known models by their names on the Hugging Face hub, for machines without the models' files.

`tests/planner/test_known_models.py` computes the number of parameters of each model from this table and compares it
with the published number. Layers, widths, heads, experts and vocabularies of 111 names are the same as in litgpt's
table (Lightning-AI/litgpt, litgpt/config.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache

from rljob_api import names as typing_errors
from rljob_planner.model_config import shape_of_config
from rljob_planner.model_shape import ModelShape

_COLUMNS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
_TABLE = """
qwen3 28 1024 16 8 128 3072 151936 40960 tied Qwen/Qwen3-0.6B{,-Base}
qwen3 28 2048 16 8 128 6144 151936 40960 tied Qwen/Qwen3-1.7B{,-Base}
qwen3 36 2560 32 8 128 9728 151936 40960 tied Qwen/Qwen3-4B{,-Base,-Instruct-2507,-Thinking-2507}
qwen3 36 4096 32 8 128 12288 151936 40960 - Qwen/Qwen3-8B{,-Base}
qwen3 40 5120 40 8 128 17408 151936 40960 - Qwen/Qwen3-14B{,-Base}
qwen3 64 5120 64 8 128 25600 151936 40960 - Qwen/Qwen3-32B{,-Base}
qwen3_moe 48 2048 32 4 128 6144 151936 40960 - num_experts=128 num_experts_per_tok=8 moe_intermediate_size=768
  Qwen/Qwen3-30B-A3B{,-Base,-Instruct-2507,-Thinking-2507}
qwen3_moe 94 4096 64 4 128 12288 151936 40960 - num_experts=128 num_experts_per_tok=8 moe_intermediate_size=1536
  Qwen/Qwen3-235B-A22B{,-Base,-Instruct-2507,-Thinking-2507}
qwen3 36 4096 32 8 128 12288 151936 131072 - deepseek-ai/DeepSeek-R1-0528-Qwen3-8B
qwen2 24 896 14 2 64 4864 151936 32768 tied Qwen/Qwen2.5-0.5B{,-Instruct} Qwen/Qwen2.5-Coder-0.5B{,-Instruct}
  Qwen/Qwen2-0.5B{,-Instruct}
qwen2 28 1536 12 2 128 8960 151936 32768 tied Qwen/Qwen2.5-1.5B{,-Instruct} Qwen/Qwen2.5-Math-1.5B{,-Instruct}
  Qwen/Qwen2.5-Coder-1.5B{,-Instruct} Qwen/Qwen2-1.5B{,-Instruct}
qwen2 36 2048 16 2 128 11008 151936 32768 tied Qwen/Qwen2.5-3B{,-Instruct} Qwen/Qwen2.5-Coder-3B{,-Instruct}
qwen2 28 3584 28 4 128 18944 152064 32768 - Qwen/Qwen2.5-7B{,-Instruct} Qwen/Qwen2.5-Math-7B{,-Instruct}
  Qwen/Qwen2.5-Coder-7B{,-Instruct} Qwen/Qwen2-7B{,-Instruct} deepseek-ai/DeepSeek-R1-Distill-Qwen-7B
qwen2 48 5120 40 8 128 13824 152064 32768 - Qwen/Qwen2.5-14B{,-Instruct} Qwen/Qwen2.5-Coder-14B{,-Instruct}
  deepseek-ai/DeepSeek-R1-Distill-Qwen-14B
qwen2 64 5120 40 8 128 27648 152064 32768 - Qwen/Qwen2.5-32B{,-Instruct} Qwen/Qwen2.5-Coder-32B{,-Instruct}
  Qwen/QwQ-32B deepseek-ai/DeepSeek-R1-Distill-Qwen-32B
qwen2 80 8192 64 8 128 29568 152064 32768 - Qwen/Qwen2.5-72B{,-Instruct} Qwen/Qwen2.5-Math-72B{,-Instruct}
  Qwen/Qwen2-72B{,-Instruct}
qwen2 28 1536 12 2 128 8960 151936 131072 - deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B
qwen2_moe 24 2048 16 16 128 5632 151936 8192 - moe_intermediate_size=1408 shared_expert_intermediate_size=5632
  num_experts=60 num_experts_per_tok=4 Qwen/Qwen1.5-MoE-A2.7B{,-Chat}
llama 16 2048 32 8 64 8192 128256 131072 tied meta-llama/Llama-3.2-1B{,-Instruct}
llama 28 3072 24 8 128 8192 128256 131072 tied meta-llama/Llama-3.2-3B{,-Instruct}
llama 32 4096 32 8 128 14336 128256 131072 - meta-llama/Llama-3.1-8B{,-Instruct}
  meta-llama/Meta-Llama-3.1-8B{,-Instruct} meta-llama/Meta-Llama-3-8B{,-Instruct}
  deepseek-ai/DeepSeek-R1-Distill-Llama-8B
llama 80 8192 64 8 128 28672 128256 131072 - meta-llama/Llama-3.1-70B{,-Instruct}
  meta-llama/Meta-Llama-3.1-70B{,-Instruct} meta-llama/Meta-Llama-3-70B{,-Instruct}
  meta-llama/Llama-3.3-70B{,-Instruct} deepseek-ai/DeepSeek-R1-Distill-Llama-70B
llama 126 16384 128 8 128 53248 128256 131072 - meta-llama/Llama-3.1-405B{,-Instruct}
  meta-llama/Meta-Llama-3.1-405B{,-Instruct}
llama 32 4096 32 32 128 11008 32000 4096 - meta-llama/Llama-2-7b{-,-chat-}hf
llama 40 5120 40 40 128 13824 32000 4096 - meta-llama/Llama-2-13b{-,-chat-}hf
llama 80 8192 64 8 128 28672 32000 4096 - meta-llama/Llama-2-70b{-,-chat-}hf
mistral 32 4096 32 8 128 14336 32000 32768 - sliding_window=4096 mistralai/Mistral-7B{,-Instruct}-v0.1
mistral 32 4096 32 8 128 14336 32000 32768 - mistralai/Mistral-7B-Instruct-v0.2
mistral 32 4096 32 8 128 14336 32768 32768 - mistralai/Mistral-7B-v0.3 mistralai/Mistral-7B-Instruct-v0.3
mistral 40 5120 32 8 128 14336 131072 131072 - mistralai/Mistral-Nemo-Base-2407 mistralai/Mistral-Nemo-Instruct-2407
mistral 40 5120 32 8 128 32768 131072 32768 - mistralai/Mistral-Small-24B-Base-2501
  mistralai/Mistral-Small-24B-Instruct-2501
mixtral 32 4096 32 8 128 14336 32000 32768 - num_local_experts=8 num_experts_per_tok=2
  mistralai/Mixtral-8x7B{,-Instruct}-v0.1
gemma2 26 2304 8 4 256 9216 256000 8192 tied sliding_window=4096 google/gemma-2-2b{,-it}
gemma2 42 3584 16 8 256 14336 256000 8192 tied sliding_window=4096 google/gemma-2-9b{,-it}
gemma2 46 4608 32 16 128 36864 256000 8192 tied sliding_window=4096 google/gemma-2-27b{,-it}
gemma3_text 18 640 4 1 256 2048 262144 32768 tied sliding_window=512 google/gemma-3-270m{,-it}
gemma3_text 26 1152 4 1 256 6912 262144 32768 tied sliding_window=512 google/gemma-3-1b{-pt,-it}
gemma3_text 34 2560 8 4 256 10240 262208 131072 tied sliding_window=1024 google/gemma-3-4b{-pt,-it}
gemma3_text 48 3840 16 8 256 15360 262208 131072 tied sliding_window=1024 google/gemma-3-12b{-pt,-it}
gemma3_text 62 5376 32 16 128 21504 262208 131072 tied sliding_window=1024 google/gemma-3-27b{-pt,-it}
llama 30 576 9 3 64 1536 49152 8192 tied HuggingFaceTB/SmolLM2-135M{,-Instruct}
llama 32 960 15 5 64 2560 49152 8192 tied HuggingFaceTB/SmolLM2-360M{,-Instruct}
llama 24 2048 32 32 64 8192 49152 8192 tied HuggingFaceTB/SmolLM2-1.7B{,-Instruct}
smollm3 36 2048 16 4 128 11008 128256 65536 tied HuggingFaceTB/SmolLM3-3B{,-Base}
olmo2 16 2048 16 16 128 8192 100352 4096 - allenai/OLMo-2-0425-1B{,-SFT,-DPO,-Instruct}
olmo2 32 4096 32 32 128 11008 100352 4096 - allenai/OLMo-2-1124-7B{,-SFT,-DPO,-Instruct}
olmo2 40 5120 40 40 128 13824 100352 4096 - allenai/OLMo-2-1124-13B{,-SFT,-DPO,-Instruct}
olmo2 64 5120 40 8 128 27648 100352 4096 - allenai/OLMo-2-0325-32B{,-SFT,-DPO,-Instruct}
phi3 32 3072 32 32 96 8192 32064 131072 - microsoft/Phi-3-mini-4k-instruct microsoft/Phi-3-mini-128k-instruct
  microsoft/Phi-3.5-mini-instruct
phi3 40 5120 40 10 128 17920 32064 131072 - microsoft/Phi-3-medium-4k-instruct microsoft/Phi-3-medium-128k-instruct
phi3 40 5120 40 10 128 17920 100352 16384 - microsoft/phi-4 microsoft/Phi-4-reasoning
phi3 32 3072 24 8 128 8192 200064 131072 tied microsoft/Phi-4-mini-instruct
llama 30 4096 32 32 128 11008 102400 4096 - deepseek-ai/deepseek-llm-7b{-base,-chat,-instruct,-rl}
  deepseek-ai/deepseek-math-7b{-base,-chat,-instruct,-rl}
deepseek_v3 61 7168 128 128 56 18432 129280 163840 - moe_intermediate_size=2048 n_routed_experts=256
  num_experts_per_tok=8 n_shared_experts=1 first_k_dense_replace=3 q_lora_rank=1536 kv_lora_rank=512
  qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=128 deepseek-ai/DeepSeek-V3 deepseek-ai/DeepSeek-V3-Base
  deepseek-ai/DeepSeek-R1 deepseek-ai/DeepSeek-R1-Zero
deepseek_v2 27 2048 16 16 128 10944 102400 163840 - moe_intermediate_size=1408 n_routed_experts=64
  num_experts_per_tok=6 n_shared_experts=2 first_k_dense_replace=1 kv_lora_rank=512 qk_nope_head_dim=128
  qk_rope_head_dim=64 v_head_dim=128 deepseek-ai/DeepSeek-V2-Lite{,-Chat}
"""
"""One row per `config.json`: model type; the numbers of _COLUMNS; `tied` if the embedding is also the output head, else
`-`; further keys; the names of the models with this configuration. An indented line continues the row."""


def known_model(name: str) -> ModelShape | None:
    """The shape of a model by its name on the hub, in upper or lower case; None if the table does not have it."""
    found = known_configs().get(name.strip().lower())
    return None if found is None else shape_of_config(found[1], found[0])


def similar_names(name: str) -> list[str]:
    """At most three names of the table that are similar to `name`, the most similar first. The part of `name` before
    the slash (the owner on the hub) may be missing or wrong."""
    names = [each for each, _ in known_configs().values()]
    by_last = {each.rpartition("/")[2]: each for each in names}
    of_last = [by_last[each] for each in typing_errors.similar_names(name.rpartition("/")[2], by_last, max_names=3)]
    return list(dict.fromkeys([*typing_errors.similar_names(name, names, max_names=3), *of_last]))[:3]


@cache
def known_configs() -> Mapping[str, tuple[str, dict[str, object]]]:
    """By each name in lower case: the name as the hub spells it, and the model's `config.json`."""
    found: dict[str, tuple[str, dict[str, object]]] = {}
    for row in re.sub(r"\n +", " ", _TABLE.strip()).splitlines():
        model_type, *words = row.split()
        numbers, tied, rest = words[: len(_COLUMNS)], words[len(_COLUMNS)], words[len(_COLUMNS) + 1 :]
        config: dict[str, object] = {"model_type": model_type, "tie_word_embeddings": tied == "tied"}
        config |= {key: int(number) for key, number in zip(_COLUMNS, numbers, strict=True)}
        config |= {key: int(number) for key, _, number in (word.partition("=") for word in rest if "=" in word)}
        for name in (name for word in rest if "=" not in word for name in _versions(word)):
            found[name.lower()] = name, config
    return found


def _versions(word: str) -> Iterator[str]:
    """The names of a pattern: `Qwen3-8B{,-Base}` stands for `Qwen3-8B` and `Qwen3-8B-Base`."""
    before, _, rest = word.partition("{")
    choices, _, after = rest.partition("}")
    yield from (f"{before}{choice}{after}" for choice in choices.split(","))
