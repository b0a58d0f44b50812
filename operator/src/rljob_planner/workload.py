"""What a job does in a step (models, tokens, passes), and where its roles are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rljob_planner.gpus import Gpu
from rljob_planner.model_shape import ModelShape, TensorSize, Unit, shard_elements


class Role(StrEnum):
    """As in `spec.roles`."""

    ACTOR = "actor"
    ROLLOUT = "rollout"
    REF = "ref"
    CRITIC = "critic"
    REWARD_MODEL = "rewardModel"


TRAIN_ROLES = (Role.ACTOR, Role.REF, Role.CRITIC, Role.REWARD_MODEL)
"""Those that a train engine serves."""
MASTER_BYTES = 4
"""Of a trained number, of a gradient, and of each moment."""
WHOLE_LOGITS_BYTES = 32 * 2**20
"""Logits of a micro-batch, in 32 bits, that are not cut into tiles (trainer, engines/train/token_logprobs.py)."""


class Head(StrEnum):
    """What a model says of a token."""

    TOKENS = "tokens"
    VALUE = "value"
    SCORE = "score"


@dataclass(frozen=True)
class LoraShape:
    """Adapters beside linear layers."""

    rank: int
    num_parameters: int
    num_layers: int
    """Linear layers that have one."""
    input_sizes_per_layer: int = 0
    """Sum of the widths of what the adapted linear layers of one decoder layer read."""
    syncs_alone: bool = False
    """Whether the rollout engine gets the adapters by themselves."""

    def tensors(self, num_decoder_layers: int) -> Unit:
        """Of a decoder layer: beside each adapted linear layer A [rank, inputs] and B [outputs, rank] (lora.py). Of B
        only the number of all elements is known, which is that of the shards where W divides outputs."""
        rest = -(-self.num_parameters // num_decoder_layers) - self.rank * self.input_sizes_per_layer
        return TensorSize(self.rank, self.input_sizes_per_layer), TensorSize(max(0, rest))


@dataclass(frozen=True)
class ModelOffload:
    """What is on the host while nothing needs it."""

    parameters: bool = False
    gradients: bool = False
    optimizer: bool = False


@dataclass(frozen=True)
class TrainModel:
    """A model that a train engine holds."""

    shape: ModelShape
    is_trained: bool
    head: Head = Head.TOKENS
    compute_bytes: int = 2
    """Of a number in the passes; a frozen model's shards have it, too."""
    checkpoints_activations: bool = False
    checkpoints_every_nth_layer: int = 1
    lora: LoraShape | None = None
    offload: ModelOffload = field(default_factory=ModelOffload)
    defers_reduction: bool = False
    is_actor_without_adapters: bool = False
    """A reference that is the actor's own model: takes no memory."""

    @property
    def is_wholly_trained(self) -> bool:
        """Not only adapters beside it."""
        return self.is_trained and self.lora is None

    @property
    def root_tensors(self) -> Unit:
        """Of what is in no layer, with this head."""
        return self.shape.root_tensors(has_token_head=self.head is Head.TOKENS)

    @property
    def layer_adapters(self) -> Unit:
        """Of one decoder layer."""
        return () if self.lora is None else self.lora.tensors(self.shape.num_layers)

    def base_elements(self, num_shards: int = 1) -> int:
        """Parameters without adapters, on the first of so many ranks."""
        return self.shape.layers_elements(num_shards) + shard_elements(self.root_tensors, num_shards)

    def adapter_elements(self, num_shards: int) -> int:
        """The same of adapters."""
        return self.shape.num_layers * shard_elements(self.layer_adapters, num_shards)

    @property
    def num_parameters(self) -> int:
        """With this head in the place of that for tokens, without adapters."""
        return self.shape.layers_parameters + shard_elements(self.root_tensors)

    @property
    def num_adapters(self) -> int:
        """Numbers of all of them."""
        return 0 if self.lora is None else self.lora.num_parameters

    @property
    def num_learned(self) -> int:
        """Numbers that have a gradient and moments."""
        return (self.num_adapters or self.num_parameters) if self.is_trained else 0

    @property
    def whole_logits_tokens(self) -> int:
        """Up to so many tokens of a micro-batch and rank have logits that are not cut into tiles."""
        return WHOLE_LOGITS_BYTES // (4 * self.shape.vocabulary_size)


