"""Memory that is really held: storages that some tensor of this process still refers to."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor


def num_live_bytes() -> int:
    """Of all storages on the host, each once."""
    gc.collect()
    return sum({storage.data_ptr(): storage.nbytes() for storage in _storages()}.values())


def _storages() -> Iterator[torch.UntypedStorage]:
    for each in gc.get_objects():
        # The type, not the object: a proxy would be asked for its class.
        if issubclass(type(each), torch.Tensor):
            local = each._local_tensor if isinstance(each, DTensor) else each
            if local.layout is torch.strided and local.device.type == "cpu" and local.untyped_storage().nbytes():
                yield local.untyped_storage()
