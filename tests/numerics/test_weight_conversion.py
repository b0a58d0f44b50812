"""Weights of files are converted to those of a model, in the parts that ranks hold, and the model's weights to those of
the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, HrmTextConfig, PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from rljob_testing.models import tiny_models
from rljob_trainer.engines.train.weight_loading import load_weights
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.models.weight_conversion import (
    FileGroup,
    HubNames,
    Window,
    file_groups,
    float32_names,
    whole_window,
)
from rljob_trainer.weights.buckets import whole_tensors

EXPERTS = ("deepseek_v3", "qwen2_moe", "qwen3_moe", "mixtral", "qwen3_next")
WEIGHTS = "model.safetensors"


def split_in_files() -> PreTrainedModel:
    """Files hold gate and up projections as one tensor, and gate, queries, keys and values as one."""
    torch.manual_seed(0)
    config = HrmTextConfig(**{**tiny_models.COMMON, "num_key_value_heads": 2})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    **{name: lambda name=name: tiny_models.make(name) for name in tiny_models.ARCHITECTURES},  # type: ignore[misc]
    "hrm_text": split_in_files,
}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Each tensor once, under its first name, without those that no file holds."""
    once = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {name: each.detach() for name, each in model.state_dict().items() if name in once}


def windows_of(tensors: Mapping[str, Tensor], rank: int, num_ranks: int) -> dict[str, Window]:
    """Windows of rows as `fully_shard` splits them."""
    found = {}
    for name, tensor in tensors.items():
        window = whole_window(tensor.shape)
        if window:
            rows = -(-tensor.shape[0] // num_ranks)
            start, end = (min(boundary * rows, tensor.shape[0]) for boundary in (rank, rank + 1))
            window = (slice(start, end), *window[1:])
        found[name] = window
    return found


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_read_their_parts_of_what_from_pretrained_loads(name: str, num_ranks: int, tmp_path: Path) -> None:
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    reference_tensors = tensors_of(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    with safe_open(tmp_path / WEIGHTS, framework="pt") as file:
        groups = file_groups(model, file.keys(), reference_tensors)
        assert sorted(target for group in groups for target in group.targets) == sorted(reference_tensors)
        for rank in range(num_ranks):
            windows = windows_of(reference_tensors, rank, num_ranks)
            reads: list[str] = []

            def read(name: str, window: Window | None, reads: list[str] = reads) -> Tensor:
                reads.append(name)
                return file.get_slice(name)[window or ...]  # type: ignore[no-any-return]

            found = {key: value for group in groups for key, value in group.load(model, read, windows).items()}
            for target, window in windows.items():
                if target in found:
                    assert torch.equal(found[target], reference_tensors[target][window]), target
                else:
                    assert reference_tensors[target][window].numel() == 0
            if name in EXPERTS and num_ranks == 3:
                # Four experts: two, two, none.
                num_experts = sum(".experts.0." in each or ".experts.2." in each for each in reads)
                assert (num_experts == 0) == (rank == 2)
                assert not any(".experts.3." in each for each in reads if rank == 0)


@pytest.mark.parametrize("name", MODELS)
def test_a_models_tensors_become_those_of_its_files(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    files, tensors = load_file(tmp_path / WEIGHTS), tensors_of(model)
    found = dict(HubNames(model).stream(tensors.items(), list(tensors)))
    assert found.keys() == files.keys()
    assert (found.keys() == tensors.keys()) == (name not in (*EXPERTS, "gpt_neox", "hrm_text"))
    for key, value in files.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("name", MODELS)
def test_experts_stay_whole_at_their_path_in_files(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    files, tensors = load_file(tmp_path / WEIGHTS), tensors_of(model)
    found = dict(HubNames(model).stream(tensors.items(), list(tensors), whole_experts=True))
    expected = {key: value for key, value in files.items() if name not in EXPERTS or ".experts." not in key}
    if name in EXPERTS:
        path = {"mixtral": "block_sparse_moe"}.get(name, "mlp")
        for key, value in tensors.items():
            if ".experts." in key:
                expected[key.replace(".mlp.", f".{path}.")] = value
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def error_of(change: Callable[[dict[str, Tensor]], None], folder: Path) -> str:
    """The error for a folder of Mixtral whose tensors have been changed."""
    tiny_models.save("mixtral", folder)
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    model = tiny_models.make("mixtral")
    with pytest.raises(ConfigurationError) as caught:
        load_weights(model, model, folder, "")
    return str(caught.value)


EXPERT = "model.layers.0.block_sparse_moe.experts.{}.w1.weight"


def test_missing_experts_are_named(tmp_path: Path) -> None:
    def drop_all(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "layers.0.block_sparse_moe.experts" in name]:
            del tensors[name]

    assert "has no tensor 'model.layers.0.mlp.experts" in error_of(drop_all, tmp_path)


def test_a_missing_expert_is_detected(tmp_path: Path) -> None:
    def drop_one(tensors: dict[str, Tensor]) -> None:
        for part in ("w1", "w2", "w3"):
            del tensors[EXPERT.format(3).replace("w1", part)]

    assert "needs 4 such tensors (seen: 3)" in error_of(drop_one, tmp_path)


def test_half_an_expert_is_detected(tmp_path: Path) -> None:
    def drop_half(tensors: dict[str, Tensor]) -> None:
        del tensors[EXPERT.format(2)]

    assert "needs 4 such tensors (seen: 3)" in error_of(drop_half, tmp_path)


def test_an_expert_of_another_shape_is_detected(tmp_path: Path) -> None:
    def cut(tensors: dict[str, Tensor]) -> None:
        for index in range(4):
            tensors[EXPERT.format(index)] = tensors[EXPERT.format(index)][:-1].clone()

    assert "experts" in error_of(cut, tmp_path)


def test_only_stacked_tensors_are_read_by_rows() -> None:
    """Experts that a file has as one tensor already are concatenated, and not stacked."""
    joined = WeightConverter(["gate", "up"], "gate_up", [Concatenate(dim=1)])
    stacked = WeightConverter(["gate.*", "up.*"], "gate_up", [MergeModulelist(dim=0), Concatenate(dim=1)])
    for converter, expected in ((None, False), (joined, False), (stacked, True)):
        assert FileGroup(("a",), ("b",), converter, ("gate",)).stacks_along_rows is expected


def test_weights_that_transformers_keeps_in_float32_are_synced_in_float32() -> None:
    tensors = tensors_of(tiny_models.make("deepseek_v3"))
    kept = float32_names(tiny_models.make("deepseek_v3"), tensors)
    assert kept == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    found = dict(whole_tensors(tensors.items(), torch.bfloat16, as_float32=kept))
    assert {name for name, tensor in found.items() if tensor.dtype == torch.float32} == kept
    assert float32_names(tiny_models.make("qwen3"), tensors_of(tiny_models.make("qwen3"))) == frozenset()
