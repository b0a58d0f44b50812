"""A model that writes the same turns in every conversation, and that training does not change: so that programs with
different random numbers do the same work.

It has the layers of a Qwen3 and computes all of them, but only three things reach its output:

- The embedding of token t is one in dimension t and zero elsewhere; the other layers add nothing to it.
- The first layer attends equally to all tokens, and writes the share of FINISHED among them into the last dimension.
- The output head gives each token one successor. The first token of a turn is a call of the tool, unless FINISHED is
  among the tokens so far: then it is the short last turn.

The successor's probability is one in float32, so the gradient is zero, and an update leaves the weights as they are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rljob_bench.counting_game import FINISHED

START, END, PAD = "<|im_start|>", "<|im_end|>", "<pad>"
BEGINNING = "assistant\n"
"""The last token before each turn of the model."""
CALL, END_OF_CALL = '<tool_call>\n{"name": "count", "arguments": {"note": "', '"}}\n</tool_call>'
LAST_TURN = "That was enough."
SCHEMA_TEXTS = (
    *(
        '{"type": "',
        '", "',
        '": "',
        '": {"',
        '": ["',
        '"]',
        "}}",
        '"}',
        "function",
        "name",
        "description",
        "parameters",
    ),
    *("object", "string", "properties", "required", "return", "Counts one call", "Any text", "Whether it is enough"),
    *(" Call count until it is enough", "tool", "user", "system", "not yet", "Task "),
)
"""Other words that are one token, so that a prompt with the tool's description is as long as with usual tokenizers."""
HIDDEN_SIZE = 384
SURE, FIRST_TOKEN, OVERRULED = 200.0, 100.0, 150.0
"""Logits of a successor: in general; of the call as the first token; of the last turn, if FINISHED is at its place."""
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RESPONSE_TEMPLATE: dict[str, object] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
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
        "content": {"close": END},
    },
}


@dataclass(frozen=True)
class Script:
    """The lengths of the turns."""

    call_tokens: int
    """Number of tokens of a turn that calls the tool, with its end token; at least four."""
    finished_at: int
    """About the number of tokens before the last turn."""
    num_layers: int

    @property
    def call(self) -> list[str]:
        """The tokens of a turn that calls the tool."""
        words = [f"n{number:02d} " for number in range(self.call_tokens - 3)]
        return [CALL, *words, END_OF_CALL, END]


LAST_TOKENS = (LAST_TURN, END)
"""The tokens of the last turn."""


def write_scripted_model(script: Script, folder: Path) -> None:
    """Writes model and tokenizer into a folder."""
    words = [*dict.fromkeys([*script.call, *LAST_TOKENS, BEGINNING, FINISHED])]
    tokenizer = _tokenizer([word for word in words if word != END])
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=768,
        num_hidden_layers=script.num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    _write_script(model, script, {word: tokenizer.convert_tokens_to_ids(word) for word in words})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Without sampling settings of its own, each program uses those of its job.
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id})
    )


def _tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """One token per byte, per word, and per special token of the chat template."""
    letters = sorted(ByteLevel.alphabet())
    backend = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(each, special=True) for each in (PAD, START, END)])
    backend.add_tokens([AddedToken(each, normalized=False) for each in (*words, *SCHEMA_TEXTS)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=PAD)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


@torch.no_grad()
def _write_script(model: Qwen3ForCausalLM, script: Script, ids: dict[str, int]) -> None:
    size, last = HIDDEN_SIZE, HIDDEN_SIZE - 1
    assert len(model.model.embed_tokens.weight) <= last, "the model needs one dimension per token, and one more"
    model.model.embed_tokens.weight.copy_(torch.eye(size)[: len(model.model.embed_tokens.weight)])
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    first = model.model.layers[0].self_attn
    first.q_proj.weight.zero_()
    first.v_proj.weight.zero_()
    # The norm before the layer multiplies the one in an embedding by the root of the size.
    first.v_proj.weight[0, ids[FINISHED]] = script.finished_at / size**0.5
    first.o_proj.weight[last, 0] = 1.0
    # So the last dimension is about one once FINISHED is there, and each of the two is scaled to root(size / 2).
    scale = (size / 2) ** 0.5
    head = model.lm_head.weight
    head.zero_()
    for tokens in (script.call, list(LAST_TOKENS)):
        for token, successor in pairwise(tokens):
            head[ids[successor], ids[token]] = SURE / scale
    head[ids[CALL], ids[BEGINNING]] = FIRST_TOKEN / scale
    head[ids[LAST_TURN], last] = OVERRULED / scale
