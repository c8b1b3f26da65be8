"""Renders a JobSet for Kubernetes that starts anew after a failure, and applies it."""

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from olmo_jax.config import Config, document
from olmo_jax.config_file import merged
from olmo_jax.errors import UserError
from olmo_jax.file_names import CONFIG
from olmo_jax.launch import cluster
from olmo_jax.launch.slurm import run_client
from olmo_jax.runtime.processes import COORDINATOR, NUM_PROCESSES
from olmo_jax.runtime.stop_signal import STOPPED_EXIT_CODE, TERMINATED

DNS_NAME = r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?"
WORKERS = "workers"
CONFIG_FOLDER = "/etc/olmo-jax"
PORT = 61_440


@dataclass(frozen=True)
class Job:
    """What a user asks of Kubernetes. `claims` are NAME:PATH, volume claims and where they lie."""

    image: str
    nodes: int
    gpus_per_node: int = 8
    name: str = "olmo-jax"
    namespace: str | None = None
    claims: Sequence[str] = ()
    grace_s: int = 300
    max_restarts: int = 10
    env: Sequence[str] = ()


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as it is, under a bar."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def render(config: Config, text: str, overrides: Sequence[str], job: Job) -> str:
    """Return a ConfigMap with the config's `text`, and a JobSet of one pod a node.

    `config` is what `text` and `overrides` make.

    A pod is one process with all GPUs of its node; its completion index is the process index. The
    first pod is the coordinator, under the name that the JobSet's headless service gives it.

    Raises: UserError for names that Kubernetes would not take, a mesh of another size, or a run
    folder that would end with its pod.
    """
    _refuse_home(text, overrides)
    _check(config, job)
    documents = [_config_map(text, job), _job_set(config, overrides, job)]
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)


def _check(config: Config, job: Job) -> None:
    cluster.check_word("--name", job.name, DNS_NAME, "moe-7b")
    cluster.check_word("--namespace", job.namespace, DNS_NAME, "training")
    cluster.check_devices(config, {"--nodes": job.nodes, "--gpus-per-node": job.gpus_per_node})
    mounts = [path for _, path in map(_claim, job.claims)]
    # Without `..`, which would lead out of a volume.
    folder = PurePosixPath(posixpath.normpath(config.run_dir))
    if not any(folder.is_relative_to(posixpath.normpath(path)) for path in mounts):
        raise UserError(
            f"run_dir={config.run_dir} lies in no volume of {list(job.claims)}, so checkpoints "
            "would end with their pod; write run_dir=/run/NAME with --claim CLAIM:/run"
        )


def _refuse_home(text: str, overrides: Sequence[str]) -> None:
    """Refuse a run folder with `~`: a pod's home folder is another one, and ends with the pod."""
    given = merged(document.parse(text, CONFIG) or {}, overrides).get("run_dir", "")
    if given.startswith("~"):
        raise UserError(
            f"run_dir={given} is in the home folder, and a pod's is not the one of this machine; "
            "write run_dir=/run/NAME with --claim CLAIM:/run"
        )


def _claim(text: str) -> tuple[str, str]:
    name, colon, path = text.partition(":")
    if not (colon and path.startswith("/")):
        raise UserError(
            f"--claim {text}: it takes NAME:PATH, a PersistentVolumeClaim and an absolute path; "
            "write --claim shared:/shared, for example"
        )
    cluster.check_word("--claim", name, r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", "shared:/shared")
    return name, path


def _metadata(job: Job, name: str) -> dict[str, Any]:
    return {"name": name} | ({"namespace": job.namespace} if job.namespace else {})


def _config_map(text: str, job: Job) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, f"{job.name}-config"),
        "data": {CONFIG: text},
    }


def _job_set(config: Config, overrides: Sequence[str], job: Job) -> dict[str, Any]:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job, job.name),
        "spec": {
            # A failed pod fails its Job at once (backoffLimit 0), and all are made anew.
            "failurePolicy": {"maxRestarts": job.max_restarts},
            "network": {"enableDNSHostnames": True, "subdomain": job.name},
            "replicatedJobs": [
                {
                    "name": WORKERS,
                    "replicas": 1,
                    "template": {
                        "spec": {
                            "backoffLimit": 0,
                            "completionMode": "Indexed",
                            "completions": job.nodes,
                            "parallelism": job.nodes,
                            "template": {"spec": _pod(config, overrides, job)},
                        }
                    },
                }
            ],
        },
    }


def _pod(config: Config, overrides: Sequence[str], job: Job) -> dict[str, Any]:
    command = ["olmo-jax", "train", f"{CONFIG_FOLDER}/{CONFIG}", *overrides]
    claims = [_claim(text) for text in job.claims]
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": f"{job.name}-config"}},
        # NCCL's buffers between the GPUs of a node; a container has 64 MiB by default.
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "memory", "mountPath": "/dev/shm"},
    ]
    for i, (claim, path) in enumerate(claims):
        volumes.append({"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"claim-{i}", "mountPath": path})
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_s,
        "containers": [
            {
                "name": "train",
                "image": job.image,
                "command": [_literal(word) for word in command],
                "env": [{"name": name, "value": value} for name, value in _variables(config, job)],
                "ports": [{"containerPort": PORT}],
                "resources": {"limits": {"nvidia.com/gpu": job.gpus_per_node}},
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def _variables(config: Config, job: Job) -> list[tuple[str, str]]:
    # JobSet's names: JobSet-job-index of the Job-index of the pod.service.
    coordinator = f"{job.name}-{WORKERS}-0-0.{job.name}:{PORT}"
    given = cluster.variables(config, job.env)
    return [
        (COORDINATOR, coordinator),
        (NUM_PROCESSES, str(job.nodes)),
        (STOPPED_EXIT_CODE, str(TERMINATED)),
        *((name, _literal(value)) for name, value in given.items()),
    ]


def _literal(text: str) -> str:
    # Kubernetes puts the variable X in the place of $(X), and makes $(X) of $$(X).
    return text.replace("$(", "$$(")


def apply(manifest: str) -> str:
    """Hand the manifest to kubectl, and return what that says.

    Raises: UserError if there is no kubectl, or it refuses.
    """
    return run_client(["kubectl", "apply", "-f", "-"], manifest)
