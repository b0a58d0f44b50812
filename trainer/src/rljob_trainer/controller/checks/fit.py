"""Checks that need more than the schema: whether the job fits the model and the data. They run before devices are
reserved."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedConfig

from rljob_api.v1alpha1.advantage import AdvantageType
from rljob_api.v1alpha1.kl import KlEstimator, KlPlacement
from rljob_api.v1alpha1.model import Lora
from rljob_api.v1alpha1.policy_loss import LossType
from rljob_api.v1alpha1.recipes import loss_type, resolve_algorithm
from rljob_api.v1alpha1.rollout import Rollout, RolloutEngine
from rljob_api.v1alpha1.rollout_correction import OldLogprobs
from rljob_api.v1alpha1.spec import RLJobSpec, TrainRole
from rljob_api.v1alpha1.training import Training
from rljob_trainer.algorithms.advantage_registry import advantage_estimator
from rljob_trainer.algorithms.interfaces import REF_LOGPROBS, ROLLOUT_LOGPROBS, VALUES
from rljob_trainer.algorithms.loss_registry import policy_loss
from rljob_trainer.controller.checks.responses import check_responses
from rljob_trainer.controller.prompt_sets import Prompts
from rljob_trainer.datasets.prompts import DATASET, evaluation_dataset
from rljob_trainer.engines.rollout.select import check_separate_adapters
from rljob_trainer.engines.train.attention import choose_attention
from rljob_trainer.engines.train.kernels import check_kernels
from rljob_trainer.engines.train.layout import ParallelLayout, check_heads, check_layout
from rljob_trainer.engines.train.lora import add_adapters, target_endings, target_layers
from rljob_trainer.engines.train.model import build_on_meta, read_config
from rljob_trainer.engines.train.sharded_model import check_interval
from rljob_trainer.errors import ConfigurationError

log = logging.getLogger(__name__)

VLLM_VOCABULARY_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this, and divides it among the ranks."""
MAX_ROPE_FACTOR = 1_000_000
"""Upper bound for a rope scaling factor, because JSON files may contain Infinity."""


def check_algorithm(spec: RLJobSpec) -> None:
    """Loads the user's own advantage and loss and tries them. Raises ConfigurationError if they fail, if they need a
    column that the job cannot provide, and if the job configures a model that nothing needs."""
    needed_by_functions = _needed_columns(spec, of_functions=True)
    _warn_of_unintended_settings(spec)
    rollout = spec.training.rollout
    if not samples_all_tokens(rollout) and ROLLOUT_LOGPROBS in needed_by_functions:
        raise ConfigurationError(
            f"spec.training.rollout: your function needs {ROLLOUT_LOGPROBS}, but with topP {rollout.top_p:g} and topK "
            f"{rollout.top_k} these are log-probabilities over the truncated vocabulary and cannot be compared with "
            f"the policy's; set topP: 1 and topK: 0, or remove {ROLLOUT_LOGPROBS!r} from its `needs`"
        )
    if not needs_critic(spec):
        _refuse_role(spec, "critic", spec.roles.critic, "a critic", f"let your advantage need {VALUES!r}")
        if spec.training.critic is not None:
            raise ConfigurationError(
                f"spec.training.critic: nothing needs a critic; remove the block, or let your advantage need {VALUES!r}"
            )
    if not needs_reference(spec):
        advice = f"set training.algorithm.kl.coefficient above 0, or let your function need {REF_LOGPROBS!r}"
        _refuse_role(spec, "ref", spec.roles.ref, "the reference model", advice)
        if spec.roles.ref.model is not None:
            raise ConfigurationError(
                f"spec.roles.ref.model: nothing needs the reference model; remove the block, or {advice}"
            )


def _warn_of_unintended_settings(spec: RLJobSpec) -> None:
    """Logs warnings for settings that are valid but probably not intended."""
    training, algorithm = spec.training, spec.training.algorithm
    kl = algorithm.kl
    is_in_loss = kl.coefficient > 0 and kl.placement is KlPlacement.LOSS
    if is_in_loss and kl.estimator is KlEstimator.K1 and not kl.straight_through:
        log.warning(
            "spec.training.algorithm.kl: the gradient of K1 in the loss has expectation 0 and only adds noise; use "
            "estimator K2 or K3, straightThrough: true, or placement: Reward"
        )
    correction = algorithm.rollout_correction
    has_single_update = training.mini_batch_size in (None, training.batch_size) and training.num_epochs_per_batch == 1
    has_equal_policies = has_single_update and correction.old_logprobs is OldLogprobs.TRAINER
    if has_equal_policies and loss_type(algorithm) is LossType.KL_COV:
        log.warning(
            "spec.training.algorithm.loss: with one update per step the old and the new policy are equal, so the "
            "penalty of KLCov has no gradient; set miniBatchSize below batchSize, or numEpochsPerBatch above 1"
        )
    rollout = training.rollout
    if rollout.sync_every_steps > 1 and not correction.uses_rollout_logprobs:
        advice = "set training.algorithm.rolloutCorrection: {type: TokenTruncated}"
        if not samples_all_tokens(rollout):
            advice = "use training.algorithm.rolloutCorrection, which requires topP: 1 and topK: 0"
        log.warning(
            "spec.training.rollout.syncEverySteps: responses are generated with weights up to %d steps old, without an "
            "off-policy correction; %s",
            rollout.sync_every_steps - 1,
            advice,
        )


