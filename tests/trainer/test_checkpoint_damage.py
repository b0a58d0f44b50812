"""Damage is found before anything is trained on, is named, and never causes a silent start from step 0."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rljob_testing.training import small_checkpoints
from rljob_trainer.checkpoints.errors import CheckpointError, DamagedError
from rljob_trainer.checkpoints.layout import digest_of
from rljob_trainer.checkpoints.load import find_newest_complete, load_into, open_checkpoint, refuse_existing
from rljob_trainer.checkpoints.tensor_file import read_header
from rljob_trainer.errors import ConfigurationError

SHARD = "rank-00001.safetensors"
MANIFEST = "manifest.json"


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def flip_bit_in_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"[2,3]") + 1] ^= 1
    path.write_bytes(data)


def flip_bit_in_length(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[6] ^= 0x40
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def change_cursor(path: Path) -> None:
    """Changes the data cursor; the file stays valid JSON and a valid manifest."""
    path.write_bytes(path.read_bytes().replace(b'"cursor":40', b'"cursor":41'))


def make_garbage(path: Path) -> None:
    path.write_bytes(b"\x00" * 512)


def make_empty(path: Path) -> None:
    path.write_bytes(b"")


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def nest_deep(path: Path) -> None:
    """A manifest that is nested deeply and has the right digest."""
    content = b'{"contractVersion":1,"extra":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    path.write_bytes(b'{"content":%s,"digest":"%s"}\n' % (content, digest_of(content).encode()))


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    (SHARD, flip_last_bit, r"rank-00001.safetensors: digest of tensor weight is sha256:\w+, .*sha256:"),
    (SHARD, flip_bit_in_header, r"rank-00001.safetensors: digest of the header is sha256:\w+, "),
    (SHARD, flip_bit_in_length, r"rank-00001.safetensors does not begin with a safetensors header"),
    (SHARD, truncate, r"rank-00001.safetensors has 95 bytes, but 96"),
    (SHARD, Path.unlink, r"rank-00001.safetensors is missing"),
    (SHARD, make_empty, r"rank-00001.safetensors has 0 bytes, but 96"),
    (MANIFEST, change_cursor, r"manifest.json: digest of the content is sha256:\w+, .*sha256:"),
    (MANIFEST, truncate, r"manifest.json is truncated or is not a sealed JSON file"),
    (MANIFEST, make_garbage, r"manifest.json is truncated or is not a sealed JSON file \(512 bytes\)"),
    (MANIFEST, make_empty, r"manifest.json is empty"),
    (MANIFEST, nest_deep, r"manifest.json: its content is nested too deeply"),
    (MANIFEST, make_folder, r"manifest.json cannot be read: Is a directory"),
]


@pytest.mark.parametrize(("file", "damage", "text"), DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(
    tmp_path: Path, file: str, damage: Callable[[Path], None], text: str
) -> None:
    small_checkpoints.save_step(tmp_path, 20, 1)
    small_checkpoints.save_step(tmp_path, 40, 1)
    damage(tmp_path / "step-00000040.start-0001" / file)
    found = find_newest_complete(tmp_path, start_number=2)
    assert found is not None
    assert found.manifest.step == 20
    assert [rejection.folder.name for rejection in found.rejected] == ["step-00000040.start-0001"]
    assert re.match(text, found.rejected[0].reason), found.rejected[0].reason
    weight = torch.zeros(5, 3)
    load_into([("weight", weight)], open_checkpoint(found.folder))
    assert torch.equal(weight, small_checkpoints.values_of(20))


def test_a_folder_without_manifest_is_ignored(tmp_path: Path) -> None:
    small_checkpoints.save_step(tmp_path, 20, 1)
    small_checkpoints.save_step(tmp_path, 40, 1)
    (tmp_path / "step-00000040.start-0001" / MANIFEST).unlink()
    found = find_newest_complete(tmp_path, start_number=2)
    assert found is not None
    assert (found.manifest.step, found.rejected) == (20, ())


def test_no_checkpoint_means_step_0_but_only_damaged_ones_are_an_error(tmp_path: Path) -> None:
    assert find_newest_complete(tmp_path / "absent", start_number=1) is None
    small_checkpoints.save_step(tmp_path, 20, 1)
    small_checkpoints.save_step(tmp_path, 40, 1)
    for step in (20, 40):
        truncate(tmp_path / f"step-000000{step}.start-0001" / SHARD)
    with pytest.raises(CheckpointError) as caught:
        find_newest_complete(tmp_path, start_number=2)
    text = str(caught.value)
    assert f"{tmp_path}: no checkpoint is usable, 2 are damaged" in text
    assert "step-00000040.start-0001: rank-00001.safetensors has 95 bytes" in text
    assert "step-00000020.start-0001: rank-00001.safetensors has 95 bytes" in text
    assert "restart from step 0" in text


def test_resume_never_is_rejected_if_checkpoints_exist(tmp_path: Path) -> None:
    refuse_existing(tmp_path)
    small_checkpoints.save_step(tmp_path, 20, 1)
    with pytest.raises(ConfigurationError, match=r"is Never, but .* 1 checkpoints \(newest: step-00000020.start"):
        refuse_existing(tmp_path)


def test_a_header_that_is_nested_too_deep_is_invalid(tmp_path: Path) -> None:
    header = b"[" * 50_000 + b"]" * 50_000
    (tmp_path / SHARD).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DamagedError, match="does not begin with a safetensors header"):
        read_header(tmp_path / SHARD)


@pytest.mark.parametrize(("file", "damage", "text"), [case for case in DAMAGES if case[0] == SHARD])
def test_a_rank_finds_the_same_damage_in_what_it_reads(
    tmp_path: Path, file: str, damage: Callable[[Path], None], text: str
) -> None:
    small_checkpoints.save_step(tmp_path, 20, 1)
    reader = open_checkpoint(tmp_path / "step-00000020.start-0001")
    damage(reader.folder / file)
    with pytest.raises(DamagedError, match=r"^rank-00001.safetensors") as caught:
        reader.read_into("weight", (0, 0), torch.zeros(4, 3))
    if "digest" in text:
        assert re.match(text, str(caught.value))


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(5, 4), r"tensor weight was saved with shape \[5, 3\], .* \[5, 4\]"),
        (torch.zeros(5, 3, dtype=torch.bfloat16), r"tensor weight was saved as F32, .* torch.bfloat16"),
    ],
)
def test_loading_into_another_shape_or_dtype_is_rejected(tmp_path: Path, tensor: torch.Tensor, text: str) -> None:
    small_checkpoints.save_step(tmp_path, 20, 1)
    reader = open_checkpoint(tmp_path / "step-00000020.start-0001")
    with pytest.raises(CheckpointError, match=text):
        load_into([("weight", tensor)], reader)
    with pytest.raises(CheckpointError, match=r"tensor bias is missing .*1 tensors"):
        load_into([("bias", torch.zeros(5))], reader)


def test_a_manifest_of_a_later_version_is_rejected_with_its_version(tmp_path: Path) -> None:
    small_checkpoints.save_step(tmp_path, 20, 1)
    path = tmp_path / "step-00000020.start-0001" / MANIFEST
    reseal(path, lambda content: content.replace('"contractVersion":1', '"contractVersion":9'))
    with pytest.raises(CheckpointError, match=r"manifest.json has contractVersion 9; .* contract versions 1 to 2"):
        find_newest_complete(tmp_path, start_number=2)


class _Bomb:
    """Creates a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("file", [SHARD, MANIFEST])
