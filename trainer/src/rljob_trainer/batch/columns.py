"""Operations on single tensor and object columns: select, concatenate, compare, measure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch

from rljob_trainer.batch.row_index import Positions
from rljob_trainer.errors import DataError

BYTES_PER_NUMBER = 8
LARGE_BYTES = 4 << 20
"""From this size on, the result of `concat_tensors` is allocated by NumPy."""
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def take_tensor(column: torch.Tensor, positions: Positions) -> torch.Tensor:
    """The rows at `positions`; a view if `positions` is a range, else a copy."""
    if isinstance(positions, range):
        return column[positions.start : positions.stop]
    index = torch.from_numpy(positions).to(column.device)
    return with_dtype(as_signed(column).index_select(0, index), column.dtype)


def with_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A view with another dtype of the same size; the tensor itself if it has the dtype, because a view by dtype would
    lose the gradient."""
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def tensor_of_array(where: str, array: npt.NDArray[np.generic]) -> torch.Tensor:
    """A tensor that shares the array's memory if torch supports its layout, otherwise a copy. Raises DataError,
    starting with `where`, for a dtype that torch does not have, for an array without dimensions, and for a masked
    array, whose mask would be lost."""
    if isinstance(array, np.ma.MaskedArray):
        raise DataError(f"{where} is a masked array, whose mask would be lost; fill it, or pass the mask as a column")
    if not array.ndim:
        raise DataError(f"{where} is a single value and has no rows; put values of the whole batch into meta")
    # torch does not support negative strides and foreign byte order, and warns about read-only memory.
    plain = np.require(array, dtype=array.dtype.newbyteorder("="), requirements=["C", "W"])
    try:
        return torch.from_numpy(plain)
    except TypeError as error:
        raise DataError(f"{where} is an array of {array.dtype}, which torch does not support; convert it") from error


def as_signed(tensor: torch.Tensor) -> torch.Tensor:
    """A view with a signed dtype if the dtype is unsigned and has 16 bits or more, because torch cannot index such
    tensors."""
    return tensor.view(_SIGNED[tensor.dtype]) if tensor.dtype in _SIGNED else tensor


def take_objects(column: tuple[object, ...], positions: Positions) -> tuple[object, ...]:
    """The values at `positions`."""
    if isinstance(positions, range):
        return column[positions.start : positions.stop]
    return tuple(column[position] for position in positions.tolist())


def concat_tensors(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates one or more tensors along the first dimension; returns a single one unchanged.

    Raises DataError with the column's name if they differ in dtype, device or another dimension: torch would silently
    convert them to a common dtype.
    """
    kinds = {(str(part.dtype), tuple(part.shape[1:]), str(part.device)): None for part in parts}
    if len(kinds) > 1:
        seen = "; ".join(
            f"{dtype} [*{''.join(f', {size}' for size in shape)}] on {device}" for dtype, shape, device in kinds
        )
        raise DataError(
            f"{name}: parts differ in dtype, shape or device (seen: {seen}); convert them, or use a ragged column for "
            "rows of different lengths"
        )
    if len(parts) == 1:
        return parts[0]
    num_bytes = sum(tensor_bytes(part) for part in parts)
    has_gradient = any(part.requires_grad for part in parts)
    if parts[0].device.type != "cpu" or num_bytes < LARGE_BYTES or has_gradient:
        return torch.cat(list(parts))
    # NumPy asks the kernel for huge pages, torch does not. A copy into new memory spends most of its time on page
    # faults.
    memory = torch.from_numpy(np.empty(num_bytes, dtype=np.uint8)).view(parts[0].dtype)
    return torch.cat(list(parts), out=memory.view(-1, *parts[0].shape[1:]))


def same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether dtype, shape, device and content are equal; NaN equals NaN."""
    if left is right:
        return True
    if left.dtype != right.dtype or left.shape != right.shape or left.device != right.device:
        return False
    if left.dtype.is_floating_point and left.dtype.itemsize == 1:
        # torch cannot compare 8-bit floats.
        left, right = left.to(torch.float32), right.to(torch.float32)
    if left.dtype == torch.complex32:
        left, right = left.to(torch.complex64), right.to(torch.complex64)
    if torch.equal(left, right):
        return True
    if not (left.dtype.is_floating_point or left.dtype.is_complex):
        return False
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def same_value(left: object, right: object) -> bool:
    """Whether two Python values are equal, including nested values and arrays; NaN equals NaN."""
    if left is right:
        return True
    match left, right:
        case torch.Tensor(), torch.Tensor():
            return same_tensor(left, right)
        case np.ndarray(), np.ndarray():
            return left.dtype == right.dtype and left.shape == right.shape and same_value(left.tolist(), right.tolist())
        case ((float() | np.number()), (float() | np.number())):
            return bool(left == right or (left != left and right != right))
        case list(), list():
            return len(left) == len(right) and all(map(same_value, left, right))
        case tuple(), tuple():
            return len(left) == len(right) and all(map(same_value, left, right))
        case deque(), deque():
            return len(left) == len(right) and all(map(same_value, left, right))
        case Mapping(), Mapping():
            return left.keys() == right.keys() and all(same_value(value, right[key]) for key, value in left.items())
        case (torch.Tensor() | np.ndarray(), _) | (_, torch.Tensor() | np.ndarray()):
            return False
    if is_dataclass(left) and type(left) is type(right):
        values = [attrgetter(each.name) for each in fields(left) if each.compare]
        return all(same_value(value(left), value(right)) for value in values)
    try:
        return bool(left == right)
    except (TypeError, ValueError, RuntimeError):
        # The result of an elementwise comparison has no truth value.
        return False


def tensor_bytes(tensor: torch.Tensor) -> int:
    """The size of the elements in bytes."""
    return tensor.numel() * tensor.element_size()


def value_bytes(value: object) -> int:
    """The estimated pickled size of a Python value: the length of strings and bytes, 8 bytes for any other scalar."""
    match value:
        case str() | bytes():
            return len(value)
        case torch.Tensor():
            return tensor_bytes(value)
        case np.ndarray():
            return value.nbytes
        case Mapping():
            return sum(value_bytes(key) + value_bytes(item) for key, item in value.items())
        case list() | tuple() | set() | frozenset():
            return sum(map(value_bytes, value))
    return BYTES_PER_NUMBER
