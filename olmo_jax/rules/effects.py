"""Keys that were changed and yet change nothing: worth a warning, no error."""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

from olmo_jax.arch.activations import present_names, rematerialized_names
from olmo_jax.config.messages import show
from olmo_jax.config.records import Config, WindowConfig


class Idle(NamedTuple):
    """The `keys` have no effect when `when` holds, because of `why` (a phrase after "because")."""

    keys: tuple[str, ...]
    when: Callable[[Config], bool]
    why: str


def _under(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


_ROPE_READS = {
    "none": set(),
    "abf": {"scaled_theta"},
    "pi": {"factor"},
    "stepwise": {"factor", "original_length", "low_frequency_factor", "high_frequency_factor"},
    "yarn": {"factor", "original_length", "beta_fast", "beta_slow"},
}
"""The keys of model.rope that each scaling rule reads, besides theta and partial."""

_SCHEDULE_READS = {
    "constant": {"warmup"},
    "linear": {"warmup", "final", "horizon"},
    "cosine": {"warmup", "final", "horizon"},
    "wsd": {"warmup", "decay", "final", "horizon"},
    "inverse_sqrt": {"warmup", "final"},
    "composable": {"stages"},
}
"""The parts of optim.schedule that each kind reads; a part is a key, and its `_fraction`."""


def _rope_idle(name: str) -> Idle:
    return Idle(
        _under("model.rope", name),
        lambda c: name not in _ROPE_READS[c.model.rope.scaling],
        "this model.rope.scaling does not read it",
    )


def _schedule_idle(part: str, *keys: str) -> Idle:
    return Idle(
        _under("optim.schedule", *keys),
        lambda c: part not in _SCHEDULE_READS[c.optim.schedule.kind],
        "this optim.schedule.kind does not read it",
    )


def _no_routed_layer(config: Config) -> bool:
    return config.model.num_routed_layers == 0


def _not_learned(config: Config) -> bool:
    return config.model.router.assignment != "learned"


def _has_full_layer(windows: WindowConfig) -> bool:
    forced = windows.force_full_first or windows.force_full_last
    return not windows.pattern or -1 in windows.pattern or forced


def _reads_horizon(config: Config) -> bool:
    """A fraction is one of the horizon, whatever the kind."""
    schedule = config.optim.schedule
    if schedule.kind == "composable":
        return False
    by_fraction = schedule.warmup_fraction is not None
    return by_fraction or "horizon" in _SCHEDULE_READS[schedule.kind]


def _no_window_binds(config: Config) -> bool:
    pattern = config.model.windows.pattern
    return bool(pattern) and all(
        window == -1 or window >= config.train.sequence_length for window in pattern
    )


IDLE: tuple[Idle, ...] = (
    Idle(
        ("parallel.shard_optimizer",),
        lambda c: c.parallel.method == "fsdp",
        "parallel.method=fsdp shards the FP32 state as it shards the weights",
    ),
    Idle(
        ("train.recompute",),
        lambda c: not rematerialized_names(c) & present_names(c),
        "the model has no result that it names",
    ),
    Idle(
        ("parallel.reshard",),
        lambda c: c.parallel.method != "fsdp",
        "only parallel.method=fsdp gathers weights",
    ),
    Idle(
        ("parallel.method",),
        lambda c: (
            c.parallel.method == "fsdp"
            and (c.mesh.fsdp, c.mesh.expert, c.mesh.sequence) == (1, 1, 1)
        ),
        "mesh.fsdp, mesh.expert and mesh.sequence are 1 and nothing is sharded",
    ),
    Idle(
        _under("parallel", "pipeline_schedule", "pipeline_chunks"),
        lambda c: c.mesh.pipeline == 1,
        "mesh.pipeline=1",
    ),
    Idle(
        _under("parallel", "context", "fold_sequence"),
        lambda c: c.mesh.sequence == 1,
        "mesh.sequence=1",
    ),
    Idle(
        ("parallel.capacity_factor",),
        lambda c: c.mesh.expert == 1 and not (c.parallel.fold_sequence and c.mesh.sequence > 1),
        "mesh.expert=1 drops nothing",
    ),
    Idle(
        ("mesh.expert",),
        _no_routed_layer,
        "no layer is routed (it only divides the batch, as mesh.data does)",
    ),
    *map(_rope_idle, sorted(set().union(*_ROPE_READS.values()))),
    Idle(
        ("model.rope.scaled_layers",),
        lambda c: c.model.rope.scaling == "none",
        "model.rope.scaling=none",
    ),
    Idle(
        ("model.rope.scaling",),
        lambda c: (
            c.model.rope.scaled_layers == "full"
            and not (c.model.rope.on_full_attention and _has_full_layer(c.model.windows))
        ),
        "model.rope.scaled_layers=full and no layer with full attention is rotated",
    ),
    Idle(
        _under("model.windows", "force_full_first", "force_full_last"),
        lambda c: not c.model.windows.pattern,
        "model.windows.pattern=[]",
    ),
    Idle(
        ("model.windows.pattern",),
        _no_window_binds,
        "no window in it is shorter than train.sequence_length",
    ),
    Idle(
        ("model.attention_gate_full_precision",),
        lambda c: c.model.attention_gate == "none",
        "model.attention_gate=none",
    ),
    Idle(
        ("model.dense_hidden",), lambda c: c.model.num_dense_layers == 0, "model.num_dense_layers=0"
    ),
    Idle(
        ("model.init.embedding_std",),
        lambda c: c.model.init.method != "normal",
        "only model.init.method=normal reads it",
    ),
    Idle(
        _under("model", "num_experts", "top_k", "expert_hidden", "shared_hidden")
        + _under("model.router", "gating", "assignment", "bias", "jitter_eps", "normalize")
        + _under("model.router", "restore_weight_scale", "expert_weight_scale", "original_top_k")
        + _under("model.router", "bias_gamma", "score_correction_bias", "num_groups", "top_groups")
        + _under("model.router", "balance_weight", "z_weight")
        + _under("train", "record_expert_counts")
        + _under("parallel", "fold_sequence"),
        _no_routed_layer,
        "no layer is routed",
    ),
    Idle(
        ("model.router.sigmoid_epsilon",),
        lambda c: c.model.router.gating != "sigmoid",
        "only model.router.gating=sigmoid reads it",
    ),
    Idle(
        ("model.router.original_top_k",),
        lambda c: c.model.router.original_top_k == c.model.top_k,
        "it equals model.top_k",
    ),
    Idle(
        ("model.router.top_groups",),
        lambda c: c.model.router.top_groups == c.model.router.num_groups,
        "it equals model.router.num_groups",
    ),
    Idle(
        _under("model.router", "bias_gamma", "score_correction_bias", "num_groups", "top_groups"),
        _not_learned,
        "model.router.assignment takes the choice of experts from the scores",
    ),
    Idle(
        ("model.router.score_correction_bias",),
        lambda c: c.model.router.bias_gamma is not None,
        "model.router.bias_gamma has the same bias, and moves it",
    ),
    Idle(
        ("model.router.balance_scope",),
        lambda c: c.model.router.balance_weight == 0 or _no_routed_layer(c),
        "no balance loss is trained",
    ),
    Idle(("optim.skip_window",), lambda c: c.optim.skip_sigma is None, "optim.skip_sigma=null"),
    Idle(("optim.no_decay",), lambda c: c.optim.weight_decay == 0, "optim.weight_decay=0"),
    _schedule_idle("warmup", "warmup", "warmup_fraction"),
    _schedule_idle("decay", "decay", "decay_fraction"),
    _schedule_idle("final", "final"),
    _schedule_idle("stages", "stages"),
    Idle(
        ("optim.schedule.horizon",),
        lambda c: not _reads_horizon(c),
        "nothing in this schedule is measured by it",
    ),
    Idle(
        ("optim.schedule.warmup_start",),
        lambda c: (
            c.optim.schedule.kind != "composable"
            and not c.optim.schedule.warmup
            and not c.optim.schedule.warmup_fraction
        ),
        "there is no warm-up",
    ),
    Idle(("train.eval_batches",), lambda c: c.data.eval_fraction == 0, "data.eval_fraction=0"),
    Idle(
        ("checkpoint.init_moments",),
        lambda c: c.checkpoint.init_from is None,
        "checkpoint.init_from=null",
    ),
)


def value_of(config: Config, key: str) -> Any:
    """Return what a config has at a dotted key."""
    return reduce(getattr, key.split("."), config)


def without_effect(config: Config) -> list[str]:
    """Return a warning for each key that differs from its default and yet changes nothing."""
    default = Config()
    return [
        f"{key}={show(value_of(config, key))} has no effect, because {idle.why}; drop the key"
        for idle in IDLE
        for key in idle.keys
        if value_of(config, key) != value_of(default, key) and idle.when(config)
    ]
