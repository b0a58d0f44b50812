"""What no schema can say of a job: whether its parts fit the model and each other. Asked before a device is taken."""

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
from rljob_api.v1alpha1.rollout_correction import RolloutCorrectionType
from rljob_api.v1alpha1.spec import RLJobSpec, TrainRole
from rljob_api.v1alpha1.training import Training
from rljob_trainer.algorithms.advantage_registry import advantage_estimator
from rljob_trainer.algorithms.interfaces import REF_LOGPROBS, ROLLOUT_LOGPROBS, VALUES
from rljob_trainer.algorithms.loss_registry import policy_loss
from rljob_trainer.controller.prompt_sets import Prompts
from rljob_trainer.controller.response_checks import check_responses
from rljob_trainer.datasets.prompts import DATASET
from rljob_trainer.engines.train.attention import choose_attention
from rljob_trainer.engines.train.layout import ParallelLayout, check_heads, check_layout
from rljob_trainer.engines.train.lora import add_adapters, has_experts, target_layers
from rljob_trainer.engines.train.model import build_on_meta, read_config
from rljob_trainer.engines.train.sharded_model import check_interval
from rljob_trainer.errors import ConfigurationError

log = logging.getLogger(__name__)

MOST_STRETCHED = 1_000_000
"""JSON has infinite factors, too."""


