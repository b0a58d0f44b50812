"""FSDP2 parameters and AdamW state, saved on some ranks and loaded on others, are equal to the last bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rljob_testing.checkpoint_ranks import RankRun, run_in_order
from rljob_trainer.checkpoints.load import open_checkpoint

DIRECTIONS = [(1, 2), (2, 1), (2, 2), (2, 3)]


@dataclass(frozen=True)
class Runs:
    folder: Path

    def root(self, saved_on: int) -> Path:
        """Of the checkpoint that so many ranks saved."""
        return self.folder / f"saved-on-{saved_on}"

    def expected(self, saved_on: int) -> dict[str, torch.Tensor]:
        """The whole tensors as the saving ranks gathered them."""
        return load_file(self.expected_file(saved_on))

    def expected_file(self, saved_on: int) -> Path:
        return self.folder / f"expected-{saved_on}.safetensors"

    def loaded_file(self, saved_on: int, loaded_on: int) -> Path:
        return self.folder / f"loaded-{saved_on}-{loaded_on}.safetensors"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("ranks"))
    saves = [RankRun(n, "train_and_save", runs.root(n), runs.expected_file(n)) for n in (1, 2)]
    loads = [RankRun(n, "load", runs.root(saved), runs.loaded_file(saved, n)) for saved, n in DIRECTIONS]
    run_in_order([*saves, *loads])
    return runs


@pytest.mark.parametrize(("saved_on", "loaded_on"), DIRECTIONS)
def test_state_is_equal_after_loading_on_another_number_of_ranks(runs: Runs, saved_on: int, loaded_on: int) -> None:
    expected, loaded = runs.expected(saved_on), load_file(runs.loaded_file(saved_on, loaded_on))
    assert len(expected) == 3 * 2 * 4  # three layers, weight and bias, each with two moments and a step count
    assert expected.keys() == loaded.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, loaded[name]), name


def test_one_process_reads_whole_tensors_of_a_sharded_checkpoint(runs: Runs) -> None:
    reader = open_checkpoint(next(runs.root(2).glob("step-*")))
    expected = runs.expected(2)
    assert set(reader.names) == set(expected)
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in expected.items())
    assert reader.entry("model/0.weight").global_shape == (13, 7)
    assert [(piece.offsets, piece.shape) for piece in reader.entry("model/0.weight").pieces] == [
        ((0, 0), (7, 7)),
        ((7, 0), (6, 7)),
    ]
    # One row for two ranks: rank 1 holds nothing of it.
    assert [piece.file for piece in reader.entry("model/2.weight").pieces] == ["rank-00000.safetensors"]
    assert reader.manifest.world_size == 2
    assert reader.manifest.extra == {"cursor": 7}


def test_shard_files_open_with_the_safetensors_library(runs: Runs) -> None:
    folder = next(runs.root(2).glob("step-*"))
    first, second = (load_file(folder / f"rank-0000{rank}.safetensors") for rank in (0, 1))
    name = "optimizer/1.weight/exp_avg_sq"
    assert torch.equal(torch.cat([first[name], second[name]]), runs.expected(2)[name])
