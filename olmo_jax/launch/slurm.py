"""Renders a batch script for Slurm that resumes by itself, and submits it."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from olmo_jax.config import Config
from olmo_jax.errors import UserError
from olmo_jax.launch import cluster
from olmo_jax.runtime.platform import has_gpu_plugin
from olmo_jax.runtime.processes import COORDINATOR

WORD = r"[A-Za-z0-9_.:@+/-]+"
LIST = r"[A-Za-z0-9_.:@+/,&|*\[\]-]+"
SCRIPT = "job.sbatch"
# Made by `make install-gpu`.
GPU_PYTHON = Path(__file__).parents[2] / ".venv-gpu" / "bin" / "python"


@dataclass(frozen=True)
class Job:
    """What a user asks of Slurm. `grace_s`: how long before its limit the job is told to stop."""

    nodes: int
    gpus_per_node: int = 8
    time: str = "24:00:00"
    job_name: str = "olmo-jax"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    cpus_per_task: int | None = None
    grace_s: int = 300
    max_restarts: int = 3
    folder: str = "."
    python: str = "python"
    env: Sequence[str] = ()
    setup: Sequence[str] = ()


def default_python() -> str:
    """Return the interpreter for the nodes: this one if it has CUDA, else that of .venv-gpu."""
    return str(GPU_PYTHON) if GPU_PYTHON.exists() and not has_gpu_plugin() else sys.executable


def render(config: Config, text: str, overrides: Sequence[str], job: Job) -> str:
    """Return the batch script that trains as `text`, a config file's, and `overrides` say.

    `config` is what they make. The script holds the text, so that the job, also when it comes back,
    runs what was submitted, whatever becomes of the file.

    Raises: UserError for names that Slurm would not take, or a mesh of another size.
    """
    logs = str(PurePosixPath(job.folder, config.run_dir, "logs"))
    _check(config, job, logs)
    directives = "\n".join(f"#SBATCH {line}" for line in _directives(job, logs))
    return _SCRIPT.format(
        directives=directives,
        folder=shlex.quote(job.folder),
        setup="".join(f"{line}\n" for line in job.setup),
        exports="\n".join(_exports(cluster.variables(config, job.env))),
        coordinator=COORDINATOR,
        logs=shlex.quote(logs),
        # A task of srun, too, has a pattern for a name: %t is its rank.
        task_log=shlex.quote(f"{logs}/rank_%t.log"),
        # srun does not take it over from the batch script.
        cpus=f"--cpus-per-task={job.cpus_per_task} " if job.cpus_per_task else "",
        max_restarts=job.max_restarts,
        text=text if text.endswith("\n") else f"{text}\n",
        end=_end_of(text),
        command=shlex.join([job.python, "-m", "olmo_jax.cli", "train"]),
        overrides="".join(f" {shlex.quote(word)}" for word in overrides),
    )


def _end_of(text: str) -> str:
    """Return a line that the text has not: it ends the text in a shell script."""
    line = "END_OF_CONFIG"
    while line in text.splitlines():
        line += "_"
    return line


def _check(config: Config, job: Job, logs: str) -> None:
    check = cluster.check_word
    check("--job-name", job.job_name, WORD, "moe-7b")
    check("--time", job.time, r"[0-9:-]+", "24:00:00")
    check("--partition", job.partition, LIST, "gpu")
    check("--account", job.account, WORD, "project-1")
    check("--qos", job.qos, WORD, "normal")
    check("--constraint", job.constraint, LIST, "h100")
    cluster.check_devices(config, {"--nodes": job.nodes, "--gpus-per-node": job.gpus_per_node})
    # A relative run_dir lies in the folder that the job is submitted from.
    if found := re.search(r'[%"\\\x00-\x1f]', logs):
        raise UserError(
            f"run_dir={config.run_dir!r} puts the logs into {logs!r}, which has {found[0]!r}, and "
            "Slurm does not take that in the name of a log; write an absolute run_dir without it"
        )


def _directives(job: Job, logs: str) -> Iterator[str]:
    yield f"--job-name={job.job_name}"
    yield f"--nodes={job.nodes}"
    yield f"--ntasks-per-node={job.gpus_per_node}"
    yield f"--gpus-per-node={job.gpus_per_node}"
    if job.cpus_per_task is not None:
        yield f"--cpus-per-task={job.cpus_per_task}"
    yield f"--time={job.time}"
    for name in ("partition", "account", "qos", "constraint"):
        if (value := getattr(job, name)) is not None:
            yield f"--{name}={value}"
    yield f'--output="{logs}/slurm_%j.log"'
    yield "--open-mode=append"
    yield "--requeue"
    yield f"--signal=B:USR1@{job.grace_s}"


def _exports(variables: Mapping[str, str]) -> Iterator[str]:
    for name, value in variables.items():
        yield f"export {name}={shlex.quote(value)}"


# Slurm signals the batch shell alone (B:), with USR1, at the end of the time: a TERM comes from
# scancel or a preemption, after which the job must not come back by its own doing.
# Never a TERM to srun itself: it answers with "forcing job termination", a SIGKILL to the tasks.
# scancel with a signal and a job cancels nothing: it signals the tasks of all steps, and not the
# batch shell. No step is named: ours is not 0 when a line of --setup has called srun.
# A `wait` that a trap has interrupted returns the trap's code, so it is called again.
# Logs grow over attempts: only what lies behind `written` is of this one.
_SCRIPT = """\
#!/bin/bash
{directives}

