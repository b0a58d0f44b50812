"""The states of the global random generators of torch (CPU, CUDA), NumPy and Python, as JSON without pickle."""

from __future__ import annotations

import base64
import random

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from rljob_trainer.checkpoints.errors import CheckpointError


class _NumpyState(BaseModel):
    model_config = ConfigDict(strict=True)

    keys: list[int]
    position: int
    has_gauss: int
    cached_gaussian: float


class _PythonState(BaseModel):
    model_config = ConfigDict(strict=True)

    version: int
    words: list[int]
    next_gauss: float | None


class _RandomState(BaseModel):
    model_config = ConfigDict(strict=True)

    torch_cpu: str
    """base64 of the generator's bytes."""
    torch_cuda: str | None
    """base64 of the bytes of the generator of the process's own GPU; None without a GPU."""
    numpy: _NumpyState
    python: _PythonState


def capture_random_state(device: torch.device) -> dict[str, JsonValue]:
    """Returns the states of this process's global generators, about 20 kB of JSON. Of the GPUs that the process sees,
    only `device` counts; the others belong to other processes."""
    _, keys, position, has_gauss, cached_gaussian = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    state = _RandomState(
        torch_cpu=_encode(torch.get_rng_state()),
        torch_cuda=_encode(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
        numpy=_NumpyState(
            keys=[int(key) for key in keys],
            position=int(position),
            has_gauss=int(has_gauss),
            cached_gaussian=float(cached_gaussian),
        ),
        python=_PythonState(version=version, words=list(words), next_gauss=next_gauss),
    )
    return state.model_dump(mode="json")


def restore_random_state(document: JsonValue, device: torch.device) -> None:
    """Sets the generators to a captured state. If `device` is a GPU, its generator gets the state of the GPU in the
    document, which may have had another number.

    Raises CheckpointError if `capture_random_state` has not created the document; then nothing is set.
    """
    try:
        state = _RandomState.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(
            f"random state of the checkpoint: {where}: {first['msg']}; the checkpoint was not written by rljob"
        ) from error
    torch.set_rng_state(_decode(state.torch_cpu))
    if device.type == "cuda" and state.torch_cuda is not None:
        torch.cuda.set_rng_state(_decode(state.torch_cuda), device)
    keys = np.array(state.numpy.keys, dtype=np.uint32)
    np.random.set_state(("MT19937", keys, state.numpy.position, state.numpy.has_gauss, state.numpy.cached_gaussian))
    random.setstate((state.python.version, tuple(state.python.words), state.python.next_gauss))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
