"""A user's own reward function, named by `package.module:function`."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_trainer.errors import ConfigurationError
from rljob_trainer.rewards.base import RewardRequest, Scorer
from rljob_trainer.user_functions import find_named, plain_function

ARGUMENTS = ("prompt", "response", "answer", "row")
MESSAGES = "messages"


@dataclass(frozen=True)
class FunctionScorer:
    """Calls `function(prompt=..., response=..., answer=..., row=...)`, with keyword arguments to prevent mistakes in
    their order. A function that has a parameter `messages` also gets `RewardRequest.messages`, as a list."""

    path: str
    where: str

    @property
    def name(self) -> str:
        """The function's path."""
        return self.path

    def load(self) -> Scorer:
        """Raises ConfigurationError if the module or the function is missing, or if the function cannot be called with
        these arguments."""
        function, signature = plain_function(find_named(self.path, self.where), self.path, self.where)
        names = (*ARGUMENTS, MESSAGES) if MESSAGES in signature.parameters else ARGUMENTS
        try:
            signature.bind(**dict.fromkeys(names))
        except TypeError as error:
            raise ConfigurationError(
                f"{self.where}: {self.path}{signature} cannot be called as "
                f"(prompt=..., response=..., answer=..., row=...): {error}; give it these four parameters"
            ) from error

        def score(request: RewardRequest) -> object:
            given = {
                "prompt": request.prompt,
                "response": request.response,
                "answer": request.answer,
                "row": dict(request.row),
                MESSAGES: [dict(message) for message in request.messages],
            }
            return function(**{name: given[name] for name in names})

        return score
