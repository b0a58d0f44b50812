"""A game of several turns in verifiers 0.4. Runs in an environment that has verifiers, and knows nothing of RLJob.

    python verifiers_letters.py BASE_URL MODEL SEED NUM_GUESSES

The policy guesses a hidden letter, and this program, as the user of the conversation, says whether the letter comes
earlier or later in the alphabet. The key of the endpoint is in the variable SESSION_KEY. Prints the letter, the guesses
and the reward of the trace as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import string
import sys

import verifiers.v1 as vf


class LetterTask(vf.Task):  # type: ignore[misc]
    """The reward is 1 if the last guess is the letter."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def is_found(self, trace: vf.Trace) -> float:
        """Scores a finished game."""
        replies = [node.message.content for node in trace.nodes if node.sampled]
        return float(bool(replies) and replies[-1] == self.data.name)


async def play(base_url: str, model: str, seed: int, num_guesses: int) -> dict[str, object]:
    """Plays one game."""
    letter = random.Random(seed).choice(string.ascii_lowercase)
    config = vf.AgentConfig(
        harness={"id": "null"},
        runtime=vf.SubprocessConfig(),
        model=model,
        client=vf.EvalClientConfig(base_url=base_url, api_key_var="SESSION_KEY"),
    )
    said, guesses = "a-z:", list[str]()
    async with vf.make_agent(config).interaction(LetterTask(vf.TaskData(name=letter))) as interaction:
        for _ in range(num_guesses):
            segment = await interaction.turn(said)
            if segment.terminated:
                break
            guess = segment.last_reply
            guesses.append(guess)
            if guess == letter:
                break
            said = "?" if guess not in string.ascii_lowercase else "<" if letter < guess else ">"
    if interaction.trace.errors:
        raise SystemExit(f"errors of the trace: {interaction.trace.errors}")
    return {"seed": seed, "letter": letter, "guesses": guesses, "reward": interaction.trace.reward}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(play(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))))
