"""A model's shape from the header of a GGUF file, llama.cpp's one-file format (ggml-org/ggml, docs/gguf.md).

The trainer turns such a file into a model of transformers by the same entries (models/gguf_conversion.py). Only the
header is read: entries of keys and values, then the names and sizes of tensors.
"""

from __future__ import annotations

import struct

from rljob_planner.errors import PlanError
from rljob_planner.model_config import shape_of_config
from rljob_planner.model_shape import ModelShape

Buffer = bytes | memoryview

_STRING, _ARRAY = 8, 9
_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_LONGEST_KEPT = 64
"""Longer lists of numbers are scores of a vocabulary."""
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
"""Of transformers, by `general.architecture`; those that transformers reads from GGUF and the planner knows."""
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

Value = int | str | list[object] | None


def shape_of_gguf(header: Buffer, name: str) -> ModelShape:
    """`header` is the file, or as much of its beginning as has the names of all tensors.

    Raises PlanError for what is no GGUF file of version 2 or 3, is cut off, or is a model of an unknown kind."""
    try:
        entries, tensors = _Reader(memoryview(header), name).header()
    except struct.error:
        raise PlanError(f"{name}: the GGUF header is cut off; name a whole file") from None
    architecture = str(entries.get("general.architecture"))
    model_type = _MODEL_TYPES.get(architecture)
    if model_type is None:
        raise PlanError(
            f"{name}: the planner does not know models of this kind (GGUF, general.architecture: {architecture!r});"
            " name a config.json of about the same sizes with --model-config FILE"
        )
    found = {key: entries.get(f"{architecture}.{each}") for each, key in _KEYS.items()}
    config: dict[str, object] = {key: value for key, value in found.items() if value is not None}
    if embedding := tensors.get("token_embd.weight"):
        config["vocab_size"] = embedding[-1]
    is_tied = "output.weight" not in tensors
    return shape_of_config({**config, "model_type": model_type, "tie_word_embeddings": is_tied}, name)


class _Reader:
    """Numbers and texts, one after the other. Raises struct.error behind the end."""

    def __init__(self, data: memoryview, name: str) -> None:
        self.data, self.name, self.place = data, name, 0

    def header(self) -> tuple[dict[str, Value], dict[str, list[int]]]:
        """Entries, and the sizes of tensors by their names; sizes are the other way round than torch's."""
        magic = bytes(self.take(4))
        if magic != b"GGUF":
            raise PlanError(f"{self.name}: is no GGUF file (it begins with {magic!r}); name another one")
        if (version := self.number("<I")) not in (2, 3):
            raise PlanError(f"{self.name}: is of a GGUF version that is not read (seen {version}); name one of 2 or 3")
        num_tensors, num_entries = self.number("<Q"), self.number("<Q")
        if max(num_tensors, num_entries) > _MAX_ENTRIES:
            raise self.damaged(f"{num_tensors} tensors")
        entries = {self.text(): self.value(self.number("<I")) for _ in range(num_entries)}
        tensors: dict[str, list[int]] = {}
        for _ in range(num_tensors):
            tensor = self.text()
            tensors[tensor] = [self.number("<Q") for _ in range(self.number("<I"))]
            self.take(4 + 8)
        return entries, tensors

    def take(self, num_bytes: int) -> memoryview:
        begin, self.place = self.place, self.place + num_bytes
        if self.place > len(self.data):
            raise struct.error
        return self.data[begin : self.place]

    def number(self, form: str) -> int:
        """An integer, or what else `struct` names so."""
        found: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return found

    def text(self) -> str:
        return bytes(self.take(self.number("<Q"))).decode("utf-8", "replace")

    def value(self, kind: int) -> Value:
        """A value of a kind of the format; None for a list of many numbers, which is passed over."""
        if kind == _STRING:
            return self.text()
        if kind in _FORMATS:
            return self.number(_FORMATS[kind])
        if kind != _ARRAY:
            raise self.damaged(f"a value of kind {kind}")
        inner, length = self.number("<I"), self.number("<Q")
        if inner == _ARRAY:
            raise self.damaged("a list of lists")
        if inner in _FORMATS and length > _LONGEST_KEPT:
            self.take(struct.calcsize(_FORMATS[inner]) * length)
            return None
        return [self.value(inner) for _ in range(length)]

    def damaged(self, seen: str) -> PlanError:
        return PlanError(f"{self.name}: its GGUF header is damaged (seen {seen}); fetch it again")