@dataclass(frozen=True)
class RolloutWork:
    """Generation."""

    shape: ModelShape
    weight_bytes: int = 2
    """Of a number."""
    is_vllm: bool = True
    """Else Hugging Face's engine, which keeps no space for its cache, and reads every prompt for each response."""
    compiles: bool = True
    max_sequences: int = 256
    """That one engine decodes at once."""
    max_model_length: int = 4096
    memory_utilization: float = 0.5
    """Share of a GPU's memory, while it generates."""
    cpu_kv_cache_bytes: int = 1 << 30
    sync_every_steps: int = 1
    adapter_rank: int | None = None
    """Of adapters beside the weights."""

    @property
    def max_batched_tokens(self) -> int:
        """Tokens that one pass of vLLM may have (trainer, engines/rollout/vllm_engine.py)."""
        return max(8192, self.max_model_length)

    @property
    def keeps_weights_asleep(self) -> bool:
        """In the host's memory, between steps (trainer, controller/model_roles.py)."""
        return self.sync_every_steps > 1 or self.adapter_rank is not None


@dataclass(frozen=True)
class TokenLengths:
    """How long prompts and responses are, in tokens."""

    prompt_mean: float
    prompt_max: int
    response_mean: float
    """As they come out: what is cut off counts with the length that it is cut to."""
    response_max: int
    """`rollout.maxNewTokens`: where responses are cut off."""
    response_cv: float = 0.8
    """Standard deviation over mean, before they are cut off (log-normal)."""
    clipped_share: float | None = None
    """Of responses those that are cut off, where it is known; counts instead of `response_cv`."""
    response_mean_low: float | None = None
    """Where the mean is a guess: what it may be at least, by which ranges of seconds are wider."""
    response_mean_high: float | None = None
    assumption: str = ""
    """Where they are from, as a sentence."""

    @property
    def longest_row(self) -> int:
        """Prompt and response."""
        return self.prompt_max + self.response_max

    @property
    def mean_row(self) -> float:
        """Prompt and response."""
        return self.prompt_mean + self.response_mean


