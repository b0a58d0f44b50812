"""TRL's GRPOTrainer as a contender of the training step, in a separate process (see `peers/trl_peer.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rljob_bench.parts_of_steps import PartsOfSteps
from rljob_bench.peer_process import PeerProcess
from rljob_bench.step_case import (
    GROUP_SIZE,
    LEARNING_RATE,
    NEW_TOKENS,
    NUM_ROWS,
    PROMPT_TOKENS,
    CaseFolder,
)

WARM_UP_STEPS = 1
"""Steps at the beginning of every turn that do not count, because the process was idle before."""
BEFORE_THE_UPDATE = "_prepare_inputs"
PARTS = {
    "rollout": (BEFORE_THE_UPDATE,),
    "generate": ("transformers.generate", "vLLM.generate"),
    "weight sync": ("sync_weights",),
    "reward": ("_calculate_rewards",),
    "update": ("update",),
    "forward": ("compute_loss",),
}
"""TRL's names for its own measurements, by our names. `rollout` is everything until the batch is complete."""


class TrlTraining:
    """A trainer that waits between its turns. It ends with its process."""

    def __init__(
        self,
        peer: PeerProcess,
        case: CaseFolder,
        dtype: str,
        engine: str,
        num_steps: int,
        folder: Path,
        *,
        device_type: str,
        gpu_memory_utilization: float,
        changed: Mapping[str, object] | None = None,
    ) -> None:
        """`engine`: see `peers/trl_peer.build`. `changed`: details below with other values. Raises PeerError if the
        trainer cannot start."""
        self._peer = peer
        self._num_steps = num_steps
        self._parts = PartsOfSteps()
        peer.ask(
            "train",
            model=str(case.model),
            prompts=str(case.prompts),
            dtype=dtype.lower(),
            engine=engine,
            details={
                "output_folder": str(folder),
                "num_rows": NUM_ROWS,
                "group_size": GROUP_SIZE,
                "new_tokens": NEW_TOKENS,
                "sampled_tokens": NEW_TOKENS,
                "max_tokens": PROMPT_TOKENS + NEW_TOKENS,
                "learning_rate": LEARNING_RATE,
                "device_type": device_type,
                "gpu_memory_utilization": gpu_memory_utilization,
                "environment": None,
                **(changed or {}),
            },
        )

    def turn(self) -> list[float]:
        """Seconds of the steps that count, each from the end of the previous step to its own end."""
        answer = self._peer.ask("steps", num_steps=WARM_UP_STEPS + self._num_steps)
        seconds, parts = answer["seconds"], answer["parts"]
        assert isinstance(seconds, list)
        assert isinstance(parts, list)
        for step, part in zip(seconds, parts, strict=True):
            part["update"] = step - part[BEFORE_THE_UPDATE]
        self._parts.add_turn(parts[WARM_UP_STEPS:])
        return [float(each) for each in seconds[WARM_UP_STEPS:]]

    def median(self, name: str) -> float | None:
        """Median seconds of a part of a step (PARTS); None if it was not measured."""
        return self._parts.median(PARTS.get(name, ()))