def _refuse_role(spec: RLJobSpec, name: str, role: TrainRole, model: str, advice: str) -> None:
    """Raises ConfigurationError if the job sets a pool or a layout for a role whose model nothing needs."""
    placed = spec.placed_roles()
    if role.pool is not None and placed[name] != placed["actor"]:
        raise ConfigurationError(
            f"spec.roles.{name}.pool: nothing needs {model}, so the role would not use pool {placed[name]!r}; "
            f"remove this field, or {advice}"
        )
    if (role.shard_size, role.sequence_parallel) != (None, None):
        raise ConfigurationError(
            f"spec.roles.{name}: nothing needs {model}, so shardSize and sequenceParallel would have no effect; remove "
            f"them, or {advice}"
        )


def check_fit(
    spec: RLJobSpec, engine: RolloutEngine, model_folder: Path, prompts: Prompts, layouts: Mapping[str, ParallelLayout]
) -> None:
    """Raises ConfigurationError if the policy's model, the data and the layouts of the roles with this model do not fit
    together."""
    check_row_lengths(model_folder, spec.training, prompts)
    check_vocabulary(model_folder, prompts.largest_token)
    check_responses(spec.training, model_folder, prompts.rows)
    check_layouts(model_folder, layouts)
    check_recomputation(model_folder, spec.training.model.gradient_checkpointing_every_nth_layer)
    check_kernels(spec.training.model.kernels, read_config(model_folder))
    if engine is RolloutEngine.VLLM:
        check_tensor_parallel(model_folder, spec.roles.rollout.tensor_parallel)
    check_lora(model_folder, spec.training.model.lora)


def check_row_lengths(model_folder: Path, training: Training, prompts: Prompts | None = None) -> None:
    """Raises ConfigurationError if the model cannot be read, or if the longest prompt plus `maxNewTokens` exceeds the
    model's maximum length. Without `prompts` a prompt counts as one token, because maxNewTokens alone may be too
    large."""
    config = read_config(model_folder)
    limits = [
        (position_limit(config), "max_position_embeddings in its config.json"),
        (choose_attention(config).max_row_tokens, "for longer rows its rotary frequencies depend on the row's length"),
    ]
    limit, reason = min(((limit, why) for limit, why in limits if limit is not None), default=(None, ""))
    environment = training.environment
    if environment is not None and limit is not None and environment.max_context_tokens > limit:
        raise ConfigurationError(
            f"spec.training.environment.maxContextTokens ({environment.max_context_tokens}): the maximum of the model "
            f"in {model_folder} is {limit} ({reason}); reduce it, or choose another model"
        )
    lengths = {DATASET: 1} if prompts is None else prompts.longest_of
    field, longest = max(lengths.items(), key=lambda each: each[1])
    new = training.rollout.max_new_tokens
    if limit is None or longest + new <= limit:
        return
    datasets = {f"spec.training.{name}": each for name, each in training.sources.items()}
    datasets |= {
        evaluation_dataset(index): each.dataset
        for index, each in enumerate(training.evaluations)
        if each.dataset is not None
    }
    dataset = datasets.get(field)
    if dataset is None:  # `maxContextTokens` includes the new tokens.
        return
    prompt, advice = "a prompt of one token", "reduce maxNewTokens"
    if longest > 1:
        prompt = f"the longest prompt ({longest} tokens)"
        advice = "reduce maxNewTokens, or maxPromptTokens with overlongPrompt: Drop"
    raise ConfigurationError(
        f"{field}.maxPromptTokens ({dataset.max_prompt_tokens}) and spec.training.rollout.maxNewTokens ({new}): "
        f"{prompt} and its response may have {longest + new} tokens, but the maximum of the model in {model_folder} is "
        f"{limit} ({reason}); {advice}, or choose another model"
    )


def position_limit(config: PreTrainedConfig) -> int | None:
    """Returns the maximum row length of a model, in tokens, computed as in vLLM; None if its configuration has no
    limit."""
    text = config.get_text_config()
    # Some model types use another key in config.json. transformers maps such a key to this attribute.
    positions: int | None = getattr(text, "max_position_embeddings", None)
    rope = text.to_dict().get("rope_parameters") or {}
    # Some scaling types are not included in max_position_embeddings. Of these, only linear scaling leaves short rows
    # unchanged.
    factor = rope.get("factor")
    if positions is not None and rope.get("rope_type") == "linear" and isinstance(factor, int | float):
        return int(positions * min(factor, MAX_ROPE_FACTOR))
    return positions


