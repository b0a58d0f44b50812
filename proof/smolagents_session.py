"""Shows that unchanged agents of smolagents 1.26 can be trained by a job with an environment of type Session.

    python proof/smolagents_session.py [--folder FOLDER]

A CodeAgent and a ToolCallingAgent, each with whole and with streamed answers, are the agents of one training step.
smolagents runs in an environment of its own (proof/other_packages/smolagents.txt). `run`, the agent's function, starts
proof/other_packages/smolagents_add.py there with the endpoint and the key of the session.

The policy is a tiny model with random weights. Its vocabulary has whole lines of code and whole tool calls, so a turn
that it samples is often one that the agents understand. The exit code is 1 if the trainer has other turns than the
agents, or if an agent could not use what the policy wrote.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from rljob_proof.agent_programs import Session, reward_of_program

PROGRAM = Path(__file__).parent / "other_packages" / "smolagents_add.py"
ROWS = [{"kind": kind, "transfer": transfer} for kind in ("code", "tools") for transfer in ("whole", "streamed")]
GROUP_SIZE = 8
CALLS = {"add": {"a": 1, "b": 2}, "final_answer": {"answer": "3"}}
TURNS = (
    "Thought: I add.\n<code>\nprint(add(1, 2))\n</code>",
    "Thought: I know.\n<code>\nfinal_answer(3)\n</code>",
    *(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in CALLS.items()
    ),
)
"""Each is a token of the policy."""
END, START, UNKNOWN, PADDING = "<|im_end|>", "<|im_start|>", "<unknown>", "<pad>"


def run(session: Session, row: Mapping[str, object], python: str, episodes: str) -> float:
    """Lets one agent of smolagents answer; the reward is 1 for the right result. `episodes`: a file for what it
    printed."""
    return reward_of_program(session, python, PROGRAM, [str(row["kind"]), str(row["transfer"])], episodes)


def main() -> int:
    """Runs the program. The exit code is 1 if something does not hold."""
    # Imported here, because the processes of agents import this module for `run`.
    from rljob_proof.other_packages import python_with
    from rljob_proof.runs import REPOSITORY, runs_in

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "proof" / "smolagents-session")
    folder = parser.parse_args().folder.resolve()
    python, episodes_file = python_with("smolagents"), folder / "episodes.jsonl"
    save_model(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": "1 + 2", **row}) + "\n" for row in ROWS))
    with runs_in(folder) as runs:
        files = runs.completed("add", job(python, episodes_file, folder))
    episodes = [json.loads(line) for line in episodes_file.read_text().splitlines()]
    num_turns = sum(episode["num_turns"] for episode in episodes)
    found = {"every agent has run": len(episodes) == GROUP_SIZE * len(ROWS)}
    for row in ROWS:
        own = [episode for episode in episodes if episode.items() >= row.items()]
        name = f"{row['kind']}, {row['transfer']}"
        found[f"{name}: an agent has used the tool"] = any(episode["has_added"] for episode in own)
        found[f"{name}: an agent has given the right answer"] = any(episode["reward"] for episode in own)
    turns, rows = (files.series(name)[0] for name in ("environment/turns/mean", "rows_per_response/mean"))
    found["the trainer has the turns of the agents"] = round(turns * len(episodes)) == num_turns
    for what, holds in found.items():
        print(f"{'met' if holds else 'MISSED'}: {what}")
    print(f"{len(episodes)} agents with {num_turns} turns; a rollout has {turns:.2f} turns in {rows:.2f} rows")
    return 0 if all(found.values()) else 1


def save_model(folder: Path) -> None:
    """Saves a tiny model with random weights, whose tokens are TURNS. All other text of a line is one unknown token."""
    import torch
    from tokenizers import AddedToken, Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    from rljob_testing.models import chat_models
    from rljob_testing.sessions import HERMES

    special = (PADDING, UNKNOWN, START, END)
    backend = Tokenizer(WordLevel({token: number for number, token in enumerate(special)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = Split(Regex("\n+"), "removed")
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.add_tokens([AddedToken(turn, normalized=False) for turn in TURNS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PADDING,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = HERMES
    tokenizer.response_template = chat_models.HERMES_RESPONSES
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def job(python: Path, episodes: Path, folder: Path) -> dict[str, JsonValue]:
    """The job: one step with all agents."""
    agent: JsonValue = {
        "path": "smolagents_session:run",
        "arguments": {"python": str(python), "episodes": str(episodes)},
    }
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "smolagents"},
        "spec": {
            "pools": [{"name": "main", "nodes": 1, "gpusPerNode": 1}],
            "training": {
                "model": {"source": str(folder / "model"), "dtype": "Float32"},
                "dataset": {"type": "File", "file": {"path": str(folder / "rows.jsonl")}},
                "environment": {
                    "type": "Session",
                    "session": agent,
                    "maxTurns": 8,
                    "maxTurnTokens": 2,
                    "maxContextTokens": 2048,
                },
                "rewards": [],
                "algorithm": {"type": "GRPO"},
                "optimizer": {"learningRate": 1.0e-3},
                # Each agent is a program of its own, so few run at the same time.
                "rollout": {"engine": "HuggingFace", "groupSize": GROUP_SIZE, "maxNewTokens": 64, "maxNumSequences": 2},
                "steps": 1,
                "batchSize": len(ROWS),
            },
            "checkpoint": {"everySteps": 1, "storage": {"persistentVolumeClaim": "rljob-storage"}},
        },
    }


if __name__ == "__main__":
    sys.exit(main())
