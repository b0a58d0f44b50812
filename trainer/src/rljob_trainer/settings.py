"""The only module that reads or writes the process environment."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rljob_api.constants import (
    ENV_ATTEMPT,
    ENV_CACHE,
    ENV_CHECKPOINT_FOLDER,
    ENV_DEVICE,
    ENV_GRACE_SECONDS,
    ENV_JOB_FOLDER,
    ENV_NODE_NAME,
    ENV_POD_NAME,
    ENV_POOL_NODES,
    ENV_RUN_FOLDER,
    ENV_RUN_STATE_FILE,
    ENV_SHIPPED_CODE,
    ENV_SPEC,
    ENV_START_NUMBER,
    RAY_WORKER_NICENESS,
    RUN_STATE_FILE_NAME,
)
from rljob_trainer.errors import ConfigurationError

NUM_THREADS_VARIABLE = "OMP_NUM_THREADS"
SPIN_COUNT_VARIABLE, SPIN_COUNT = "GOMP_SPINCOUNT", "100000"
"""How long a thread looks out for the next parallel loop before it sleeps: a millisecond or a few. A step of a small
model has thousands of such loops, a few of them in a millisecond; waking threads for each (OMP_WAIT_POLICY
PASSIVE) made it a quarter longer, and never sleeping (ACTIVE) takes the cores from everything else on the machine."""
COMPILER_CACHE_VARIABLES = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""And the folders, below the cache."""
PYTHON_PATH = "PYTHONPATH"
HUB_CACHE_VARIABLE = "HF_HUB_CACHE"
"""Where the Hugging Face library keeps what it downloads."""
MAX_NUMBER = 2_147_483_647
"""Of attempts and starts: what fits the documents that hold them."""
DEFAULT_GRACE_SECONDS = 60.0


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
    pool_nodes: Mapping[str, int]
    """Numbers of nodes by pools, of an attempt that runs on fewer than the job asks for; else empty."""
    start_number: int
    """Grows with every start on the same checkpoint folder; a later start fences the earlier ones."""
    device_type: str | None
    """`cpu` or `cuda`; found out when None."""
    ray_address: str | None
    """An existing Ray cluster; one is started here when None."""
    shipped_code: Path | None
    """A folder that workers on a cluster of their own get a copy of, as their working directory."""
    cache_folder: Path
    num_threads: int | None
    """CPU threads per worker process; each takes its share of the cores that it may use when None."""
    is_ray_job: bool
    """Started through Ray's Jobs API, which sets `num_threads` to 1 where nobody else has set it."""
    environment: Mapping[str, str]
    """The variables themselves, for processes that get a chosen part of them."""


@dataclass(frozen=True)
class PodSettings:
    """What the small programs beside the trainer in a pod (see `pod`) are told."""

    grace_seconds: float
    """How long a pod's stop may wait for the trainer to save and end."""
    run_folder: Path | None
    ray_token: str | None
    attempt: int | None = None


def read_settings() -> Settings:
    """Raises ConfigurationError for a missing or impossible variable."""
    spec_text = os.environ.get(ENV_SPEC)
    if not spec_text:
        raise ConfigurationError(f"{ENV_SPEC}: not set; the trainer is started by `rljob run` or by the operator")
    run_folder = Path(os.environ.get(ENV_RUN_FOLDER, "run")).absolute()
    attempt = _number(ENV_ATTEMPT, 1)
    device_type = os.environ.get(ENV_DEVICE)
    if device_type not in (None, "cpu", "cuda"):
        raise ConfigurationError(f"{ENV_DEVICE}: must be cpu or cuda (seen: {device_type!r})")
    return Settings(
        spec_text=spec_text,
        run_folder=run_folder,
        checkpoint_folder=Path(os.environ.get(ENV_CHECKPOINT_FOLDER, str(run_folder / "checkpoints"))).absolute(),
        run_state_file=Path(os.environ.get(ENV_RUN_STATE_FILE, str(run_folder / RUN_STATE_FILE_NAME))).absolute(),
        job_folder=Path(os.environ.get(ENV_JOB_FOLDER, ".")).absolute(),
        attempt=attempt,
        pool_nodes=_pool_nodes(),
        start_number=_number(ENV_START_NUMBER, attempt),
        device_type=device_type,
        ray_address=os.environ.get("RAY_ADDRESS"),
        shipped_code=Path(os.environ[ENV_SHIPPED_CODE]) if ENV_SHIPPED_CODE in os.environ else None,
        cache_folder=cache_folder(),
        num_threads=_number(NUM_THREADS_VARIABLE, 0) or None,
        is_ray_job="RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ,
        environment=dict(os.environ),
    )


def _pool_nodes() -> Mapping[str, int]:
    text = os.environ.get(ENV_POOL_NODES, "{}")
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(type(nodes) is int and nodes > 0 for nodes in found.values()):
        raise ConfigurationError(
            f"{ENV_POOL_NODES}: must be a JSON object of numbers of nodes by pools (seen: {text!r})"
        )
    return found


def pod_and_node() -> tuple[str | None, str | None]:
    """The names that Kubernetes knows this process's pod and node by; None elsewhere."""
    return os.environ.get(ENV_POD_NAME) or None, os.environ.get(ENV_NODE_NAME) or None


