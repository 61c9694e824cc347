"""Bytes that one device sends in a compiled program, by kind of collective, from its HLO text.

Only the names, sizes and operands of instructions are read, and which computations they call: the
body of a loop counts as often as it runs.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

# Bytes that each of n devices in a ring sends of operands of `size` bytes.
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
    size: float  # bytes of the result; all elements of a tuple together
    opcode: str
    operands: tuple[str, ...]  # names in the same computation; the value of a constant
    attributes: str  # text after the operands
    is_root: bool


Computation = dict[str, Instruction]  # by name


class Traffic(NamedTuple):
    """Bytes that one device sends in one run of a program, and its calls, by kind of collective."""

    sent: dict[str, int]
    calls: dict[str, int]


def count(text: str) -> Traffic:
    """Counts the collectives in HLO text, as from `jax.stages.Compiled.as_text`.

    An all-reduce of which every device keeps only its part counts as a reduce-scatter. Raises
    ValueError when a collective is in a loop that runs an unknown number of times.
    """
    computations, entry = parse(text)
    sent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    seen = set()
    for name, times in executions(computations, entry):
        computation = computations[name]
        for x in computation.values():
            kind = x.opcode.removesuffix('-start')
            if kind not in SENT:
                continue
            if math.isnan(times):
                raise ValueError(
                    f'{x.name} of the compiled step is in a loop, and neither the '
                    'compiler nor a counter says how often it runs: what the step '
                    'sends is unknown.'
                )
            # On TPUs, a collective that runs beside fusions occurs in each of them.
            if chain := re.search(r'channel_id=(\d+).*chain_id="?(\d+)', x.attributes):
                if chain.groups() in seen:
                    continue
                seen.add(chain.groups())
            if kind == 'all-reduce' and keeps_a_part(x, computation):
                kind = 'reduce-scatter'
            size = sum(computation[operand].size for operand in x.operands)
            devices = None if kind == 'collective-permute' else group_size(x.attributes)
            runs = int(times)  # which is whole
            sent[kind] += runs * int(SENT[kind](size, devices))
            calls[kind] += runs
    return Traffic(dict(sent), dict(calls))


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """All computations by name, and the name of the one that is the whole program."""
    computations: dict[str, Computation] = {}
    entry = ''
    for line in text.splitlines():
        if header := HEADER.match(line):
            computation: Computation = {}
            computations[header[2]] = computation
            entry = header[2] if header[1] else entry
        elif found := INSTRUCTION.match(line):
            root, name, shapes, opcode, operands, attributes = found.groups()
            size = sum(
                int(bits or 8) / 8 * math.prod(map(int, re.findall(r'\d+', dimensions)))
                for bits, dimensions in ARRAY.findall(shapes)
            )
            operands = tuple(re.findall(r'%([\w.\-]+)', operands)) or (operands,)
            computation[name] = Instruction(name, size, opcode, operands, attributes, bool(root))
    return computations, entry


def executions(
    computations: dict[str, Computation], name: str, times: float = 1
) -> Iterator[tuple[str, float]]:
    """(name, how often it is executed or NaN) of a computation and of all that it calls."""
    yield name, times
    for x in computations[name].values():
        if x.opcode in CALLERS:  # all branches of a conditional count
            trips = trip_count(x, computations[name], computations) if x.opcode == 'while' else 1
            for called in CALLED.findall(x.attributes):
                for each in called.split(', '):
                    yield from executions(computations, each.removeprefix('%'), times * trips)


def trip_count(
    loop: Instruction, caller: Computation, computations: dict[str, Computation]
) -> float:
    """How often the body of a loop in the computation `caller` runs, NaN if that is unknown.

    The compiler says it, or else the loop counts from one constant to another in constant steps:
    jax.lax.scan by one, and loops that a TPU's compiler unrolls by more.
    """
    if known := re.search(r'known_trip_count\D*(\d+)', loop.attributes):
        return int(known[1])
    condition, body = (computations[_called_as(role, loop)] for role in ('condition', 'body'))
    try:
        less, after = (next(x for x in xs.values() if x.is_root) for xs in (condition, body))
        counter = re.match(r', index=(\d+)', condition[less.operands[0]].attributes)
        if counter is None:
            return math.nan
        index = int(counter[1])
        add = body[after.operands[index]]
        while add.opcode in SAME_NUMBERS:
            add = body[add.operands[0]]
        if (less.opcode, add.opcode) != ('compare', 'add') or 'direction=LT' not in less.attributes:
            return math.nan
        start = constant(caller[caller[loop.operands[0]].operands[index]], caller)
        length = constant(condition[less.operands[1]], condition)
        step = constant(body[add.operands[1]], body)
    except (KeyError, ValueError):  # it is not such a counter
        return math.nan
    return math.ceil((length - start) / step)


def _called_as(role, loop):
    """The name of the computation that a loop calls as its 'condition' or 'body'."""
    found = re.search(rf'{role}=%([\w.\-]+)', loop.attributes)
    if found is None:  # HLO has both of every loop
        raise ValueError(f'{loop.name} has no {role}')
    return found[1]


def constant(x: Instruction, computation: Computation) -> int:
    """The integer that an instruction yields; raises ValueError when it is not constant."""
    if x.opcode in SAME_NUMBERS:
        return constant(computation[x.operands[0]], computation)
    if x.opcode != 'constant':
        raise ValueError(f'{x.name} is {x.opcode}')
    return int(x.operands[0])


def keeps_a_part(x: Instruction, computation: Computation) -> bool:
    """Whether each device only uses a slice of an all-reduce, as in a reduce-scatter."""
    users = [user for user in computation.values() if x.name in user.operands]
    if len(users) != 1 or len(x.operands) != 1:
        return False
    return users[0].opcode == 'dynamic-slice' or (
        users[0].opcode in SAME_NUMBERS and keeps_a_part(users[0], computation)
    )


def group_size(attributes: str) -> int:
    """Number of devices that take part in a collective together, however its groups are written."""
    if mesh := re.search(r'replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}', attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", mesh[2]))
    if counted := re.search(r'replica_groups=\[\d+,(\d+)\]<=', attributes):
        return int(counted[1])
    if listed := re.search(r'replica_groups=\{\{([^}]*)\}', attributes):
        return listed[1].count(',') + 1
    raise ValueError(f'no groups of devices in {attributes[:200]}')
