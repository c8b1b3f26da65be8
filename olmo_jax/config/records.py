"""The configuration as typed, frozen records. No jax here: `olmo-jax check` must answer at once."""

import math
import os
from collections.abc import Generator
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

INT32_MAX = 2**31 - 1

Count = Annotated[int, Field(ge=1, le=INT32_MAX)]
Natural = Annotated[int, Field(ge=0, le=INT32_MAX)]
AtMostInt32 = Annotated[int, Field(le=INT32_MAX)]
# A check takes divisors of these, or a run makes as many threads or buffers.
SmallCount = Annotated[int, Field(ge=1, le=65_536)]
SmallNatural = Annotated[int, Field(ge=0, le=65_536)]
# A check walks over all layers.
MOST_LAYERS = 1000
Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
# Lengths of the schedule may count tokens.
Long = Annotated[int, Field(ge=1, le=2**63 - 1)]
LongNatural = Annotated[int, Field(ge=0, le=2**63 - 1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Above1 = Annotated[float, Field(gt=1, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]


def expanded(path: str) -> str:
    """Return a path with the home folder written out for `~` or `~user` in front.

    Raises: ValueError with the rule and what to write instead, if there is no such user.
    """
    whole = os.path.expanduser(path)
    if whole.startswith("~"):
        raise ValueError(
            "names the home folder of a user that does not exist here; write the whole path, or ./ "
            "before a name that starts with ~"
        )
    return whole


HomePath = Annotated[Name, AfterValidator(expanded)]
Platform = Literal["auto", "gpu", "cpu"]
Recompute = (
    Literal["none", "block", "attention", "experts"]
    | Annotated[tuple[Name, ...], Field(strict=False, min_length=1)]
)


class Record(BaseModel, frozen=True):
    """A section: no unknown key, no coercion (`true` is not a number), but a tuple takes a list."""

    model_config = ConfigDict(extra="forbid", strict=True)


class MeshConfig(Record, frozen=True):
    """Devices along each axis, slowest first. One axis may be -1: whatever the devices leave.

    Iterating yields the axes and their sizes alone, and so does `dict`.
    """

    pipeline: AtMostInt32 = 1
    data: AtMostInt32 = 1
    fsdp: AtMostInt32 = 1
    expert: AtMostInt32 = 1
    sequence: AtMostInt32 = 1
    platform: Platform = "auto"

    def __iter__(self) -> Generator[tuple[str, int], None, None]:
        for name in type(self).model_fields:
            if name != "platform":
                yield name, getattr(self, name)


class ParallelConfig(Record, frozen=True):
    method: Literal["ddp", "fsdp"] = "ddp"
    shard_optimizer: bool = True
    reshard: Literal["full", "after_backward", "step"] = "full"
    pipeline_schedule: Literal["interleaved", "1f1b", "gpipe"] = "interleaved"
    pipeline_chunks: SmallCount = 1
    context: Literal["ulysses", "ring"] = "ulysses"
    fold_sequence: bool = False
    dispatch: Literal["gather"] = "gather"
    capacity_factor: Positive = 1.25


class RopeConfig(Record, frozen=True):
    """Rotary positions. `scaling` names the rule; each rule reads its own keys only."""

    theta: Above1 = 500_000.0
    partial: Annotated[float, Field(gt=0, le=1)] = 1.0
    full_precision: bool = True
    on_full_attention: bool = True
    scaling: Literal["none", "abf", "pi", "stepwise", "yarn"] = "none"
    scaled_layers: Literal["full", "all"] = "full"
    scaled_theta: Above1 = 8_000_000.0
    factor: Positive = 32.0
    original_length: Count = 8192
    low_frequency_factor: Positive = 1.0
    high_frequency_factor: Positive = 4.0
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0


class WindowConfig(Record, frozen=True):
    """Sliding windows: a layer sees the last `pattern[i]` positions, itself included; -1 sees all.

    The pattern repeats over the layers that come after a forced first one.
    """

    pattern: Annotated[tuple[AtMostInt32, ...], Field(strict=False)] = ()
    force_full_first: bool = True
    force_full_last: bool = True


class InitConfig(Record, frozen=True):
    method: Literal["normal", "llama", "llama_depth", "fan_in"] = "normal"
    std: Positive = 0.02
    embedding_std: Positive | None = None


class RouterConfig(Record, frozen=True):
    gating: Literal["softmax", "topk_softmax", "sigmoid"] = "softmax"
    assignment: Literal["learned", "random", "uniform"] = "learned"
    bias: bool = False
    jitter_eps: Annotated[float, Field(gt=0, lt=1)] | None = None
    normalize: Positive | None = 1.0
    restore_weight_scale: bool = True
    expert_weight_scale: Positive | None = None
    original_top_k: SmallCount | None = None
    num_groups: SmallCount | None = None
    top_groups: SmallCount | None = None
    sigmoid_epsilon: NonNegative = 1e-7
    bias_gamma: Positive | None = None
    score_correction_bias: bool = False
    balance_weight: NonNegative = 0.005
    balance_scope: Literal["instance", "microbatch", "global"] = "instance"
    z_weight: NonNegative = 2e-4


class ModelConfig(Record, frozen=True):
    num_layers: Layers = 4
    num_dense_layers: Natural = 1
    d_model: Count = 128
    num_heads: SmallCount = 4
    num_kv_heads: SmallCount = 2
    head_dim: SmallCount = 32
    num_experts: SmallNatural = 8
    top_k: SmallNatural = 2
    expert_hidden: Natural = 128
    shared_hidden: Natural = 128
    dense_hidden: Natural = 384
    vocab_size: Count = 4096
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    norm: Literal["pre", "reordered", "peri"] = "peri"
    norm_eps: Positive = 1e-6
    qk_norm: Literal["none", "head", "head_gains", "full"] = "head"
    attention_bias: bool = False
    attention_gate: Literal["none", "headwise", "elementwise"] = "none"
    attention_gate_full_precision: bool = True
    clip_qkv: Positive | None = None
    scalable_softmax: bool = False
    embedding_norm: bool = True
    embedding_scale: Positive | Literal["sqrt_d_model"] | None = "sqrt_d_model"
    tie_embeddings: bool = False
    rope: RopeConfig = RopeConfig()
    windows: WindowConfig = WindowConfig()
    init: InitConfig = InitConfig()
    router: RouterConfig = RouterConfig()

    @property
    def embedding_multiplier(self) -> float:
        """The factor on the embedding: sqrt(d_model), a given number, or 1."""
        if self.embedding_scale == "sqrt_d_model":
            return math.sqrt(self.d_model)
        return 1.0 if self.embedding_scale is None else self.embedding_scale

    @property
    def num_routed_layers(self) -> int:
        return self.num_layers - self.num_dense_layers


class StageConfig(Record, frozen=True):
    """One stretch of the composable schedule; `start` and `end` are fractions of optim.lr."""

    duration: Long
    shape: Literal["linear", "cosine"] = "linear"
    start: NonNegative | None = None
    end: NonNegative


class ScheduleConfig(Record, frozen=True):
    """Learning rate over time, in `unit`s; each length is a count or a fraction of `horizon`.

    `horizon` is where a decay ends: by default train.steps, or the tokens of all steps.
    """

    kind: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt", "composable"] = "cosine"
    unit: Literal["steps", "tokens"] = "steps"
    horizon: Long | None = None
    warmup: LongNatural | None = None
    warmup_fraction: Fraction | None = None
    warmup_start: NonNegative = 0.0
    decay: LongNatural | None = None
    decay_fraction: Fraction | None = None
    final: Fraction = 0.1
    stages: Annotated[tuple[StageConfig, ...], Field(strict=False)] = ()

    def end(self, *, total_steps: int, total_tokens: int) -> int:
        """Return where the schedule ends, in `unit`s: with the run, unless `horizon` says where."""
        return self.horizon or (total_tokens if self.unit == "tokens" else total_steps)

    def warmup_length(self, end: int) -> int:
        """Return the warm-up of a schedule that ends there, in `unit`s."""
        return _length(self.warmup, self.warmup_fraction, end, 0.0)

    def decay_length(self, end: int) -> int:
        """Return the decay of a `wsd` schedule that ends there, in `unit`s."""
        return _length(self.decay, self.decay_fraction, end, 0.1)


def _length(count: int | None, fraction: float | None, end: int, default: float) -> int:
    """Return a count, or else a fraction of the whole.

    Source: olmo_core 3.0.0, optim/scheduler.py (which rounds the fraction likewise).
    """
    if count is not None:
        return count
    return round(end * (default if fraction is None else fraction))


class OptimConfig(Record, frozen=True):
    lr: NonNegative = 1e-3
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.1
    no_decay: Annotated[tuple[Name, ...], Field(strict=False)] = (
        "embedding.*",
        "*norm*",
        "*bias*",
        "*softmax_scale*",
    )
    max_grad_norm: Positive | None = 1.0
    skip_sigma: Positive | None = None
    skip_window: Annotated[int, Field(ge=2, le=65_536)] = 128
    schedule: ScheduleConfig = ScheduleConfig()


class SourceConfig(Record, frozen=True):
    """A folder that `olmo-jax data tokenize` wrote, or one `.npy` token file in such a folder."""

    path: HomePath
    weight: Positive = 1.0
    label_mask: HomePath | None = None


class DataConfig(Record, frozen=True):
    sources: Annotated[tuple[SourceConfig, ...], Field(strict=False)] = ()
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    document_attention: bool = True
    threads: Annotated[int, Field(ge=1, le=1024)] = 2
    prefetch: SmallCount = 8


class ProfileConfig(Record, frozen=True):
    """A trace of `steps` steps, from step `start` on."""

    start: Count = 10
    steps: Count = 3


class TrainConfig(Record, frozen=True):
    steps: Count = 100
    global_batch: Count = 8
    microbatch: Count = 1
    sequence_length: Annotated[int, Field(ge=2, le=2**20)] = 256
    z_loss_weight: NonNegative = 1e-4
    head_chunk_tokens: Count = 1024
    eval_every: Natural = 0
    eval_batches: Count = 4
    recompute: Recompute = "none"
    record_expert_counts: bool = False
    deterministic: bool = False
    step_timeout_s: Positive = 1800.0
    first_step_timeout_s: Positive = 7200.0
    max_bad_steps: Count = 10
    profile: ProfileConfig | None = None


class CheckpointConfig(Record, frozen=True):
    """Every how many steps the whole state is written, which are kept, what a run starts from."""

    every: Natural = 1000
    keep: Count = 2
    keep_every: Natural = 0
    init_from: HomePath | None = None
    init_moments: bool = False


class Config(Record, frozen=True):
    run_dir: HomePath = "runs/default"
    seed: Seed = 0
    mesh: MeshConfig = MeshConfig()
    parallel: ParallelConfig = ParallelConfig()
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
