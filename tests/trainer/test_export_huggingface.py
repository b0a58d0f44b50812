"""An exported folder is loaded by `transformers` and computes the same logits as the trained model."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rljob_api.v1alpha1.checkpoint import ExportDtype
from rljob_testing import process_counters
from rljob_testing.models import tiny_models
from rljob_trainer.checkpoints.errors import CheckpointError, DamagedError
from rljob_trainer.checkpoints.export import MAX_FILE_BYTES, export_dtype, write_huggingface
from rljob_trainer.checkpoints.load import CheckpointReader, open_known_checkpoint
from rljob_trainer.checkpoints.save import begin_save, commit, save_shard
from rljob_trainer.checkpoints.sharding import ShardedTensor

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
    """The folder of the model before training, with tokenizer files."""
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


def checkpoint_of(folder: Path, named: Iterable[tuple[str, torch.Tensor]], num_moments: int = 100) -> Path:
    """A checkpoint of the tensors and an optimizer's moments, from two ranks with half of the rows each."""
    tensors = [(f"model.{name}", tensor.detach()) for name, tensor in named]
    tensors.append(("optimizer.exp_avg.lm_head.weight", torch.ones(num_moments)))
    checkpoint = begin_save(folder, 20, 1)
    records = []
    for rank in (0, 1):
        shards = []
        for name, tensor in tensors:
            middle = len(tensor) // 2
            rows, first = (tensor[middle:], middle) if rank else (tensor[:middle], 0)
            offsets = (first, *[0] * (tensor.dim() - 1))
            shards.append(ShardedTensor(name, rows, tuple(tensor.shape), offsets))
        records.append(save_shard(checkpoint, rank, shards))
    commit(folder, checkpoint, 20, 1, records, {})
    return checkpoint


