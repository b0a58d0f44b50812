"""A job as the planner sees it: the work of a step (`Workload`) and where its roles run (`Placement`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rljob_planner.gpus import Gpu
from rljob_planner.model_shape import ModelShape, NonLayerUnits, TensorSize, Unit, shard_elements


class Role(StrEnum):
    """The roles of `spec.roles`."""

    ACTOR = "actor"
    ROLLOUT = "rollout"
    REF = "ref"
    CRITIC = "critic"
    REWARD_MODEL = "rewardModel"


TRAIN_ROLES = (Role.ACTOR, Role.REF, Role.CRITIC, Role.REWARD_MODEL)
"""The roles whose model is in a train engine (FSDP2)."""
MASTER_BYTES = 4
"""Bytes of a trained parameter, of its gradient, and of each of its two moments. All are float32."""
WHOLE_LOGITS_BYTES = 32 * 2**20
"""Larger logits of a micro-batch, in float32, are computed in tiles (trainer, engines/train/token_logprobs.py)."""


class Head(StrEnum):
    """The output head of a model: it predicts the next token, a value (critic), or a score (reward model)."""

    TOKENS = "tokens"
    VALUE = "value"
    SCORE = "score"


@dataclass(frozen=True)
class LoraShape:
    """The sizes of all LoRA adapters of a model."""

    rank: int
    num_parameters: int
    num_linear_layers: int
    """The number of linear layers with an adapter, over all decoder layers."""
    matrices: Unit = ()
    """A [rank, inputs] and B [outputs, rank] of each adapted linear layer, alternately, over all decoder layers."""
    syncs_alone: bool = False
    """Whether a weight sync sends only the adapters. Otherwise it sends the weights with the adapters merged in."""

    def tensors(self, num_decoder_layers: int) -> Unit:
        """The adapters of one decoder layer: the `matrices` (trainer, lora.py). All B together count as one column, so
        the sizes of their shards are exact only where W divides the outputs."""
        inputs = sum(each.columns * each.copies for each in self.matrices[::2]) // num_decoder_layers
        rest = -(-self.num_parameters // num_decoder_layers) - self.rank * inputs
        return TensorSize(self.rank, inputs), TensorSize(max(0, rest))


@dataclass(frozen=True)
class ModelOffload:
    """Which state of a model is moved to host memory while no pass needs it."""

    parameters: bool = False
    gradients: bool = False
    optimizer: bool = False


@dataclass(frozen=True)
class TrainModel:
    """A model in a train engine."""

    shape: ModelShape
    is_trained: bool
    head: Head = Head.TOKENS
    compute_bytes: int = 2
    """m: bytes of an element in passes, and in the shards of a frozen model."""
    checkpoints_activations: bool = False
    """Whether gradient checkpointing is on."""
    chooses_checkpointing: bool = field(default=False, compare=False)
    """Whether the job leaves this open (`Auto`)."""
    checkpoints_for_interval: bool = field(default=False, compare=False)
    """Whether `Auto` means `Always` only because not every layer is to be recomputed."""
    checkpoints_every_nth_layer: int = 1
    """With gradient checkpointing: 1 means that every layer is recomputed, 2 every second layer, ..."""
    lora: LoraShape | None = None
    offload: ModelOffload = field(default_factory=ModelOffload)
    defers_reduction: bool = False
    """Whether gradients are summed over ranks only after the last micro-batch of an update, not after each one."""
    is_actor_without_adapters: bool = False
    """Whether this is a reference that is the actor's model without its adapters, and takes no memory of its own."""
    has_own_weights: bool = False
    """Whether this is a reference with other weights than the policy's, so that it can never be the actor's model."""

    @property
    def is_wholly_trained(self) -> bool:
        """Whether all weights are trained, instead of adapters only."""
        return self.is_trained and self.lora is None

    @property
    def non_layer_units(self) -> NonLayerUnits:
        """Embedding, last norm and this model's head."""
        return self.shape.non_layer_units(has_token_head=self.head is Head.TOKENS)

    @property
    def layer_adapters(self) -> Unit:
        """The adapters of one decoder layer."""
        return () if self.lora is None else self.lora.tensors(self.shape.num_layers)

    def base_elements(self, num_shards: int = 1) -> int:
        """Number of parameters on rank 0 of `num_shards` ranks, without adapters."""
        return self.shape.layers_elements(num_shards) + shard_elements(self.non_layer_units.tensors, num_shards)

    def adapter_elements(self, num_shards: int) -> int:
        """Number of adapter parameters on rank 0 of `num_shards` ranks."""
        return self.shape.num_layers * shard_elements(self.layer_adapters, num_shards)

    @property
    def num_parameters(self) -> int:
        """P: number of parameters with this model's output head, without adapters."""
        return self.shape.layers_parameters + shard_elements(self.non_layer_units.tensors)

    @property
    def num_adapter_parameters(self) -> int:
        """Parameters of all adapters."""
        return 0 if self.lora is None else self.lora.num_parameters

    @property
    def num_trained_parameters(self) -> int:
        """Number of parameters that have a gradient and moments."""
        return (self.num_parameters if self.lora is None else self.num_adapter_parameters) if self.is_trained else 0

    @property
    def whole_logits_tokens(self) -> int:
        """The largest number of tokens whose logits a rank computes at once, without tiles."""
        return WHOLE_LOGITS_BYTES // (4 * self.shape.vocabulary_size)


