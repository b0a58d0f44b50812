"""Fused kernels in training: norms and rotary embedding of liger-kernel instead of those of transformers.

Only the modules of one model are changed, and during a forward pass the rotary function of its Python module. Other
models of the process, such as that of the HuggingFace engine, keep the operations of transformers. The check of
`logprob_parity` compares the engine with these kernels to the model without.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

from torch import Tensor, nn
from transformers import PreTrainedConfig

from rljob_api.v1alpha1.model import Kernels
from rljob_trainer.errors import ConfigurationError

FIELD = "spec.training.model.kernels"
LIGER_MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model types whose norms are all of Llama's form, weight * (x / rms(x)) with rms in float32, and which rotate queries
and keys by `apply_rotary_pos_emb` of their own Python module."""
ROTARY = "apply_rotary_pos_emb"

Forward = Callable[..., object]


def check_kernels(kernels: Kernels, config: PreTrainedConfig) -> None:
    """Raises ConfigurationError if a model with this configuration cannot run with these kernels, or if their package
    is not installed."""
    if kernels is Kernels.PLAIN:
        return
    if config.model_type not in LIGER_MODEL_TYPES:
        raise ConfigurationError(
            f"{FIELD}: Liger supports models of the types {', '.join(LIGER_MODEL_TYPES)} (seen: "
            f"'{config.model_type}'); set Plain"
        )
    if importlib.util.find_spec("liger_kernel") is None:
        raise ConfigurationError(
            f"{FIELD}: liger-kernel is not installed (seen: Liger); install the trainer's `kernels` extra (on a "
            "cluster, in your own image), or set Plain"
        )


def check_kernel_device(kernels: Kernels, device_type: str) -> None:
    """Raises ConfigurationError if these kernels do not run on devices of this type."""
    if kernels is not Kernels.PLAIN and device_type != "cuda":
        raise ConfigurationError(f"{FIELD}: Liger needs GPUs (seen: {device_type}); set Plain")


@contextmanager
def errors_about_kernels(kernels: Kernels) -> Iterator[None]:
    """Adds the advice to set Plain to a ConfigurationError of this block, because these kernels may be the cause."""
    try:
        yield
    except ConfigurationError as error:
        if kernels is Kernels.PLAIN:
            raise
        raise ConfigurationError(f"{error}; or set {FIELD}: Plain (seen: {kernels.value})") from error


@contextmanager
def fused_kernels(language_model: nn.Module, kernels: Kernels) -> Iterator[None]:
    """Within this block the model runs with these kernels."""
    changed = apply_kernels(language_model, kernels)
    try:
        yield
    finally:
        for module in changed:
            del vars(module)["forward"]


def apply_kernels(language_model: nn.Module, kernels: Kernels) -> list[nn.Module]:
    """Makes the model run with these kernels from now on. Returns the modules that were changed: each has a `forward`
    of its own, instead of that of its class. `check_kernels` has accepted the model."""
    if kernels is Kernels.PLAIN:
        return []
    from liger_kernel.transformers.functional import liger_rms_norm
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    changed = list[nn.Module]()
    for module in language_model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            vars(module)["forward"] = _norm(module, liger_rms_norm)
        elif name.endswith("Attention"):
            vars(module)["forward"] = _attention(module, liger_rotary_pos_emb)
        else:
            continue
        changed.append(module)
    return changed


def _norm(module: nn.Module, norm: Callable[..., Tensor]) -> Forward:
    """The forward pass of a norm. With `in_place`, liger-kernel would overwrite the incoming gradient, which a model
    may still need elsewhere. The parity check would not notice this, because it compares log-probabilities only."""
    epsilon = module.variance_epsilon

    def forward(hidden: Tensor) -> Tensor:
        return norm(hidden, module.weight, epsilon, offset=0.0, casting_mode="llama", in_place=False)

    return forward


def _attention(module: nn.Module, rotary: Callable[..., tuple[Tensor, Tensor]]) -> Forward:
    """The forward pass of an attention module. While it runs, `rotary` replaces the rotary function of the Python
    module. Then the original returns, because other models of the process use the same Python module. A recomputed
    layer calls this forward pass again.

    The function writes into queries and keys, and in the backward pass into their gradients. This is safe in the models
    of LIGER_MODEL_TYPES: the tensors are outputs of projections or norms, which keep only their inputs for the backward
    pass, so nothing reads them afterwards."""
    plain, python_module = module.forward, sys.modules[type(module).__module__]

    def forward(*arguments: object, **named: object) -> object:
        with _replaced(python_module, rotary):
            return plain(*arguments, **named)

    return forward


@contextmanager
def _replaced(python_module: ModuleType, rotary: Callable[..., tuple[Tensor, Tensor]]) -> Iterator[None]:
    before = getattr(python_module, ROTARY)
    setattr(python_module, ROTARY, rotary)
    try:
        yield
    finally:
        setattr(python_module, ROTARY, before)