@dataclass(frozen=True)
class Workload:
    """A job without its places."""

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
    """Of the train roles that the job has."""
    rollout: RolloutWork
    needs_old_logprobs: bool
    """Whether there is a pass for them: an only update's own forward pass gives them else."""
    needs_old_logprobs_in_any_case: bool = True
    """Whether something else than several updates per step asks for them."""
    needs_whole_pass: bool = False
    """A pass without gradient over each mini-batch (Clip-Cov, KL-Cov)."""
    checkpoint_every_steps: int | None = None
    evaluation_every_steps: int | None = None
    """0: only before the first and after the last step; None: there are no evaluations."""
    scores_first: bool = False
    """Whether scores say what is learned from, and so are waited for before the passes."""
    learned_fraction: float = 1.0
    """Of the responses those that are learned from; more are generated where dynamic sampling replaces the others."""
    generated_per_learned: float = 1.0
    """Rounds of dynamic sampling, as a factor on generation."""
    has_greedy_responses: bool = False
    """One more to each prompt, beside the others, which is scored and not learned from (ReMax)."""
    assumptions: tuple[str, ...] = ()
    """What is taken for granted beside lengths, for people."""
    reward_seconds: float = 0.0
    """Per step, beside the reward model; waited for after the passes beside which scores are computed."""

    def with_model(self, role: Role, model: TrainModel) -> Workload:
        """With another model in a role."""
        return replace(self, models={**self.models, role: model})

    @property
    def num_responses(self) -> int:
        """Of a step, over all workers."""
        return self.batch_size * self.group_size

    @property
    def num_requests(self) -> int:
        """Responses that are generated at once, over all engines."""
        return self.num_responses + (self.batch_size if self.has_greedy_responses else 0)

    def requests_per_engine(self, layout: RolloutLayout) -> int:
        """Responses that one engine makes in a step, at most."""
        return -(-self.num_requests // max(1, layout.num_engines))

    @property
    def num_updates(self) -> int:
        """Optimizer updates per step."""
        return self.num_epochs_per_batch * (self.batch_size // self.mini_batch_size)

    @property
    def roles(self) -> tuple[Role, ...]:
        """Those that the job has, in the order of `Role`."""
        return tuple(role for role in Role if role is Role.ROLLOUT or role in self.models)


@dataclass(frozen=True)
class TrainLayout:
    """As the trainer's ParallelLayout: `shard_size` GPUs hold a copy together."""

    num_gpus: int
    shard_size: int
    sequence_parallel: int = 1
    keeps_shard_size: bool = field(default=False, compare=False)
    """Whether the job's file says it: a larger pool then has more copies, and no larger ones."""

    @property
    def is_left_open(self) -> bool:
        """Whether it is that of a role of which a job says nothing."""
        return self.shard_size == self.num_gpus and self.sequence_parallel == 1 and not self.keeps_shard_size

    @property
    def num_replicas(self) -> int:
        """Copies of the model."""
        return self.num_gpus // self.shard_size

    @property
    def num_data_ranks(self) -> int:
        """Parts that batches are split into."""
        return self.num_gpus // self.sequence_parallel


@dataclass(frozen=True)
class RolloutLayout:
    """`tensor_parallel` GPUs hold a copy together."""

    num_gpus: int
    tensor_parallel: int = 1

    @property
    def num_engines(self) -> int:
        """Copies of the model."""
        return self.num_gpus // self.tensor_parallel


@dataclass(frozen=True)
class PlacedPool:
    """Equal nodes, and the roles that share their GPUs."""

    name: str
    nodes: int
    gpus_per_node: int
    gpu: Gpu
    layouts: Mapping[Role, TrainLayout]
    rollout: RolloutLayout | None = None
    """None where the rollout is elsewhere."""

    @property
    def num_gpus(self) -> int:
        """Of all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def roles(self) -> tuple[Role, ...]:
        """In the order of `Role`."""
        return tuple(role for role in Role if role in self.layouts or (role is Role.ROLLOUT and self.rollout))


class Schedule(StrEnum):
    """What of a step goes on beside what."""

    SYNCHRONOUS = "synchronous"
    ONE_STEP_OFF = "one step off"
    """Generation of the next step beside the training of this one; needs the rollout on a pool of its own."""


@dataclass(frozen=True)
class Placement:
    """All roles of a job."""

    pools: tuple[PlacedPool, ...]
    schedule: Schedule = Schedule.SYNCHRONOUS

    def with_pool(self, old: PlacedPool, new: PlacedPool) -> Placement:
        """With one of its pools changed."""
        return replace(self, pools=tuple(new if pool is old else pool for pool in self.pools))

    def pool_of(self, role: Role) -> PlacedPool:
        """The one with this role. Raises KeyError."""
        for pool in self.pools:
            if role in pool.roles:
                return pool
        raise KeyError(role)

    def layout_of(self, role: Role) -> TrainLayout:
        """Of a train role. Raises KeyError."""
        return self.pool_of(role).layouts[role]

    @property
    def num_gpus(self) -> int:
        """Of all pools."""
        return sum(pool.num_gpus for pool in self.pools)

    @property
    def runs_today(self) -> bool:
        """Whether this version of the trainer can run it: actor and rollout on one pool, one after the other."""
        return self.schedule is Schedule.SYNCHRONOUS and self.pool_of(Role.ACTOR) is self.pool_of(Role.ROLLOUT)
