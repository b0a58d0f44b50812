"""The samples and the conversations with tokens, checked and in the shape that the page shows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from rljob_page.curves import is_step
from rljob_page.run_files import Json, is_finite

MAX_TEXT = 200_000
"""The largest number of characters of a text of a sample."""
_TOKEN_LISTS = ("text", "isTrained", "isSampled", "rolloutLogprob", "trainerLogprob", "age", "advantage")
_TRUNCATED = " … (truncated)"


def sample_entries(samples: Iterable[Json]) -> list[Json]:
    """The samples with the fields that the page shows. Empty fields are left out."""
    entries = []
    for sample in samples:
        entry: Json = {
            "step": sample.get("step"),
            "kind": text_of(sample.get("kind")),
            "evaluation": text_of(sample.get("evaluation")),
            "group": text_of(sample.get("group")),
            "prompt": text_of(sample.get("prompt")),
            "response": text_of(sample.get("response")),
            "answer": text_of(sample.get("answer")),
            "score": sample.get("score") if is_finite(sample.get("score")) else None,
            "outcome": text_of(sample.get("outcome")),
        }
        for name in ("rewards", "found", "statuses"):
            value = sample.get(name)
            if isinstance(value, dict) and value:
                entry[name] = {str(key): each if is_finite(each) else text_of(each) for key, each in value.items()}
        messages = sample.get("messages")
        if isinstance(messages, list) and messages:
            entry["messages"] = [_message(each) for each in messages]
        entries.append(entry)
    return entries


def conversation_sets(tokens: Mapping[str, Json]) -> tuple[dict[str, Json], list[str]]:
    """The conversations of training and evaluation, and notes about damaged ones, which are left out."""
    sets: dict[str, Json] = {}
    notes = []
    for name, document in tokens.items():
        entries, step = document.get("conversations"), document.get("step")
        found = [_conversation(each) for each in entries] if isinstance(entries, list) else [None]
        damaged = sum(each is None for each in found)
        if damaged:
            notes.append(f"{damaged} damaged conversations of tokens/{name}.json are left out")
        sets[name] = {
            "step": step if is_step(step) else None,
            "conversations": [each for each in found if each is not None],
        }
    return sets, notes


def text_of(value: object) -> str:
    """A text of a sample, at most `MAX_TEXT` characters; other JSON values as JSON."""
    try:
        text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except RecursionError:
        text = "(nested too deeply)"
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + _TRUNCATED


def _message(message: object) -> Json:
    if not isinstance(message, dict):
        return {"role": "", "content": text_of(message)}
    rest = {key: value for key, value in message.items() if key not in ("role", "content") and value}
    content = text_of(message.get("content"))
    return {"role": text_of(message.get("role")), "content": content + ("\n" + text_of(rest) if rest else "")}


def _conversation(entry: object) -> Json | None:
    """None if the lists of the tokens are missing or differ in length."""
    tokens = entry.get("tokens") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(tokens, dict):
        return None
    lists = {name: tokens.get(name) for name in _TOKEN_LISTS}
    lengths = {len(values) if isinstance(values, list) else -1 for values in lists.values()}
    if len(lengths) != 1 or -1 in lengths:
        return None
    shown: dict[str, list[object]] = {}
    for name, values in lists.items():
        assert isinstance(values, list), "checked above"
        shown[name] = [_token_value(name, value) for value in values]
    omitted = [entry.get(name) for name in ("omittedPromptTokens", "omittedTokens")]
    return {
        "kind": text_of(entry.get("kind")),
        "evaluation": text_of(entry.get("evaluation")),
        "group": text_of(entry.get("group")),
        "prompt": text_of(entry.get("prompt")),
        "score": entry.get("score") if is_finite(entry.get("score")) else None,
        "outcome": text_of(entry.get("outcome")),
        "tokens": shown,
        "omittedTokens": sum(each for each in omitted if is_step(each)),
    }


def _token_value(name: str, value: object) -> object:
    if name == "text":
        return text_of(value)
    if name in ("isTrained", "isSampled"):
        return value is True
    return round(value, 4) if is_finite(value) else None
