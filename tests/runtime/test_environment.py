"""What is set before jax is imported, and what of the user's own is kept."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from olmo_jax.config.records import Platform
from olmo_jax.errors import UserError
from olmo_jax.launch.cluster import GPU_FLAGS
from olmo_jax.runtime import environment, platform
from olmo_jax.runtime.environment import cache_dir, prepare
from olmo_jax.runtime.processes import Processes

NAMES = (
    "JAX_PLATFORMS",
    "XLA_FLAGS",
    "JAX_COMPILATION_CACHE_DIR",
    "OLMO_JAX_CACHE",
    "CUDA_VISIBLE_DEVICES",
    platform.PLATFORM,
    platform.SLURM_JOB,
    *platform.SLURM_CARDS,
    *platform.SLURM_COUNTS,
    platform.POD,
    platform.POD_GPUS,
    environment.NO_PROXY,
    "no_proxy",
    *environment.PROXIES,
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not imported jax, on a machine without a GPU, with nothing set."""
    monkeypatch.delitem(sys.modules, "jax")
    for name in NAMES:
        # Set first, so that whatever `prepare` sets is taken back after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    put_gpu(monkeypatch, card=False, plugin=False)


def put_gpu(monkeypatch: pytest.MonkeyPatch, *, card: bool, plugin: bool) -> None:
    for module in (environment, platform):
        monkeypatch.setattr(module, "has_gpu", lambda: card)
        monkeypatch.setattr(module, "has_gpu_plugin", lambda: plugin)


def put_gpu_of_driver(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(platform, "GPUS", Cards(count))


class Cards(NamedTuple):
    """The driver's listing of so many cards."""

    count: int

    def glob(self, _: str) -> range:
        return range(self.count)


def flags() -> dict[str, str]:
    pairs = (flag.split("=") for flag in os.environ.get("XLA_FLAGS", "").split())
    return {name.removeprefix("--xla_"): value for name, value in pairs}


def test_without_a_gpu_devices_are_emulated_and_slow_collectives_are_waited_for() -> None:
    assert prepare(6) == ()
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    assert flags() == {
        "force_host_platform_device_count": "6",
        "cpu_collective_call_warn_stuck_timeout_seconds": "600",
        "cpu_collective_call_terminate_timeout_seconds": "600",
    }


def test_the_users_flags_are_kept_but_not_a_number_of_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(
        "XLA_FLAGS",
        "--xla_dump_to=/d --xla_cpu_collective_call_terminate_timeout_seconds=9 "
        "--xla_force_host_platform_device_count=3",
    )
    prepare(4)
    assert flags()["dump_to"] == "/d"
    assert flags()["cpu_collective_call_terminate_timeout_seconds"] == "9"
    # XLA takes the last one.
    assert flags()["force_host_platform_device_count"] == "4"


def test_each_process_emulates_its_share() -> None:
    prepare(8, Processes(1, 4, "host:1"))
    assert flags()["force_host_platform_device_count"] == "2"


def test_a_share_that_is_given_holds() -> None:
    prepare(8, Processes(1, 4, "host:1", devices_per_process=3))
    assert flags()["force_host_platform_device_count"] == "3"


def test_devices_that_do_not_divide_over_the_processes_are_refused() -> None:
    with pytest.raises(UserError, match="3 processes for a mesh of 8 CPU devices"):
        prepare(8, Processes(1, 3, "host:1"))


def test_the_web_proxy_is_kept_from_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(8, Processes(1, 4, "host7:1"))
    assert environment.NO_PROXY not in os.environ
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "intern")
    prepare(8, Processes())
    assert environment.NO_PROXY not in os.environ
    prepare(8, Processes(1, 4, "host7:1"))
    assert os.environ[environment.NO_PROXY] == "intern,host7"


