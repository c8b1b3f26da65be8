"""What the command line takes: every command, its arguments and their help."""

import argparse
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import shtab

from olmo_jax.config.records import expanded
from olmo_jax.rules.resume_policy import ALLOWABLE


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what a command line asks for; its options stand anywhere among the other words.

    argparse ends the list of overrides at the first option after the config, and returns the
    overrides after that option as words that it does not know.
    """
    top = parser()
    given, left = top.parse_known_args(words)
    overrides = [word for word in left if word != "--"]
    unknown = [word for word in overrides if word.startswith("-") or "overrides" not in given]
    if unknown:
        top.error(f"unrecognized arguments: {' '.join(unknown)}")
    if overrides:
        given.overrides = [*given.overrides, *overrides]
    return given


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each sets `command` to the name of its function."""
    top = argparse.ArgumentParser(
        prog="olmo-jax", description="Train Mixture-of-Experts language models in JAX."
    )
    top.add_argument("--version", action=Version, nargs=0, help="print the versions and exit")
    shtab.add_argument_to(top, help="print what lets a shell complete commands, and exit")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    add_config_commands(commands)
    add_run_commands(commands)
    data = commands.add_parser("data", help="make and look at training data")
    add_data_commands(data.add_subparsers(required=True, metavar="COMMAND"))
    checkpoint = commands.add_parser("checkpoint", help="look at checkpoints, export their weights")
    add_checkpoint_commands(checkpoint.add_subparsers(required=True, metavar="COMMAND"))
    launch = commands.add_parser("launch", help="train in many processes: here, Slurm, Kubernetes")
    add_launch_commands(launch.add_subparsers(required=True, metavar="WHERE"))
    return top


