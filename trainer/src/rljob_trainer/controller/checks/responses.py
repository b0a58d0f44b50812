"""Checks with the model's tokenizer whether responses can end, and whether the pattern of a Format reward can match.
Runs before devices are reserved."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_api.v1alpha1.reward import RewardType
from rljob_api.v1alpha1.training import Training
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.engines.rollout.response_text import ResponseDecoder, response_decoder
from rljob_trainer.engines.train.model import read_config
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.models.assistant_turn import AssistantTurn
from rljob_trainer.models.tokenizer import Tokenizer
from rljob_trainer.rewards.format import first_impossible_part, literal_beginning

TAG = re.compile(r"<[^<>\n]+>")
OPENING_TAG = re.compile(r"<[^<>\n]+>|\[[^\[\]\n]+\]")
"""A tag at the beginning of a pattern, such as `<think>` or Mistral's `[THINK]`."""

log = logging.getLogger(__name__)


def check_responses(training: Training, model_folder: Path, prompts: Sequence[PromptRow]) -> None:
    """Raises ConfigurationError if no response can end and truncated responses are masked, or if the pattern of a
    Format reward can never match. Logs a warning for probable mistakes."""
    tokenizer = Tokenizer(model_folder)
    are_chats = training.environment is not None or any(row.messages is not None for row in prompts)
    _check_ends(training, model_folder, tokenizer, are_chats=are_chats)
    patterns = [
        (f"spec.training.rewards[{index}].format.pattern (reward {reward.name})", reward.format.pattern)
        for index, reward in enumerate(training.rewards)
        if reward.type is RewardType.FORMAT and reward.format is not None
    ]
    # The text of a conversation has end tokens and stop strings between its turns.
    if patterns and training.environment is None:
        decoder = response_decoder(tokenizer)
        for where, pattern in patterns:
            _check_pattern(where, pattern, tokenizer, decoder, prompts, training.rollout.stop)
            _warn_of_beginnings(where, pattern, prompts)


def _check_ends(training: Training, model_folder: Path, tokenizer: Tokenizer, *, are_chats: bool) -> None:
    """Checks that responses can end with an end token of the model or with a stop string, and that the end token is the
    one with which the chat template ends a turn."""
    num_tokens: int = read_config(model_folder).get_text_config().vocab_size
    ends = [token for token in tokenizer.eos_token_ids if 0 <= token < num_tokens]
    stops = [stop for stop in training.rollout.stop if stop in _decoded(tokenizer, stop)]
    if not ends and not stops:
        ids = list(tokenizer.eos_token_ids)
        seen = f"; seen: {ids}, which are not in the vocabulary" if ids else ""
        cause = (
            f"the model in {model_folder} has no end token (eos_token_id in generation_config.json, config.json or "
            f"the tokenizer{seen}), and spec.training.rollout.stop has no string that its tokenizer can produce "
            f"({list(training.rollout.stop)}), so every response is truncated at rollout.maxNewTokens"
        )
        advice = "set eos_token_id in generation_config.json, or add a string to rollout.stop"
        if resolve_algorithm(training.algorithm).mask_truncated_responses:
            raise ConfigurationError(
                f"spec.training.algorithm.maskTruncatedResponses: {cause}, and masking leaves nothing to train on; "
                f"{advice}, or set maskTruncatedResponses: false"
            )
        log.warning("spec.training.model.source: %s; %s", cause, advice)
        return
    end_of_turn = AssistantTurn(tokenizer).turn_end_token_id if are_chats else None
    if end_of_turn is not None and end_of_turn not in ends and not stops:
        text = tokenizer.decode([end_of_turn], skip_special_tokens=False)
        log.warning(
            "spec.training.model.source: the chat template ends a turn with %s, but this is not an end token of the "
            "model in %s, so responses continue after it; add token %d to eos_token_id in generation_config.json, or "
            "%s to rollout.stop",
            text,
            model_folder,
            end_of_turn,
            text,
        )


def _check_pattern(
    where: str,
    pattern: str,
    tokenizer: Tokenizer,
    decoder: ResponseDecoder,
    prompts: Sequence[PromptRow],
    stop: Sequence[str],
) -> None:
    """Raises ConfigurationError if every match of the pattern contains a text that no response contains."""
    beginnings = {row.turn_beginning for row in prompts}

    def seen(*texts: str) -> str:
        """Returns the text that rewards get for the tokens of these texts."""
        return decoder.response_text((), [*chain(*tokenizer.encode_all(texts, add_special_tokens=False))]).text

    def impossible_part_of(text: str) -> str | None:
        for beginning in beginnings:
            # Text that the chat template writes is not generated, so neither decoding nor stop strings change it.
            generated = _without_overlap(text, beginning)
            parts: tuple[str, ...] = (
                *(each for each in stop if each in generated),
                # Decoded with a second text after it, because some tokens are only removed at the end of a response.
                *(each for each in TAG.findall(generated) if each not in seen(each, "a")),
            )
            if parts:
                return parts[0]
        return None

    if part := first_impossible_part(pattern, impossible_part_of):
        cause, advice = f"the tokenizer decodes it as {seen(part)!r}", "use other tags, or another model"
        if part in stop:
            cause, advice = (
                "it is in spec.training.rollout.stop, and stop strings are removed from responses",
                "remove it from the pattern or from rollout.stop",
            )
        raise ConfigurationError(
            f"{where}: {pattern!r} can never match, because no response contains {part!r}: {cause}; {advice}"
        )


def _without_overlap(text: str, beginning: str) -> str:
    """Removes from the start of `text` the longest part that `beginning` ends with; the model must generate the rest.
    Example: `Okay` for the text `<think>\\nOkay` if the turn begins with `<think>\\n`."""
    if text in beginning:
        return ""
    return next(text[size:] for size in range(len(text), -1, -1) if beginning.endswith(text[:size]))


def _warn_of_beginnings(where: str, pattern: str, prompts: Sequence[PromptRow]) -> None:
    """Logs a warning if the pattern begins in another way than the responses that rewards get."""
    wanted = literal_beginning(pattern)
    for beginning in {row.turn_beginning for row in prompts}:
        given = beginning.lstrip()
        if not wanted.startswith(given) and not given.startswith(wanted):
            log.warning(
                "%s: %r never matches, because the chat template begins the assistant's turn with %r, and the response "
                "that rewards get includes this text; add it to the start of the pattern",
                where,
                pattern,
                beginning,
            )
    tag = OPENING_TAG.match(wanted)
    if tag and any(not row.turn_beginning and row.prompt.rstrip().endswith(tag[0]) for row in prompts):
        log.warning(
            "%s: %r begins with %s, but prompts already end with it, so the response does not contain it; remove it "
            "from the beginning of the pattern",
            where,
            pattern,
            tag[0],
        )


def _decoded(tokenizer: Tokenizer, text: str) -> str:
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False)
