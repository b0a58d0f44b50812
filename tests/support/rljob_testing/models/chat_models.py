"""Tokenizers with the chat templates of real models. They have one token per byte, and special tokens for roles and
turns."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

STRUCTURE = (
    *("</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|User|>", "<|Assistant|>"),
)
"""Special tokens. The first is the end token, the second the padding token."""
TAGS = ("<think>", "</think>", "<answer>", "</answer>")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nBEGINNING{% endif %}"
)
QWEN3 = (
    "{% set last = namespace(index=-1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set last.index = loop.index0 %}{% endif %}"
    "{% endfor %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% set content = message.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.index0 > last.index %}<think>\n\n</think>\n\n{% endif %}{{ content }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nBEGINNING{% endif %}"
)
"""Removes thinking from turns before the last user message, and adds thinking to later turns."""
LLAMA3 = (
    "{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\nBEGINNING{% endif %}"
)
R1 = (
    "{% for message in messages %}{% if message.role == 'user' %}<|User|>{{ message.content }}"
    "{% elif message.role == 'assistant' %}<|Assistant|>{{ message.content.split('</think>')[-1] }}</s>"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
HERMES = (
    "{% if tools %}<|im_start|>system\nTools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}{% if message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif message.role == 'assistant' %}<|im_start|>assistant\nTHINKING{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{% if message.content or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>"
    "{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nBEGINNING{% endif %}"
)
"""ChatML with tools. Results of several tools are one message."""
QWEN3_TOOLS = (
    "{% set last = namespace(index=-1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set last.index = loop.index0 %}{% endif %}"
    "{% endfor %}"
    + HERMES.replace(
        "THINKING",
        "{% if loop.index0 > last.index %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}",
    )
)
"""Removes thinking before the last user message, and writes it in all later turns, even if it is empty."""
HERMES_RESPONSES: dict[str, object] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*"},
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
        "content": {"close": "<|im_end|>"},
    },
}
"""A response template for HERMES and QWEN3_TOOLS."""
WITHOUT_GENERATION_PROMPT = CHATML.partition("{% if add")[0]

TEMPLATES = {
    "ChatML": CHATML.replace("BEGINNING", ""),
    "ChatML, thinking": CHATML.replace("BEGINNING", "<think>\n"),
    "Qwen3": QWEN3.replace("BEGINNING", ""),
    "Qwen3, thinking": QWEN3.replace("BEGINNING", "<think>\n"),
    "Qwen3, not thinking": QWEN3.replace("BEGINNING", "<think>\n\n</think>\n\n"),
    "Llama 3": LLAMA3.replace("BEGINNING", ""),
    "Llama 3, thinking": LLAMA3.replace("BEGINNING", "<think>"),
    "R1": R1,
    # DeepSeek-V3.1 does not think: the end of a thought comes before the content of each turn.
    "V3.1": R1.replace("<|Assistant|>{{", "<|Assistant|></think>{{").replace("<think>\n", "</think>"),
    # Past turns have an empty thought on one line; the generation prompt begins a thought with a line break.
    "Nemotron": R1.replace("<|Assistant|>{{", "<|Assistant|><think></think>{{"),
    "Gemma": (
        "{% for message in messages %}<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
        "{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "Mistral": (
        "{% for message in messages %}{% if message.role == 'assistant' %} {{ message.content }}</s>"
        "{% else %}[INST] {{ message.content }} [/INST]{% endif %}{% endfor %}"
    ),
    # gpt-oss: the tokens after the role differ between a generation prompt and a past turn.
    "harmony": (
        "{% for message in messages %}<|start|>{{ message.role }}"
        "{% if message.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ message.content }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
    # Vicuna: turns have a space after the colon, the generation prompt has none.
    "colon": (
        "{% for message in messages %}{{ message.role | upper }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    ),
    "without add_generation_prompt": WITHOUT_GENERATION_PROMPT,
    "whatever is asked for": R1.replace("add_generation_prompt", "messages[-1].role != 'assistant'"),
    # Rejects a conversation that ends with an assistant turn.
    "no other assistant": (
        "{% if messages[-1].role == 'assistant' %}{{ raise_exception('the user speaks last') }}{% endif %}"
        + CHATML.replace("BEGINNING", "<think>\n")
    ),
}


def save(
    folder: Path,
    template: str,
    *,
    are_special: bool = True,
    eos_token: str | None = STRUCTURE[0],
    pad_token: str | None = STRUCTURE[1],
    response_template: dict[str, object] | None = None,
) -> Path:
    """Saves such a tokenizer as a model folder. TAGS are special tokens of it, or ordinary added tokens."""
    letters = sorted(ByteLevel.alphabet())
    backend = Backend(BPE({letter: number for number, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(each, special=True) for each in STRUCTURE])
    (backend.add_special_tokens if are_special else backend.add_tokens)(
        [AddedToken(each, special=are_special) for each in TAGS]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos_token, pad_token=pad_token)
    tokenizer.chat_template = template
    tokenizer.response_template = response_template
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(backend.get_vocab())}))
    return folder
