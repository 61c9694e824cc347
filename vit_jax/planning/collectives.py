"""Bytes that one device sends in a compiled program, by kind of collective, from its HLO text.

The parser reads the names, sizes and operands of instructions, and the computations that they call.
The body of a loop counts once per iteration.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

# Bytes that each of n devices in a ring sends, for operands of `size` bytes.
SENT = {
    'all-gather': lambda size, n: size * (n - 1),
    'all-reduce': lambda size, n: 2 * size * (n - 1) / n,
    'reduce-scatter': lambda size, n: size * (n - 1) / n,
    'all-to-all': lambda size, n: size * (n - 1) / n,
    'collective-permute': lambda size, n: size,
}
SAME_NUMBERS = ('bitcast', 'convert', 'copy', 'reshape', 'transpose')
CALLERS = ('while', 'conditional', 'fusion', 'call', 'async-start', 'custom-call')

HEADER = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*\{$')
INSTRUCTION = re.compile(r'\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(([^)]*)\)(.*)')
ARRAY = re.compile(r'\b[a-z]+(\d*)\w*\[([\d,<=]*)\]')  # bf16[8,128]; pred has no number of bits
CALLED = re.compile(
    r'\b(?:body|calls|to_apply|called_computations|branch_computations|'
    r'true_computation|false_computation)=\{?(%[\w.\-]+(?:, %[\w.\-]+)*)'
)


class Instruction(NamedTuple):
    """A line of HLO."""

    name: str
    size: float  # bytes of the result, the sum over the elements of a tuple
    opcode: str
    operands: tuple[str, ...]  # names in the same computation; for a constant, its value
    attributes: str  # text after the operands
    is_root: bool


Computation = dict[str, Instruction]  # by name


class Traffic(NamedTuple):
    """Bytes that one device sends in one run of a program, and number of calls, by collective."""

    sent: dict[str, int]
    calls: dict[str, int]


def count(text: str) -> Traffic:
    """Counts the collectives in HLO text, as from `jax.stages.Compiled.as_text`.

    An all-reduce whose result is used in parts, one per device, counts as a reduce-scatter.

    Raises:
      ValueError: a collective is in a loop with an unknown number of iterations.
    """
    computations, entry = parse(text)
    sent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    counted_chains = set()
    for name, times in executions(computations, entry):
        computation = computations[name]
        for instruction in computation.values():
            kind = _kind(instruction, computation)
            if kind is None:
                continue
            if math.isnan(times):
                raise ValueError(
                    f'{instruction.name} of the compiled step is in a loop, and neither the '
                    'compiler nor a counter shows the number of iterations: the bytes that the '
                    'step sends are unknown.'
                )
            # On TPUs a collective that overlaps with fusions has an instruction in each of the
            # fusions.
            chain = _chain(instruction)
            if chain is not None:
                if chain in counted_chains:
                    continue
                counted_chains.add(chain)
            runs = int(times)
            sent[kind] += runs * _bytes_sent(kind, instruction, computation)
            calls[kind] += runs
    return Traffic(dict(sent), dict(calls))


def _kind(instruction, computation):
    """The kind of collective of an instruction, or None."""
    kind = instruction.opcode.removesuffix('-start')
    if kind not in SENT:
        return None
    if kind == 'all-reduce' and keeps_a_part(instruction, computation):
        return 'reduce-scatter'
    return kind


def _chain(instruction):
    """The channel and chain of a TPU collective that has several instructions, or None."""
    match = re.search(r'channel_id=(\d+).*chain_id="?(\d+)', instruction.attributes)
    return None if match is None else match.groups()


def _bytes_sent(kind, instruction, computation):
    size = sum(computation[operand].size for operand in instruction.operands)
    num_devices = None
    if kind != 'collective-permute':
        num_devices = group_size(instruction.attributes)
    return int(SENT[kind](size, num_devices))


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Returns all computations by name, and the name of the entry computation."""
    computations: dict[str, Computation] = {}
    entry = ''
    for line in text.splitlines():
        header = HEADER.match(line)
        if header is not None:
            is_entry, name = header.groups()
            computation: Computation = {}
            computations[name] = computation
            if is_entry:
                entry = name
            continue
        instruction = _parse_instruction(line)
        if instruction is not None:
            computation[instruction.name] = instruction
    return computations, entry


