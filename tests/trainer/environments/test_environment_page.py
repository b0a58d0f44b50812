"""The classes of docs/environments.md can be used as they stand there."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType

import pytest

from rljob_testing import pages
from rljob_trainer.environments.description import ClassSpec, describe_class, load_class
from rljob_trainer.environments.returned_values import as_reward

PAGE = pages.REPOSITORY / "docs" / "environments.md"


def classes() -> Iterator[tuple[str, type]]:
    """The classes of the page's blocks."""
    for block in pages.blocks(PAGE, "python"):
        names: dict[str, object] = {"__name__": "page"}
        exec(compile(block.text, str(PAGE), "exec"), names)
        for name, value in names.items():
            if inspect.isclass(value):
                yield name, value


CLASSES: Mapping[str, type] = dict(classes())
TOOLS = {"GuessNumber": (), "Shop": ("buy", "price"), "Graded": (), "Dice": ()}


def test_the_page_has_these_classes() -> None:
    assert set(CLASSES) == set(TOOLS)


@pytest.mark.parametrize("name", TOOLS)
def test_a_class_of_the_page_is_described_without_a_mistake(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("page_of_environments")
    vars(module)[name] = CLASSES[name]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    spec = ClassSpec(name, f"{module.__name__}:{name}", {}, "spec.training.environment.classes[0]")
    described = describe_class(load_class(spec), spec)
    assert described.tool_names == TOOLS[name]
    assert described.has_reward


@pytest.mark.parametrize("name", TOOLS)
def test_a_class_of_the_page_gives_a_reward_although_its_first_turn_was_cut_off(name: str) -> None:
    rollout = CLASSES[name]()
    rollout.reset(**({"seed": 0} if name == "Dice" else {}))
    # `respond` was not called.
    reward = rollout.get_reward()
    assert as_reward(reward) == reward


def test_the_game_of_the_page_is_won_by_halving() -> None:
    game = CLASSES["GuessNumber"](highest=20)
    assert game.reset() == "Guess my number. It is between 1 and 20."
    low, high, answer = 1, 20, ""
    assert game.respond({"content": "hm"}) == "Write one number."
    while answer is not None:
        guess = (low + high) // 2
        answer = game.respond({"content": str(guess)})
        low, high = (guess + 1, high) if answer == "larger" else (low, guess - 1)
    assert game.get_reward() == 1


def test_the_shop_of_the_page_sells_what_it_should() -> None:
    shop = CLASSES["Shop"]()
    shop.reset(budget=50)
    assert shop.buy("lamp") == "You have 10 coins left."
    assert shop.get_reward() == 0
    with pytest.raises(KeyError, match="'pear'"):
        shop.price("pear")
    shop.buy("apple")
    assert shop.get_reward() == 1
