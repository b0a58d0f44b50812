"""A fake of the package liger-kernel: the same functions, by plain operations that run on CPUs. Like those of the
package, the rotary function writes into its arguments, and into their gradients."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Protocol

import pytest
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

TRANSFORMERS = "liger_kernel.transformers"


class _RotaryInPlace(torch.autograd.Function):
    """As `ops.rope.LigerRopeFunction`. Tensors that are transposed back are contiguous, so they are not copied."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates queries and keys."""
        ctx.save_for_backward(cos, sin)
        return _rotated_in_place(q, cos, sin), _rotated_in_place(k, cos, sin)

    @staticmethod
    def backward(ctx: _Saved, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Rotates their gradients back."""
        cos, sin = ctx.saved_tensors
        return _rotated_in_place(dq, cos, -sin), _rotated_in_place(dk, cos, -sin), None, None


class _Saved(Protocol):
    saved_tensors: tuple[Tensor, ...]


def _rotated_in_place(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    states = states.transpose(1, 2).contiguous()
    one, other = states.chunk(2, dim=-1)
    states.copy_(states * cos.unsqueeze(2) + torch.cat((-other, one), dim=-1) * sin.unsqueeze(2))
    return states.transpose(1, 2)


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
        assert (position_ids, unsqueeze_dim) == (None, 1)
        self.calls.append("rotary")
        factor = 1 + self.rotary_error
        rotated: tuple[Tensor, Tensor] = _RotaryInPlace.apply(  # type: ignore[no-untyped-call]
            q, k, cos * factor, sin * factor
        )
        return rotated

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
