"""Tools of rows (`toolsField`): how they reach the chat template, and what is rejected. The tokenizer is the
quickstart's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rljob_api.v1alpha1.dataset import Dataset
from rljob_testing.models import chat_models, tiny_models
from rljob_testing.training.prompts import load_prompts
from rljob_trainer.datasets.prompts import PromptMaker, PromptRow
from rljob_trainer.errors import DatasetError
from rljob_trainer.models.tokenizer import Tokenizer

WHERE = "spec.training.dataset"
MODEL = Path(str(files("rljob_trainer"))) / "assets/sort_digits/model"
PLAIN = "{% for m in messages %}>{{ m.content }}>{% endfor %}"
WITH_TOOLS = "{% for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}" + PLAIN
CHAT = [{"role": "user", "content": "1"}]


def tool(name: str = "add", **parameters: object) -> dict[str, object]:
    schema = {"type": "object", "properties": {key: {"type": value} for key, value in parameters.items()}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Tokenizer]:
    """The quickstart's tokenizer with a chat template that writes tools, with one that does not, and without any."""
    folder, found = tmp_path_factory.mktemp("models"), dict[str, Tokenizer]()
    for name, template in (("tools", WITH_TOOLS), ("plain", PLAIN), ("none", None)):
        shutil.copytree(MODEL, folder / name)
        if template is not None:
            tiny_models.change_json(folder / name / "tokenizer_config.json", chat_template=template)
        found[name] = Tokenizer(folder / name)
    return found


def loaded(
    folder: Path, tokenizer: Tokenizer, *tools: object, prompt: object = CHAT, **fields: object
) -> list[PromptRow]:
    """Loads rows with these values in the column `tools`."""
    rows = ({"prompt": prompt, "tools": each, "meta": {"tools": each}} for each in tools)
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"type": "File", "file": {"path": "a.jsonl"}, "toolsField": "tools", **fields}
    return load_prompts(Dataset.from_wire(settings), tokenizer, folder, WHERE)


def test_the_chat_template_gets_the_tools_of_each_row(tmp_path: Path, models: Mapping[str, Tokenizer]) -> None:
    lists: list[object] = [[tool("add"), tool("sub", a="string")], [], None]
    texts = [json.dumps([tool("add")]), "[]", "null"]
    rows = loaded(tmp_path, models["tools"], *lists, *texts)
    calls = [json.dumps(each) for each in (tool("add"), tool("sub", a="string"))]
    assert [row.prompt for row in rows] == [
        *(f"[{calls[0]}][{calls[1]}]>1>", ">1>", ">1>"),
        *(f"[{calls[0]}]>1>", ">1>", ">1>"),
    ]
    # Tools count for the length; the text that is compared with other datasets does not have them.
    assert len(rows[0].token_ids) > len(rows[3].token_ids) > len(rows[1].token_ids)
    assert {row.source_prompt for row in rows} == {"1"}
    assert loaded(tmp_path, models["tools"], lists[0], toolsField="meta.tools")[0].prompt == rows[0].prompt
    [row] = loaded(tmp_path, models["tools"], lists[0], prompt="1", applyChatTemplate=True)
    assert row.prompt == rows[0].prompt


def test_keys_that_parquet_has_added_are_removed(tmp_path: Path, models: Mapping[str, Tokenizer]) -> None:
    """A column of dictionaries has the same keys in each row."""
    table = pyarrow.table({"prompt": [CHAT, CHAT], "tools": [[tool("add", a="number")], [tool("sub", b="string")]]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    dataset = Dataset.from_wire({"type": "File", "file": {"path": "a.parquet"}, "toolsField": "tools"})
    rows = load_prompts(dataset, models["tools"], tmp_path, WHERE)
    assert ['"a"' in row.prompt for row in rows] == [True, False]
    assert ["null" in row.prompt for row in rows] == [False, False]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (tool(), r"line 1: column 'tools' \(toolsField\) must have a list of tools, .* put a single tool into a list"),
        (json.dumps(tool()), r"must have a list of tools, or JSON text of one \(seen: '\{\"type"),
        (3, r"must have a list of tools, or JSON text of one \(seen: 3\)"),
        ("add, sub", r"has text that is not JSON \(Expecting value.*; seen: 'add, sub'\)"),
        (
            [tool(), {"name": "add"}],
            r"tool 2 of column 'tools' \(toolsField\) is not a function \(seen: \{'name': 'add'",
        ),
        (["add"], r"tool 1 of .* is not a function \(seen: 'add'\); write \{\"type\": \"function\""),
        ([{"type": "function", "function": {"name": None}}], r"tool 1 of .* is not a function"),
    ],
)
def test_values_that_are_not_tools_are_rejected(
    value: object, words: str, tmp_path: Path, models: Mapping[str, Tokenizer]
) -> None:
    with pytest.raises(DatasetError, match=words):
        loaded(tmp_path, models["tools"], value)


def test_a_template_that_ignores_tools_is_rejected_even_if_only_a_later_row_has_some(
    tmp_path: Path, models: Mapping[str, Tokenizer]
) -> None:
    assert [row.prompt for row in loaded(tmp_path, models["plain"], [], None)] == [">1>", ">1>"]
    with pytest.raises(DatasetError, match=r"line 2: the model's chat template ignores tools, .* remove toolsField"):
        loaded(tmp_path, models["plain"], [], [tool()])


def test_tools_need_a_chat_and_a_column_and_no_environment(tmp_path: Path, models: Mapping[str, Tokenizer]) -> None:
    with pytest.raises(
        DatasetError, match=r"dataset\.toolsField: would be ignored, .* line 1 is a string .* remove it"
    ):
        loaded(tmp_path, models["tools"], [tool()], prompt="1")
    with pytest.raises(DatasetError, match=r"no column 'functions' \(spec.training.dataset.toolsField\)"):
        loaded(tmp_path, models["tools"], [tool()], toolsField="functions")
    with pytest.raises(DatasetError, match=r"applyChatTemplate: .* has no chat template"):
        loaded(tmp_path, models["none"], [tool()])
    dataset = Dataset.from_wire({"type": "File", "file": {"path": "a.jsonl"}, "toolsField": "tools"})
    with pytest.raises(DatasetError, match=r"toolsField: would be ignored, because training\.environment defines"):
        PromptMaker(dataset, models["tools"], WHERE, for_environment=True)


def test_the_beginning_of_the_turn_is_found_in_prompts_with_tools(tmp_path: Path) -> None:
    """Also if it depends on the tools."""
    template = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + chat_models.CHATML
    template = template.replace("BEGINNING", "{% if tools %}<think>\n{% endif %}")
    tokenizer = Tokenizer(chat_models.save(tmp_path / "model", template))
    rows = loaded(tmp_path, tokenizer, [tool()], [], maxPromptTokens=4096)
    assert [row.turn_beginning for row in rows] == ["<think>\n", ""]
