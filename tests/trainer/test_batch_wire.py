"""Batches are pickled without copying their tensors, and unpickled without copying them."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from rljob_testing.training import data_protos
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.errors import DataError

NUM_ROWS = 1024
MEGABYTE = 1024 * 1024


def large_batch() -> DataProto:
    """64 MB, half of it padded, half of it ragged."""
    return DataProto(
        {
            "hidden": torch.randn(NUM_ROWS, 8192).to(torch.bfloat16),
            "ids": torch.ones(NUM_ROWS, 2048, dtype=torch.int64),
        },
        ragged={"tokens": RaggedColumn(torch.ones(NUM_ROWS * 8192, dtype=torch.int32), torch.full((NUM_ROWS,), 8192))},
    )


def dumped(batch: DataProto) -> tuple[bytes, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(batch, protocol=5, buffer_callback=buffers.append), buffers


def address(buffer: pickle.PickleBuffer | bytes) -> int:
    view = buffer.raw() if isinstance(buffer, pickle.PickleBuffer) else memoryview(buffer)
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def addresses(batch: DataProto) -> list[int]:
    ragged = batch.ragged["tokens"]
    return [*(t.data_ptr() for t in batch.tensors.values()), ragged.values.data_ptr(), ragged.lengths.data_ptr()]


def test_a_batch_of_64_megabytes_is_sent_out_of_band_from_its_own_memory() -> None:
    batch = large_batch()
    in_band, buffers = dumped(batch)
    assert len(in_band) < 1000
    assert [address(buffer) for buffer in buffers] == addresses(batch)
    assert sum(len(buffer.raw()) for buffer in buffers) == 64 * MEGABYTE + 8 * NUM_ROWS


def test_it_is_received_over_the_memory_of_read_only_buffers() -> None:
    batch = large_batch()
    in_band, buffers = dumped(batch)
    stored = [bytes(buffer) for buffer in buffers]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrived: DataProto = pickle.loads(in_band, buffers=stored)
    assert addresses(arrived) == [address(buffer) for buffer in stored]
    for name, tensor in batch.tensors.items():
        assert torch.equal(arrived[name], tensor)
    assert arrived.ragged["tokens"].same_as(batch.ragged["tokens"])


@pytest.mark.parametrize("is_read_only", [True, False])
def test_a_received_batch_keeps_its_memory_alive(is_read_only: bool) -> None:
    memory = bytearray(np.array([7], dtype=np.int64).tobytes())
    in_band, _ = dumped(DataProto({"x": torch.zeros(1, dtype=torch.int64)}))
    buffer = memoryview(memory).toreadonly() if is_read_only else memoryview(memory)
    arrived = pickle.loads(in_band, buffers=[buffer])
    del buffer
    # Python does not move memory that another object still uses.
    with pytest.raises(BufferError):
        memory.extend(b"more")
    assert arrived["x"].tolist() == [7]
    del arrived
    memory.extend(b"more")


def test_a_slice_is_sent_without_the_rest() -> None:
    batch = large_batch().slice(3, 4)
    in_band, buffers = dumped(batch)
    assert [len(buffer.raw()) for buffer in buffers] == [8192 * 2, 2048 * 8, 8192 * 4, 8]
    assert address(buffers[0]) == batch["hidden"].data_ptr()
    assert len(pickle.dumps(batch)) < len(in_band) + 8192 * 2 + 2048 * 8 + 8192 * 4 + 1000


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.arange(24).reshape(4, 6)[:, ::2], id="every second column"),
        pytest.param(torch.arange(24).reshape(4, 6).T, id="transposed"),
        pytest.param(torch.arange(4).reshape(4, 1).expand(4, 3), id="expanded"),
        pytest.param(torch.zeros(0, 3, dtype=torch.bfloat16), id="no rows"),
        pytest.param(torch.zeros(3, 0, dtype=torch.bool), id="empty rows"),
        pytest.param(torch.tensor([True, False]), id="bool"),
        pytest.param(torch.tensor([1.5, float("nan")], dtype=torch.bfloat16), id="bfloat16"),
        pytest.param(torch.tensor([1.5, -0.0]).to(torch.float8_e5m2), id="float8"),
        pytest.param(torch.tensor([2**64 - 1], dtype=torch.uint64), id="uint64"),
        pytest.param(torch.tensor([1 + 2j]).conj(), id="conjugated"),
        pytest.param(torch.tensor([1.5], requires_grad=True), id="with gradient"),
        pytest.param(torch.nn.Parameter(torch.tensor([1.5])), id="parameter"),
    ],
)
def test_every_tensor_is_received_with_dtype_shape_and_content(tensor: torch.Tensor) -> None:
    batch = DataProto({"x": tensor})
    in_band, buffers = dumped(batch)
    for arrived in (
        pickle.loads(in_band, buffers=[bytearray(buffer.raw()) for buffer in buffers]),
        *(pickle.loads(pickle.dumps(batch, protocol)) for protocol in (2, 4, 5)),
    ):
        assert (arrived["x"].dtype, arrived["x"].shape) == (tensor.dtype, tensor.shape)
        assert repr(arrived["x"].tolist()) == repr(tensor.tolist())
        assert not arrived["x"].requires_grad


def test_a_tensor_of_inference_mode_is_received() -> None:
    with torch.inference_mode():
        batch = DataProto({"x": torch.arange(3)})
    assert pickle.loads(pickle.dumps(batch))["x"].tolist() == [0, 1, 2]
    assert batch.tensor_versions() == {}


def test_tensors_that_are_not_plain_bytes_are_rejected_by_name() -> None:
    with pytest.raises(DataError, match=r"column 'odd': a Tensor of torch.float32, layout torch.sparse_coo, .*dense"):
        pickle.dumps(DataProto({"odd": torch.zeros(2, 2).to_sparse()}))


def test_all_kinds_of_columns_and_meta_are_received_in_another_process() -> None:
    batch = DataProto(
        {"x": torch.tensor([1, 2])},
        {"texts": ("a", "b")},
        {"step": 3, "names": ("u", "v")},
        {"tokens": RaggedColumn.from_rows([[1], [2, 3]])},
    )
    program = (
        "import pickle, sys\n"
        "b = pickle.load(sys.stdin.buffer)\n"
        "print(b['x'].tolist(), b.objects['texts'], dict(b.meta), b.ragged['tokens'].values.tolist())"
    )
    result = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(batch), capture_output=True, check=True)
    assert result.stdout.decode().strip() == "[1, 2] ('a', 'b') {'step': 3, 'names': ('u', 'v')} [1, 2, 3]"


def test_a_remote_block_is_sent_by_reference() -> None:
    batch = data_protos.remote_batch(large_batch())
    assert len(pickle.dumps(batch)) < 20_000
    arrived: DataProto = pickle.loads(pickle.dumps(batch.slice(2, 4)))
    assert arrived.remote[0].shards == batch.remote[0].shards
    assert data_protos.rows_of(arrived.fetched(["ids"]).only(["ids"])) == data_protos.rows_of(
        large_batch().only(["ids"]).slice(2, 4)
    )


def test_a_deep_copy_has_memory_of_its_own() -> None:
    batch = DataProto({"x": torch.zeros(2)}, {"lists": ([1], [2])})
    copied = copy.deepcopy(batch)
    batch["x"].add_(1)
    assert copied["x"].tolist() == [0.0, 0.0]
    assert copied.object_column("lists")[0] is not batch.object_column("lists")[0]