@dataclass(frozen=True)
class RolloutWork:
    """The model that generates, and the settings of its engine."""

    shape: ModelShape
    weight_bytes: int = 2
    """b: bytes of a weight."""
    has_float32_head: bool = False
    """Whether logits have 32 bits, also with weights of 16 bits."""
    is_vllm: bool = True
    """Whether vLLM generates; else transformers: no reserved KV cache, and each response's prompt is computed again."""
    compiles: bool = True
    """Whether vLLM compiles the model and uses CUDA graphs."""
    max_sequences: int = 256
    """The largest number of sequences that one engine decodes at the same time."""
    max_model_length: int = 4096
    """Tokens of the longest sequence: prompt and response."""
    memory_utilization: float = 0.5
    """Share of the GPU's memory that vLLM may use while it is awake."""
    cpu_kv_cache_bytes: int = 1 << 30
    """Size of vLLM's KV cache on CPUs."""
    sync_every_steps: int = 1
    adapter_rank: int | None = None
    """LoRA rank if the engine keeps adapters beside the weights, else None."""

    @property
    def max_batched_tokens(self) -> int:
        """The largest number of tokens in one forward pass of vLLM (trainer, engines/rollout/vllm_start.py)."""
        return max(8192, self.max_model_length)

    @property
    def keeps_weights_on_host(self) -> bool:
        """Whether weights stay in host memory while the engine sleeps (trainer, controller/model_roles.py)."""
        return self.sync_every_steps > 1 or self.adapter_rank is not None


@dataclass(frozen=True)
class TokenLengths:
    """Lengths in tokens, of prompts (with the messages of an environment) and responses (all sampled tokens)."""

    prompt_mean: float
    prompt_max: int
    response_mean: float
    """Mean after truncation at `response_max`."""
    response_max: int
    """`rollout.maxNewTokens`, where responses are truncated."""
    response_cv: float = 0.8
    """Standard deviation divided by mean, of the log-normal distribution before truncation."""
    clipped_share: float | None = None
    """Share of truncated responses; None if unknown. If it is above 0 and below 1, the spread of the lengths follows
    from this share instead of `response_cv`, except for the low and the high mean."""
    response_mean_low: float | None = None
    """Lower bound of the mean if the mean is a guess; it widens the range of seconds."""
    response_mean_high: float | None = None
    """Upper bound of the mean, for the same purpose."""
    assumption: str = ""
    """A sentence that says where these lengths come from."""
    conversation_max: int | None = None
    """`environment.maxContextTokens`, the limit of prompt and response together; None without an environment."""
    num_turns: float = 1.0
    """Mean number of the policy's turns in a rollout; 1 without an environment."""

    @property
    def longest_row(self) -> int:
        """Tokens of the longest prompt with the longest response, or of the longest conversation."""
        return self.conversation_max or self.prompt_max + self.response_max

    @property
    def mean_row(self) -> float:
        """Tokens of a mean prompt with a mean response."""
        return self.prompt_mean + self.response_mean


