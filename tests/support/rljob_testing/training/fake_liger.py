"""A stand-in for the package liger-kernel: the same functions, by plain operations that run on CPUs."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch import Tensor

TRANSFORMERS = "liger_kernel.transformers"


@dataclass
class FakeLiger:
    """Counts calls. `norm_error` and `rotary_error` are relative errors of the results."""

    norm_error: float = 0.0
    rotary_error: float = 0.0
    calls: list[str] = field(default_factory=list)
    in_place: set[bool] = field(default_factory=set)

    def rms_norm(
        self,
        X: Tensor,  # the package's name
        W: Tensor,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = True,
    ) -> Tensor:
        """`functional.liger_rms_norm` with the casts of Llama."""
        assert (offset, casting_mode) == (0.0, "llama")
        self.calls.append("norm")
        self.in_place.add(in_place)
        wide = X.float()
        normalized = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        result: Tensor = W * normalized.to(X.dtype) * (1 + self.norm_error)
        return result

    def rotary(
        self,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        position_ids: Tensor | None = None,
        unsqueeze_dim: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """`rope.liger_rotary_pos_emb`."""
        assert position_ids is None
        self.calls.append("rotary")
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

        def rotated(states: Tensor) -> Tensor:
            one, other = states.chunk(2, dim=-1)
            return (states * cos + torch.cat((-other, one), dim=-1) * sin) * (1 + self.rotary_error)

        return rotated(q), rotated(k)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Makes this the installed package."""
        modules = {name: ModuleType(name) for name in ("liger_kernel", TRANSFORMERS)}
        for name, function in {"functional": self.rms_norm, "rope": self.rotary}.items():
            module = modules[f"{TRANSFORMERS}.{name}"] = ModuleType(f"{TRANSFORMERS}.{name}")
            vars(module)["liger_rms_norm" if name == "functional" else "liger_rotary_pos_emb"] = function
        for name, module in modules.items():
            module.__spec__ = ModuleSpec(name, None)
            module.__path__ = []
            patch.setitem(sys.modules, name, module)
