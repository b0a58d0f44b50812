"""Tensors on their way to another process: with pickle protocol 5 their bytes leave out of band and are not copied.

A tensor travels as a flat array of its bytes. NumPy hands such an array to the pickler as one buffer over the tensor's
own memory, and what is unpickled is a view of the buffer that the reader was given: an object store needs one copy to
store a batch and none to read it. Bytes serve all dtypes alike, also those that NumPy does not have (bfloat16).
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
    """A tensor's bytes with what is needed to read them."""

    data: npt.NDArray[np.uint8]
    dtype: torch.dtype
    shape: tuple[int, ...]


def pack(name: str, tensor: torch.Tensor) -> PackedTensor:
    """A tensor for pickling. Shares its memory where that is contiguous and on the CPU, else holds a copy.

    Only the elements of the tensor travel, not the larger one of which it may be a view, and no gradient. Raises
    DataError, naming the column, for tensors that are not plain bytes (sparse, quantized, distributed).
    """
    detached = tensor.detach()
    if type(detached) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        raise DataError(
            f"column '{name}': a {type(detached).__name__} of {tensor.dtype}, layout {tensor.layout}, cannot travel; "
            "make it a dense tensor"
        )
    plain = detached.cpu().resolve_conj().resolve_neg().contiguous()
    # A single element counts as contiguous whatever its stride, which stays, and then cannot be seen as bytes.
    flat = plain.as_strided((plain.numel(),), (1,), plain.storage_offset())
    return PackedTensor(flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))


def unpack(packed: PackedTensor) -> torch.Tensor:
    """The tensor, over the memory of `packed.data`.

    It looks writable even where that memory is not (an object store's): treat received columns as read-only.
    """
    if not packed.data.size:
        return torch.empty(packed.shape, dtype=packed.dtype)
    data = packed.data if packed.data.flags.writeable else np.asarray(_WritableLook(packed.data))
    return torch.from_numpy(data).view(packed.dtype).view(packed.shape)


class _ArrayInterface(TypedDict):
    """NumPy's array interface, version 3, of a flat array of bytes."""

    version: int
    typestr: str
    shape: tuple[int, ...]
    data: tuple[int, bool]


class _WritableLook:
    """Shows read-only bytes as writable, and keeps them alive: torch has no read-only tensors and warns of such bytes
    for each one that it is given."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self._data = data
        self.__array_interface__ = _ArrayInterface(
            version=3, typestr="|u1", shape=data.shape, data=(data.ctypes.data, False)
        )