@dataclass(frozen=True)
class Workload:
    """The work of a step of a job, independent of where its roles run."""

    name: str
    batch_size: int
    """Prompts per step."""
    group_size: int
    """Responses per prompt."""
    mini_batch_size: int
    """Prompts per optimizer update."""
    num_epochs_per_batch: int
    num_steps: int
    max_tokens_per_micro_batch: int
    lengths: TokenLengths
    models: Mapping[Role, TrainModel]
    """The models of the job's train roles, by role."""
    rollout: RolloutWork
    needs_old_logprobs: bool
    """Whether a separate pass computes the policy's log-probabilities before the first update (not if it is alone)."""
    always_needs_old_logprobs: bool = True
    """Whether the job would need this separate pass even with one update per step."""
    needs_mini_batch_pass: bool = False
    """Whether each mini-batch has an additional pass without gradient (Clip-Cov, KL-Cov)."""
    checkpoint_every_steps: int | None = None
    evaluations_every_steps: tuple[int, ...] = ()
    """Of each evaluation. 0: it runs only before the first and after the last step."""
    waits_for_scores: bool = False
    """Whether the scores decide which responses are trained on, so that the passes start after the scores."""
    trained_fraction: float = 1.0
    """Share of a batch's responses that are trained on. Dynamic sampling replaces responses that would not be."""
    generation_factor: float = 1.0
    """The number of prompts for which dynamic sampling generates responses, divided by the batch size."""
    has_greedy_responses: bool = False
    """Whether each prompt has one additional, greedy response, which is scored but not trained on (ReMax)."""
    assumptions: tuple[str, ...] = ()
    """Further assumptions, as sentences."""
    reward_seconds: float = 0.0
    """Measured seconds of all rewards of a step, during which other passes can run; 0 if unknown. They are the time of
    the phase `reward`, unless the pass of a reward model is predicted to take longer."""

    def with_model(self, role: Role, model: TrainModel) -> Workload:
        """The same workload with another model in a role."""
        return replace(self, models={**self.models, role: model})

    @property
    def num_responses(self) -> int:
        """Responses per step that may be trained on, over all workers."""
        return self.batch_size * self.group_size

    @property
    def num_requests(self) -> int:
        """Responses per step that all engines together generate, without further rounds of dynamic sampling."""
        return self.num_responses + (self.batch_size if self.has_greedy_responses else 0)

    def requests_per_engine(self, layout: RolloutLayout) -> int:
        """The largest number of responses that one engine generates per step."""
        return -(-self.num_requests // max(1, layout.num_engines))

    @property
    def num_updates(self) -> int:
        """Optimizer steps per training step."""
        return self.num_epochs_per_batch * (self.batch_size // self.mini_batch_size)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The job's roles, in the order of `Role`."""
        return tuple(role for role in Role if role is Role.ROLLOUT or role in self.models)


@dataclass(frozen=True)
class TrainLayout:
    """How a model in training is distributed over the GPUs of its pool: `shard_size` GPUs hold one copy (W)."""

    num_gpus: int
    shard_size: int
    sequence_parallel: int = 1
    has_fixed_shard_size: bool = field(default=False, compare=False)
    """Whether the job file sets the shard size. Then a larger pool holds more copies, not one copy on more GPUs."""
    is_written: bool = field(default=False, compare=False)
    """Whether the job file sets the shard size or sequence parallelism, even to the default value."""

    @property
    def is_default(self) -> bool:
        """Whether the role has the default layout, and the job file does not set it."""
        return self.shard_size == self.num_gpus and self.sequence_parallel == 1 and not self.is_written

    @property
    def num_replicas(self) -> int:
        """Copies of the model."""
        return self.num_gpus // self.shard_size

    @property
    def num_data_ranks(self) -> int:
        """The number of ranks with different rows. GPUs that share rows (sequence parallelism) are one such rank."""
        return self.num_gpus // self.sequence_parallel

    def resized(self, num_gpus: int) -> TrainLayout:
        """The layout on another number of GPUs. The shard size stays if the job file sets it, or if there are several
        copies. Otherwise one copy is distributed over all GPUs of the new layout."""
        keeps = self.has_fixed_shard_size or self.num_replicas > 1
        return replace(self, num_gpus=num_gpus, shard_size=self.shard_size if keeps else num_gpus)


@dataclass(frozen=True)
class RolloutLayout:
    """How the rollout model is distributed over the GPUs of its pool: `tensor_parallel` GPUs hold one copy (TP)."""

    num_gpus: int
    tensor_parallel: int = 1

    @property
    def num_engines(self) -> int:
        """Rollout engines; each has one copy of the model."""
        return self.num_gpus // self.tensor_parallel


@dataclass(frozen=True)
class PlacedPool:
    """A pool of equal nodes, with the layout of each role on its GPUs."""

    name: str
    nodes: int
    gpus_per_node: int
    gpu: Gpu
    layouts: Mapping[Role, TrainLayout]
    rollout: RolloutLayout | None = None
    """None: the rollout is on another pool."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes of the pool."""
        return self.nodes * self.gpus_per_node

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles on this pool, in the order of `Role`."""
        return tuple(role for role in Role if role in self.layouts or (role is Role.ROLLOUT and self.rollout))


class Schedule(StrEnum):
    """Whether generation and training take turns or run at the same time."""

    SYNCHRONOUS = "synchronous"
    ONE_STEP_OFF = "generation one step ahead"
    """The responses of the next step are generated while this step trains. The rollout needs a pool of its own."""


def can_run(groups: Iterable[Iterable[Role]], schedule: Schedule) -> bool:
    """Whether this version of the trainer can run a job whose pools have these groups of roles: actor and rollout share
    a pool and take turns."""
    return schedule is Schedule.SYNCHRONOUS and any({Role.ACTOR, Role.ROLLOUT} <= set(roles) for roles in groups)


@dataclass(frozen=True)
class Placement:
    """The pools of a job, with all its roles."""

    pools: tuple[PlacedPool, ...]
    schedule: Schedule = Schedule.SYNCHRONOUS

    def with_pool(self, old: PlacedPool, new: PlacedPool) -> Placement:
        """The same placement with pool `new` instead of pool `old`."""
        return replace(self, pools=tuple(new if pool is old else pool for pool in self.pools))

    def pool_of(self, role: Role) -> PlacedPool:
        """The pool with this role.

        Raises:
            KeyError: no pool has it.
        """
        for pool in self.pools:
            if role in pool.roles:
                return pool
        raise KeyError(role)

    def layout_of(self, role: Role) -> TrainLayout:
        """The layout of a train role. Raises the errors of `pool_of`."""
        return self.pool_of(role).layouts[role]

    @property
    def num_gpus(self) -> int:
        """GPUs of all pools."""
        return sum(pool.num_gpus for pool in self.pools)

    @property
    def is_supported(self) -> bool:
        """Whether this version of the trainer can run this placement."""
        return can_run((pool.roles for pool in self.pools), self.schedule)