@pytest.mark.parametrize(
    ("processes", "visible", "taken"),
    [
        # A lone process, or a pod of its own, has all; so has one that sees its own only.
        (Processes(), "0,1,2,3", None),
        (Processes(1, 2, "host:1"), "0,1,2,3", None),
        (Processes(3, 4, "host:1", local_index=1), "0", None),
        (Processes(3, 4, "host:1", local_index=1), "0,1", [1]),
        (Processes(1, 2, "host:1", local_index=1, devices_per_process=2), "4,5,6,7", [2, 3]),
    ],
)
def test_a_process_takes_its_own_gpus(
    monkeypatch: pytest.MonkeyPatch, processes: Processes, visible: str, taken: list[int] | None
) -> None:
    put_gpu(monkeypatch, card=True, plugin=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert environment.local_devices(processes) == taken
    put_gpu(monkeypatch, card=False, plugin=False)
    assert environment.local_devices(processes) is None


def test_a_gpu_is_left_to_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpu(monkeypatch, card=True, plugin=True)
    put_gpu_of_driver(monkeypatch, 8)
    assert prepare(8) == ()
    assert "JAX_PLATFORMS" not in os.environ
    assert flags() == {}
    prepare(8, deterministic=True)
    assert flags() == {"gpu_deterministic_ops": "true"}


def test_a_gpu_that_jax_cannot_use_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpu(monkeypatch, card=True, plugin=False)
    (note,) = prepare(8)
    assert prepare(8, platform="auto") == (note,)
    assert prepare(8, platform="cpu") == ()
    assert "olmo_jax[cuda13]" in note
    assert os.environ["JAX_PLATFORMS"] == "cpu"


SLURM = {"SLURM_JOB_ID": "7"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
ASK_FOR_GPUS = [
    ("gpu", {}, "mesh.platform=gpu asks for GPUs"),
    ("auto", {"OLMO_JAX_PLATFORM": "gpu"}, "OLMO_JAX_PLATFORM=gpu asks for GPUs"),
    ("auto", SLURM | {"SLURM_JOB_GPUS": "0"}, "SLURM_JOB_GPUS=0 (a job with GPUs) asks for GPUs"),
    ("auto", SLURM | {"SLURM_STEP_GPUS": "2,3"}, "SLURM_STEP_GPUS=2,3 (a job with"),
    ("auto", SLURM | {"SLURM_GPUS_ON_NODE": "8"}, "SLURM_GPUS_ON_NODE=8 (a job with"),
    ("auto", SLURM | {"SLURM_GPUS_PER_TASK": "h100:1"}, "SLURM_GPUS_PER_TASK=h100:1 (a job with"),
    ("auto", POD | {"NVIDIA_VISIBLE_DEVICES": "GPU-8f1a"}, "NVIDIA_VISIBLE_DEVICES=GPU-8f1a"),
    ("auto", {"JAX_PLATFORMS": "cuda"}, "JAX_PLATFORMS=cuda asks for GPUs"),
    (None, {"JAX_PLATFORMS": "cuda,cpu"}, "JAX_PLATFORMS=cuda,cpu asks for GPUs"),
    (None, {"JAX_PLATFORMS": "gpu"}, "JAX_PLATFORMS=gpu asks for GPUs"),
]
DO_NOT = [
    ("auto", {}),
    ("auto", {"JAX_PLATFORMS": ""}),
    ("auto", SLURM | {"SLURM_GPUS_ON_NODE": "0", "SLURM_JOB_GPUS": ""}),
    ("auto", {"SLURM_GPUS_ON_NODE": "8"}),
    ("auto", POD | {"NVIDIA_VISIBLE_DEVICES": "all"}),
    ("auto", {"NVIDIA_VISIBLE_DEVICES": "GPU-8f1a"}),
    ("auto", {"OLMO_JAX_PLATFORM": "cpu"} | SLURM | {"SLURM_JOB_GPUS": "0"}),
    ("cpu", {"OLMO_JAX_PLATFORM": "gpu"} | SLURM | {"SLURM_JOB_GPUS": "0"}),
    # Not training: any device will do.
    (None, SLURM | {"SLURM_JOB_GPUS": "0"}),
]


@pytest.mark.parametrize(("asked", "variables", "words"), ASK_FOR_GPUS)
def test_who_asks_for_gpus_and_has_none_is_told_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, asked: Platform | None, variables: dict[str, str], words: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as raised:
        prepare(8, platform=asked)
    said = str(raised.value)
    assert said.startswith(words)
    assert "no NVIDIA GPU is here" in said
    assert "no CUDA plugin" in said
    assert ("unset JAX_PLATFORMS" in said) == ("JAX_PLATFORMS" in variables)
    put_gpu(monkeypatch, card=True, plugin=False)
    with pytest.raises(UserError, match=r"CUDA cannot be used: jax has no CUDA plugin"):
        prepare(8, platform=asked)
    put_gpu(monkeypatch, card=True, plugin=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(UserError, match=r"CUDA_VISIBLE_DEVICES=-1 hides the GPUs"):
        prepare(8, platform=asked)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert prepare(8, platform=asked) == ()
    assert flags() == {}
    # jax takes "gpu" for CUDA and ROCm at once.
    assert os.environ.get("JAX_PLATFORMS", "cuda") in ("cuda", "cuda,cpu")


@pytest.mark.parametrize(("asked", "variables"), DO_NOT)
def test_who_does_not_ask_for_gpus_takes_cpu_devices(
    monkeypatch: pytest.MonkeyPatch, asked: Platform | None, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    prepare(8, platform=asked)
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    assert flags()["force_host_platform_device_count"] == "8"


def test_cpu_devices_are_emulated_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpu(monkeypatch, card=True, plugin=True)
    put_gpu_of_driver(monkeypatch, 1)
    assert platform.runs_on_gpu("auto")
    prepare(8, platform="cpu")
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    # From here on, also for who does not know the config.
    assert not platform.runs_on_gpu()


@pytest.mark.parametrize(
    ("asked", "variables", "words"),
    [
        ("gpu", {"JAX_PLATFORMS": "cpu"}, "mesh.platform=gpu asks for GPU devices, and JAX_PLATF"),
        ("cpu", {"JAX_PLATFORMS": "cuda"}, "mesh.platform=cpu asks for CPU devices, and JAX_PLATF"),
        (
            "auto",
            SLURM | {"SLURM_JOB_GPUS": "0", "JAX_PLATFORMS": "cpu"},
            "SLURM_JOB_GPUS=0 (a job with GPUs) asks for GPU devices, and JAX_PLATFORMS=cpu for",
        ),
        ("auto", {"OLMO_JAX_PLATFORM": "tpu"}, "OLMO_JAX_PLATFORM=tpu is none of auto, gpu and"),
        (None, {"JAX_PLATFORMS": "tpu"}, "JAX_PLATFORMS=tpu: jax has no platform 'tpu' here; it"),
        ("auto", {"JAX_PLATFORMS": "rocm"}, "JAX_PLATFORMS=rocm: jax has no platform 'rocm'"),
        ("auto", {"JAX_PLATFORMS": "cpu,foo"}, "JAX_PLATFORMS=cpu,foo: jax has no platform 'foo'"),
    ],
)
def test_platforms_that_contradict_or_do_not_exist_are_refused(
    monkeypatch: pytest.MonkeyPatch, asked: Platform | None, variables: dict[str, str], words: str
) -> None:
    put_gpu(monkeypatch, card=True, plugin=True)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as raised:
        prepare(8, platform=asked)
    assert str(raised.value).startswith(words)


@pytest.mark.parametrize(
    ("shown", "count"), [(None, 4), ("", 0), ("-1", 0), ("0,1", 2), ("2,-1,3", 1), ("GPU-8f1a", 1)]
)
def test_cuda_shows_the_cards_before_the_first_wrong_name(
    monkeypatch: pytest.MonkeyPatch, shown: str | None, count: int
) -> None:
    put_gpu_of_driver(monkeypatch, 4)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert platform.num_visible_gpus() == count


def test_the_users_platform_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpu(monkeypatch, card=True, plugin=True)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    prepare(8)
    assert flags()["force_host_platform_device_count"] == "8"


def test_compiled_programs_are_kept_where_the_user_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "olmo_jax"
    monkeypatch.setenv("OLMO_JAX_CACHE", str(tmp_path / "own"))
    prepare(8)
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "own" / "compiled")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/jax/own")
    prepare(8)
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "/jax/own"


def test_it_refuses_to_come_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", object())
    with pytest.raises(RuntimeError, match="before jax is imported"):
        prepare(8)


def test_jax_takes_what_was_set_and_knows_every_flag_of_the_launchers() -> None:
    code = (
        "from olmo_jax.runtime.environment import prepare; prepare(3); "
        "import jax; print(jax.device_count(), jax.default_backend())"
    )
    flags = [f"{name}={value}" for name, value in GPU_FLAGS.items()]
    own = {**os.environ, "XLA_FLAGS": " ".join([*flags, environment.DETERMINISTIC_FLAG])}
    # XLA aborts the process on a flag that it does not know.
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=own,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["3", "cpu"]
