"""What must be seen once on real GPUs: traces that repeat, kernels that are right, a step's time.

python tools/gpu_check.py --data runs/quickstart-data
python tools/gpu_check.py --only kernels --output check.json
For whoever gets a GPU, for a few minutes: one line a check, and JSON of all. On a CPU the checks
of kernels and traces run too, on the backends that are there.
- trace: 20 steps of a small model, twice, each from its own process with `train.deterministic` and
  all flags that a run sets: losses and gradient norms must be equal bit for bit;
- kernels: grouped products and attention of the default backends against plain products and dense
  attention in FP32, forward and gradients, with empty groups and packed documents;
- step: time, tokens/s and MFU of the 8-layer benchmark, its layers and experts scaled to the memory
  by the plan, beside the time that the plan predicts. Compiling is not part of it.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from olmo_jax.config.records import Config
from olmo_jax.config_file import load
from olmo_jax.plan.hardware import MACHINES, Hardware
from olmo_jax.runtime.environment import prepare

ROOT = Path(__file__).parents[1]
BENCHMARK = ROOT / "configs" / "olmo3moe" / "bench_8layer.yaml"
QUICKSTART = ROOT / "configs" / "quickstart.yaml"

NUM_STEPS = 20
EQUAL = ("loss", "z_loss", "balance_loss", "router_z_loss", "grad_norm")

# Of bf16 results, against FP32: a few roundings of 2^-8.
TOLERANCE = 2e-2

Found = dict[str, Any]


def relative(found: Any, wanted: Any) -> float:
    """Return the relative L2 distance of two arrays."""
    import numpy as np

    a, b = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


# Traces.


def trace_once(data: Path, folder: Path) -> list[tuple[float, ...]]:
    """Train a few steps in a process of its own; return what each step reported."""
    command = [sys.executable, "-m", "olmo_jax.cli", "train", str(QUICKSTART)]
    command += [f"run_dir={folder}", f"train.steps={NUM_STEPS}", "train.deterministic=true"]
    command += [f"data.sources=[{{path: {data}}}]", "train.eval_every=0", "checkpoint.every=0"]
    command += ["mesh.data=-1", "mesh.expert=1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)[key] for key in EQUAL) for line in lines]


def check_trace(data: Path | None) -> Found:
    """Compare two runs of the same config."""
    if data is None:
        return {"passed": None, "note": "give --data, a folder that `data tokenize` wrote"}
    with tempfile.TemporaryDirectory() as folder:
        first, second = (trace_once(data.resolve(), Path(folder) / str(n)) for n in (1, 2))
    differing = [
        i + 1 for i, pair in enumerate(zip(first, second, strict=True)) if len({*pair}) > 1
    ]
    passed = len(first) == NUM_STEPS and not differing
    return {"passed": passed, "steps": len(first), "first_difference": differing[:1]}


# Kernels.


def check_grouped(dtype: str) -> Found:
    """Compare the default grouped product with one product a group, and its gradients."""
    import jax
    import jax.numpy as jnp

    from olmo_jax.ops import target
    from olmo_jax.ops.grouped_matmul import default_backend, grouped_matmul

    sizes = [0, 300, 1, 0, 515, 208, 0, 0]
    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.random.normal(keys[0], (1100, 256), jnp.float32).astype(dtype)
    weights = jax.random.normal(keys[1], (len(sizes), 256, 384)) / 16
    outer = jax.random.normal(keys[2], (1100, 384), jnp.float32)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]

    def plain(rows: Any, weights: Any) -> Any:
        rounded = weights.astype(dtype).astype(jnp.float32)
        wide = rows.astype(jnp.float32)
        parts = [
            wide[end - size : end] @ rounded[i]
            for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
        ]
        rest = jnp.zeros((rows.shape[0] - ends[-1], weights.shape[2]))
        return jnp.sum(jnp.concatenate([*parts, rest]) * outer)

    def ours(rows: Any, weights: Any) -> Any:
        result = grouped_matmul(rows, weights, jnp.array(sizes, jnp.int32))
        return jnp.sum(result.astype(jnp.float32) * outer)

    found, wanted = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(rows, weights) for f in (ours, plain)
    )
    far = {
        "value": relative(found[0], wanted[0]),
        "rows": relative(found[1][0], wanted[1][0]),
        "weights": relative(found[1][1], wanted[1][1]),
    }
    backend = default_backend(*target.here())
    return {"passed": max(far.values()) < TOLERANCE, "backend": backend, **far}


def check_attention(dtype: str, window: int | None) -> Found:
    """Compare the default attention with the dense one: packed documents, grouped heads."""
    import jax
    import jax.numpy as jnp

    from olmo_jax.ops.attention import attention, default_backend

    length, width = 512, 128
    keys = jax.random.split(jax.random.key(1), 4)
    shapes = ((2, length, 8, width), (2, length, 2, width), (2, length, 2, width))
    arrays = [
        jax.random.normal(key, shape, jnp.float32).astype(dtype)
        for key, shape in zip(keys, shapes, strict=False)
    ]
    outer = jax.random.normal(keys[3], shapes[0])
    segments = jnp.cumsum(jnp.arange(length) % 177 == 0)[None].repeat(2, axis=0).astype(jnp.int32)

    def value(backend: str | None, cast: str) -> Callable[..., Any]:
        def total(*arrays: Any) -> Any:
            q, k, v = (array.astype(cast) for array in arrays)
            out = attention(
                q,
                k,
                v,
                segment_ids=segments,
                window=window,
                scale=width**-0.5,
                backend=backend,
            )
            return jnp.sum(out.astype(jnp.float32) * outer)

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))

    found, wanted = value(None, dtype)(*arrays), value("dense", "float32")(*arrays)
    far = {name: relative(a, b) for name, a, b in zip("qkv", found[1], wanted[1], strict=True)}
    backend = default_backend(jnp.dtype(dtype), width, length, segmented=True)
    return {"passed": max(far.values()) < TOLERANCE, "backend": backend, **far}


def check_kernels() -> Found:
    """Run all comparisons of kernels in bf16."""
    found = {
        "grouped product": check_grouped("bfloat16"),
        "attention": check_attention("bfloat16", None),
        "attention in a window": check_attention("bfloat16", 100),
    }
    return {"passed": all(each["passed"] for each in found.values()), **found}


# A step.


def scaled_benchmark(hardware: Hardware, num_devices: int) -> Config:
    """Return the 8-layer benchmark with as many experts and layers as the plan says that fit."""
    from olmo_jax.mesh.layout import Layout
    from olmo_jax.plan.alternatives import changed
    from olmo_jax.plan.plan import Plan

    config = load(BENCHMARK)
    rows = 8 * config.train.microbatch * num_devices
    mesh = {"data": 1, "expert": num_devices}
    for experts in (64, 32, 16, 8):
        for layers in (8, 6, 4, 3, 2):
            model = {"num_experts": experts, "num_layers": layers}
            train = {"global_batch": rows, "recompute": "none"}
            scaled = changed(config, {"mesh": mesh, "model": model, "train": train})
            if (
                experts % num_devices == 0
                and Plan(Layout(scaled, dict(scaled.mesh)), hardware).fits
            ):
                return scaled
    raise SystemExit(f"nothing of the benchmark fits {num_devices} x {hardware.name}")


def random_batch(config: Config) -> Any:
    """Return a batch of random tokens, one document a row."""
    import numpy as np

    from olmo_jax.data.batch import Batch

    train = config.train
    shape = (train.global_batch, train.sequence_length)
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, config.model.vocab_size, shape, dtype=np.int32)
    places = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    ones, rows = np.ones(shape, np.int32), np.arange(shape[0], dtype=np.int32)
    return Batch(tokens, np.roll(tokens, -1, axis=1), ones, places, np.ones(shape, bool), rows)


def check_step(hardware: Hardware, steps: int) -> Found:
    """Time steps of the scaled benchmark, and put the plan beside."""
    import jax

    from olmo_jax.mesh.layout import Layout
    from olmo_jax.plan.plan import Plan
    from olmo_jax.train.program import build_here

    config = scaled_benchmark(hardware, jax.device_count())
    program = build_here(config)
    batch, state = program.put(random_batch(config)), program.init()
    times, metrics = [], {}
    for _ in range(steps + 2):
        start = time.perf_counter()
        state, metrics = program.step(state, batch, 1e-4)
        jax.block_until_ready(metrics)
        times.append(time.perf_counter() - start)
    # The first one compiles, the second may still warm up.
    median = statistics.median(times[2:])
    plan = Plan(Layout(config, dict(config.mesh)), hardware)
    held = [device.memory_stats() or {} for device in jax.local_devices()]
    return {
        "passed": math.isfinite(float(metrics["loss"])),
        "layers": config.model.num_layers,
        "experts": config.model.num_experts,
        "step_time_s": median,
        "times_s": times,
        "planned_step_time_s": plan.step_time_s,
        "tokens_per_s_and_device": plan.tokens / median / plan.num_devices,
        "mfu": plan.mfu * plan.step_time_s / median,
        "planned_mfu": plan.mfu,
        "peak_bytes": max((stats.get("peak_bytes_in_use", 0) for stats in held), default=0),
        "planned_peak_bytes": plan.memory_bytes["total"],
    }


CHECKS = ("kernels", "trace", "step")


def parser() -> argparse.ArgumentParser:
    description, _, epilog = (__doc__ or "").partition("\n\n")
    made = argparse.ArgumentParser(
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--only", nargs="+", choices=CHECKS, default=CHECKS)
    made.add_argument("--data", type=Path, help="a folder of tokens, for the trace")
    made.add_argument("--hardware", choices=tuple(MACHINES), default="h200", help="for the plan")
    made.add_argument("--steps", type=int, default=10, help="timed steps")
    made.add_argument("--output", type=Path, help="where the JSON goes")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the checks that were asked for; return 1 if one did not pass."""
    options = parser().parse_args(arguments)
    found: dict[str, Found] = {}
    # Before this process takes the GPU: the runs have processes of their own.
    if "trace" in options.only:
        found["trace"] = check_trace(options.data)
    for text in prepare(1):
        print(text, file=sys.stderr)
    if "kernels" in options.only:
        found["kernels"] = check_kernels()
    if "step" in options.only:
        found["step"] = check_step(MACHINES[options.hardware], options.steps)
    for name, each in found.items():
        print(f"{name}: {'passed' if each['passed'] else 'not passed'} {json.dumps(each)}")
    if options.output:
        options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return int(any(each["passed"] is False for each in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
