"""The user's own reward function, by `package.module:function`."""

from __future__ import annotations

import importlib
import inspect
import traceback
from dataclasses import dataclass
from difflib import get_close_matches
from types import ModuleType

from rljob_trainer.errors import ConfigurationError
from rljob_trainer.rewards.base import RewardRequest, Scorer

ARGUMENTS = ("prompt", "response", "answer", "row")


@dataclass(frozen=True)
class FunctionScorer:
    """`function(prompt=..., response=..., answer=..., row=...)`: by name, so that no order can be got wrong."""

    path: str
    where: str = "spec.training.reward.function.path"

    @property
    def name(self) -> str:
        """The path."""
        return self.path

    def load(self) -> Scorer:
        """Raises ConfigurationError if the module or function is missing or cannot be called like this."""
        module_name, _, function_name = self.path.partition(":")
        module = self._import(module_name)
        function = vars(module).get(function_name)
        if function is None:
            near = get_close_matches(function_name, vars(module), n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else "; check the name"
            raise ConfigurationError(
                f"{self.where}: module {module_name} ({module.__file__}) has no {function_name!r}{hint}"
            )
        if not callable(function) or inspect.iscoroutinefunction(function):
            kind = "an async function" if callable(function) else f"a {type(function).__name__}"
            raise ConfigurationError(f"{self.where}: {self.path} is {kind}; name a plain function")
        try:
            inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS))
        except TypeError as error:
            raise ConfigurationError(
                f"{self.where}: {self.path}{inspect.signature(function)} cannot be called as "
                f"(prompt=..., response=..., answer=..., row=...): {error}; give it these four parameters"
            ) from error

        def score(request: RewardRequest) -> object:
            return function(
                prompt=request.prompt, response=request.response, answer=request.answer, row=dict(request.row)
            )

        return score

    def _import(self, module_name: str) -> ModuleType:
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
                raise ConfigurationError(
                    f"{self.where}: no module {error.name!r} (looking for {self.path}); put the folder that holds it "
                    "on PYTHONPATH, or in spec.code on a cluster"
                ) from error
            raise self._import_failed(error) from error
        except BaseException as error:
            # A module may raise anything while it is imported, SystemExit included; all of it is the job's fault.
            raise self._import_failed(error) from error

    def _import_failed(self, error: BaseException) -> ConfigurationError:
        lines = "".join(traceback.format_exception(error, limit=-3)).strip()
        return ConfigurationError(f"{self.where}: importing {self.path} failed; mend it:\n{lines}")
