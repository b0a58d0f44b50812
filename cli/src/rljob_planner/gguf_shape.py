"""Reads a model's shape from the header of a GGUF file, llama.cpp's single-file format (ggml-org/ggml, docs/gguf.md).

Only the header is read: key-value entries, then names and sizes of tensors. The trainer uses the same entries when it
converts such files (models/gguf_conversion.py).
"""

from __future__ import annotations

import struct

from rljob_planner.errors import PlanError
from rljob_planner.model_config import shape_of_config
from rljob_planner.model_shape import ModelShape

Buffer = bytes | memoryview

_STRING, _ARRAY = 8, 9
"""GGUF's numbers for the types of values that are not numbers."""
_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""Formats of Python's `struct` by GGUF's number of a numeric type."""
_LONGEST_KEPT_ARRAY = 64
"""Longer arrays of numbers are skipped, because they only describe the vocabulary."""
_MAX_ENTRIES = 1_000_000

_MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
"""transformers' `model_type` by GGUF's `general.architecture`, for models that both transformers and the planner
know."""
_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Keys of config.json by the keys of GGUF, which in a file have the architecture before them: `qwen3.block_count`."""

Value = int | str | list[object] | None


def shape_of_gguf(header: Buffer, name: str) -> ModelShape:
    """The shape of the model in a GGUF file. `header`: the bytes of the file, or its first bytes up to the name and
    size of the last tensor.

    Raises:
        PlanError: the file is no GGUF file of version 2 or 3, its header is truncated or damaged, or the planner
            does not know the model's architecture.
    """
    try:
        entries, tensors = _Reader(memoryview(header), name).header()
    except struct.error:
        raise PlanError(f"{name}: the GGUF header is truncated; use a complete file") from None
    architecture = str(entries.get("general.architecture"))
    model_type = _MODEL_TYPES.get(architecture)
    if model_type is None:
        raise PlanError(
            f"{name}: the planner does not know this GGUF architecture (general.architecture: {architecture!r});"
            " for an estimate of the policy, use --model-config FILE with the config.json of a model of similar size"
        )
    found = {key: entries.get(f"{architecture}.{each}") for each, key in _KEYS.items()}
    config: dict[str, object] = {key: value for key, value in found.items() if value is not None}
    if embedding := tensors.get("token_embd.weight"):
        config["vocab_size"] = embedding[-1]
    is_tied = "output.weight" not in tensors
    return shape_of_config({**config, "model_type": model_type, "tie_word_embeddings": is_tied}, name)


class _Reader:
    """Reads the header value by value. Raises struct.error at the end of the data."""

    def __init__(self, data: memoryview, name: str) -> None:
        self.data, self.name, self.offset = data, name, 0

    def header(self) -> tuple[dict[str, Value], dict[str, list[int]]]:
        """Entries by key, and sizes of tensors by name. A size lists its dimensions in the reverse of torch's order."""
        magic = bytes(self.take(4))
        if magic != b"GGUF":
            raise PlanError(f"{self.name}: not a GGUF file (it begins with {magic!r}); choose another file")
        if (version := self.number("<I")) not in (2, 3):
            raise PlanError(f"{self.name}: unsupported GGUF version (seen {version}); use a file of version 2 or 3")
        num_tensors, num_entries = self.number("<Q"), self.number("<Q")
        if max(num_tensors, num_entries) > _MAX_ENTRIES:
            raise self.damaged(f"{num_tensors} tensors and {num_entries} entries")
        entries = {self.text(): self.value(self.number("<I")) for _ in range(num_entries)}
        tensors: dict[str, list[int]] = {}
        for _ in range(num_tensors):
            tensor = self.text()
            tensors[tensor] = [self.number("<Q") for _ in range(self.number("<I"))]
            self.take(4 + 8)
        return entries, tensors

    def take(self, num_bytes: int) -> memoryview:
        """The next `num_bytes` bytes."""
        begin, self.offset = self.offset, self.offset + num_bytes
        if self.offset > len(self.data):
            raise struct.error
        return self.data[begin : self.offset]

    def number(self, form: str) -> int:
        """A number in one of `struct`'s formats."""
        found: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return found

    def text(self) -> str:
        """A string: its number of bytes, then the bytes in UTF-8."""
        return bytes(self.take(self.number("<Q"))).decode("utf-8", "replace")

    def value(self, kind: int) -> Value:
        """A value of this GGUF type; None for a long array of numbers, which is skipped."""
        if kind == _STRING:
            return self.text()
        if kind in _FORMATS:
            return self.number(_FORMATS[kind])
        if kind != _ARRAY:
            raise self.damaged(f"a value of type {kind}")
        inner, length = self.number("<I"), self.number("<Q")
        if inner == _ARRAY:
            raise self.damaged("a list of lists")
        if inner in _FORMATS and length > _LONGEST_KEPT_ARRAY:
            self.take(struct.calcsize(_FORMATS[inner]) * length)
            return None
        return [self.value(inner) for _ in range(length)]

    def damaged(self, seen: str) -> PlanError:
        return PlanError(f"{self.name}: the GGUF header is damaged (seen {seen}); download the file again")
