"""Counts what one device does in a compiled program: FLOPs, and bytes sent by kind of collective.

XLA's own cost analysis counts the body of a loop once; here it is multiplied by its trip count. The
input is HLO text, of which only the computations, shapes and a few attributes are read.
"""

import math
import re
from collections import defaultdict
from typing import NamedTuple

BYTES = {'pred': 1, 's4': 0.5, 'u4': 0.5, 's8': 1, 'u8': 1, 's16': 2, 'u16': 2, 'bf16': 2, 'f16': 2,
         's32': 4, 'u32': 4, 'f32': 4, 's64': 8, 'u64': 8, 'f64': 8, 'c64': 8, 'c128': 16}
COLLECTIVES = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute')
SAME_NUMBERS = ('bitcast', 'convert', 'copy', 'reshape', 'transpose')


class Instruction(NamedTuple):
    """A line of HLO.

    Attributes:
      shapes: (dtype, dimensions) of the result, or of every element of a tuple.
      operands: names; of a constant its value.
      attributes: text after the operands.
    """

    name: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str


class Counts(NamedTuple):
    """What one device does in one run of a program.

    Attributes:
      flops: of dot products and convolutions; a multiplication and an addition are two.
      sent: bytes by kind of collective, see `_bytes_sent`.
      calls: how often each kind is executed.
    """

    flops: int
    sent: dict[str, int]
    calls: dict[str, int]


