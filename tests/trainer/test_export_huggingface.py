"""An exported folder is loaded by `transformers` and computes the same logits as the model that was trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rljob_trainer.checkpoints.errors import CheckpointError
from rljob_trainer.checkpoints.export import write_huggingface
from rljob_trainer.checkpoints.load import open_checkpoint
from rljob_trainer.checkpoints.save import begin_save, commit, save_shard
from rljob_trainer.checkpoints.sharding import ShardedTensor, sharded_tensors_from_dtensors

TOKENS_BT = torch.tensor([[1, 5, 9, 2], [3, 3, 7, 0]])
"""B = 2 sequences, T = 4 tokens."""


def tiny_model(tied: bool, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        tie_word_embeddings=tied,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def source(tmp_path: Path, tied: bool) -> Path:
    """The folder of the model before training, with files of a tokenizer."""
    folder = tmp_path / "source"
    tiny_model(tied, seed=1).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja", "README.md"):
        (folder / name).write_text(f"content of {name}")
    return folder


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS_BT).logits
    return logits


def load(folder: Path) -> torch.nn.Module:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, local_files_only=True)
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    loaded: torch.nn.Module = model
    return loaded.eval()


def test_the_logits_of_the_loaded_folder_are_equal(tmp_path: Path, source: Path, tied: bool) -> None:
    trained = tiny_model(tied, seed=2)
    assert not torch.equal(logits_of(trained), logits_of(load(source)))
    write_huggingface(tmp_path / "export", source, trained.state_dict().items(), torch.float32)
    assert torch.equal(logits_of(load(tmp_path / "export")), logits_of(trained))
    stored = load_file(tmp_path / "export" / "model.safetensors")
    assert ("lm_head.weight" in stored) is not tied


def test_a_committed_checkpoint_is_exported_without_the_training_processes(
    tmp_path: Path, source: Path, tied: bool
) -> None:
    trained = tiny_model(tied, seed=2)
    folder = begin_save(tmp_path / "checkpoints", 20, 1)
    weights = [(f"model/{name}", parameter) for name, parameter in trained.named_parameters()]
    moment = ShardedTensor("optimizer/lm_head.weight/exp_avg", torch.ones(17, 8), (17, 8), (0, 0))
    records = [save_shard(folder, 0, [*sharded_tensors_from_dtensors(weights, rank=0), moment])]
    commit(tmp_path / "checkpoints", folder, 20, 1, records, {})
    named = open_checkpoint(folder).read_all("model/")
    write_huggingface(tmp_path / "export", source, named, torch.float32)
    assert torch.equal(logits_of(load(tmp_path / "export")), logits_of(trained))


def test_settings_are_copied_and_the_dtype_is_that_of_the_export(tmp_path: Path, source: Path, tied: bool) -> None:
    trained = tiny_model(tied, seed=2)
    write_huggingface(tmp_path / "export", source, trained.state_dict().items(), torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja"):
        assert (tmp_path / "export" / name).read_text() == f"content of {name}"
    assert (tmp_path / "export" / "generation_config.json").read_bytes() == (
        source / "generation_config.json"
    ).read_bytes()
    assert not (tmp_path / "export" / "README.md").exists()
    loaded = load(tmp_path / "export")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    expected = dict(trained.named_parameters())
    assert all(torch.equal(value, expected[name].bfloat16()) for name, value in loaded.named_parameters())


def test_large_models_are_split_into_files_with_an_index(tmp_path: Path, source: Path, tied: bool) -> None:
    trained = tiny_model(tied, seed=2)
    write_huggingface(tmp_path / "export", source, trained.state_dict().items(), torch.float32, max_file_bytes=1000)
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "export").glob("*.safetensors"))
    num_files = len(files)
    assert num_files > 2
    assert [path.name for path in files] == [
        f"model-{number:05d}-of-{num_files:05d}.safetensors" for number in range(1, num_files + 1)
    ]
    sizes = {}
    for path in files:
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 1000
        assert all(index["weight_map"][name] == path.name for name in tensors)
        sizes.update({name: tensor.nbytes for name, tensor in tensors.items()})
    assert sizes.keys() == index["weight_map"].keys()
    assert sum(sizes.values()) == index["metadata"]["total_size"]
    assert torch.equal(logits_of(load(tmp_path / "export")), logits_of(trained))


def without_a_norm(trained: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor) for name, tensor in trained.state_dict().items() if name != "model.norm.weight")


def with_a_wrapper(trained: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((f"_wrapped.{name}", tensor) for name, tensor in trained.state_dict().items())


def cut_short(trained: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor[:1]) for name, tensor in trained.state_dict().items())


@pytest.mark.parametrize(
    ("named", "text"),
    [
        (without_a_norm, r"1 tensors of the model were not given, the first is model.norm.weight"),
        (with_a_wrapper, r"tensor _wrapped.model.embed_tokens.weight .* the model has no such tensor"),
        (cut_short, r"tensor model.embed_tokens.weight of shape \[1, 8\] was given, the model has shape \[17, 8\]"),
    ],
)
def test_another_set_of_tensors_is_refused_and_the_former_export_stays(
    tmp_path: Path, source: Path, tied: bool, named: object, text: str
) -> None:
    assert callable(named)
    first = tiny_model(tied, seed=2)
    write_huggingface(tmp_path / "export", source, first.state_dict().items(), torch.float32)
    with pytest.raises(CheckpointError, match=text):
        write_huggingface(tmp_path / "export", source, named(tiny_model(tied, seed=3)), torch.float32)
    assert torch.equal(logits_of(load(tmp_path / "export")), logits_of(first))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "source"]


def test_an_export_replaces_a_former_one(tmp_path: Path, source: Path, tied: bool) -> None:
    for seed in (2, 3):
        write_huggingface(tmp_path / "export", source, tiny_model(tied, seed).state_dict().items(), torch.float32)
    assert torch.equal(logits_of(load(tmp_path / "export")), logits_of(tiny_model(tied, seed=3)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "source"]
