"""The command line. It alone imports a command's module when the command runs."""

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

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
    if code == INTERRUPTED:
        # A thread may be inside XLA's compiler, and an interpreter that ends normally aborts on it.
        os._exit(code)
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 for a user's mistake, 130 for Ctrl-C.

    A wrong usage exits with 2.
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
    return top


def add_config_commands(commands: argparse._SubParsersAction) -> None:
    for name, command, text in (
        ("check", check, "check a config and say what it asks for; starts no device"),
        ("train", train, "train, and leave the run folder"),
    ):
        one = commands.add_parser(name, help=text, description=text)
        one.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file")
        one.add_argument("overrides", nargs="*", metavar="a.b=c", help=OVERRIDES_HELP)
        one.set_defaults(command=command)


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


def train(given: argparse.Namespace) -> None:
    from olmo_jax.config import load
    from olmo_jax.launch import environment
    from olmo_jax.mesh.axes import num_devices_wanted
    from olmo_jax.plan.summary import warnings

    config = load(given.config, given.overrides)
    warn(warnings(config))
    warn(
        environment.prepare(
            num_devices_wanted(config.mesh), deterministic=config.train.deterministic
        )
    )
    from olmo_jax.train import loop

    loop.train(config)


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


def warn(texts: Sequence[str]) -> None:
    for text in texts:
        print(f"olmo-jax: warning: {text}", file=sys.stderr)


if __name__ == "__main__":
    run()