def _parse_instruction(line):
    match = INSTRUCTION.match(line)
    if match is None:
        return None
    root, name, shapes, opcode, arguments, attributes = match.groups()
    size = 0.0
    for bits, dimensions in ARRAY.findall(shapes):
        size += int(bits or 8) / 8 * math.prod(map(int, re.findall(r'\d+', dimensions)))
    operands = tuple(re.findall(r'%([\w.\-]+)', arguments)) or (arguments,)
    return Instruction(name, size, opcode, operands, attributes, bool(root))


def executions(
    computations: dict[str, Computation], name: str, times: float = 1
) -> Iterator[tuple[str, float]]:
    """Yields (name, number of executions) of a computation and of all computations that it calls.

    All branches of a conditional count. The number is NaN if it is unknown.
    """
    yield name, times
    computation = computations[name]
    for instruction in computation.values():
        if instruction.opcode not in CALLERS:
            continue
        trips: float = 1
        if instruction.opcode == 'while':
            trips = trip_count(instruction, computation, computations)
        for names in CALLED.findall(instruction.attributes):
            for called in names.split(', '):
                yield from executions(computations, called.removeprefix('%'), times * trips)


def trip_count(
    loop: Instruction, caller: Computation, computations: dict[str, Computation]
) -> float:
    """Returns the number of iterations of a loop, NaN if it is unknown.

    Either the compiler states the number, or the loop counts from one constant to another in
    constant steps: by 1 in jax.lax.scan, by more in loops that a TPU compiler unrolls.

    Args:
      loop: the instruction of the loop.
      caller: the computation that contains it.
      computations: all computations by name.
    """
    known = re.search(r'known_trip_count\D*(\d+)', loop.attributes)
    if known is not None:
        return int(known[1])
    condition = computations[_called_as('condition', loop)]
    body = computations[_called_as('body', loop)]
    try:
        return _counted_trips(loop, caller, condition, body)
    except (KeyError, ValueError):  # the loop has no such counter
        return math.nan


def _counted_trips(loop, caller, condition, body):
    """The number of iterations according to the counter of a loop; NaN without a counter."""
    comparison = _root(condition)
    counter = re.match(r', index=(\d+)', condition[comparison.operands[0]].attributes)
    if counter is None:
        return math.nan
    index = int(counter[1])
    addition = body[_root(body).operands[index]]
    while addition.opcode in SAME_NUMBERS:
        addition = body[addition.operands[0]]
    is_less_than = comparison.opcode == 'compare' and 'direction=LT' in comparison.attributes
    if not is_less_than or addition.opcode != 'add':
        return math.nan
    initial_values = caller[loop.operands[0]].operands
    start = constant(caller[initial_values[index]], caller)
    end = constant(condition[comparison.operands[1]], condition)
    step = constant(body[addition.operands[1]], body)
    return math.ceil((end - start) / step)


def _root(computation):
    return next(instruction for instruction in computation.values() if instruction.is_root)


def _called_as(role, loop):
    """The name of the computation that is the 'condition' or 'body' of a loop."""
    match = re.search(rf'{role}=%([\w.\-]+)', loop.attributes)
    if match is None:
        raise ValueError(f'{loop.name} has no {role}')
    return match[1]


def constant(instruction: Instruction, computation: Computation) -> int:
    """Returns the integer result of an instruction; raises ValueError if it is not constant."""
    if instruction.opcode in SAME_NUMBERS:
        return constant(computation[instruction.operands[0]], computation)
    if instruction.opcode != 'constant':
        raise ValueError(f'{instruction.name} is {instruction.opcode}')
    return int(instruction.operands[0])


def keeps_a_part(all_reduce: Instruction, computation: Computation) -> bool:
    """Whether each device only uses a slice of the result of an all-reduce."""
    users = [user for user in computation.values() if all_reduce.name in user.operands]
    if len(users) != 1 or len(all_reduce.operands) != 1:
        return False
    (user,) = users
    if user.opcode in SAME_NUMBERS:
        return keeps_a_part(user, computation)
    return user.opcode == 'dynamic-slice'


def group_size(attributes: str) -> int:
    """Returns the number of devices in each group of a collective, in any notation of groups."""
    mesh = re.search(r'replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}', attributes)
    if mesh is not None:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", mesh[2]))
    shape = re.search(r'replica_groups=\[\d+,(\d+)\]<=', attributes)
    if shape is not None:
        return int(shape[1])
    groups = re.search(r'replica_groups=\{\{([^}]*)\}', attributes)
    if groups is not None:
        return groups[1].count(',') + 1
    raise ValueError(f'no groups of devices in {attributes[:200]}')