def test_a_pickle_in_place_of_a_file_is_not_executed(tmp_path: Path, file: str) -> None:
    small_checkpoints.save_step(tmp_path, 20, 1)
    mark = tmp_path / "executed"
    bomb = pickle.dumps(_Bomb(mark))
    (tmp_path / "step-00000020.start-0001" / file).write_bytes(bomb)
    with pytest.raises(CheckpointError, match=file):
        find_newest_complete(tmp_path, start_number=2)
    assert not mark.exists()
    pickle.loads(bomb)
    assert mark.exists()  # Unpickling it would have worked.


def test_a_manifest_cannot_make_the_reader_leave_its_folder(tmp_path: Path) -> None:
    small_checkpoints.save_step(tmp_path, 20, 1)
    path = tmp_path / "step-00000020.start-0001" / MANIFEST
    reseal(path, lambda content: content.replace(SHARD, "../../secret"))
    with pytest.raises(CheckpointError, match=r"manifest.json: files.1.name: String should match pattern"):
        find_newest_complete(tmp_path, start_number=2)


def reseal(path: Path, change: Callable[[str], str]) -> None:
    """What an attacker with write access would do: the digest fits the changed content."""
    content = path.read_text().removeprefix('{"content":').rsplit(',"digest"', 1)[0]
    assert json.loads(content)
    changed = change(content)
    assert changed != content
    digest = hashlib.sha256(changed.encode()).hexdigest()
    path.write_text(f'{{"content":{changed},"digest":"sha256:{digest}"}}\n')
