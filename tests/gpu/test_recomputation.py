"""Recomputed activations: the same gradients with less memory, in all layers or in every n-th."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch import nn

from rljob_testing import compare
from rljob_testing.gpu.device import DeviceContext
from rljob_testing.models import tiny_models
from rljob_testing.training import engine_updates
from rljob_trainer.engines.train.engine import TrainEngine
from rljob_trainer.engines.train.model import transformer_layers
from rljob_trainer.engines.train.settings import TrainEngineSettings

NUM_LAYERS = 5
RECOMPUTED = {0: [], 1: [0, 1, 2, 3, 4], 2: [0, 2, 4], 3: [0, 3]}
"""Layers that run twice, for each value of `gradient_checkpointing_every_nth_layer`; 0 stands for no recomputation."""


def watched_update(settings: TrainEngineSettings) -> tuple[engine_updates.Update, list[int]]:
    """An update, and which layers ran twice in it."""
    engine = TrainEngine(settings)
    counts: Counter[int] = Counter()

    def counted(number: int) -> None:
        def note(_module: nn.Module, _arguments: object) -> None:
            counts[number] += 1

        layers[number].register_forward_pre_hook(note)

    layers = transformer_layers(engine.model)
    for number in range(len(layers)):
        counted(number)
    found = engine_updates.update(engine, engine_updates.random_batch())
    assert set(counts.values()) <= {1, 2}
    return found, [number for number, count in sorted(counts.items()) if count == 2]


def test_gradients_equal_those_of_kept_activations(case: DeviceContext) -> None:
    folder = tiny_models.save_deep(case.folder / "model", NUM_LAYERS)
    for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        results: dict[int, engine_updates.Update] = {}
        for every, recomputed in RECOMPUTED.items():
            settings = replace(
                engine_updates.engine_settings(folder, case.device, dtype, gradient_checkpointing=every > 0),
                gradient_checkpointing_every_nth_layer=max(every, 1),
            )
            results[every], twice = watched_update(settings)
            assert twice == recomputed
        for every in (1, 2, 3):
            found = compare.relative_difference(results[every].gradients, results[0].gradients)
            assert case.note(f"{str(dtype).removeprefix('torch.')}, every {every}", found) <= limit
            assert results[every].loss == results[0].loss


def test_recomputing_more_layers_keeps_less_memory(case: DeviceContext) -> None:
    """Measured by the tensors that are saved for the backward pass, and on GPUs by the allocator's peak."""
    folder = tiny_models.save_deep(case.folder / "model", NUM_LAYERS)
    kept: list[int] = []
    peaks: list[int] = []
    for every in (0, 2, 1):
        settings = replace(
            engine_updates.engine_settings(folder, case.device, gradient_checkpointing=every > 0),
            gradient_checkpointing_every_nth_layer=max(every, 1),
        )
        engine, batch = TrainEngine(settings), engine_updates.random_batch([120] * 16)
        sizes: dict[int, int] = {}

        def note(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            if not isinstance(tensor, nn.Parameter):
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            engine_updates.update(engine, batch)
        kept.append(sum(sizes.values()))
        case.note(f"every {every}, kept KiB", kept[-1] / 1024)
        if case.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            engine_updates.update(engine, batch)
            peaks.append(torch.cuda.max_memory_allocated())
            case.note(f"every {every}, peak KiB", peaks[-1] / 1024)
    assert kept[0] > 1.5 * kept[1] > 1.5 * 1.5 * kept[2]
    assert peaks == sorted(peaks, reverse=True)
