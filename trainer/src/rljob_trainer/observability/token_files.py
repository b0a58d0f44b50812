"""The files with the tokens of a few conversations: `tokens/training.json` of the newest step, and
`tokens/evaluation.json` of the newest evaluation. Each is replaced atomically.

    {"version": 1, "step": 12, "conversations": [
        {"kind": "train", "group": 0, "prompt": "5 2 1>", "score": 1.0, "outcome": "COMPLETED",
         "tokens": {"text": ["5", " 2"], "isSampled": [false, true], "isTrained": [false, true],
                    "rolloutLogprob": [null, -0.25], "trainerLogprob": [null, -0.26], "age": [null, 0],
                    "advantage": [null, 0.5]},
         "omittedPromptTokens": 0, "omittedTokens": 0}]}

The lists of a conversation have the same length, and its texts joined are the conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TOKENS_FOLDER_NAME = "tokens"
"""Name of the folder in the run folder."""
TRAINING_TOKENS, EVALUATION_TOKENS = "training", "evaluation"
"""The files' names without their suffix."""
FORMAT_VERSION = 1
MAX_CONVERSATIONS = 32
MAX_FILE_BYTES = 1 << 20
MAX_PROMPT_CHARACTERS = 1_000
"""A longer prompt is cut in the field `prompt`; `samples.jsonl` has it whole."""
TOKEN_BYTES = 46
"""Bytes of a token in the file if its text is short."""
PROMPT_SHARE = 4
"""If a conversation is cut, at most one in this many of its tokens are those of the prompt."""
MARGIN = 0.97
"""A file that is too large is cut to this fraction of MAX_FILE_BYTES, because the size of a token is only estimated."""


@dataclass(frozen=True)
class TokenValues:
    """The values of each token of a conversation, in lists of the same length."""

    text: Sequence[str]
    is_sampled: Sequence[bool]
    """Whether the policy has sampled the token. False if another row of the response trains on it."""
    is_trained: Sequence[bool]
    """Whether the update has trained on the token."""
    rollout_logprob: Sequence[float | None]
    """Log-probability by the rollout engine, in nats. Here and below None stands for a value that does not exist. All
    numbers must be finite."""
    trainer_logprob: Sequence[float | None]
    """Log-probability by the trainer before the step's updates."""
    age: Sequence[int | None]
    """Age of the weights that sampled the token, in steps."""
    advantage: Sequence[float | None]

    def between(self, start: int, stop: int) -> dict[str, Sequence[str | bool | float | None]]:
        """Returns the values of the tokens start..stop-1 for the file."""
        return {
            "text": self.text[start:stop],
            "isSampled": self.is_sampled[start:stop],
            "isTrained": self.is_trained[start:stop],
            "rolloutLogprob": self.rollout_logprob[start:stop],
            "trainerLogprob": self.trainer_logprob[start:stop],
            "age": self.age[start:stop],
            "advantage": self.advantage[start:stop],
        }


@dataclass(frozen=True)
class Conversation:
    """A response with its prompt, or what was kept of it."""

    kind: str
    """The value of SampleKind."""
    group: int
    """The group of the response in its step, as in `samples.jsonl`."""
    prompt: str
    score: float | None
    outcome: str
    num_prompt_tokens: int
    """Tokens before the first sampled one, including those that were left out."""
    num_tokens: int
    """All tokens, including those that were left out."""
    first_token: int
    """The number of the first token of `tokens`."""
    tokens: TokenValues
    evaluation: str = ""
    """The name of the evaluation, as in `samples.jsonl`; empty for training."""

    def document(self, max_tokens: int) -> dict[str, object]:
        """Returns the entry of the file, with at most `max_tokens` tokens."""
        first, stop = kept_tokens(self.num_prompt_tokens, self.num_tokens, max_tokens)
        return {
            "kind": self.kind,
            **({"evaluation": self.evaluation} if self.evaluation else {}),
            "group": self.group,
            "prompt": self.prompt[:MAX_PROMPT_CHARACTERS],
            "score": self.score,
            "outcome": self.outcome,
            "tokens": self.tokens.between(first - self.first_token, stop - self.first_token),
            "omittedPromptTokens": first,
            "omittedTokens": self.num_tokens - (stop - first),
        }


def kept_tokens(num_prompt_tokens: int, num_tokens: int, max_tokens: int) -> tuple[int, int]:
    """Returns the first token of a conversation that is kept, and the one after the last, so that these are at most
    `max_tokens`. Left out are the beginning of a prompt that takes more than its share, and the end of the response."""
    if num_tokens <= max_tokens:
        return 0, num_tokens
    first = max(0, min(num_prompt_tokens - max_tokens // PROMPT_SHARE, num_tokens - max_tokens))
    return first, first + max_tokens


def fair_limit(sizes: Sequence[float], counts: Sequence[int], budget: float) -> int:
    """Returns the largest number n such that the sum of `sizes[i] * min(counts[i], n)` is at most `budget`."""
    low, high = 0, max(counts, default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(size * min(count, middle) for size, count in zip(sizes, counts, strict=True)) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def max_tokens_per_conversation(counts: Sequence[int]) -> int:
    """Returns the largest number of tokens of a conversation for which the file may be small enough. `counts`: the
    tokens of each conversation."""
    return fair_limit([TOKEN_BYTES] * len(counts), counts, MAX_FILE_BYTES)


def token_file(run_folder: Path, name: str) -> Path:
    """Returns the path of a file, such as TRAINING_TOKENS."""
    return run_folder / TOKENS_FOLDER_NAME / f"{name}.json"


def write_token_file(path: Path, step: int, conversations: Sequence[Conversation]) -> None:
    """Writes the conversations, cut so that the file has at most MAX_FILE_BYTES. Replaces the file atomically. Raises
    OSError."""
    content = _content(step, conversations)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def all_token_files(run_folder: Path) -> list[Path]:
    """Returns the paths of the files that exist."""
    return sorted((run_folder / TOKENS_FOLDER_NAME).glob("*.json"))


def remove_newer(path: Path, resumed_from_step: int | None) -> None:
    """Removes a file if it is damaged, if its `step` is after `resumed_from_step` (the run repeats that step), or if
    `resumed_from_step` is None (the run is new). Raises OSError."""
    try:
        step = json.loads(path.read_bytes())["step"]
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError):
        step = None
    if resumed_from_step is None or not isinstance(step, int) or step > resumed_from_step:
        path.unlink(missing_ok=True)


def _content(step: int, conversations: Sequence[Conversation]) -> bytes:
    counts = [len(each.tokens.text) for each in conversations]
    limit = max(counts, default=0)
    while True:
        kept = [min(limit, count) for count in counts]
        entries = [
            _compact(each.document(count)).encode(errors="backslashreplace")
            for each, count in zip(conversations, kept, strict=True)
        ]
        head = _compact({"version": FORMAT_VERSION, "step": step}).encode()
        content = head[:-1] + b',"conversations":[' + b",".join(entries) + b"]}"
        if len(content) <= MAX_FILE_BYTES or limit == 0:
            return content
        sizes = [len(entry) / max(1, count) for entry, count in zip(entries, kept, strict=True)]
        limit = min(limit - 1, fair_limit(sizes, kept, MARGIN * MAX_FILE_BYTES))


def _compact(document: Mapping[str, object]) -> str:
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
