"""Rules on what is trained: data and model. Those on rewards are in reward_rules.py."""

from __future__ import annotations

import re
from collections.abc import Callable

from rljob_api.v1alpha1.dataset import Dataset, HuggingFaceDataset
from rljob_api.v1alpha1.model import LoraSync, Model
from rljob_api.v1alpha1.rollout import Rollout, RolloutEngine
from rljob_api.v1alpha1.rule import ContractT, Rule, cel_text, rule, union_rules
from rljob_api.v1alpha1.training import Training

LOCAL_SOURCE = r"^(/|\./|\.\./|~|package://)"
_PROMPT = "{prompt}"
# A whole number of bytes that is not 0; with a unit no digit is too small.
_SOME_MEMORY = r"^\+?[0-9.]*[1-9]"


def _revision_rule(on: type[ContractT], field: str, read: Callable[[ContractT], tuple[str, str | None]]) -> Rule:
    """A revision belongs to a repository of the hub. `read` gives the source and the revision."""

    def holds(value: ContractT) -> bool:
        source, revision = read(value)
        return revision is None or re.search(LOCAL_SOURCE, source) is None

    return rule(
        on,
        f"{on.__name__}.revision",
        field=".revision",
        cel=f"!has(self.revision) || !self.{field}.matches({cel_text(LOCAL_SOURCE)})",
        wrong=f"a revision needs a Hugging Face repository, but {field} is a local path",
        advice="remove the revision",
        holds=holds,
    )


def _engine_takes_adapters(training: Training) -> bool:
    lora = training.model.lora
    wants_adapter = lora is not None and lora.sync is LoraSync.ADAPTER
    return not wants_adapter or training.rollout.engine is not RolloutEngine.HUGGING_FACE


UNION_RULES = (
    *union_rules(
        Dataset,
        (
            ("File", "file", lambda dataset: (dataset.type, dataset.file)),
            ("HuggingFace", "hugging_face", lambda dataset: (dataset.type, dataset.hugging_face)),
            ("ReasoningGym", "reasoning_gym", lambda dataset: (dataset.type, dataset.reasoning_gym)),
        ),
    ),
)

SOURCE_RULES = (
    _revision_rule(Model, "source", lambda model: (model.source, model.revision)),
    _revision_rule(HuggingFaceDataset, "path", lambda dataset: (dataset.path, dataset.revision)),
    rule(
        Model,
        "Model.gradientCheckpointingEveryNthLayer",
        field=".gradientCheckpointingEveryNthLayer",
        cel="self.gradientCheckpointing || self.gradientCheckpointingEveryNthLayer == 1",
        wrong="no layer's activations are recomputed without gradientCheckpointing",
        advice="write gradientCheckpointing: true, or remove this field",
        holds=lambda model: model.gradient_checkpointing or model.gradient_checkpointing_every_nth_layer == 1,
    ),
    rule(
        Dataset,
        "Dataset.promptTemplate",
        field=".promptTemplate",
        cel="self.promptTemplate.contains('{prompt}')"
        " && self.promptTemplate.indexOf('{prompt}') == self.promptTemplate.lastIndexOf('{prompt}')",
        wrong="must contain {prompt} exactly once",
        advice="write {prompt} where the row's prompt belongs",
        holds=lambda dataset: dataset.prompt_template.count(_PROMPT) == 1,
    ),
)

TRAINING_RULES = (
    rule(
        Training,
        "Training.warmupSteps",
        field=".optimizer.warmupSteps",
        cel="self.optimizer.warmupSteps <= self.steps - (has(self.critic) ? self.critic.warmupSteps : 0)",
        wrong="must not be more than training.steps, less critic.warmupSteps where there are any",
        advice="lower it, or train for more steps",
        holds=lambda t: t.optimizer.warmup_steps <= t.steps - (t.critic.warmup_steps if t.critic else 0),
    ),
    rule(
        Training,
        "Training.timelineSteps",
        field=".timelineSteps",
        cel="self.timelineSteps.all(step, step <= self.steps)",
        wrong="must not be more than training.steps",
        advice="name steps that are done (the first is 1)",
        holds=lambda t: all(step <= t.steps for step in t.timeline_steps),
    ),
    rule(
        Rollout,
        "Rollout.cpuKvCache",
        field=".cpuKvCache",
        cel=f"!has(self.cpuKvCache) || string(self.cpuKvCache).matches({cel_text(_SOME_MEMORY)})",
        wrong="must be above 0: an engine without a KV cache generates nothing",
        advice="write some memory, such as 1Gi (the default), or leave it out",
        holds=lambda rollout: re.search(_SOME_MEMORY, rollout.cpu_kv_cache) is not None,
    ),
    rule(
        Training,
        "Training.loraSync",
        field=".model.lora.sync",
        cel="!has(self.model.lora) || self.model.lora.sync != 'Adapter' || self.rollout.engine != 'HuggingFace'",
        wrong="the HuggingFace engine takes no adapters",
        advice="write Merged or Auto, or rollout.engine: VLLM",
        holds=_engine_takes_adapters,
    ),
)
