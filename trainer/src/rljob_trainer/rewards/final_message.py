"""The final message to the user: a response without thinking and special tokens.

Scorers get the whole response (`Format` and `Function` need it). The scorers that search for an answer read only the
final message.
"""

from __future__ import annotations

import re

BEGIN, END = "<think>", "</think>"
CHANNEL = "<|channel|>"
"""gpt-oss (harmony) thinks in the channel `analysis`, calls tools in `commentary`, and answers in `final`:
`<|channel|>analysis<|message|>3 x 6<|end|><|start|>assistant<|channel|>final<|message|>It is 18`."""
FINAL_CHANNEL = re.compile(r"<\|channel\|>\s*final\b[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")
SPECIAL_TOKEN = re.compile(
    # `<|eom|>`, DeepSeek's `<｜User｜>`. A single character is excluded, because `<|x|>` may be mathematics.
    r"<[|\uff5c][^\s<>()\[\]{}|\uff5c]{2,40}[|\uff5c]>"
    r"|</?s>|<(?:unk|pad|bos|eos|mask|start_of_turn|end_of_turn)>"
)
"""Special tokens are matched as text, because a scoring process has no tokenizer."""


def final_message(response: str) -> str:
    """The response without thinking and special tokens. A special token becomes a line break, so that the text before
    and after it is not joined: `18<|endoftext|>Question 2`."""
    return SPECIAL_TOKEN.sub("\n", without_thinking(response))


def without_thinking(response: str) -> str:
    """The text after the last `</think>`; in a response with channels, the text of the last final channel. Empty if the
    text contains thinking that does not end."""
    text = response.rpartition(END)[2]
    if CHANNEL in text:
        text = FINAL_CHANNEL.split(text)[-1]
    return "" if BEGIN in text or CHANNEL in text else text