class Version(argparse.Action):
    """Prints the versions and exits. argparse's own action reads them for every command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(versions())
        parser.exit()


def versions() -> str:
    """Return the versions that a bug report needs; imports no jax."""
    packages = [f"{name} {version(name)}" for name in ("olmo_jax", "jax", "jaxlib")]
    return ", ".join([*packages, f"Python {platform.python_version()}"])


def add_config(one: argparse.ArgumentParser) -> None:
    """Let a command take a config and what stands after it."""
    add_path(one, "config", metavar="CONFIG", help="a YAML file")
    add_overrides(one)


def add_overrides(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "overrides",
        nargs="*",
        metavar="a.b=c",
        help="a.b=c: any key of the config, typed as YAML types it",
    )


def add_path(one: argparse._ActionsContainer, name: str, **options: Any) -> None:
    """Add an argument that is a path, which a shell completes."""
    added = one.add_argument(name, **{"type": path, **options})
    added.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]


def add_config_commands(commands: argparse._SubParsersAction) -> None:
    text = "check a config and say what it asks for; starts no device"
    one = commands.add_parser("check", help=text, description=text)
    add_config(one)
    one.set_defaults(command="check")
    add_plan_command(commands)
    add_compile_command(commands)
    text = "train, or resume the run that the run folder holds"
    one = commands.add_parser("train", help=text, description=text)
    add_config(one)
    one.add_argument(
        "--allow-change",
        action="append",
        default=[],
        choices=ALLOWABLE,
        metavar="KEY",
        help="resume although seed, data or tokenizer is not the checkpoint's; model and tokenizer "
        "also allow another one than that of checkpoint.init_from",
    )
    one.set_defaults(command="train")


def add_plan_command(commands: argparse._SubParsersAction) -> None:
    text = "say what a config holds, sends and takes on a machine; starts no device"
    one = commands.add_parser("plan", help=text, description=text)
    add_config(one)
    add_path(
        one,
        "--hardware",
        type=path_text,
        default="h200",
        metavar="NAME_OR_FILE",
        help="h200, b300, b200, h100, a100, or a YAML file; default: h200",
    )
    one.add_argument(
        "--devices", type=positive, metavar="N", help="default: those of the mesh; an open axis, 8"
    )
    one.add_argument("--search", action="store_true", help="rank every mesh of so many devices")
    one.add_argument("--json", action="store_true", help="the same as JSON")
    add_path(one, "--picture", metavar="FILE", help="draw it too: .png or .svg")
    one.set_defaults(command="plan")


def add_compile_command(commands: argparse._SubParsersAction) -> None:
    text = "compile a config's step for GPUs that are not here, and say what XLA made of it"
    one = commands.add_parser("compile", help=text, description=text)
    add_config(one)
    one.add_argument("--target", choices=("h100", "h200", "b200"), default="h200")
    one.add_argument("--devices", type=positive, metavar="N", help="default: those of the mesh")
    one.add_argument("--devices-per-node", type=positive, default=8, metavar="N", help="default: 8")
    add_path(one, "--hlo", metavar="FILE", help="write the compiled program there")
    one.add_argument("--json", action="store_true", help="the same as JSON")
    one.set_defaults(command="compile_step")


def add_run_commands(commands: argparse._SubParsersAction) -> None:
    text = "evaluate a run's weights on its held-out documents"
    one = commands.add_parser("eval", help=text, description=text)
    add_path(one, "run", metavar="RUN", help="a run folder")
    add_overrides(one)
    one.add_argument(
        "--allow-change",
        action="append",
        default=[],
        choices=("model",),
        metavar="KEY",
        help="evaluate although model is not the checkpoint's",
    )
    one.set_defaults(command="evaluate")
    text = "continue a text with a run's weights"
    one = commands.add_parser("sample", help=text, description=text)
    add_path(one, "run", metavar="RUN", help="a run folder")
    one.add_argument("text", metavar="TEXT", help="what to continue")
    one.add_argument("--tokens", type=positive, default=64, metavar="N", help="at most so many")
    one.add_argument(
        "--temperature", type=non_negative, default=0.8, metavar="T", help="0: the likeliest token"
    )
    one.add_argument("--seed", type=natural, default=0, metavar="S")
    one.set_defaults(command="sample")


def add_data_commands(commands: argparse._SubParsersAction) -> None:
    text = "turn text, jsonl and gzip files into a folder of tokens"
    one = commands.add_parser("tokenize", help=text, description=text)
    add_path(one, "--input", nargs="+", required=True, metavar="DIR_OR_FILE")
    add_path(one, "--output", required=True, metavar="DIR", help="a new folder")
    kind = one.add_mutually_exclusive_group()
    kind.add_argument("--vocab-size", type=positive, metavar="N", help="train a BPE; default 4096")
    add_path(kind, "--tokenizer", metavar="FILE", help="use this tokenizer.json")
    one.add_argument(
        "--suffix", nargs="+", default=[], metavar=".EXT", help="of a folder, only such files"
    )
    one.add_argument(
        "--exclude", nargs="+", default=[], metavar="NAME", help="skip folders of this name"
    )
    one.add_argument("--skip-bad", action="store_true", help="leave bad input out and count it")
    one.set_defaults(command="tokenize")
    text = "print the batch of a step as text"
    one = commands.add_parser("show", help=text, description=text)
    add_config(one)
    one.add_argument("--step", type=int, default=1, metavar="N", help="from 1")
    one.set_defaults(command="show")


def add_checkpoint_commands(commands: argparse._SubParsersAction) -> None:
    # A run folder may be in a bucket.
    run: dict[str, Any] = {
        "type": path_text,
        "metavar": "RUN",
        "help": "a run folder; of it, the last checkpoint",
    }
    either = {**run, "help": "a run folder, or RUN/checkpoints/step_N"}
    text = "list a run's checkpoints"
    one = commands.add_parser("list", help=text, description=text)
    add_path(one, "run", **run | {"help": "a run folder"})
    one.set_defaults(command="list_checkpoints")
    text = "read every leaf of a checkpoint and compare it with its checksum"
    one = commands.add_parser("verify", help=text, description=text)
    add_path(one, "run", **run)
    one.add_argument("--step", type=natural, metavar="N", help="another one than the last")
    one.set_defaults(command="verify_checkpoint")
    text = "compare two checkpoints leaf by leaf; the exit code is 0 if they are equal, else 1"
    one = commands.add_parser("diff", help=text, description=text)
    add_path(one, "first", **either | {"metavar": "A"})
    add_path(one, "second", **either | {"metavar": "B"})
    one.set_defaults(command="diff_checkpoints")
    text = "write a run's weights as a Hugging Face folder"
    one = commands.add_parser("export-weights", help=text, description=text)
    add_path(one, "run", **either)
    add_path(one, "out", metavar="OUT", help="a new folder")
    one.set_defaults(command="export_weights")


def add_launch_commands(commands: argparse._SubParsersAction) -> None:
    text = "start the processes of a job on this machine"
    one = commands.add_parser("local", help=text, description=text)
    one.add_argument("--processes", type=positive, required=True, metavar="N")
    one.add_argument(
        "--devices-per-process", type=positive, metavar="M", help="default: the mesh's share; 1 GPU"
    )
    add_path(one, "--logs", metavar="DIR", help="default: run_dir/logs")
    one.add_argument("line", nargs=argparse.REMAINDER, metavar="-- train CONFIG [a.b=c ...]")
    one.set_defaults(command="launch_local")
    add_slurm_command(commands)
    add_kubernetes_command(commands)


def add_slurm_command(commands: argparse._SubParsersAction) -> None:
    text = "render a batch script for Slurm, and submit it"
    one = commands.add_parser("slurm", help=text, description=text)
    add_cluster_options(one, max_restarts=3)
    one.add_argument("--time", default="24:00:00", metavar="D-HH:MM:SS", help="limit of one go")
    one.add_argument("--job-name", default="olmo-jax", metavar="NAME")
    for name in ("partition", "account", "qos", "constraint"):
        one.add_argument(f"--{name}", metavar="NAME", help="as sbatch takes it")
    one.add_argument("--cpus-per-task", type=positive, metavar="N", help="of each GPU's process")
    text = "default: .venv-gpu's if it is there and this one has no CUDA, else this one"
    add_path(one, "--python", type=path_text, metavar="PATH", help=text)
    one.add_argument(
        "--setup", action="append", default=[], metavar="LINE", help="a shell line run before"
    )
    one.set_defaults(command="launch_slurm")


def add_kubernetes_command(commands: argparse._SubParsersAction) -> None:
    text = "render a JobSet for Kubernetes, and apply it"
    one = commands.add_parser("kubernetes", help=text, description=text)
    add_cluster_options(one, max_restarts=10)
    one.add_argument("--image", required=True, metavar="NAME", help="has olmo-jax on its PATH")
    one.add_argument("--name", default="olmo-jax", metavar="NAME")
    one.add_argument("--namespace", metavar="NAME")
    one.add_argument(
        "--claim", action="append", default=[], metavar="NAME:PATH", help="a volume claim to mount"
    )
    one.set_defaults(command="launch_kubernetes")


def add_cluster_options(one: argparse.ArgumentParser, *, max_restarts: int) -> None:
    add_config(one)
    one.add_argument("--nodes", type=positive, required=True, metavar="N")
    one.add_argument("--gpus-per-node", type=positive, default=8, metavar="N", help="default: 8")
    one.add_argument(
        "--grace", type=positive, default=300, metavar="S", help="seconds to stop in; default: 300"
    )
    one.add_argument(
        "--max-restarts",
        type=natural,
        default=max_restarts,
        metavar="N",
        help=f"after failures; default: {max_restarts}",
    )
    one.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="for every process"
    )
    one.add_argument("--dry-run", action="store_true", help="print it, and hand over nothing")


def path(text: str) -> Path:
    """Read a path; `~` stands for the home folder."""
    return Path(path_text(text))


def path_text(text: str) -> str:
    """Read what may be a path and keep its spelling: pathlib makes gs:/x of gs://x, x of ./x."""
    try:
        return expanded(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} {error}") from None


def natural(text: str) -> int:
    """Read a whole number from 0."""
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return number


def positive(text: str) -> int:
    """Read a whole number from 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def non_negative(text: str) -> float:
    """Read a finite number from 0."""
    if not 0 <= (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no finite number from 0")
    return number