cd {folder} || exit 1
{setup}
{exports}
nodes=${{SLURM_JOB_NODELIST:?this script runs under Slurm}}
{coordinator}="$(scontrol show hostnames "$nodes" | head -n 1):$((61440 + SLURM_JOB_ID % 4096))"
export {coordinator}

logs={logs}
mkdir -p "$logs"
config="$logs/config_$SLURM_JOB_ID.yaml"
cat > "$config" <<'{end}' || exit 1
{text}{end}
failures="$logs/failures_$SLURM_JOB_ID"
declare -A written
for log in "$logs"/rank_*.log; do
  written[${{log##*/}}]=$(stat -c %s "$log" 2>/dev/null)
done
stopped=
step=

stop() {{
  stopped=$1
  interrupted=yes
  if [ -n "$step" ]; then scancel --signal=TERM "$SLURM_JOB_ID"; fi
}}
trap 'stop limit' USR1
trap 'stop cancelled' TERM

srun --kill-on-bad-exit=1 --open-mode=append {cpus}--output={task_log} \\
  {command} "$config"{overrides} &
step=$!
interrupted=yes
while [ -n "$interrupted" ]; do
  interrupted=
  wait "$step"
  code=$?
done
step=

if [ "$stopped" = cancelled ]; then
  echo "olmo-jax: stopped from outside; exit code $code"
  exit "$code"
fi
if [ "$code" -eq 0 ]; then rm -f "$failures"; fi
if [ "$stopped" = limit ]; then
  echo "olmo-jax: stopped before the end of the time, exit code $code; the job is requeued"
  scontrol requeue "$SLURM_JOB_ID"
  exit "$code"
fi
if [ "$code" -eq 0 ]; then exit 0; fi
for log in "$logs"/rank_*.log; do
  tail -c "+$((${{written[${{log##*/}}]:-0}} + 1))" "$log" 2>/dev/null | grep '^olmo-jax: '
done | tail -n 5
count=$(($(cat "$failures" 2>/dev/null || echo 0) + 1))
echo "$count" > "$failures"
if [ "$count" -gt {max_restarts} ]; then
  echo "olmo-jax: exit code $code, failure $count in a row; {max_restarts} restarts are allowed"
  exit "$code"
fi
echo "olmo-jax: exit code $code; restart $count of {max_restarts}"
scontrol requeue "$SLURM_JOB_ID"
exit "$code"
"""


def check_python(python: str) -> None:
    """Start the interpreter of the job here, and see that it has jax and its CUDA plugin.

    Raises: UserError if it does not.
    """
    code = (
        "import importlib.util as u, sys, jax, olmo_jax\n"
        "if not any(u.find_spec(f'jax_cuda{cuda}_plugin') for cuda in (12, 13)):\n"
        "    sys.exit('its jax has no CUDA plugin')"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        said = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        failure = said if done.returncode else ""
    except OSError as error:
        failure = error.strerror or str(error)
    if failure:
        raise UserError(
            f"--python {python}: the job would not find its GPUs with it: {failure}; write "
            f"--python PATH of one with olmo_jax[cuda13] (`make install-gpu` makes {GPU_PYTHON}); "
            "if the nodes have another one under that name: --dry-run, and sbatch what it prints"
        )


def submit(script: str, config: Config, python: str) -> str:
    """Write the script into `run_dir/logs`, hand it to sbatch, and return what that says.

    Raises: UserError if `python`, the job's interpreter, cannot use GPUs, if the folder cannot be
    written, or if there is no sbatch, or it refuses.
    """
    check_python(python)
    # Slurm makes no folder for the log that it is to write there.
    path = Path(config.run_dir) / "logs" / SCRIPT
    path.parent.mkdir(parents=True, exist_ok=True)
    # The folder that it is submitted from may have a name that is no UTF-8.
    path.write_text(script, encoding="utf-8", errors="surrogateescape")
    return run_client(["sbatch", str(path)])


def run_client(command: Sequence[str], given: str | None = None) -> str:
    """Run a scheduler's own command with `given` as its input, and return its output.

    Raises: UserError if it is not there, or fails.
    """
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(
            f"{command[0]} is not on the PATH of this machine; run this where jobs are submitted, "
            "or use --dry-run and submit what it prints"
        ) from None
    if done.returncode != 0:
        raise UserError(
            f"{shlex.join(command)} failed with exit code {done.returncode}: "
            f"{(done.stderr or done.stdout).strip()}; mend that, or look at it with --dry-run"
        )
    return done.stdout.strip()
