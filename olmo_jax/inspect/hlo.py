"""Read what XLA made of a step: where collectives stand, loops and trip counts, donation.

Input is `compiled.as_text()`, of the CPU or GPU compiler. Positions and kinds come from here. Bytes
that must equal a formula do not: XLA:CPU widens bf16 collectives to f32, and XLA merges equal ones
(see `jaxpr`). A loop of one iteration is gone after compilation.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from olmo_jax.inspect.jaxpr import Loop

KINDS = {
    "all-reduce": "reduce",
    "reduce-scatter": "reduce_scatter",
    "all-gather": "all_gather",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "ragged_all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}
"""Opcode (with or without `-start`) to the kind of collective, as `jaxpr` names them."""

Groups = tuple[tuple[int, ...], ...]

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ([\w\-]+)\(")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_CALLED_LISTS = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'"?known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)')
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")


@dataclass(frozen=True)
class Instruction:
    """One line: name, result type and opcode as printed, and what stands behind the operands.

    The operand of a `parameter` is its number.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def op_name(self) -> str:
        """The named scopes that it was traced under; stays the same when XLA moves it."""
        found = re.search(r'\bop_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    @property
    def called(self) -> tuple[str, ...]:
        """The computations it runs."""
        lists = ",".join(_CALLED_LISTS.findall(self.attributes))
        return (*(name for _, name in _CALLED.findall(self.attributes)), *_names(lists))

    @property
    def loop(self) -> Loop:
        """The loop that a `while` is."""
        count = _TRIP_COUNT.search(self.attributes)
        return Loop(self.op_name, int(count.group(1)) if count else None)


@dataclass(frozen=True)
class Module:
    """A compiled program: instructions by computation, and the header line."""

    header: str
    computations: dict[str, tuple[Instruction, ...]]
    entry: str

    @cached_property
    def types(self) -> dict[str, str]:
        """The result type of each instruction; names are unique in a module."""
        return {i.name: i.type for body in self.computations.values() for i in body}


@dataclass(frozen=True)
class Collective:
    """One communication: types and bytes that a rank puts in, groups of ranks, the loops around it.

    `groups` of a permute are (source, target) pairs; () is one group of all ranks.
    """

    kind: str
    operands: tuple[str, ...]
    operand_bytes: int
    groups: Groups
    asynchronous: bool
    op_name: str
    loops: tuple[Loop, ...]


def parse(text: str) -> Module:
    """Split the text of a compiled program into instructions.

    Raises: ValueError if there is no entry computation.
    """
    # A computation is a header that ends in {, then one instruction a line. The outermost one is
    # marked ENTRY; bodies of loops, fusions and reducers stand before it, by name.
    computations: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = header.group(2)
            computations[current] = []
            entry = current if header.group(1) else entry
        elif current and _INSTRUCTION.match(line):
            computations[current].append(_instruction(line))
    if not entry:
        raise ValueError(
            "the text has no ENTRY computation; pass compiled.as_text() of a jitted step"
        )
    return Module(text.partition("\n")[0], {k: tuple(v) for k, v in computations.items()}, entry)


def _instruction(line: str) -> Instruction:
    found = _INSTRUCTION.match(line)
    assert found
    #     %name = f32[8,8]{1,0} all-gather-start(%a, %b), replica_groups={{0,1}}, metadata={...}
    #     name    type          opcode           operands  attributes
    #
    # A tuple's type holds spaces and parentheses, and so may operands: both end where their first
    # parenthesis closes, which no regular expression finds.
    rest = line[found.end() :]
    type_end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    opcode = _OPCODE.match(rest, type_end)
    if opcode is None:
        raise ValueError(f"cannot read the HLO line {line.strip()[:120]!r}")
    end = _closing(rest, opcode.end() - 1)
    inner = rest[opcode.end() : end - 1]
    operands = (inner,) if opcode.group(1) == "parameter" else _names(inner)
    return Instruction(found.group(1), rest[:type_end], opcode.group(1), operands, rest[end:])


def _closing(text: str, start: int) -> int:
    """Return the index behind the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if not depth:
            return index + 1
    raise ValueError(f"parenthesis without end in the HLO text {text[start : start + 120]!r}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"%([\w.\-]+)", text))


def instructions(module: Module) -> Iterator[tuple[Instruction, tuple[Loop, ...]]]:
    """Yield every instruction that runs, with the loops around it, outermost first.

    A computation that is called from two places comes twice. Reducers are left out.
    """
    yield from _instructions(module, module.entry, ())


def _instructions(
    module: Module, computation: str, loops: tuple[Loop, ...]
) -> Iterator[tuple[Instruction, tuple[Loop, ...]]]:
    for instruction in module.computations[computation]:
        yield instruction, loops
        if _combines(instruction):
            continue
        inner = (*loops, instruction.loop) if instruction.opcode == "while" else loops
        for called in instruction.called:
            yield from _instructions(module, called, inner)


def _combines(instruction: Instruction) -> bool:
    """Say whether what an instruction calls is a scalar reducer, or its own asynchronous body."""
    return _kind(instruction) is not None or instruction.opcode in (
        "reduce",
        "reduce-window",
        "scatter",
        "select-and-scatter",
        "sort",
        "map",
    )


def _kind(instruction: Instruction) -> str | None:
    return KINDS.get(instruction.opcode.removesuffix("-start"))


def collectives(module: Module) -> list[Collective]:
    """Return all communication in the order of the text, each place once whatever its trip counts.

    A `-start` stands for its pair. A collective in the body of an asynchronous wrapper or fusion
    counts where that is started.
    """
    return [
        _collective(module, instruction, loops)
        for instruction, loops in instructions(module)
        if _kind(instruction) is not None
    ]


def _collective(module: Module, found: Instruction, loops: tuple[Loop, ...]) -> Collective:
    operands = tuple(_types_of(module, found))
    return Collective(
        kind=_reduction(module, found) or KINDS[found.opcode.removesuffix("-start")],
        operands=operands,
        operand_bytes=sum(type_bytes(operand) for operand in operands),
        groups=replica_groups(found.attributes),
        asynchronous=found.opcode.endswith("-start"),
        op_name=found.op_name,
        loops=loops,
    )


def _types_of(module: Module, found: Instruction) -> Iterator[str]:
    for operand in found.operands:
        for dtype, dims in _ARRAY.findall(module.types[operand]):
            yield f"{dtype}[{dims}]"


def _reduction(module: Module, found: Instruction) -> str | None:
    """Return `max` or `min` for an all-reduce whose reducer is one."""
    if not found.opcode.startswith("all-reduce") or not found.called:
        return None
    opcodes = [i.opcode for i in module.computations[found.called[0]]]
    names = {"maximum": "max", "minimum": "min"}
    return next((names[opcode] for opcode in opcodes if opcode in names), None)


def type_bytes(text: str) -> int:
    """Return the bytes of all arrays in a printed type such as `(f32[8,8]{1,0}, bf16[4])`."""
    return sum(
        _itemsize_bits(dtype) * math.prod(int(dim) for dim in dims.split(",") if dim) // 8
        for dtype, dims in _ARRAY.findall(text)
    )


def _itemsize_bits(dtype: str) -> int:
    if dtype in ("pred", "token"):
        return 8 if dtype == "pred" else 0
    return int(re.findall(r"\d+", dtype)[0])


def replica_groups(attributes: str) -> Groups:
    """Return the groups of ranks in the attributes of a collective, in any form that XLA prints.

    Lists `{{0,4},{1,5}}`, iotas `[2,4]<=[4,2]T(1,0)`, meshes `mesh['data'=2,'expert'=4] {'data'}`.

    Raises: ValueError on another form.
    """
    found = re.search(r"(?:replica_groups|source_target_pairs)=", attributes)
    if found is None:
        return ()
    text = attributes[found.end() :]
    for pattern, read in _GROUP_FORMS:
        match = pattern.match(text)
        if match:
            return read(*match.groups())
    raise ValueError(
        f"cannot read the replica groups {text[:80]!r}; add their form to hlo._GROUP_FORMS"
    )


def _listed_groups(text: str) -> Groups:
    return tuple(_ints(group) for group in re.findall(r"\{([\d,]+)\}", text))


def _iota_groups(shape: str, reshape: str, transpose: str | None) -> Groups:
    # [2,4]<=[4,2]T(1,0): 0..7 as [4, 2], transposed, as 2 groups of 4: (0 2 4 6) and (1 3 5 7).
    ranks = np.arange(math.prod(_ints(reshape))).reshape(_ints(reshape))
    return _rows(ranks.transpose(_ints(transpose) if transpose else None).reshape(_ints(shape)))


def _mesh_groups(mesh: str, axes: str) -> Groups:
    # mesh['data'=2,'expert'=4] {'data'}: ranks differ in the named axes within a group, and in the
    # others between groups. So those go last, and a row is a group.
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    names, grouped = list(sizes), re.findall(r"'([^']+)'", axes)
    ranks = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    order = [names.index(name) for name in names if name not in grouped]
    order += [names.index(name) for name in grouped]
    group_size = math.prod(sizes[name] for name in grouped)
    return _rows(ranks.transpose(order).reshape(-1, group_size))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _rows(ranks: np.ndarray) -> Groups:
    return tuple(tuple(int(rank) for rank in row) for row in ranks)


_GROUP_FORMS = (
    (re.compile(r"\{((?:\{[\d,]+\},?)*)\}"), _listed_groups),
    (re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"), _iota_groups),
    (re.compile(r"mesh\[((?:'[^']+'=\d+,?)+)\] \{((?:'[^']+',?)*)\}"), _mesh_groups),
)


def kinds(found: Iterable[Collective]) -> dict[str, int]:
    """Return how many places there are of each kind."""
    return dict(sorted(Counter(collective.kind for collective in found).items()))


def loops(module: Module) -> list[Loop]:
    """Return every loop of the program."""
    return [
        instruction.loop for instruction, _ in instructions(module) if instruction.opcode == "while"
    ]


def unbounded_loops(module: Module) -> list[Loop]:
    """Return the loops whose trip count XLA does not know: the host waits on each iteration."""
    return [loop for loop in loops(module) if loop.length is None]


def conditionals(module: Module) -> list[Instruction]:
    """Return every branch taken at run time."""
    return [
        instruction
        for instruction, _ in instructions(module)
        if instruction.opcode == "conditional"
    ]


def callbacks(module: Module) -> list[Instruction]:
    """Return what talks to the host: Python callbacks, in- and outfeeds, host transfers."""
    return [i for i, _ in instructions(module) if _is_callback(i)]


def _is_callback(instruction: Instruction) -> bool:
    if instruction.opcode in ("send", "recv"):
        return "is_host_transfer=true" in instruction.attributes
    target = custom_call_target(instruction) or ""
    return instruction.opcode in ("infeed", "outfeed") or "callback" in target.lower()


def custom_call_target(instruction: Instruction) -> str | None:
    """Return the name of the library function that a custom call runs."""
    found = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    return found.group(1) if found else None


def donated(module: Module) -> dict[int, int]:
    """Return the bytes per device of each parameter whose buffer an output takes, by number."""
    # input_output_alias={ {0}: (3, {}, may-alias), ... }: output 0 takes the buffer of parameter 3.
    start = module.header.find("input_output_alias={")
    if start < 0:
        return {}
    text = module.header[start:].partition("entry_computation_layout=")[0]
    sizes = _parameter_bytes(module)
    numbers = sorted({int(number) for number in re.findall(r"\{[\d, ]*\}: \((\d+),", text)})
    return {number: sizes[number] for number in numbers}


def _parameter_bytes(module: Module) -> dict[int, int]:
    entry = module.computations[module.entry]
    return {int(i.operands[0]): type_bytes(i.type) for i in entry if i.opcode == "parameter"}
