"""The command line. It alone imports a command's module when the command runs."""

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from olmo_jax.errors import UserError

INTERRUPTED = 130

OVERRIDES_HELP = "a.b=c: any key of the config, typed as YAML types it"


def run() -> None:
    """Run the command line as a program."""
    code = main()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = code or discard_output()
    sys.stderr.flush()
    if code:
        from olmo_jax.launch.processes import leave

        leave(code)
    sys.exit(0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 for a user's mistake, 130 for Ctrl-C.

    A wrong usage exits with 2, a job in which nothing moves any more with 124 (its watchdog).
    """
    given = parser().parse_args(arguments)
    try:
        return given.command(given) or 0
    except UserError as error:
        print(f"olmo-jax: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return discard_output()
    except OSError as error:
        print(f"olmo-jax: {text_of(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("olmo-jax: interrupted", file=sys.stderr)
        return INTERRUPTED


def discard_output() -> int:
    """Let what is still to be printed go nowhere: the reader, such as `head`, has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def text_of(error: OSError) -> str:
    """Return a message for what the system refused."""
    advice = {
        errno.EACCES: "a path that this user may use is needed; change its rights, or name another",
        errno.ENOSPC: "the disk is full; make room, or name a folder on another",
        errno.ENAMETOOLONG: "a name has at most 255 bytes on most systems; write a shorter one",
    }.get(error.errno or 0, "mend that, or name another path")
    return f"{error.filename or 'a file'}: {error.strerror or error}; {advice}"


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each sets `command` to its function."""
    top = argparse.ArgumentParser(
        prog="olmo-jax", description="Train Mixture-of-Experts language models in JAX."
    )
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


def add_config_commands(commands: argparse._SubParsersAction) -> None:
    for name, command, text in (
        ("check", check, "check a config and say what it asks for; starts no device"),
        ("train", train, "train, or go on with the run that the run folder holds"),
    ):
        one = commands.add_parser(name, help=text, description=text)
        one.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file")
        one.add_argument("overrides", nargs="*", metavar="a.b=c", help=OVERRIDES_HELP)
        one.set_defaults(command=command)
        if command is train:
            one.add_argument(
                "--allow-change",
                action="append",
                default=[],
                choices=("seed", "data", "tokenizer"),
                metavar="KEY",
                help="go on although seed, data or tokenizer is not the checkpoint's",
            )


def add_run_commands(commands: argparse._SubParsersAction) -> None:
    text = "evaluate a run's weights on its held-out documents"
    one = commands.add_parser("eval", help=text, description=text)
    one.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    one.add_argument("overrides", nargs="*", metavar="a.b=c", help=OVERRIDES_HELP)
    one.set_defaults(command=evaluate)
    text = "continue a text with a run's weights"
    one = commands.add_parser("sample", help=text, description=text)
    one.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    one.add_argument("text", metavar="TEXT", help="what to continue")
    one.add_argument("--tokens", type=positive, default=64, metavar="N", help="at most so many")
    one.add_argument(
        "--temperature", type=non_negative, default=0.8, metavar="T", help="0: the likeliest token"
    )
    one.add_argument("--seed", type=natural, default=0, metavar="S")
    one.set_defaults(command=sample)


def add_data_commands(commands: argparse._SubParsersAction) -> None:
    text = "turn text, jsonl and gzip files into a folder of tokens"
    one = commands.add_parser("tokenize", help=text, description=text)
    one.add_argument("--input", nargs="+", type=Path, required=True, metavar="DIR_OR_FILE")
    one.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder")
    kind = one.add_mutually_exclusive_group()
    kind.add_argument("--vocab-size", type=positive, metavar="N", help="train a BPE; default 4096")
    kind.add_argument("--tokenizer", type=Path, metavar="FILE", help="use this tokenizer.json")
    one.add_argument(
        "--suffix", nargs="+", default=[], metavar=".EXT", help="of a folder, only such files"
    )
    one.add_argument(
        "--exclude", nargs="+", default=[], metavar="NAME", help="skip folders of this name"
    )
    one.add_argument("--skip-bad", action="store_true", help="leave bad input out and count it")
    one.set_defaults(command=tokenize)
    text = "print the batch of a step as text"
    one = commands.add_parser("show", help=text, description=text)
    one.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file")
    one.add_argument("overrides", nargs="*", metavar="a.b=c", help=OVERRIDES_HELP)
    one.add_argument("--step", type=int, default=1, metavar="N", help="from 1")
    one.set_defaults(command=show)


def add_checkpoint_commands(commands: argparse._SubParsersAction) -> None:
    run = {"metavar": "RUN", "help": "a run folder; of it, the last checkpoint"}
    either = {**run, "help": "a run folder, or RUN/checkpoints/step_N"}
    text = "list a run's checkpoints"
    one = commands.add_parser("list", help=text, description=text)
    one.add_argument("run", metavar="RUN", help="a run folder")
    one.set_defaults(command=list_checkpoints)
    text = "read every leaf of a checkpoint and compare it with its checksum"
    one = commands.add_parser("verify", help=text, description=text)
    one.add_argument("run", **run)
    one.add_argument("--step", type=natural, metavar="N", help="another one than the last")
    one.set_defaults(command=verify_checkpoint)
    text = "compare two checkpoints leaf by leaf; the exit code is 0 if they are equal, else 1"
    one = commands.add_parser("diff", help=text, description=text)
    one.add_argument("first", **either | {"metavar": "A"})
    one.add_argument("second", **either | {"metavar": "B"})
    one.set_defaults(command=diff_checkpoints)
    text = "write a run's weights as a Hugging Face folder"
    one = commands.add_parser("export-weights", help=text, description=text)
    one.add_argument("run", **either)
    one.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    one.set_defaults(command=export_weights)


def add_launch_commands(commands: argparse._SubParsersAction) -> None:
    text = "start the processes of a job on this machine"
    one = commands.add_parser("local", help=text, description=text)
    one.add_argument("--processes", type=positive, required=True, metavar="N")
    one.add_argument(
        "--devices-per-process", type=positive, metavar="M", help="default: the mesh's share; 1 GPU"
    )
    one.add_argument("--logs", type=Path, metavar="DIR", help="default: run_dir/logs")
    one.add_argument("line", nargs=argparse.REMAINDER, metavar="-- train CONFIG [a.b=c ...]")
    one.set_defaults(command=launch_local)
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
    one.add_argument("--python", default=sys.executable, metavar="PATH", help="default: this one")
    one.add_argument(
        "--setup", action="append", default=[], metavar="LINE", help="a shell line run before"
    )
    one.set_defaults(command=launch_slurm)


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
    one.set_defaults(command=launch_kubernetes)


def add_cluster_options(one: argparse.ArgumentParser, *, max_restarts: int) -> None:
    one.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file")
    one.add_argument("overrides", nargs="*", metavar="a.b=c", help=OVERRIDES_HELP)
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


def check(given: argparse.Namespace) -> None:
    from olmo_jax.config import load
    from olmo_jax.plan.summary import summary

    print(f"{given.config} is {summary(load(given.config, given.overrides))}")


def train(given: argparse.Namespace) -> int:
    from olmo_jax.launch import stop

    # Before the imports that take long.
    stop.end_on_sigterm()
    from olmo_jax.config import load
    from olmo_jax.launch import environment
    from olmo_jax.launch.processes import die_with_launcher, discover
    from olmo_jax.mesh.axes import num_devices_wanted
    from olmo_jax.plan.summary import warnings

    die_with_launcher()
    config = load(given.config, given.overrides)
    processes = discover()
    if processes.index == 0:
        warn(warnings(config))
    warn(
        environment.prepare(
            num_devices_wanted(config.mesh), processes, deterministic=config.train.deterministic
        )
    )
    from olmo_jax.launch.connection import connect

    connect(processes)
    from olmo_jax.train import loop

    loop.train(config, given.allow_change)
    return stop.exit_code()


def evaluate(given: argparse.Namespace) -> None:
    from olmo_jax.launch import environment
    from olmo_jax.mesh.axes import num_devices_wanted
    from olmo_jax.train import run_folder

    config = run_folder.load_config(given.run, given.overrides)
    warn(environment.prepare(num_devices_wanted(config.mesh)))
    from olmo_jax.train.evaluate import evaluate as evaluate_run

    found = evaluate_run(given.run, config)
    print(f"loss {found.loss:.4f}  perplexity {found.perplexity:.2f}  tokens {found.counted:,}")


def sample(given: argparse.Namespace) -> None:
    from olmo_jax.launch import environment

    warn(environment.prepare(1))
    from olmo_jax.train.sample import sample as sample_run

    text = sample_run(
        given.run,
        given.text,
        num_tokens=given.tokens,
        temperature=given.temperature,
        seed=given.seed,
    )
    print(text)


def tokenize(given: argparse.Namespace) -> None:
    from olmo_jax.data.tokenize import tokenize as tokenize_files
    from olmo_jax.train.progress import StageProgress, open_console

    with StageProgress(open_console()) as progress:
        manifest = tokenize_files(
            given.input,
            given.output,
            vocab_size=given.vocab_size,
            tokenizer=given.tokenizer,
            suffixes=given.suffix,
            exclude=given.exclude,
            skip_bad=given.skip_bad,
            progress=progress.show,
        )
    skipped = f", {manifest.num_skipped} skipped" if given.skip_bad else ""
    print(
        f"{given.output}: {manifest.num_tokens:,} tokens in {manifest.num_documents:,} "
        f"documents{skipped}, vocabulary {manifest.vocab_size:,}"
    )


def show(given: argparse.Namespace) -> None:
    from olmo_jax.config import load
    from olmo_jax.data.corpus import corpus_of
    from olmo_jax.data.show import show as show_batch

    config = load(given.config, given.overrides)
    corpus = corpus_of(config)
    print(show_batch(corpus, given.step, config.train.global_batch))


def list_checkpoints(given: argparse.Namespace) -> None:
    inspection = _inspection()
    inspection.show(inspection.listed(given.run))


def verify_checkpoint(given: argparse.Namespace) -> None:
    print(_inspection().verify(given.run, given.step))


def diff_checkpoints(given: argparse.Namespace) -> int:
    inspection = _inspection()
    table, line = inspection.diff(given.first, given.second)
    if table is not None:
        inspection.show(table)
    print(line)
    return int(table is not None)


def export_weights(given: argparse.Namespace) -> None:
    print(_inspection().export_weights(given.run, given.out))


def _inspection() -> ModuleType:
    from olmo_jax.launch import environment

    warn(environment.prepare(1))
    from olmo_jax.checkpoint import inspection

    return inspection


def launch_local(given: argparse.Namespace) -> int:
    from olmo_jax.config import load
    from olmo_jax.launch.local import launch

    line = given.line[1:] if given.line[:1] == ["--"] else given.line
    asked = parser().parse_args(line)
    if asked.command is not train:
        raise UserError(
            f"launch local -- {' '.join(line)}: it starts `train`, and no other command; write "
            "olmo-jax launch local --processes 2 -- train CONFIG"
        )
    # Once here, so that a mistake is told once.
    config = load(asked.config, asked.overrides)
    return launch(
        [sys.executable, "-m", "olmo_jax.cli", *line],
        config,
        num_processes=given.processes,
        devices_per_process=given.devices_per_process,
        logs=given.logs,
    )


def launch_slurm(given: argparse.Namespace) -> None:
    from olmo_jax.config import load
    from olmo_jax.launch import slurm

    config = load(given.config, given.overrides)
    job = slurm.Job(
        nodes=given.nodes,
        gpus_per_node=given.gpus_per_node,
        time=given.time,
        job_name=given.job_name,
        partition=given.partition,
        account=given.account,
        qos=given.qos,
        constraint=given.constraint,
        cpus_per_task=given.cpus_per_task,
        grace_s=given.grace,
        max_restarts=given.max_restarts,
        folder=os.getcwd(),
        python=given.python,
        env=given.env,
        setup=given.setup,
    )
    script = slurm.render(config, ["train", str(given.config), *given.overrides], job)
    print(script, end="")
    if not given.dry_run:
        print(slurm.submit(script, config))


def launch_kubernetes(given: argparse.Namespace) -> None:
    from olmo_jax.config import load
    from olmo_jax.launch import kubernetes

    config = load(given.config, given.overrides)
    job = kubernetes.Job(
        image=given.image,
        nodes=given.nodes,
        gpus_per_node=given.gpus_per_node,
        name=given.name,
        namespace=given.namespace,
        claims=given.claim,
        grace_s=given.grace,
        max_restarts=given.max_restarts,
        env=given.env,
    )
    text = given.config.read_text(encoding="utf-8")
    manifest = kubernetes.render(config, text, given.overrides, job)
    print(manifest, end="")
    if not given.dry_run:
        print(kubernetes.apply(manifest))


def warn(texts: Sequence[str]) -> None:
    for text in texts:
        print(f"olmo-jax: warning: {text}", file=sys.stderr)


if __name__ == "__main__":
    run()