def export(
    tmp_path: Path,
    source: Path,
    named: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype = torch.float32,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Saves the tensors and exports them to `tmp_path / "export"`."""
    checkpoint = checkpoint_of(tmp_path / f"checkpoints-{len(list(tmp_path.iterdir()))}", named)
    folder = tmp_path / "export"
    write_huggingface(folder, source, open_known_checkpoint(checkpoint), "model.", dtype, max_file_bytes)
    return folder


def test_the_logits_of_the_loaded_folder_are_equal(tmp_path: Path, source: Path, tied: bool) -> None:
    trained = tiny_model(tied, seed=2)
    assert not torch.equal(logits_of(trained), logits_of(load(source)))
    folder = export(tmp_path, source, trained.named_parameters())
    assert torch.equal(logits_of(load(folder)), logits_of(trained))
    stored = load_file(folder / "model.safetensors")
    assert ("lm_head.weight" in stored) is not tied


def test_export_reports_its_progress(tmp_path: Path, source: Path, tied: bool) -> None:
    checkpoint = checkpoint_of(tmp_path / "checkpoints", tiny_model(tied, seed=1).named_parameters())
    reported: list[tuple[int, int]] = []

    def note(number: int, of: int) -> None:
        reported.append((number, of))

    saved = open_known_checkpoint(checkpoint)
    write_huggingface(tmp_path / "export", source, saved, "model.", torch.float32, on_progress=note)
    assert reported == [(number, len(reported)) for number in range(1, len(reported) + 1)]
    assert len(reported) > 10


def test_second_names_of_tied_tensors_are_left_out(tmp_path: Path, source: Path, tied: bool) -> None:
    trained = tiny_model(tied, seed=2)
    folder = export(tmp_path, source, trained.state_dict().items())
    assert torch.equal(logits_of(load(folder)), logits_of(trained))
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) is not tied


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_settings_are_copied_and_the_dtype_is_that_of_the_export(
    tmp_path: Path, source: Path, tied: bool, dtype: torch.dtype
) -> None:
    trained = tiny_model(tied, seed=2)
    folder = export(tmp_path, source, trained.state_dict().items(), dtype)
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja"):
        assert (folder / name).read_text() == f"content of {name}"
    assert (folder / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    assert not (folder / "README.md").exists()
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {dtype}
    loaded = load(folder)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    expected = dict(trained.named_parameters())
    assert all(torch.equal(value, expected[name].to(dtype)) for name, value in loaded.named_parameters())


def test_large_models_are_split_into_files_with_an_index(tmp_path: Path, source: Path, tied: bool) -> None:
    trained = tiny_model(tied, seed=2)
    folder = export(tmp_path, source, trained.state_dict().items(), max_file_bytes=1000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
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
    assert torch.equal(logits_of(load(folder)), logits_of(trained))


def without_a_norm(trained: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor) for name, tensor in trained.state_dict().items() if name != "model.norm.weight")


def with_a_wrapper(trained: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((f"_wrapped.{name}", tensor) for name, tensor in trained.state_dict().items())


def cut_short(trained: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor[:2]) for name, tensor in trained.state_dict().items())


@pytest.mark.parametrize(
    ("named", "text"),
    [
        (without_a_norm, r"1 tensors of the model .*step-00000020.start-0001 .*model.norm.weig"),
        (with_a_wrapper, r"tensor _wrapped.model.embed_tokens.weight .* the model has no such tensor"),
        (cut_short, r"tensor model.embed_tokens.weight .* \[2, 8\], .* \[17, 8\]"),
    ],
)
def test_a_different_set_of_tensors_is_rejected_and_the_former_export_stays(
    tmp_path: Path,
    source: Path,
    tied: bool,
    named: Callable[[torch.nn.Module], Iterator[tuple[str, torch.Tensor]]],
    text: str,
) -> None:
    first = tiny_model(tied, seed=2)
    export(tmp_path, source, first.state_dict().items())
    with pytest.raises(CheckpointError, match=text):
        export(tmp_path, source, named(tiny_model(tied, seed=3)))
    assert torch.equal(logits_of(load(tmp_path / "export")), logits_of(first))
    assert not list(tmp_path.glob("export?*"))


def test_an_export_replaces_a_former_one(tmp_path: Path, source: Path, tied: bool) -> None:
    for seed in (2, 3):
        export(tmp_path, source, tiny_model(tied, seed).state_dict().items())
    assert torch.equal(logits_of(load(tmp_path / "export")), logits_of(tiny_model(tied, seed=3)))
    assert not list(tmp_path.glob("export?*"))


# The rest does not depend on tied heads.
@pytest.fixture
def untied(tmp_path: Path) -> Path:
    folder = tmp_path / "untied"
    tiny_model(tied=False, seed=1).save_pretrained(folder)
    return folder


def test_values_that_float16_cannot_represent_are_rejected(tmp_path: Path, untied: Path) -> None:
    trained = tiny_model(tied=False, seed=2)
    trained.get_parameter("model.norm.weight").data[3] = -70_000.0
    with pytest.raises(CheckpointError, match=r"model.norm.weight .*70000, .*float16; set"):
        export(tmp_path, untied, trained.named_parameters(), torch.float16)
    assert not list(tmp_path.glob("export*"))


def test_a_checkpoint_whose_files_have_other_sizes_is_not_exported(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path / "checkpoints", tiny_model(tied=False, seed=2).named_parameters())
    shard = checkpoint / "rank-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DamagedError, match=r"rank-00001.safetensors has [\d,]+ bytes, but [\d,]+ were written"):
        open_known_checkpoint(checkpoint)


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("configured", "held", "expected"),
    [
        ("bfloat16", torch.float32, torch.bfloat16),
        ("float16", torch.float32, torch.float16),
        (None, torch.bfloat16, torch.bfloat16),
        (None, None, torch.float32),
    ],
)
def test_auto_is_the_dtype_of_the_source(
    tmp_path: Path, field: str, configured: str | None, held: torch.dtype | None, expected: torch.dtype
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({field: configured} if configured else {}))
    if held:
        save_file(
            {"scale": torch.ones(2, dtype=torch.int8), "weight": torch.ones(2, dtype=held)}, tmp_path / "w.safetensors"
        )
    assert export_dtype(ExportDtype.AUTO, tmp_path) is expected
    assert export_dtype(ExportDtype.FLOAT32, tmp_path) is torch.float32
    assert export_dtype(ExportDtype.BFLOAT16, tmp_path) is torch.bfloat16


class WatchedReader(CheckpointReader):
    """Counts how many of the tensors that it has returned still exist when the next one is read."""

    given: list[weakref.ref[torch.Tensor]]
    most_at_once = 0

    def read(self, name: str) -> torch.Tensor:
        self.most_at_once = max(self.most_at_once, sum(each() is not None for each in self.given))
        tensor = super().read(name)
        self.given.append(weakref.ref(tensor))
        return tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_are_read_once_and_held_one_at_a_time(tmp_path: Path, dtype: torch.dtype) -> None:
    """3 MB of weights, and twice as much optimizer state beside them in the checkpoint."""
    config = Qwen3Config(
        vocab_size=1000, hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    trained = Qwen3ForCausalLM(config)
    trained.save_pretrained(tmp_path / "source")
    num_weights = sum(parameter.numel() for parameter in trained.parameters())
    checkpoint = checkpoint_of(tmp_path / "checkpoints", trained.named_parameters(), num_moments=2 * num_weights)
    known = open_known_checkpoint(checkpoint)
    # The first run also imports modules.
    write_huggingface(tmp_path / "export", tmp_path / "source", known, "model.", dtype)
    reader = WatchedReader(known.folder, known.manifest, compares_digests=False)
    reader.given = []
    with process_counters.bytes_read() as read:
        write_huggingface(tmp_path / "export", tmp_path / "source", reader, "model.", dtype)
    assert 4 * num_weights <= read.count < 1.05 * 4 * num_weights
    assert len(reader.given) == len(list(trained.parameters()))
    assert reader.most_at_once == 0


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_are_exported_one_by_one_and_read_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_models.save(name, tmp_path / "source")
    trained = tiny_models.make(name)
    for parameter in trained.parameters():
        parameter.data.mul_(1.25)
    reads: list[str] = []
    read = CheckpointReader.read

    def counted(self: CheckpointReader, tensor: str) -> torch.Tensor:
        reads.append(tensor)
        return read(self, tensor)

    monkeypatch.setattr(CheckpointReader, "read", counted)
    folder = export(tmp_path, source, trained.named_parameters())
    assert len(reads) == len(set(reads)) == len(dict(trained.named_parameters()))
    assert load_file(folder / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()
    loaded = dict(load(folder).named_parameters())
    assert all(torch.equal(loaded[key], value) for key, value in trained.named_parameters())


def test_weights_that_transformers_keeps_in_float32_are_exported_in_float32(tmp_path: Path) -> None:
    source = tiny_models.save("deepseek_v3", tmp_path / "source")
    trained = tiny_models.make("deepseek_v3")
    once = {name for name, _ in (*trained.named_parameters(), *trained.named_buffers())}
    named = [(name, tensor) for name, tensor in trained.state_dict().items() if name in once]
    stored = load_file(export(tmp_path, source, named, torch.bfloat16) / "model.safetensors")
    kept = {name for name, tensor in stored.items() if tensor.dtype == torch.float32}
    assert kept == {name for name in stored if name.endswith("e_score_correction_bias")}
    assert len(kept) == 1
