"""Kill a run again and again at random moments, and compare it with one that was never killed.

Both runs train the same small model on tokens that are made up. The first is left alone. Of the
second, one attempt after another is killed (SIGKILL), one in five before its steps and the others
while steps are taken and checkpoints written, since one follows every other step; the attempt after
it resumes by itself. The last attempt is left alone. Both final checkpoints must be equal bit for
bit, and each step must have one line in metrics.jsonl, equal but for the clock.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from olmo_jax.data.shards import write_shard
from olmo_jax.data.token_manifest import Manifest, folder_fingerprint, write_manifest

VOCAB_SIZE = 300
CLOCK = ("tokens_per_s", "step_time_s")
CONFIG: dict[str, Any] = {
    "mesh": {"expert": 2},
    "model": {
        "num_layers": 2,
        "d_model": 32,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "num_experts": 4,
        "expert_hidden": 32,
        "shared_hidden": 32,
        "dense_hidden": 64,
        "vocab_size": VOCAB_SIZE,
        "router": {"bias_gamma": 0.01},
    },
    "optim": {"skip_sigma": 6.0, "skip_window": 8},
    "train": {"global_batch": 4, "sequence_length": 64},
    "checkpoint": {"every": 2, "keep": 2},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; return 0 if nothing differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a new folder for both runs")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True)
    write_tokens(given.folder / "tokens")
    quiet, killed = (write_config(given.folder, name, given.steps) for name in ("quiet", "killed"))
    left_alone(quiet)
    moments = random.Random(given.seed)
    # The attempts together come to about two thirds of the way.
    most_steps = max(2, round(1.6 * given.steps / given.kills))
    for number in range(1, given.kills + 1):
        print(f"kill {number:2}: {kill_once(killed, moments, most_steps)}", flush=True)
    left_alone(killed)
    faults = list(differences(given.folder / "quiet", given.folder / "killed"))
    print("\n".join(faults) or f"{given.kills} kills, and the same run bit for bit")
    return int(bool(faults))


def write_tokens(folder: Path) -> None:
    """Write documents of random tokens, as `olmo-jax data tokenize` would."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    kind = np.dtype("uint16")
    documents = [draw.integers(1, VOCAB_SIZE, n) for n in draw.integers(10, 200, 400)]
    arrays = iter([np.append(document, 0).astype(kind) for document in documents])
    shard = write_shard(folder, 0, arrays, kind)
    facts: dict[str, Any] = {
        "dtype": "uint16",
        "vocab_size": VOCAB_SIZE,
        "eos_id": 0,
        "tokenizer_sha256": "0" * 64,
    }
    manifest = Manifest(
        **facts,
        num_tokens=shard.num_tokens,
        num_documents=shard.num_documents,
        num_skipped=0,
        files=(shard,),
        fingerprint=folder_fingerprint([shard], **facts),
    )
    write_manifest(folder, manifest)


def write_config(folder: Path, name: str, steps: int) -> Path:
    """Write the config of one of both runs."""
    config = {
        **CONFIG,
        "run_dir": str(folder / name),
        "data": {"sources": [{"path": str(folder / "tokens")}]},
        "train": {**CONFIG["train"], "steps": steps},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start(config: Path) -> subprocess.Popen[str]:
    # A line of it must be there when it is said.
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "olmo_jax.cli", "train", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=variables,
    )


def left_alone(config: Path) -> None:
    """Train to the end.

    Raises: SystemExit with what the run said, if it fails.
    """
    process = start(config)
    said = process.communicate()[0]
    if process.returncode:
        raise SystemExit(f"a run that nobody killed failed:\n{said}")


def kill_once(config: Path, moments: random.Random, most_steps: int) -> str:
    """Start an attempt and kill it, one in five before its steps; return what it was at."""
    process = start(config)
    if moments.random() < 0.2:
        time.sleep(moments.uniform(0, 6))
        return end(config, process, "before its steps")
    wait_for_steps(config, process, moments.randint(1, most_steps))
    time.sleep(moments.uniform(0, 0.5))
    return end(config, process, "in its steps")


def wait_for_steps(config: Path, process: subprocess.Popen[str], number: int) -> None:
    """Wait until an attempt has taken so many steps, or has ended."""
    assert process.stdout is not None
    # By its first line of a step it has cut the metrics back.
    first = next((line for line in process.stdout if line.startswith("step ")), "step 0/")
    step = int(first.split()[1].partition("/")[0])
    metrics = config.with_suffix("") / "metrics.jsonl"
    while process.poll() is None and count_lines(metrics) < step + number - 1:
        time.sleep(0.005)


def end(config: Path, process: subprocess.Popen[str], when: str) -> str:
    """Kill an attempt, and return what it was at and leaves.

    Raises: SystemExit with what it said, if it has failed by itself.
    """
    ended = process.poll() is not None
    process.kill()
    said = process.communicate()[0]
    if ended and process.returncode:
        raise SystemExit(f"an attempt failed by itself:\n{said}")
    folders = (config.with_suffix("") / "checkpoints").glob("*")
    found = Counter("unfinished" if "tmp" in folder.name else "whole" for folder in folders)
    steps = count_lines(config.with_suffix("") / "metrics.jsonl")
    return f"{'after its end' if ended else when}, {steps} lines, checkpoints {dict(found)}"


def count_lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def differences(quiet: Path, killed: Path) -> Iterator[str]:
    """Yield what differs between both runs' ends."""
    command = [sys.executable, "-m", "olmo_jax.cli", "checkpoint", "diff", str(quiet), str(killed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout.strip())
    if done.returncode:
        yield f"the final checkpoints differ\n{done.stderr}"
    lines = [
        [
            {key: value for key, value in json.loads(line).items() if key not in CLOCK}
            for line in (run / "metrics.jsonl").read_text().splitlines()
        ]
        for run in (quiet, killed)
    ]
    if lines[0] != lines[1]:
        yield f"the metrics differ: {len(lines[0])} and {len(lines[1])} lines"
    if left := [path.name for path in (killed / "checkpoints").glob("*tmp*")]:
        yield f"left over: {left}"


if __name__ == "__main__":
    sys.exit(main())