def told_run_folder() -> str | None:
    """Where it is set; nothing is checked here."""
    return os.environ.get(ENV_RUN_FOLDER) or None


def told_run_state() -> tuple[Path, int] | None:
    """The file for RunState and the attempt, where the one is told and the other is possible: all that is needed to
    report that the rest of the environment is not."""
    path, attempt = os.environ.get(ENV_RUN_STATE_FILE), os.environ.get(ENV_ATTEMPT, "1")
    return (Path(path).absolute(), int(attempt) if _is_number(attempt) else 1) if path else None


def read_pod_settings() -> PodSettings:
    """Never raises: what stops a pod must not fail."""
    grace, run_folder = os.environ.get(ENV_GRACE_SECONDS, ""), os.environ.get(ENV_RUN_FOLDER)
    attempt = os.environ.get(ENV_ATTEMPT, "")
    return PodSettings(
        grace_seconds=float(grace) if _is_number(grace) else DEFAULT_GRACE_SECONDS,
        run_folder=Path(run_folder) if run_folder else None,
        ray_token=os.environ.get("RAY_AUTH_TOKEN"),
        attempt=int(attempt) if _is_number(attempt) else None,
    )


def cache_folder() -> Path:
    """Where models are kept between runs."""
    return Path(_cache()).expanduser()


def cpp_compiler() -> str:
    """The program by which torch compiles for CPUs."""
    return os.environ.get("CXX", "g++")


def variables_named(names: Iterable[str]) -> dict[str, str]:
    """Those of these variables that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def worker_environment(device_type: str, num_threads: int | None, *, compiles: bool = False) -> dict[str, str]:
    """Variables that a worker process must have before it imports torch or vLLM. `compiles`: whether vLLM does."""
    threads = "" if num_threads is None else str(num_threads)
    variables = {
        NUM_THREADS_VARIABLE: threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        # Large pages for large tensors on the host: writing to new memory takes half the time.
        "THP_MEM_ALLOC_ENABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        PYTHON_PATH: os.environ.get(PYTHON_PATH, ""),
        HUB_CACHE_VARIABLE: os.environ.get(HUB_CACHE_VARIABLE, ""),
    }
    if device_type == "cpu":
        variables |= {
            # The binding of threads to cores assumes that the engine owns the machine.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            SPIN_COUNT_VARIABLE: os.environ.get(SPIN_COUNT_VARIABLE, SPIN_COUNT),
        }
        if compiles:
            # Symptom: `Compiling model again due to a load failure` (vllm-cpu 0.32.0): what vLLM keeps on CPUs by its
            # own means, it cannot load. torch keeps the compiled code all the same.
            variables["VLLM_USE_AOT_COMPILE"] = "0"
        else:
            # vLLM decorates small sampling functions with torch.compile even in eager mode: 20 s at the first call,
            # and a C++ compiler that the machine may not have.
            variables["TORCHDYNAMO_DISABLE"] = "1"
    if compiles:
        variables |= {
            name: os.environ.get(name, f"{_cache()}/compiled/{folder}")
            for name, folder in COMPILER_CACHE_VARIABLES.items()
        }
        variables["CXX"] = os.environ.get("CXX", "")
    return {name: value for name, value in variables.items() if value}


def take_on_environment(variables: Mapping[str, str]) -> None:
    """Makes these variables those of this process, which has not imported yet what reads them. What is in its
    PYTHONPATH comes before what is in theirs, and is kept: Ray puts the copy of a job's folder there."""
    own = _entries(os.environ.get(PYTHON_PATH, ""))
    theirs = [entry for entry in _entries(variables.get(PYTHON_PATH, "")) if entry not in own]
    # `~` is this machine's.
    variables = {
        name: str(Path(value).expanduser()) if name in COMPILER_CACHE_VARIABLES else value
        for name, value in variables.items()
    }
    os.environ.update({**variables, **({PYTHON_PATH: os.pathsep.join([*own, *theirs])} if own or theirs else {})})
    place = max((sys.path.index(entry) for entry in own if entry in sys.path), default=0) + 1
    sys.path[place:place] = [entry for entry in theirs if entry not in sys.path]


def driver_environment() -> None:
    """Settings of libraries in the controller's process that have to be made before they are imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(*RAY_WORKER_NICENESS)
    if ENV_CACHE in os.environ and "HF_HOME" not in os.environ:
        # Whoever names a place for models means downloaded ones, too: in a pod it is the volume that has the room.
        os.environ.setdefault(HUB_CACHE_VARIABLE, str(cache_folder() / "hub"))


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


def _entries(path: str) -> list[str]:
    return [entry for entry in path.split(os.pathsep) if entry]


def _number(name: str, default: int) -> int:
    """Raises ConfigurationError where the variable is set to something else than a whole number from 1."""
    text = os.environ.get(name)
    if text is None or text == "":
        return default
    if not _is_number(text):
        raise ConfigurationError(f"{name}: must be a whole number from 1 to {MAX_NUMBER} (seen: {text!r})")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 10 and 1 <= int(text) <= MAX_NUMBER


def _cache() -> str:
    """`cache_folder`, as a text that may begin with `~`."""
    return os.environ.get(ENV_CACHE) or f"{os.environ.get('XDG_CACHE_HOME', '~/.cache')}/rljob"
