"""Pickles tensors without copying: with pickle protocol 5 their bytes are out-of-band buffers.

A tensor is pickled as a flat array of its bytes. NumPy passes such an array to the pickler as a buffer over the
tensor's own memory, and unpickling returns a view of the reader's buffer, so an object store needs one copy to store a
batch and none to read it. Bytes work for all dtypes, also for those that NumPy does not have (bfloat16).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch

from rljob_trainer.errors import DataError


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A tensor's bytes with the dtype and shape that are needed to read them."""

    data: npt.NDArray[np.uint8]
    dtype: torch.dtype
    shape: tuple[int, ...]


def pack(name: str, tensor: torch.Tensor) -> PackedTensor:
    """Packs a tensor for pickling. Shares memory with a tensor that is contiguous and on the CPU; copies others.

    Only the elements of a view are packed, not those of the tensor behind it; a gradient is not packed. Raises
    DataError with the column's name for tensors that are not plain bytes (sparse, quantized, distributed).
    """
    detached = tensor.detach()
    if type(detached) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        raise DataError(
            f"column '{name}': a {type(detached).__name__} of {tensor.dtype}, layout {tensor.layout}, cannot be sent "
            "to another process; convert it to a dense tensor"
        )
    plain = detached.cpu().resolve_conj().resolve_neg().contiguous()
    # A single element is contiguous with any stride, but cannot be viewed as bytes unless the stride is 1.
    flat = plain.as_strided((plain.numel(),), (1,), plain.storage_offset())
    return PackedTensor(flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))


def unpack(packed: PackedTensor) -> torch.Tensor:
    """The tensor, sharing the memory of `packed.data`.

    torch shows the tensor as writable even if its memory is read-only, as in an object store. So treat received columns
    as read-only.
    """
    if not packed.data.size:
        return torch.empty(packed.shape, dtype=packed.dtype)
    data = packed.data if packed.data.flags.writeable else np.asarray(_WritableView(packed.data))
    return torch.from_numpy(data).view(packed.dtype).view(packed.shape)


class _ArrayInterface(TypedDict):
    """NumPy's array interface, version 3, of a flat array of bytes."""

    version: int
    typestr: str
    shape: tuple[int, ...]
    data: tuple[int, bool]


class _WritableView:
    """Presents read-only bytes as writable and keeps them alive, because torch has no read-only tensors and warns about
    each read-only array that it is given."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self._data = data
        self.__array_interface__ = _ArrayInterface(
            version=3, typestr="|u1", shape=data.shape, data=(data.ctypes.data, False)
        )