def check_vocabulary(model_folder: Path, largest_token: int) -> None:
    """Raises ConfigurationError if the tokenizer produces tokens that are not in the model's vocabulary."""
    vocabulary: int = read_config(model_folder).get_text_config().vocab_size
    if largest_token >= vocabulary:
        raise ConfigurationError(
            f"spec.training.model.source: the tokenizer in {model_folder} produces token {largest_token}, but the "
            f"model's vocabulary has {vocabulary} tokens; use the tokenizer that belongs to the model"
        )


def check_vocabulary_size(policy: PreTrainedConfig, model: PreTrainedConfig, source: str) -> None:
    """Raises ConfigurationError if the policy may generate tokens that the model does not have. Embeddings often have
    more rows than the tokenizer has tokens, and their number may differ between sizes of the same model family."""
    generated, known = (int(config.get_text_config().vocab_size) for config in (policy, model))
    if known < generated:
        raise ConfigurationError(
            f"spec.training.model.source: {source} has {known} tokens (vocab_size), but the policy may generate "
            f"{generated}; choose a model with at least as many, or pad its embeddings"
        )


def check_layouts(model_folder: Path, layouts: Mapping[str, ParallelLayout]) -> None:
    """Checks the layouts of the roles that have the model. Raises ConfigurationError if the model cannot be read, or if
    its heads are not divisible by the number of sequence ranks."""
    config = read_config(model_folder)
    for role, layout in layouts.items():
        check_layout(layout, config, f"spec.roles.{role}.sequenceParallel")


def check_tensor_parallel(model_folder: Path, tensor_parallel: int) -> None:
    """Checks tensor parallelism in vLLM. Raises ConfigurationError if the model cannot be read, or if its heads or its
    vocabulary are not divisible. vLLM itself checks the widths of MLPs."""
    if tensor_parallel == 1:
        return
    config = read_config(model_folder)
    check_heads("spec.roles.rollout.tensorParallel", tensor_parallel, config)
    vocabulary: int = config.get_text_config().vocab_size
    padded = -(-vocabulary // VLLM_VOCABULARY_PADDING) * VLLM_VOCABULARY_PADDING
    if padded % tensor_parallel:
        raise ConfigurationError(
            f"spec.roles.rollout.tensorParallel: must divide the model's vocabulary of {vocabulary} tokens, which vLLM "
            f"pads to {padded} (seen: {tensor_parallel}); choose a power of 2"
        )


def check_lora(model_folder: Path, lora: Lora | None) -> None:
    """Raises ConfigurationError for targets that the model does not have, or whose separate adapters vLLM ignores."""
    if lora is None:
        return
    model = build_on_meta(model_folder)
    check_separate_adapters(lora.sync, target_endings(model, lora.targets))
    log.info("lora: adapters of rank %d for %d linear layers", lora.rank, len(target_layers(model, lora.targets)))
    add_adapters(model, lora)


def check_recomputation(model_folder: Path, every_nth_layer: int) -> None:
    """Raises ConfigurationError if the model cannot be read, or if it has fewer layers than `every_nth_layer`."""
    if every_nth_layer == 1:
        return
    num_layers: int = read_config(model_folder).get_text_config().num_hidden_layers
    check_interval(every_nth_layer, num_layers)


def needs_reference(spec: RLJobSpec) -> bool:
    """Whether there is a KL term, or the user's own advantage or loss needs the reference's log-probabilities. A job
    that only evaluates needs no reference."""
    has_kl = spec.training.algorithm.kl.coefficient > 0
    return spec.training.steps > 0 and (has_kl or REF_LOGPROBS in _needed_columns(spec))


def needs_critic(spec: RLJobSpec) -> bool:
    """Whether the advantage needs a critic's values. A job that only evaluates needs no critic."""
    return spec.training.steps > 0 and VALUES in _needed_columns(spec)


def samples_all_tokens(rollout: Rollout) -> bool:
    """Whether responses are sampled from the whole vocabulary. Only then the log-probabilities of rollout engine and
    trainer are comparable."""
    return rollout.top_p == 1 and rollout.top_k == 0


def _needed_columns(spec: RLJobSpec, *, of_functions: bool = False) -> frozenset[str]:
    """Returns the columns that advantage and loss need. `of_functions`: only those of the user's own functions, because
    built-in ones do not compare log-probabilities with the rollout engine's."""
    resolved = resolve_algorithm(spec.training.algorithm)
    by_advantage = advantage_estimator(resolved, spec.training.rollout.group_size).needs
    by_loss = policy_loss(resolved).needs
    if of_functions:
        by_advantage = by_advantage if resolved.advantage.type is AdvantageType.FUNCTION else frozenset()
        by_loss = by_loss if resolved.loss.type is LossType.FUNCTION else frozenset()
    return by_advantage | by_loss