def check_algorithm(spec: RLJobSpec) -> None:
    """Loads and tries the user's own parts of the algorithm. Raises ConfigurationError for what is wrong with them, for
    what they need and cannot get, and for what the job says of a model that nothing needs."""
    needed_by_functions = _needed_columns(spec, of_functions=True)
    _warn_of_little_use(spec)
    rollout = spec.training.rollout
    if not samples_all_tokens(rollout) and ROLLOUT_LOGPROBS in needed_by_functions:
        raise ConfigurationError(
            f"spec.training.rollout: with topP {rollout.top_p:g} and topK {rollout.top_k} the generator's "
            "log-probabilities are of what the cut left, those of the policy of all tokens, and your function would "
            f"compare the two; write topP: 1 and topK: 0, or do not need {ROLLOUT_LOGPROBS}"
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


def _warn_of_little_use(spec: RLJobSpec) -> None:
    """Of what a job may say, and hardly wants."""
    training, algorithm = spec.training, spec.training.algorithm
    kl = algorithm.kl
    is_in_loss = kl.coefficient > 0 and kl.placement is KlPlacement.LOSS
    if is_in_loss and kl.estimator is KlEstimator.K1 and not kl.straight_through:
        log.warning(
            "spec.training.algorithm.kl: the gradient of K1 in the loss has expectation 0 and only adds noise; write "
            "K2 or K3, straightThrough: true, or placement: Reward"
        )
    has_single_update = training.mini_batch_size in (None, training.batch_size) and training.num_epochs_per_batch == 1
    if has_single_update and loss_type(algorithm) is LossType.KL_COV:
        log.warning(
            "spec.training.algorithm.loss: with one update per step old and new policy are the same, and the penalty "
            "of KLCov has no gradient; set miniBatchSize below batchSize, or numEpochsPerBatch above 1"
        )
    rollout, correction = training.rollout, algorithm.rollout_correction
    if rollout.sync_every_steps > 1 and correction.type is RolloutCorrectionType.NONE and correction.rejection is None:
        advice = "training.algorithm.rolloutCorrection: {type: TokenTruncated} does"
        if not samples_all_tokens(rollout):
            advice = "only without topP and topK something can (training.algorithm.rolloutCorrection)"
        log.warning(
            "spec.training.rollout.syncEverySteps: responses are by weights up to %d steps old, and nothing corrects "
            "for it; %s",
            rollout.sync_every_steps - 1,
            advice,
        )


def _refuse_role(spec: RLJobSpec, name: str, role: TrainRole, model: str, advice: str) -> None:
    """Raises ConfigurationError where the job gives a pool or a layout to a role whose model nothing needs."""
    placed = spec.placed_roles()
    if role.pool is not None and placed[name] != placed["actor"]:
        raise ConfigurationError(
            f"spec.roles.{name}.pool: nothing needs {model}, and the GPUs of pool {placed[name]!r} would stay idle; "
            f"remove the pool, or {advice}"
        )
    if (role.shard_size, role.sequence_parallel) != (None, None):
        raise ConfigurationError(
            f"spec.roles.{name}: nothing needs {model}, and its layout would be ignored; remove it, or {advice}"
        )


def check_fit(
    spec: RLJobSpec, engine: RolloutEngine, model_folder: Path, prompts: Prompts, layouts: Mapping[str, ParallelLayout]
) -> bool:
    """The policy's model, its data and the layouts of the roles that have the model must fit each other. Returns
    whether adapters are put into a model with experts. Raises ConfigurationError."""
    check_row_lengths(model_folder, spec.training, prompts)
    check_vocabulary(model_folder, prompts.largest_token)
    check_responses(spec.training, model_folder, prompts.rows)
    check_layouts(model_folder, layouts)
    check_recomputation(model_folder, spec.training.model.gradient_checkpointing_every_nth_layer)
    if engine is RolloutEngine.VLLM:
        check_tensor_parallel(model_folder, spec.roles.rollout.tensor_parallel)
    return check_lora(model_folder, spec.training.model.lora)


def check_row_lengths(model_folder: Path, training: Training, prompts: Prompts | None = None) -> None:
    """Raises ConfigurationError for a model that cannot be read, and where the longest prompt and `maxNewTokens` are
    more tokens than the model reads. Before there are `prompts`, a prompt counts as one token: maxNewTokens alone may
    be too much."""
    config = read_config(model_folder)
    limits = [
        (position_limit(config), "max_position_embeddings in its config.json"),
        (choose_attention(config).max_row_tokens, "in longer rows its rotary frequencies follow the row's length"),
    ]
    limit, reason = min(((limit, why) for limit, why in limits if limit is not None), default=(None, ""))
    lengths = {DATASET: 1} if prompts is None else prompts.longest_of
    field, longest = max(lengths.items(), key=lambda each: each[1])
    new = training.rollout.max_new_tokens
    if limit is None or longest + new <= limit:
        return
    dataset = training.dataset if field == DATASET or training.evaluation is None else training.evaluation.dataset
    prompt = "a prompt of one token" if longest == 1 else f"the longest prompt ({longest} tokens)"
    raise ConfigurationError(
        f"{field}.maxPromptTokens ({dataset.max_prompt_tokens}) and spec.training.rollout.maxNewTokens ({new}): "
        f"{prompt} with its response may have {longest + new} tokens, and the model in {model_folder} reads at most "
        f"{limit} ({reason}); lower maxNewTokens, or maxPromptTokens with overlongPrompt: Drop, or choose another model"
    )


def position_limit(config: PreTrainedConfig) -> int | None:
    """Tokens of the longest row that a model reads, as in vLLM; None where its configuration names no limit."""
    text = config.get_text_config()
    # Some types have another name for it, which only the attribute knows.
    positions: int | None = getattr(text, "max_position_embeddings", None)
    rope = text.to_dict().get("rope_parameters") or {}
    # Of the kinds of scaling that do not count in max_position_embeddings, this one does not change short rows.
    factor = rope.get("factor")
    if positions is not None and rope.get("rope_type") == "linear" and isinstance(factor, int | float):
        return int(positions * min(factor, MOST_STRETCHED))
    return positions


def check_vocabulary(model_folder: Path, largest_token: int) -> None:
    """Raises ConfigurationError where the tokenizer gives tokens that the model does not have."""
    vocabulary: int = read_config(model_folder).get_text_config().vocab_size
    if largest_token >= vocabulary:
        raise ConfigurationError(
            f"spec.training.model.source: the tokenizer in {model_folder} gives token {largest_token}, and the model "
            f"has {vocabulary} tokens; is it the tokenizer of another model?"
        )


def check_vocabulary_size(policy: PreTrainedConfig, model: PreTrainedConfig, source: str) -> None:
    """Raises ConfigurationError where the policy may generate tokens that the model does not have: embeddings are often
    longer than the tokenizer's list, by another length in each size of a model."""
    generated, known = (int(config.get_text_config().vocab_size) for config in (policy, model))
    if known < generated:
        raise ConfigurationError(
            f"spec.training.model.source: {source} has {known} tokens (vocab_size), and the policy may generate "
            f"{generated}; choose a model with as many, or pad its embeddings"
        )


def check_layouts(model_folder: Path, layouts: Mapping[str, ParallelLayout]) -> None:
    """Of the roles that have the model. Raises ConfigurationError for a model that cannot be read, or that does not
    divide over sequence ranks."""
    config = read_config(model_folder)
    for role, layout in layouts.items():
        check_layout(layout, config, f"spec.roles.{role}.sequenceParallel")


def check_tensor_parallel(model_folder: Path, tensor_parallel: int) -> None:
    """For vLLM. Raises ConfigurationError for a model that cannot be read, or whose heads do not divide."""
    if tensor_parallel > 1:
        check_heads("spec.roles.rollout.tensorParallel", tensor_parallel, read_config(model_folder))


def check_lora(model_folder: Path, lora: Lora | None) -> bool:
    """Whether adapters are put into a model with experts. Raises ConfigurationError for targets that the model does not
    have."""
    if lora is None:
        return False
    model = build_on_meta(model_folder)
    log.info("lora: rank %d beside %d linear layers", lora.rank, len(target_layers(model, lora.targets)))
    add_adapters(model, lora)
    return has_experts(model)


def check_recomputation(model_folder: Path, every_nth_layer: int) -> None:
    """Raises ConfigurationError for a model that cannot be read, or that has fewer layers."""
    if every_nth_layer == 1:
        return
    num_layers: int = read_config(model_folder).get_text_config().num_hidden_layers
    check_interval(every_nth_layer, num_layers)


def needs_reference(spec: RLJobSpec) -> bool:
    """Whether there is a KL term, or the user's own advantage or loss asks for the reference's log-probabilities."""
    return spec.training.algorithm.kl.coefficient > 0 or REF_LOGPROBS in _needed_columns(spec)


def needs_critic(spec: RLJobSpec) -> bool:
    """Whether the advantage asks for a critic's values."""
    return VALUES in _needed_columns(spec)


def samples_all_tokens(rollout: Rollout) -> bool:
    """Whether responses are drawn from all tokens, so that generator and trainer speak of one distribution."""
    return rollout.top_p == 1 and rollout.top_k == 0


def _needed_columns(spec: RLJobSpec, *, of_functions: bool = False) -> frozenset[str]:
    """What the advantage and the loss ask for; of the user's own alone, which alone compare log-probabilities with the
    generator's."""
    resolved = resolve_algorithm(spec.training.algorithm)
    by_advantage = advantage_estimator(resolved, spec.training.rollout.group_size).needs
    by_loss = policy_loss(resolved).needs
    if of_functions:
        by_advantage = by_advantage if resolved.advantage.type is AdvantageType.FUNCTION else frozenset()
        by_loss = by_loss if resolved.loss.type is LossType.FUNCTION else frozenset()
    return by_advantage | by_loss
