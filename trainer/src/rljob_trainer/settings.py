"""The only module that reads or writes the process environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rljob_api.contract import (
    ENV_ATTEMPT,
    ENV_CHECKPOINT_FOLDER,
    ENV_DEVICE,
    ENV_JOB_FOLDER,
    ENV_RUN_FOLDER,
    ENV_RUN_STATE_FILE,
    ENV_SPEC,
    RUN_STATE_FILE_NAME,
)
from rljob_trainer.errors import ConfigurationError


@dataclass(frozen=True)
class Settings:
    """What the environment says about this run; everything else is in the job."""

    spec_text: str
    run_folder: Path
    checkpoint_folder: Path
    run_state_file: Path
    job_folder: Path
    """Base of relative dataset paths."""
    attempt: int
    device_type: str | None
    """`cpu` or `cuda`; found out when None."""
    ray_address: str | None
    """An existing Ray cluster; one is started here when None."""
    cache_folder: Path
    num_threads: int | None
    """CPU threads per worker process; the machine's cores are shared out when None."""
    num_cores: int
    environment: Mapping[str, str]
    """The variables themselves, for processes that get a chosen part of them."""


def read_settings() -> Settings:
    """Raises ConfigurationError for a missing or impossible variable."""
    spec_text = os.environ.get(ENV_SPEC)
    if not spec_text:
        raise ConfigurationError(f"{ENV_SPEC}: not set; the trainer is started by `rljob run` or by the operator")
    run_folder = Path(os.environ.get(ENV_RUN_FOLDER, "run")).absolute()
    attempt_text = os.environ.get(ENV_ATTEMPT, "1")
    if not attempt_text.isdecimal() or int(attempt_text) < 1:
        raise ConfigurationError(f"{ENV_ATTEMPT}: must be a whole number from 1 (seen: {attempt_text!r})")
    device_type = os.environ.get(ENV_DEVICE)
    if device_type not in (None, "cpu", "cuda"):
        raise ConfigurationError(f"{ENV_DEVICE}: must be cpu or cuda (seen: {device_type!r})")
    threads_text = os.environ.get("OMP_NUM_THREADS", "")
    if threads_text and not (threads_text.isdecimal() and int(threads_text) > 0):
        raise ConfigurationError(f"OMP_NUM_THREADS: must be a whole number from 1 (seen: {threads_text!r})")
    return Settings(
        spec_text=spec_text,
        run_folder=run_folder,
        checkpoint_folder=Path(os.environ.get(ENV_CHECKPOINT_FOLDER, str(run_folder / "checkpoints"))).absolute(),
        run_state_file=Path(os.environ.get(ENV_RUN_STATE_FILE, str(run_folder / RUN_STATE_FILE_NAME))).absolute(),
        job_folder=Path(os.environ.get(ENV_JOB_FOLDER, ".")).absolute(),
        attempt=int(attempt_text),
        device_type=device_type,
        ray_address=os.environ.get("RAY_ADDRESS"),
        cache_folder=cache_folder(),
        num_threads=int(threads_text) if threads_text else None,
        num_cores=len(os.sched_getaffinity(0)),
        environment=dict(os.environ),
    )


def cache_folder() -> Path:
    """Where converted models are kept between runs."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "rljob"
    return Path(os.environ.get("RLJOB_CACHE", str(default)))


def worker_environment(device_type: str, num_threads: int) -> dict[str, str]:
    """Variables that a worker process must have before it imports torch or vLLM."""
    threads = str(num_threads)
    variables = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    if device_type == "cpu":
        variables |= {
            # The binding of threads to cores assumes that the engine owns the machine.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_WAIT_POLICY": "PASSIVE",
            # vLLM decorates small sampling functions with torch.compile even in eager mode: 20 s at the first call,
            # and a C++ compiler that the machine may not have.
            "TORCHDYNAMO_DISABLE": "1",
        }
    return {name: value for name, value in variables.items() if value}


def driver_environment() -> None:
    """Settings of libraries in the controller's process that have to be made before they are imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def export_rank(rank: int, world_size: int, local_rank: int, master_address: str, master_port: int) -> None:
    """Sets what torch.distributed and vLLM's external launcher read."""
    os.environ.update(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(local_rank),
            "MASTER_ADDR": master_address,
            "MASTER_PORT": str(master_port),
        }
    )
