"""The quick start's policy with the head of a sequence classifier."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rljob_trainer.engines.train.output_head import VALUE_WEIGHT

POLICY = Path(str(files("rljob_trainer"))) / "assets" / "sort_digits" / "model"
WEIGHTS = "model.safetensors"


def save_scoring_model(folder: Path, *, num_labels: int | None = 1, **config: object) -> Path:
    """With a drawn head for so many labels, or none, and these changes of its config.json."""
    shutil.copytree(POLICY, folder)
    weights = load_file(POLICY / WEIGHTS)
    if num_labels is not None:
        weights[VALUE_WEIGHT] = torch.randn(num_labels, 64, generator=torch.Generator().manual_seed(0)) / 8
    (folder / WEIGHTS).unlink()
    save_file(weights, folder / WEIGHTS)
    change_json(folder / "config.json", **config)
    return folder


def change_json(file: Path, **changes: object) -> None:
    """Writes the object in `file` with these fields."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
