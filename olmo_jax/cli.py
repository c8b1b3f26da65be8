"""The command line: what each command does. It alone imports a module when a command runs."""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from olmo_jax.arguments import parse
from olmo_jax.errors import UserError
from olmo_jax.runtime.streams import complain, discard, open_standard_streams, printable

INTERRUPTED = 130


def run() -> None:
    """Run the command line as a program."""
    open_standard_streams()
    try:
        code = main()
    except SystemExit as end:
        # argparse has printed the help, or what is wrong with the usage.
        code = int(end.code or 0)
    code = code or flush_output()
    if code:
        from olmo_jax.runtime.processes import exit_process

        exit_process(code)
    sys.exit(0)


def flush_output() -> int:
    """Write what is still in a buffer; return 1 if it cannot be written."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return discard_output()
    except OSError as error:
        complain(f"olmo-jax: standard output: {error.strerror}; write it to another place")
        return discard_output()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 for a user's mistake, 130 for Ctrl-C.

    A wrong usage exits with 2, a job in which nothing moves any more with 124 (its watchdog).
    """
    try:
        given = parse(arguments)
        return COMMANDS[given.command](given) or 0
    except UserError as error:
        complain(f"olmo-jax: {error}")
        return 1
    except BrokenPipeError:
        return discard_output()
    except OSError as error:
        complain(f"olmo-jax: {text_of(error)}")
        return 1
    except KeyboardInterrupt:
        complain("olmo-jax: interrupted")
        return INTERRUPTED


def discard_output() -> int:
    """Let what is still to be printed go nowhere: the reader, such as `head`, has gone."""
    discard(sys.stdout)
    return 1


def text_of(error: OSError) -> str:
    """Return a message for what the system refused."""
    advice = {
        errno.EACCES: "a path that this user may use is needed; change its rights, or name another",
        errno.ENOSPC: "the disk is full; make room, or name a folder on another",
        errno.ENAMETOOLONG: "a name has at most 255 bytes on most systems; write a shorter one",
    }.get(error.errno or 0, "mend that, or name another path")
    return f"{error.filename or 'a file'}: {error.strerror or error}; {advice}"


def check(given: argparse.Namespace) -> None:
    from olmo_jax.config_file import load
    from olmo_jax.plan.summary import summary

    print(f"{given.config} is {summary(load(given.config, given.overrides))}")


def plan(given: argparse.Namespace) -> None:
    from olmo_jax.config_file import load
    from olmo_jax.plan import command

    command.check_picture(given.picture, search=given.search)
    config = load(given.config, given.overrides)
    if given.search:
        print(command.searched(config, given.hardware, given.devices, as_json=given.json))
        return
    made = command.planned(config, given.hardware, given.devices)
    if given.picture is not None:
        # Takes longer to import than all the rest.
        from olmo_jax.plan.picture import draw

        title = f"{printable(given.config)} on {made.num_devices} x {made.hardware.name}"
        draw(made, title).savefig(given.picture, dpi=80)
    print(command.rendered(made, as_json=given.json))


def compile_step(given: argparse.Namespace) -> None:
    import json

    from olmo_jax.config_file import load
    from olmo_jax.mesh.axes import num_devices_wanted
    from olmo_jax.runtime.environment import prepare_compiler

    config = load(given.config, given.overrides)
    prepare_compiler()
    from olmo_jax.inspect import gpu_compile, gpu_report

    num_devices = given.devices or num_devices_wanted(config.mesh)
    compiled = gpu_compile.compile_for(config, given.target, num_devices, given.devices_per_node)
    if given.hlo is not None:
        given.hlo.write_text(compiled.text, encoding="utf-8")
    numbers = gpu_report.as_json(compiled) if given.json else None
    print(json.dumps(numbers, indent=2) if numbers else gpu_report.text(compiled))


