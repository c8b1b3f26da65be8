"""The order of devices, the counts that are refused, the table and the warning."""

from dataclasses import dataclass

import jax
import pytest
from jax.sharding import AxisType

from olmo_jax.errors import UserError
from olmo_jax.mesh.axes import AXES
from olmo_jax.mesh.devices import build_mesh, device_table, expert_group_warning


@dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int
    platform: str = "gpu"

    def __str__(self) -> str:
        return f"{self.platform}:{self.id}"


def fakes(num_processes: int, each: int, platform: str = "gpu") -> list[FakeDevice]:
    """Return devices whose ids have gaps, as several CPU processes give them."""
    return [
        FakeDevice(2048 * process + i, process, platform)
        for process in range(num_processes)
        for i in range(each)
    ]


def sizes_of(**given: int) -> dict[str, int]:
    return dict.fromkeys(AXES, 1) | given


def test_all_axes_are_there_and_auto():
    mesh = build_mesh(sizes_of(data=2, expert=4))
    assert mesh.axis_names == AXES
    assert mesh.devices.shape == (1, 2, 1, 4, 1)
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_ranks_go_through_one_process_after_the_other():
    devices = fakes(2, 4)
    interleaved = [device for pair in zip(devices[4:], devices[:4], strict=True) for device in pair]
    mesh = build_mesh(sizes_of(data=2, expert=4), interleaved)
    assert list(mesh.devices.flat) == devices


def test_local_order_is_kept():
    devices = fakes(1, 4)[::-1]
    assert list(build_mesh(sizes_of(expert=4), devices).devices.flat) == devices


def test_smaller_cpu_mesh_takes_the_first_devices():
    mesh = build_mesh(sizes_of(data=2))
    assert list(mesh.devices.flat) == jax.devices()[:2]


@pytest.mark.parametrize(
    ("sizes", "devices"),
    [
        (sizes_of(data=4), fakes(1, 8)),
        (sizes_of(data=4, expert=4), fakes(1, 8)),
        (sizes_of(data=4), fakes(2, 4, "cpu")),
        (sizes_of(data=4, expert=4), fakes(1, 8, "cpu")),
        (sizes_of(), fakes(1, 8)),
    ],
)
def test_mesh_must_have_all_devices(sizes, devices):
    with pytest.raises(UserError) as raised:
        build_mesh(sizes, devices)
    assert "there are 8" in str(raised.value)
    assert "product is 8" in str(raised.value)


def test_table_has_a_line_for_each_rank():
    table = device_table(build_mesh(sizes_of(data=2, expert=2), fakes(2, 2)))
    lines = [line.split() for line in table.splitlines()]
    assert lines[0] == ["rank", *AXES, "process", "device"]
    assert lines[1] == ["0", "0", "0", "0", "0", "0", "0", "gpu:0"]
    assert lines[4] == ["3", "0", "1", "0", "1", "0", "1", "gpu:2049"]


def test_expert_group_inside_a_process_does_not_warn():
    assert expert_group_warning(build_mesh(sizes_of(data=4, expert=2), fakes(2, 4))) is None


@pytest.mark.parametrize("axes", [{"expert": 8}, {"expert": 4, "sequence": 2}])
def test_expert_group_that_leaves_its_process_warns(axes):
    warning = expert_group_warning(build_mesh(sizes_of(**axes), fakes(2, 4)))
    assert warning is not None
    assert f"mesh.expert={axes['expert']}" in warning
    assert "0 and 1" in warning
    assert "1, 2 or 4" in warning