class Module:
    """A parsed HLO module."""

    def __init__(self, text: str):
        self._computations, self._roots, self._entry = {}, {}, None
        current = None
        for line in text.splitlines():
            if line.startswith(('%', 'ENTRY')) and line.rstrip().endswith('{'):
                name = re.match(r'(?:ENTRY )?%?([\w.\-]+)', line).group(1)
                current = self._computations[name] = {}
                if line.startswith('ENTRY'):
                    self._entry = name
            elif line.startswith('}'):
                current = None
            elif current is not None and ' = ' in line:
                instruction = _parse(line)
                current[instruction.name] = instruction
                if line.lstrip().startswith('ROOT'):
                    self._roots[name] = instruction

    def count(self) -> Counts:
        """Counts of the whole program."""
        self._flops, self._sent, self._calls = 0, defaultdict(int), defaultdict(int)
        self._seen, self._callers = set(), {}
        self._walk(self._entry, 1)
        return Counts(self._flops, dict(self._sent), dict(self._calls))

    def _walk(self, name, times):
        computation = self._computations[name]
        for x in computation.values():
            kind = x.opcode.removesuffix('-start')
            if x.opcode == 'dot':
                self._flops += times * _dot_flops(x, computation)
            elif x.opcode == 'convolution':
                self._flops += times * _convolution_flops(x, computation)
            elif kind in COLLECTIVES:
                self._count_collective(kind, x, name, times)
            elif x.opcode == 'while':
                body = _called(x, 'body')
                self._callers[body] = (name, x)
                self._walk(body, times * self._trips(x, name))
            elif x.opcode == 'conditional':  # the costlier of its branches is not looked for
                for branch in _branches(x):
                    self._walk(branch, times)
            elif x.opcode in ('fusion', 'call', 'async-start', 'custom-call'):
                for called in _called_by(x):
                    self._callers[called] = (name, x)
                    self._walk(called, times)

    def _count_collective(self, kind, x, name, times):
        computation = self._computations[name]
        # A collective that runs beside computation stands in each fusion that it runs beside.
        chain = re.search(r'chain_id="?(\d+)', x.attributes)
        if chain:
            key = (chain.group(1), re.search(r'channel_id=(\d+)', x.attributes).group(1))
            if key in self._seen:
                return
            self._seen.add(key)
        size = sum(_size(shape) for operand in x.operands for shape in computation[operand].shapes)
        if kind == 'all-reduce' and self._only_a_part_is_used(x, name):
            kind = 'reduce-scatter'
        group = 0 if kind == 'collective-permute' else group_size(x.attributes)
        self._sent[kind] += times * _bytes_sent(kind, size, group)
        self._calls[kind] += times

    def _only_a_part_is_used(self, x, name):
        """Whether each device slices its part out of a sum: a reduce-scatter, or soon made one."""
        users = [y for y in self._computations[name].values() if x.name in y.operands]
        if len(users) != 1 or len(x.shapes) != 1:
            return False
        if users[0].opcode in SAME_NUMBERS:
            return self._only_a_part_is_used(users[0], name)
        return users[0].opcode == 'dynamic-slice'

    def _trips(self, loop, name):
        known = re.search(r'known_trip_count\D*(\d+)', loop.attributes)
        if known:
            return int(known.group(1))
        condition, body = _called(loop, 'condition'), _called(loop, 'body')
        index = self._tested_index(condition)
        value = self._value(self._tuple_element(loop.operands[0], index, name), name, None)
        trips = 0
        while self._value(self._roots[condition].name, condition, (index, value)):
            root = self._roots[body]
            value = self._value(root.operands[index], body, (index, value))
            trips += 1
            if trips > 10**6:
                raise ValueError(f'no end of the loop {loop.name}')
        return trips

    def _tested_index(self, condition):
        """Which element of a loop's tuple its condition compares with a constant."""
        elements = [x for x in self._computations[condition].values()
                    if x.opcode == 'get-tuple-element']
        used = {name for x in self._computations[condition].values()
                if x.opcode in ('compare', 'fusion', 'call') for name in x.operands}
        tested = [_index(x) for x in elements if x.name in used]
        if len(tested) != 1:
            raise ValueError(f'condition {condition} compares {len(tested)} elements')
        return tested[0]

    def _tuple_element(self, operand, index, name):
        """Name of the element of a tuple."""
        x = self._computations[name][operand]
        if x.opcode == 'tuple':
            return x.operands[index]
        if x.opcode in ('copy', 'bitcast', 'opt-barrier'):
            return self._tuple_element(x.operands[0], index, name)
        raise ValueError(f'{operand} in {name} is {x.opcode}, not a tuple')

    def _value(self, operand, name, element):
        """The integer that a scalar is.

        Args:
          operand: its name.
          name: computation that it stands in.
          element: (index, value) of the parameter's tuple that is known.
        """
        x = self._computations[name][operand]

        def of(i):
            return self._value(x.operands[i], name, element)

        if x.opcode == 'constant':
            return int(x.operands[0])
        if x.opcode in SAME_NUMBERS + ('copy-start', 'copy-done'):
            return of(0)
        if x.opcode in ('add', 'subtract', 'multiply'):
            a, b = of(0), of(1)
            return a + b if x.opcode == 'add' else a - b if x.opcode == 'subtract' else a * b
        if x.opcode == 'compare':
            a, b = of(0), of(1)
            direction = re.search(r'direction=(\w+)', x.attributes).group(1)
            return {'LT': a < b, 'LE': a <= b, 'GT': a > b, 'GE': a >= b, 'EQ': a == b,
                    'NE': a != b}[direction]
        if x.opcode in ('fusion', 'call'):
            called = _called_by(x)[0]
            return self._in_called(called, x, name, element)
        if x.opcode == 'get-tuple-element':
            source = self._computations[name][x.operands[0]]
            if source.opcode == 'parameter':
                if element is not None and element[0] == _index(x):
                    return element[1]
                return self._loop_invariant(_index(x), name)
            if source.opcode in ('fusion', 'call'):
                called = _called_by(source)[0]
                return self._in_called(called, source, name, element, _index(x))
            return self._value(self._tuple_element(source.name, _index(x), name), name, element)
        raise ValueError(f'the value of {operand} = {x.opcode} in {name} is not constant')

    def _in_called(self, called, call, name, element, index=None):
        """Value of (an element of) the root of a computation, whose parameters are scalars here."""
        known = {}
        root = self._roots[called]
        wanted = root.name if index is None else root.operands[index]

        def value(operand):
            x = self._computations[called][operand]
            if x.opcode == 'parameter':
                number = int(x.operands[0])
                if number not in known:
                    known[number] = self._value(call.operands[number], name, element)
                return known[number]
            if x.opcode == 'constant':
                return int(x.operands[0])
            if x.opcode in SAME_NUMBERS:
                return value(x.operands[0])
            a, b = (value(o) for o in x.operands)
            if x.opcode == 'compare':
                direction = re.search(r'direction=(\w+)', x.attributes).group(1)
                return {'LT': a < b, 'LE': a <= b, 'GT': a > b, 'GE': a >= b, 'EQ': a == b,
                        'NE': a != b}[direction]
            return {'add': a + b, 'subtract': a - b, 'multiply': a * b}[x.opcode]

        return value(wanted)

    def _loop_invariant(self, index, body):
        """Value of an element of the tuple of a loop that its body hands on as it is."""
        caller, loop = self._callers[body]
        passed = self._computations[body][self._roots[body].operands[index]]
        if passed.opcode != 'get-tuple-element' or _index(passed) != index:
            raise ValueError(f'element {index} of the loop {loop.name} changes')
        return self._value(self._tuple_element(loop.operands[0], index, caller), caller, None)