def train(given: argparse.Namespace) -> int:
    from olmo_jax.runtime import stop_signal

    # Before the imports that take long.
    stop_signal.end_when_told()
    from olmo_jax.config_file import load
    from olmo_jax.mesh.axes import num_devices_wanted
    from olmo_jax.plan.summary import warnings
    from olmo_jax.runtime import environment
    from olmo_jax.runtime.processes import die_with_launcher, discover

    die_with_launcher()
    config = load(given.config, given.overrides)
    processes = discover()
    if processes.index == 0:
        warn(warnings(config))
    warn(
        environment.prepare(
            num_devices_wanted(config.mesh),
            processes,
            deterministic=config.train.deterministic,
            platform=config.mesh.platform,
        )
    )
    from olmo_jax.runtime.connection import connect

    connect(processes)
    from olmo_jax.train import training_run

    training_run.train(config, given.allow_change)
    return stop_signal.exit_code()


def evaluate(given: argparse.Namespace) -> None:
    from olmo_jax.mesh.axes import num_devices_wanted
    from olmo_jax.runtime import environment
    from olmo_jax.train import run_folder

    config = run_folder.load_config(given.run, given.overrides)
    wanted = num_devices_wanted(config.mesh)
    warn(environment.prepare(wanted, platform=config.mesh.platform))
    from olmo_jax.train.evaluate import evaluate as evaluate_run

    found, notes = evaluate_run(given.run, config, given.allow_change)
    label = f"  ({'; '.join(notes)})" if notes else ""
    print(
        f"loss {found.loss:.4f}  perplexity {found.perplexity:.2f}  tokens "
        f"{found.loss_tokens:,}{label}"
    )


def sample(given: argparse.Namespace) -> None:
    from olmo_jax.runtime import environment

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

    notes: list[str] = []
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
            say=notes.append,
        )
    skipped = f", {manifest.num_skipped} skipped" if given.skip_bad or manifest.num_skipped else ""
    print(
        f"{given.output}: {manifest.num_tokens:,} tokens in {manifest.num_documents:,} "
        f"documents{skipped}, vocabulary {manifest.vocab_size:,}"
    )
    warn(notes)


def show(given: argparse.Namespace) -> None:
    from olmo_jax.config_file import load
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
    from olmo_jax.runtime import environment

    warn(environment.prepare(1))
    from olmo_jax.checkpoint import inspection

    return inspection


def launch_local(given: argparse.Namespace) -> int:
    from olmo_jax.config_file import load
    from olmo_jax.launch.local import launch

    line = given.line[1:] if given.line[:1] == ["--"] else given.line
    asked = parse(line)
    if asked.command != train.__name__:
        raise UserError(
            f"launch local -- {' '.join(line)}: it starts `train`, and no other command; write "
            "olmo-jax launch local --processes 2 -- train CONFIG"
        )
    from pathlib import Path

    from olmo_jax.train.run_folder import refuse_unusable

    # Once here, so that a mistake is told once, and before a log is written.
    config = load(asked.config, asked.overrides)
    refuse_unusable(Path(config.run_dir))
    return launch(
        [sys.executable, "-m", "olmo_jax.cli", *line],
        config,
        num_processes=given.processes,
        devices_per_process=given.devices_per_process,
        logs=given.logs,
    )


def launch_slurm(given: argparse.Namespace) -> None:
    from olmo_jax.config_file import load
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
        python=given.python or slurm.default_python(),
        env=given.env,
        setup=given.setup,
    )
    text = given.config.read_text(encoding="utf-8")
    script = slurm.render(config, text, given.overrides, job)
    print(script, end="")
    if not given.dry_run:
        print(slurm.submit(script, config, job.python))


def launch_kubernetes(given: argparse.Namespace) -> None:
    from olmo_jax.config_file import load
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
        complain(f"olmo-jax: warning: {text}")


COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    command.__name__: command
    for command in (
        check,
        plan,
        compile_step,
        train,
        evaluate,
        sample,
        tokenize,
        show,
        list_checkpoints,
        verify_checkpoint,
        diff_checkpoints,
        export_weights,
        launch_local,
        launch_slurm,
        launch_kubernetes,
    )
}


if __name__ == "__main__":
    run()
