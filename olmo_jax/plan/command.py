"""What `olmo-jax plan` prints."""

import json
import math
from pathlib import Path

from olmo_jax.config import Config, with_mesh
from olmo_jax.config.messages import listing
from olmo_jax.errors import UserError
from olmo_jax.mesh.axes import num_devices_wanted, resolve
from olmo_jax.plan import report
from olmo_jax.plan.hardware import machine
from olmo_jax.plan.plan import Plan
from olmo_jax.plan.search import search as search_meshes

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


def plan(
    config: Config,
    *,
    hardware: str,
    num_devices: int | None,
    search: bool,
    as_json: bool,
    picture: Path | None,
    title: str,
) -> str:
    """Return the text of the command, and write the picture.

    Raises: UserError for options that do not fit each other or the config.
    """
    if picture is not None and (picture.suffix not in PICTURES or search):
        what = "goes with a plan, not with --search" if search else f"ends in {picture.suffix!r}"
        raise UserError(
            f"--picture {picture} {what}; use a name in {listing(PICTURES)} and one config"
        )
    on, wanted = machine(hardware), num_devices or num_devices_wanted(config.mesh)
    if search:
        found = search_meshes(config, wanted, on)
        if as_json:
            return json.dumps(report.search_json(found), indent=2)
        return report.search_text(found, on.name, wanted)
    sizes = sizes_for(config, wanted)
    made = Plan(with_mesh(config, sizes), sizes, on)
    if picture is not None:
        # Takes longer to import than all the rest.
        from olmo_jax.plan.picture import draw

        draw(made, f"{title} on {wanted} x {on.name}").savefig(picture, dpi=80)
    return json.dumps(report.as_json(made), indent=2) if as_json else report.text(made)