def group_size(attributes: str) -> int:
    """Devices that take part in a collective together, from any of the ways to write its groups."""
    mesh = re.search(r'replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}', attributes)
    if mesh:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh.group(1)))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", mesh.group(2)))
    counted = re.search(r'replica_groups=\[(\d+),(\d+)\]<=', attributes)
    if counted:
        return int(counted.group(2))
    listed = re.search(r'replica_groups=\{\{([^}]*)\}', attributes)
    if listed:
        return listed.group(1).count(',') + 1
    raise ValueError(f'no groups of devices in {attributes[:200]}')


def _bytes_sent(kind, size, group):
    """Bytes that a device of a ring of `group` sends, its operands having `size` bytes."""
    if kind == 'collective-permute':
        return int(size)
    if kind == 'all-gather':
        return int(size * (group - 1))
    return int((2 if kind == 'all-reduce' else 1) * size * (group - 1) / group)


def _parse(line):
    line = re.sub(r'/\*.*?\*/', '', line.strip().removeprefix('ROOT '))
    name, _, rest = line.partition(' = ')
    end = _closing(rest) + 1 if rest.startswith('(') else rest.index(' ')
    shapes = tuple((dtype, tuple(int(d) for d in re.findall(r'\d+', dims)))
                   for dtype, dims in re.findall(r'(\w+)\[([\d,<=]*)\]', rest[:end]))
    rest = rest[end:].lstrip()
    opcode, _, _ = rest.partition('(')
    rest = rest[len(opcode):]
    end = _closing(rest)
    inside = rest[1:end]
    operands = tuple(re.findall(r'%([\w.\-]+)', inside)) or ((inside,) if inside else ())
    attributes = rest[end + 1:]
    return Instruction(name.lstrip('%'), shapes, opcode, operands, attributes)


def _closing(text):
    """Position of the parenthesis that closes the one at 0."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == '(') - (character == ')')
        if depth == 0:
            return i
    raise ValueError(f'no end of {text[:100]}')


def _size(shape):
    dtype, dims = shape
    return BYTES.get(dtype, 1) * math.prod(dims)


def _called(x, attribute):
    return re.search(rf'\b{attribute}=%?([\w.\-]+)', x.attributes).group(1)


def _called_by(x):
    found = re.search(r'\b(?:calls|to_apply|called_computations)=\{?([^,}]*(?:, ?%[^,}]*)*)',
                      x.attributes)
    return re.findall(r'%([\w.\-]+)', found.group(1)) if found else []


def _branches(x):
    found = re.search(r'branch_computations=\{([^}]*)\}', x.attributes)
    if found:
        return re.findall(r'%([\w.\-]+)', found.group(1))
    return [_called(x, 'true_computation'), _called(x, 'false_computation')]


def _index(x):
    return int(re.search(r'index=(\d+)', x.attributes).group(1))


def _dot_flops(x, computation):
    contracted = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', x.attributes).group(1)
    lhs = computation[x.operands[0]].shapes[0][1]
    products = math.prod(lhs[int(i)] for i in contracted.split(',') if i)
    return 2 * math.prod(x.shapes[0][1]) * products


def _convolution_flops(x, computation):
    """Only products with what lies inside the input count: TPUs write dot products this way."""
    lhs_labels, kernel_labels, out_labels = re.search(
        r'dim_labels=(\w+)_(\w+)->(\w+)', x.attributes).groups()
    lhs, kernel = (computation[name].shapes[0][1] for name in x.operands[:2])
    out = x.shapes[0][1]
    window = dict(re.findall(r'(\w+)=([\dx_\-]+)', re.search(
        r'window=\{([^}]*)\}', x.attributes).group(1) if 'window={' in x.attributes else ''))
    total = 2 * out[out_labels.index('b')] * out[out_labels.index('f')]
    total *= kernel[kernel_labels.index('i')]

    def option(name, axis, default):
        return window[name].split('x')[axis] if name in window else default

    for axis in range(len(lhs_labels) - 2):
        label = str(axis)
        size, positions = lhs[lhs_labels.index(label)], out[out_labels.index(label)]
        stride, dilation, spread = (int(option(name, axis, 1)) for name in (
            'stride', 'rhs_dilate', 'lhs_dilate'))
        before = int(option('pad', axis, '0_0').split('_')[0])
        total *= _inside(size, kernel[kernel_labels.index(label)], positions, stride, dilation,
                         spread, before)
    return total


def _inside(size, taps, positions, stride, dilation, spread, before):
    """Pairs of an output position and a tap of the kernel that meet a number of the input."""
    pairs = 0
    for tap in range(taps):
        at = [p * stride + tap * dilation - before for p in (range(positions))]
        pairs += sum(0 <= i <= (size - 1) * spread and i % spread == 0 for i in at)
    return pairs
