"""What a program compiled for GPUs hides behind what: read off XLA's own schedule.

The text of such a program is in the order in which it is issued. A collective that XLA made
asynchronous is a `-start` and a `-done`; what is issued between the two runs while it is under way.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from olmo_jax.inspect.hlo import KINDS, Collective, Instruction, Module, collectives, instructions
from olmo_jax.inspect.hlo import custom_call_target as target_of
from olmo_jax.inspect.jaxpr import Loop

LIBRARIES = {
    "cudnn$fmha": "cuDNN attention",
    "cublas": "cuBLAS product",
    "mosaic_gpu": "Mosaic kernel (grouped product)",
    "triton": "Triton kernel",
    "cub$": "CUB sort",
}
"""Part of a custom call's target, in small letters, to what it is."""

TRITON_PRODUCT = "Triton product"


class Transfer(NamedTuple):
    """One place of a collective, and what is issued while it is under way.

    `times` a step; `products` between start and done, of which `kernels` are all that is issued.
    """

    collective: Collective
    times: int | None
    asynchronous: bool
    products: int
    kernels: int


def times_of(loops: Sequence[Loop]) -> int | None:
    """Return how often something in these loops runs, None if a trip count is unknown."""
    total = 1
    for loop in loops:
        if loop.length is None:
            return None
        total *= loop.length
    return total


def transfers(module: Module) -> list[Transfer]:
    """Return every collective with what runs beside it, in the order of `hlo.collectives`."""
    places = {
        instruction.name: (body, i)
        for body in module.computations.values()
        for i, instruction in enumerate(body)
    }
    starts = [
        instruction
        for instruction, _ in instructions(module)
        if instruction.opcode.removesuffix("-start") in KINDS
    ]
    found = []
    for collective, start in zip(collectives(module), starts, strict=True):
        between = _between(*places[start.name]) if collective.asynchronous else ()
        kernels = [each for each in between if is_kernel(each)]
        found.append(
            Transfer(
                collective,
                times_of(collective.loops),
                collective.asynchronous,
                sum(is_product(module, each) for each in kernels),
                len(kernels),
            )
        )
    return found


def _between(body: Sequence[Instruction], start: int) -> Sequence[Instruction]:
    """Return what is issued between a start and its done."""
    #     %s = all-gather-start(%x)     start
    #     %f = fusion(...)              what it hides behind
    #     %d = all-gather-done(%s)      the first -done that takes %s
    name = body[start].name
    for end in range(start + 1, len(body)):
        if body[end].opcode.endswith("-done") and name in body[end].operands:
            return body[start + 1 : end]
    return ()


def is_kernel(instruction: Instruction) -> bool:
    """Say whether an instruction launches work: not a tuple, a bitcast or another transfer."""
    opcode = instruction.opcode.removesuffix("-start")
    return opcode in ("fusion", "custom-call", "while", "dot", "copy", "call", "sort")


def is_product(module: Module, instruction: Instruction) -> bool:
    """Say whether it multiplies matrices, or calls a loop that does."""
    if instruction.opcode == "custom-call":
        target = (target_of(instruction) or "").lower()
        return any(word in target for word in ("cublas", "fmha", "mosaic", "triton"))
    if instruction.opcode == "dot":
        return True
    return any(
        is_product(module, inner)
        for name in instruction.called
        for inner in module.computations[name]
    )


def backends(module: Module) -> dict[str, int]:
    """Return in how many places the program calls each library or kernel compiler."""
    found: Counter[str] = Counter()
    for instruction, _ in instructions(module):
        target = (target_of(instruction) or "").lower()
        for part, words in LIBRARIES.items():
            if part in target:
                found[words] += 1
        if re.search(r'"kind":"__triton\w*gemm', instruction.attributes):
            found[TRITON_PRODUCT] += 1
    return dict(found.most_common())


def host_waits(module: Module) -> list[str]:
    """Return what would make the host wait, or talk to it: none of it belongs into a step."""
    return list(_host_waits(module))


def _host_waits(module: Module) -> Iterator[str]:
    for instruction, _ in instructions(module):
        if instruction.opcode == "conditional":
            yield f"conditional {instruction.name}"
        elif instruction.opcode == "while" and instruction.loop.length is None:
            yield f"loop without a trip count {instruction.name}"
        elif instruction.opcode in ("infeed", "outfeed"):
            yield f"{instruction.opcode} {instruction.name}"
        elif "callback" in (target_of(instruction) or "").lower():
            yield f"host callback {instruction.name}"
        elif "is_host_transfer=true" in instruction.attributes:
            yield f"host transfer {instruction.name}"
