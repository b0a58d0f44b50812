"""TRL's GRPOTrainer as a contender of the training step, in a process of its own (see `peers/trl_peer.py`)."""

from __future__ import annotations

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
"""At the beginning of every turn: not like the others, because the process has waited."""
PARTS = {
    "generate": ("transformers.generate", "vLLM.generate"),
    "weight sync": ("sync_weights",),
    "reward": ("_calculate_rewards",),
    "update": ("update",),
    "forward": ("compute_loss",),
}
"""By the names that ours have: those by which TRL measures itself."""
BEFORE_THE_UPDATE = "_prepare_inputs"


class TrlTraining:
    """Trains, and waits between its turns. Ended with its process."""

    def __init__(
        self, peer: PeerProcess, case: CaseFolder, dtype: str, engine: str, num_steps: int, folder: Path
    ) -> None:
        """`engine`: see `peers/trl_peer.build`. Raises PeerError when it cannot begin."""
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
                "max_tokens": PROMPT_TOKENS + NEW_TOKENS,
                "learning_rate": LEARNING_RATE,
            },
        )

    def turn(self) -> list[float]:
        """Seconds of the steps that count, each from the end of the step before to its own end."""
        answer = self._peer.ask("steps", num_steps=WARM_UP_STEPS + self._num_steps)
        seconds, parts = answer["seconds"], answer["parts"]
        assert isinstance(seconds, list)
        assert isinstance(parts, list)
        for step, part in zip(seconds, parts, strict=True):
            part["update"] = step - part[BEFORE_THE_UPDATE]
        self._parts.add_turn(parts[WARM_UP_STEPS:])
        return [float(each) for each in seconds[WARM_UP_STEPS:]]

    def median(self, name: str) -> float | None:
        """Seconds of a part of a step (PARTS); None where it was not measured."""
        return self._parts.median(PARTS.get(name, ()))
