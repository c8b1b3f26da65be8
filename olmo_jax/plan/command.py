"""What `olmo-jax plan` prints."""

import json
import math
from pathlib import Path

from olmo_jax.config import Config
from olmo_jax.config.messages import listing
from olmo_jax.errors import UserError
from olmo_jax.mesh.axes import num_devices_wanted, resolve
from olmo_jax.mesh.layout import Layout
from olmo_jax.plan import render
from olmo_jax.plan.hardware import machine
from olmo_jax.plan.plan import Plan
from olmo_jax.plan.search import search
from olmo_jax.rules import with_mesh

PICTURES = (".png", ".svg")


def sizes_for(config: Config, num_devices: int) -> dict[str, int]:
    """Return the mesh's sizes for exactly so many devices.

    Raises: UserError if they are more or fewer.
    """
    sizes = resolve(config.mesh, num_devices)
    if (used := math.prod(sizes.values())) != num_devices:
        raise UserError(
            f"--devices {num_devices} is not the {used} devices of the mesh; use --devices {used}, "
            "mesh.data=-1 for what the other axes leave, or `olmo-jax plan --search` for all meshes"
        )
    return sizes


def check_picture(picture: Path | None, *, search: bool) -> None:
    """Refuse a picture that cannot be drawn.

    Raises: UserError for another kind of file, and for a picture of a search.
    """
    if picture is not None and (picture.suffix not in PICTURES or search):
        what = "goes with a plan, not with --search" if search else f"ends in {picture.suffix!r}"
        raise UserError(
            f"--picture {picture} {what}; use a name in {listing(PICTURES)} and one config"
        )


def planned(config: Config, hardware: str, num_devices: int | None) -> Plan:
    """Return the plan of a config on a machine.

    Raises: UserError for a machine that is not known, or devices that are not the mesh's.
    """
    sizes = sizes_for(config, num_devices or num_devices_wanted(config.mesh))
    return Plan(Layout(with_mesh(config, sizes), sizes), machine(hardware))


def rendered(plan: Plan, *, as_json: bool) -> str:
    """Return the text of a plan, or its JSON."""
    return json.dumps(render.as_json(plan), indent=2) if as_json else render.text(plan)


def searched(config: Config, hardware: str, num_devices: int | None, *, as_json: bool) -> str:
    """Return the ranking of every mesh of so many devices as text, or as JSON.

    Raises: UserError for a machine that is not known.
    """
    on, wanted = machine(hardware), num_devices or num_devices_wanted(config.mesh)
    found = search(config, wanted, on)
    if as_json:
        return json.dumps(render.search_json(found), indent=2)
    return render.search_text(found, on.name, wanted)
