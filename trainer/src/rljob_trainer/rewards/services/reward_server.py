"""A reward server: an HTTP service of the user scores batches of responses.

A request has the fields of two protocols, so that servers made for either of them can be used:

| protocol | fields of a request | reply |
|---|---|---|
| RLJob | `prompts`, `responses`, `answers`, `rows`: lists of the same length | `{"scores": [...]}` |
| OpenRLHF | `query`: prompt + response, `prompts`, `labels`: the answers | `{"rewards": [...], "scores": [...]}` |

The answers are the expected ones of the rows. In a job with an environment, a request also has `messages`, the
conversation of each response.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from rljob_trainer.errors import ResourceError
from rljob_trainer.rewards.base import RewardOutcome, RewardRequest, RewardStatus, as_score
from rljob_trainer.rewards.function import score_list
from rljob_trainer.rewards.services.service import Counts, Service, ServiceError
from rljob_trainer.rewards.services.settings import RemoteSettings, key_of

FIELDS = ("rewards", "scores")
"""Fields of a reply with the scores. OpenRLHF's servers may return both; it trains on the rewards."""


class RewardServer:
    """Sends requests to a reward server."""

    def __init__(self, spec: RemoteSettings) -> None:
        self._spec = spec
        self.service = Service(spec.url, key_of(spec.key_variable, spec.where), spec.timeout_seconds)

    async def probe(self) -> None:
        """Raises ResourceError if no server replies at the URL."""
        service = self.service.for_probe()
        try:
            problem = await service.is_reachable()
        finally:
            await service.close()
        if problem is not None:
            raise ResourceError(
                f"{self._spec.where}: the reward server cannot be reached: {problem}; start the server, or check "
                f"remote.url (seen: {self.service.shown_url})"
            )

    async def scores(self, requests: Sequence[RewardRequest]) -> Sequence[RewardOutcome]:
        """Scores a batch. If the server fails, all of its responses have this failure."""
        started, counts = time.monotonic(), Counts(float)

        def outcome(score: float | None, status: RewardStatus, detail: str) -> RewardOutcome:
            return RewardOutcome(score, status, detail, time.monotonic() - started)

        try:
            reply = await self.service.call(self._body(requests), _unchanged, counts)
            values = _values(reply, len(requests))
        except ServiceError as error:
            found = [outcome(None, RewardStatus.UNREACHABLE, f"cannot be used: {error}")] * len(requests)
        except (TypeError, ValueError) as error:
            found = [outcome(None, RewardStatus.ERROR, str(error))] * len(requests)
        else:
            found = []
            for value in values:
                try:
                    found.append(outcome(as_score(value), RewardStatus.OK, ""))
                except (TypeError, ValueError) as error:
                    found.append(outcome(None, RewardStatus.ERROR, str(error)))
        # The counts are those of the whole batch.
        first = RewardOutcome(found[0].score, found[0].status, found[0].detail, found[0].seconds, None, counts)
        return [first, *found[1:]]

    def _body(self, requests: Sequence[RewardRequest]) -> dict[str, object]:
        prompts, responses = [each.prompt for each in requests], [each.response for each in requests]
        answers = [_json_value(each.answer) for each in requests]
        query = [f"{prompt}{response}" for prompt, response in zip(prompts, responses, strict=True)]
        messages = [[dict(message) for message in each.messages] for each in requests]
        return {
            "prompts": prompts,
            "responses": responses,
            "answers": answers,
            "rows": [_json_value(each.row) for each in requests],
            "query": query,
            "labels": answers,
            **({"messages": messages} if any(messages) else {}),
        }


def _json_value(value: object) -> object:
    """The value with null for NaN and infinite numbers, which JSON does not have. Tables have NaN for values that are
    missing."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _json_value(item) for key, item in value.items()}
    return [_json_value(item) for item in value] if isinstance(value, list | tuple) else value


def _unchanged(reply: Mapping[str, object]) -> Mapping[str, object]:
    return reply


def _values(reply: Mapping[str, object], num_responses: int) -> Sequence[object]:
    """The scores in a reply. Raises TypeError or ValueError."""
    for field in FIELDS:
        if field in reply:
            return score_list(reply[field], num_responses)
    keys = ", ".join(reply) or "none"
    raise ValueError(
        f'returned a JSON object without "scores" (keys: {keys}); return {{"scores": [one number per response]}}'
    )
