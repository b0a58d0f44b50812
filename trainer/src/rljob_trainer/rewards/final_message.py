"""What a model says to the user: a response without thinking and without special tokens.

Rewards see both (`Format` and `Function` need them); those that look for an answer read the final message only.
"""

from __future__ import annotations

import re

BEGIN, END = "<think>", "</think>"
CHANNEL = "<|channel|>"
"""gpt-oss (harmony) thinks in the channel `analysis`, calls tools in `commentary`, and answers in `final`:
`<|channel|>analysis<|message|>3 x 6<|end|><|start|>assistant<|channel|>final<|message|>It is 18`."""
FINAL_CHANNEL = re.compile(r"<\|channel\|>\s*final\b[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")
SPECIAL_TOKEN = re.compile(
    # `<|eom|>`, DeepSeek's `<｜User｜>`. One character is none: `<|x|>` may be mathematics.
    r"<[|\uff5c][^\s<>()\[\]{}|\uff5c]{2,40}[|\uff5c]>"
    r"|</?s>|<(?:unk|pad|bos|eos|mask|start_of_turn|end_of_turn)>"
)
"""As text: a process that scores has no tokenizer."""


def final_message(response: str) -> str:
    """The response without thinking and special tokens. These become line ends, so that they do not join what stands
    on both sides: `18<|endoftext|>Question 2`."""
    return SPECIAL_TOKEN.sub("\n", without_thinking(response))


def without_thinking(response: str) -> str:
    """The text after the last `</think>`, of a response in channels the text of the last final one. Empty where
    thinking after it does not end."""
    said = response.rpartition(END)[2]
    if CHANNEL in said:
        said = FINAL_CHANNEL.split(said)[-1]
    return "" if BEGIN in said or CHANNEL in said else said
