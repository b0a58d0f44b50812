"""Which rollout engine a worker uses, whether that compiles the model, and whether it has adapters of its own."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from pathlib import Path

from rljob_api.v1alpha1.model import LoraSync
from rljob_api.v1alpha1.rollout import Compile
from rljob_api.v1alpha1.rollout import RolloutEngine as RolloutEngineName
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.settings import cpp_compiler

MIN_STEPS_TO_COMPILE = 300
"""Of a job on CPUs. On two cores the first compilation of a small model took 40 s, and a start with what an earlier
one has left in the cache 8 s; a step became a third of a second shorter."""


def select_engine(wanted: RolloutEngineName) -> RolloutEngineName:
    """`VLLM` or `HuggingFace`. Raises ConfigurationError when vLLM is wanted and not installed."""
    installed = importlib.util.find_spec("vllm") is not None
    if wanted is RolloutEngineName.AUTO:
        return RolloutEngineName.VLLM if installed else RolloutEngineName.HUGGING_FACE
    if wanted is RolloutEngineName.VLLM and not installed:
        raise ConfigurationError(
            "spec.training.rollout.engine: vLLM is not installed (seen: VLLM); install the trainer's `cpu` or `gpu` "
            "extra, or write HuggingFace or Auto"
        )
    return wanted


def check_build(found: str, device_type: str) -> None:
    """Raises ConfigurationError for a build of vLLM that cannot compute on this kind of device. `found` is the kind of
    vLLM's platform: empty where it has found no device that it was built for."""
    if found != device_type:
        build = "cpu" if device_type == "cpu" else "gpu"
        raise ConfigurationError(
            f"spec.training.rollout.engine: the installed vLLM does not compute on this machine's device "
            f"({device_type}; vLLM finds {found or 'no device that it was built for'}); install the trainer's "
            f"`{build}` extra, or write HuggingFace"
        )


def select_compile(wanted: Compile, engine: RolloutEngineName, device_type: str, num_steps: int) -> Compile:
    """`ALWAYS` or `NEVER`; the workers' machines are taken to be like this one. Raises ConfigurationError when it is
    wanted and the engine cannot, or on CPUs this machine lacks what it takes."""
    if engine is not RolloutEngineName.VLLM:
        if wanted is Compile.ALWAYS:
            raise ConfigurationError(
                f"spec.training.rollout.compile: only vLLM compiles, and the engine is {engine.value} (seen: Always); "
                "write Never or Auto"
            )
        return Compile.NEVER
    if wanted is Compile.NEVER:
        return wanted
    if device_type != "cpu":
        return Compile.ALWAYS
    missing = missing_for_compilation()
    if wanted is Compile.ALWAYS and missing:
        raise ConfigurationError(
            f"spec.training.rollout.compile: on CPUs compiling takes {missing}, which is not here (seen: Always); "
            "install it (on a cluster in an image of your own: the CPU image has none), or write Never or Auto"
        )
    is_worth_it = wanted is Compile.ALWAYS or (not missing and num_steps >= MIN_STEPS_TO_COMPILE)
    return Compile.ALWAYS if is_worth_it else Compile.NEVER


def select_lora_sync(
    wanted: LoraSync, engine: RolloutEngineName, device_type: str, *, has_experts: bool
) -> tuple[LoraSync, str]:
    """`ADAPTER` or `MERGED`, and why. Raises ConfigurationError where adapters are wanted and the engine takes none."""
    if engine is not RolloutEngineName.VLLM:
        if wanted is LoraSync.ADAPTER:
            raise ConfigurationError(
                f"spec.training.model.lora.sync: the {engine.value} engine takes no adapters (seen: Adapter); write "
                "Merged or Auto, or rollout.engine: VLLM"
            )
        return LoraSync.MERGED, f"the {engine.value} engine takes no adapters"
    if has_experts and wanted is LoraSync.ADAPTER and device_type == "cpu":
        raise ConfigurationError(
            "spec.training.model.lora.sync: vLLM takes no adapters for models with experts on CPUs (seen: Adapter); "
            "write Merged or Auto"
        )
    if wanted is not LoraSync.AUTO:
        return wanted, "the job says so"
    if has_experts:
        return LoraSync.MERGED, "the model has experts"
    if device_type == "cpu":
        return LoraSync.MERGED, "vLLM decodes half as fast with adapters on CPUs"
    return LoraSync.ADAPTER, "on GPUs adapters cost little"


def missing_for_compilation() -> str | None:
    """What torch's compiler for CPUs would not find; None when everything is there."""
    compiler = cpp_compiler()
    if shutil.which(compiler) is None:
        return f"a C++ compiler ({compiler})"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return None if header.exists() else f"Python's header files ({header})"
