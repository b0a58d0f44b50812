"""An agent of smolagents 1.26 that has a tool to add numbers. Runs in an environment that has smolagents, and knows
nothing of RLJob.

    python smolagents_add.py BASE_URL MODEL code|tools whole|streamed

The key of the endpoint is in the variable SESSION_KEY. Prints what has happened as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys

from smolagents import CodeAgent, LogLevel, OpenAIModel, ToolCallingAgent, tool
from smolagents.memory import ActionStep

AGENTS = {"code": CodeAgent, "tools": ToolCallingAgent}
MAX_STEPS = 3
CALLS: list[tuple[int, int]] = []
"""The numbers that the agent has added."""


@tool  # type: ignore[untyped-decorator]
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    CALLS.append((a, b))
    return a + b


def answer(base_url: str, model: str, kind: str, transfer: str) -> dict[str, object]:
    """Lets the agent answer a question."""
    policy = OpenAIModel(model_id=model, api_base=base_url, api_key=os.environ["SESSION_KEY"])
    agent = AGENTS[kind](
        tools=[add],
        model=policy,
        max_steps=MAX_STEPS,
        stream_outputs=transfer == "streamed",
        verbosity_level=LogLevel.OFF,
    )
    result = agent.run("What is 1 + 2?")
    return {
        "kind": kind,
        "transfer": transfer,
        "num_turns": sum(isinstance(step, ActionStep) for step in agent.memory.steps),
        "has_added": (1, 2) in CALLS,
        "reward": float(str(result) == "3"),
    }


if __name__ == "__main__":
    # smolagents prints answers that are streamed.
    with contextlib.redirect_stdout(sys.stderr):
        result = answer(*sys.argv[1:])
    print(json.dumps(result))
