"""The JobSet as rendered: equal to the one looked at, and nothing in a name leaves its place."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from olmo_jax.cli import main
from olmo_jax.config_file import load
from olmo_jax.errors import UserError
from olmo_jax.launch.kubernetes import Job, render
from olmo_jax.runtime.processes import Processes, discover

HERE = Path(__file__).parent
CONFIG = HERE / "config.yaml"
GOLDEN = HERE / "golden" / "jobset.yaml"
JOB = Job(
    image="registry.example/olmo-jax:1",
    nodes=2,
    name="moe-7b",
    namespace="training",
    claims=["shared-claim:/shared", "cache:/cache"],
    env=["NCCL_DEBUG=INFO", "NOTE=$(HOME): 'x' \"y\" # no comment"],
)
OVERRIDES = ["seed=1", "data.sources=[{path: '/shared/$(id) x'}]"]


def rendered(job: Job = JOB, overrides: list[str] | None = None) -> str:
    overrides = OVERRIDES if overrides is None else overrides
    return render(load(CONFIG, overrides), CONFIG.read_text(), overrides, job)


def container(text: str) -> dict[str, Any]:
    _, job_set = yaml.safe_load_all(text)
    (replicated,) = job_set["spec"]["replicatedJobs"]
    (found,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    return found


def test_the_manifest_is_the_one_that_was_looked_at() -> None:
    assert rendered() == GOLDEN.read_text()


def test_the_pod_gets_the_config_as_it_is_written_and_the_overrides() -> None:
    config_map, _ = yaml.safe_load_all(rendered())
    assert config_map["data"]["config.yaml"] == CONFIG.read_text()
    words = container(rendered())["command"]
    assert words[:3] == ["olmo-jax", "train", "/etc/olmo-jax/config.yaml"]
    # $$( is Kubernetes' way to write $( itself.
    assert [word.replace("$$(", "$(") for word in words[3:]] == OVERRIDES


def test_a_pod_finds_the_others() -> None:
    given = {entry["name"]: entry["value"] for entry in container(rendered())["env"]}
    found = discover({**given, "JOB_COMPLETION_INDEX": "1"})
    assert found == Processes(1, 2, "moe-7b-workers-0-0.moe-7b:61440")


def test_a_value_stays_a_value() -> None:
    given = {entry["name"]: entry["value"] for entry in container(rendered())["env"]}
    assert given["NOTE"] == "$$(HOME): 'x' \"y\" # no comment"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "Moe_7b"}, "--name 'Moe_7b' has characters"),
        ({"name": "x" * 60}, "has characters"),
        ({"namespace": "a\nb"}, "--namespace 'a\\nb' has characters"),
        ({"claims": ["shared"]}, "--claim shared: it takes NAME:PATH"),
        ({"claims": ["shared:data"]}, "--claim shared:data: it takes NAME:PATH"),
        ({"claims": ["cache:/cache"]}, "lies in no volume of ['cache:/cache']"),
        ({"claims": ["a:/shar"]}, "lies in no volume of"),
        ({"gpus_per_node": 4}, "--nodes 2 x --gpus-per-node 4 = 8 devices, but mesh.data=2"),
    ],
)
def test_what_kubernetes_would_not_take_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as raised:
        rendered(replace(JOB, **change))
    assert words in str(raised.value)


def test_a_run_folder_that_leads_out_of_its_volume_is_refused() -> None:
    with pytest.raises(UserError, match="lies in no volume of"):
        rendered(overrides=["run_dir=/shared/../tmp/x"])
    rendered(overrides=["run_dir=/tmp/../shared/x"])
    rendered(replace(JOB, claims=["a:/x/../shared"]))


def test_a_run_folder_in_the_home_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/shared")
    with pytest.raises(UserError, match="run_dir=~/run is in the home folder, and a pod's is not"):
        rendered(overrides=["run_dir=~/run"])
    rendered(overrides=["run_dir=~/run", "run_dir=/shared/run"])
    # What is only read fails in the pod if it is not there.
    rendered(overrides=["checkpoint.init_from=~/old"])


def test_the_manifest_is_handed_to_kubectl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["launch", "kubernetes", "--nodes", "2", "--image", "i", "--claim", "c:/shared"]
    monkeypatch.setenv("PATH", "")
    assert main([*arguments, "--dry-run", str(CONFIG)]) == 0
    manifest = capsys.readouterr().out
    assert main([*arguments, str(CONFIG)]) == 1
    assert "kubectl is not on the PATH" in capsys.readouterr().err
    (tmp_path / "kubectl").write_text(f'#!/bin/sh\n/bin/cat > "{tmp_path}/got"; echo "did $*"\n')
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([*arguments, str(CONFIG)]) == 0
    assert capsys.readouterr().out == f"{manifest}did apply -f -\n"
    assert (tmp_path / "got").read_text() == manifest
