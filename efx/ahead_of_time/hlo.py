"""What a compiled program does, read off its text: instructions and how often each of them runs.

XLA's own analysis counts the body of a loop once and says nothing of communication, so the text is
read here: computations, the trip counts of loops, and what they call.
"""

import dataclasses
import functools
import json
import math
import re
from collections import Counter, defaultdict

import numpy as np

from efx.layers.flops import causal_pairs

# Bytes of a number; what is not listed (tokens, opaque handles) has none.
_BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4,
    "s64": 8, "u64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16,
    "f8e4m3fn": 1, "f8e5m2": 1,
}  # fmt: skip
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# These compute nothing and move no memory themselves.
_FREE = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
    "call", "after-all", "partition-id", "replica-id", "opt-barrier",
)  # fmt: skip

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """Attributes:
    shapes: ((dtype, dimensions), ...), one of an array, several of a tuple.
    operands: names. text: everything after the operands: attributes, metadata, configuration.
    """

    name: str
    shapes: tuple
    opcode: str
    operands: tuple
    text: str

    @property
    def bytes(self):
        return sum(map(size_of, self.shapes))

    def attribute(self, key):
        """The value of `key=%name`, or ""."""
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.text)
        return found[1] if found else ""

    def numbers(self, key):
        """The numbers of `key={1,2}` or `"key":["1","2"]`; () without them."""
        found = re.search(rf'\b{key}"?[=:]\s*[{{\[]([^}}\]]*)[}}\]]', self.text)
        return tuple(map(int, re.findall(r"\d+", found[1]))) if found else ()


@dataclasses.dataclass
class Computation:
    """Attributes:
    instructions: {name: Instruction}, in order. root: the name of its result.
    """

    instructions: dict
    root: str = ""

    @functools.cached_property
    def users(self):
        """{name: instructions that read it}"""
        found = defaultdict(list)
        for instruction in self.instructions.values():
            for name in instruction.operands:
                found[name].append(instruction)
        return found

    def operand(self, instruction, index):
        return self.instructions[instruction.operands[index]]

    def read(self, instruction):
        """Bytes of all operands."""
        return sum(self.instructions[name].bytes for name in instruction.operands)


def size_of(shape):
    """Bytes of (dtype, dimensions)."""
    dtype, dimensions = shape
    return _BYTES.get(dtype, 0) * math.prod(dimensions)


def shapes_in(text):
    """All shapes in a text, in order."""
    return tuple(
        (dtype, tuple(map(int, filter(None, sizes.split(",")))))
        for dtype, sizes in _SHAPE.findall(text)
    )


def _shapes_text(shapes):
    return ", ".join(f"{dtype}[{','.join(map(str, sizes))}]" for dtype, sizes in shapes)


def _op_name(instruction):
    """The operation of the model that an instruction belongs to; "" if XLA does not say."""
    found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', instruction.text)
    return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Step:
    """An instruction of a program and how often it runs.

    Attributes:
      home: the `Computation` that it stands in. runs: times. fused: inside a fusion, whose
        instructions run as one and touch no memory in between.
    """

    instruction: Instruction
    home: Computation
    runs: int
    fused: bool


class Program:
    """A compiled program from the text that XLA prints of it.

    Attributes:
      steps: every instruction that runs, with what is called, each call for itself.
      unknown_loops: loops whose trip count is not in the text; they count as one trip.
    """

    def __init__(self, text):
        self._computations, entry = _parse(text)
        self.unknown_loops = 0
        self.steps = []
        self._visit(entry, 1, False)

    def called(self, instruction):
        """The `Computation` that a fusion or an asynchronous start wraps."""
        return self._computations[instruction.attribute("calls")]

    def _visit(self, name, runs, fused):
        home = self._computations[name]
        for instruction in home.instructions.values():
            self.steps.append(Step(instruction, home, runs, fused))
            opcode = instruction.opcode
            if opcode == "while":
                trips = self._trips(instruction, home)
                self.unknown_loops += trips is None
                self._visit(instruction.attribute("body"), runs * (trips or 1), fused)
            elif opcode == "conditional":  # counted as if every branch ran: an upper bound
                for branch in _branches(instruction):
                    self._visit(branch, runs, fused)
            elif opcode == "call":
                self._visit(instruction.attribute("to_apply"), runs, fused)
            elif opcode == "fusion" or opcode.endswith("-start"):
                if inner := instruction.attribute("calls"):
                    self._visit(inner, runs, fused or opcode == "fusion")

    def _trips(self, loop, home):
        """How often a loop runs: from XLA's own note, else by the bound that its condition compares
        a counter with. None if neither says."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.text):
            return int(known[1])
        condition = self._computations[loop.attribute("condition")]
        compared = condition.instructions[condition.root]
        arguments = [condition.instructions[name] for name in compared.operands]
        if compared.opcode == "fusion":  # the comparison is inside, of the fusion's own operands
            inner = self.called(compared)
            compared, places = inner.instructions[inner.root], []
            for name in compared.operands:
                place = re.match(r"\d+", inner.instructions[name].text)
                inside = inner.instructions[name]
                places.append(arguments[int(place[0])] if inside.opcode == "parameter" else inside)
            arguments = places
        if compared.opcode != "compare" or len(arguments) != 2:
            return None
        if compared.attribute("direction") == "GT":
            arguments.reverse()
        elif compared.attribute("direction") != "LT":
            return None
        counter, bound = arguments
        if bound.opcode != "constant" or counter.opcode != "get-tuple-element":
            return None
        values = home.operand(loop, 0)
        if values.opcode != "tuple":
            return None
        start = home.operand(values, int(counter.attribute("index")))
        while start.opcode in ("copy", "bitcast"):
            start = home.operand(start, 0)
        if start.opcode != "constant":
            return None
        return max(0, _constant(bound) - _constant(start))


def _constant(instruction):
    return int(re.match(r"-?\d+", instruction.text)[0])


def _branches(instruction):
    if listed := re.search(r"branch_computations=\{([^}]*)\}", instruction.text):
        return re.findall(r"[\w.\-]+", listed[1])
    return [instruction.attribute(f"{case}_computation") for case in ("true", "false")]


def _parse(text):
    """({name: Computation}, name of the entry)"""
    computations, entry, current, lines = {}, "", None, []

    def finish():
        if lines:
            _add(current, "\n".join(lines))
            lines.clear()

    for line in text.splitlines():
        if not line.startswith(" ") and (head := _COMPUTATION.match(line)):
            finish()
            current = computations[head[2]] = Computation({})
            entry = head[2] if head[1] else entry
        elif line == "}" or line.startswith("}, execution_thread"):
            finish()
            current = None
        elif current is not None:
            if _INSTRUCTION.match(line):
                finish()
                lines.append(line)
            elif lines:  # attributes may go on over several lines
                lines.append(line)
    return computations, entry


def _add(computation, text):
    head = _INSTRUCTION.match(text)
    root, name, shape, opcode = head.groups()
    depth, end = 1, head.end()
    while depth and end < len(text):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    inside, after = text[head.end() : end - 1], text[end:]
    # A constant has its value, a parameter its number, in place of operands.
    leaf = opcode in ("constant", "parameter")
    operands = () if leaf else tuple(re.findall(r"%([\w.\-]+)", inside))
    instruction = Instruction(name, shapes_in(shape), opcode, operands, inside * leaf + after)
    computation.instructions[name] = instruction
    if root:
        computation.root = name


# ---- communication ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Collective:
    """What devices exchange, summed over alike instructions.

    Attributes:
      kind: one of COLLECTIVES. shapes: of the arrays that are in one exchange, as XLA writes them.
      where: the operation of the model that it belongs to; "" if XLA does not say.
      hosts: over which a group of devices that exchange is spread. members: of a group on one of
        its hosts.
      runs: a step. bytes: a step and device, of the array before it is scattered or after it is
        gathered; of a permutation, what is sent.
    """

    kind: str
    shapes: str
    where: str
    hosts: int
    members: int
    runs: int
    bytes: int


def collectives(program, host_of):
    """Every `Collective` of a program, the largest first.

    host_of: [the host of each device of the program, by its number].
    """
    found = defaultdict(lambda: [0, 0])
    for step in program.steps:
        instruction = step.instruction
        started = instruction.opcode.endswith("-start")
        kind = instruction.opcode.removesuffix("-start")
        if kind not in COLLECTIVES or (step.fused and _continues(step)):
            continue
        shapes = [s for name in instruction.operands for s in step.home.instructions[name].shapes]
        if kind == "all-gather":  # the result of a start is the pair of operand and result
            shapes = instruction.shapes[len(shapes) * started :]
        if kind == "all-reduce" and step.fused and _scatters(step):
            kind = "reduce-scatter"
        spread = _spread(instruction, host_of)
        entry = found[kind, _shapes_text(shapes), _op_name(instruction), *spread]
        entry[0] += step.runs
        entry[1] += step.runs * int(sum(map(size_of, shapes)))
    listed = [Collective(*key, *value) for key, value in found.items()]
    return sorted(listed, key=lambda c: -c.bytes)


def _spread(instruction, host_of):
    """(hosts of a group of devices that exchange, its members on one of them), of the group that is
    spread most."""
    groups = _groups(instruction.text, len(host_of))
    counts = [Counter(host_of[number] for number in group) for group in groups]
    return max((len(count), min(count.values())) for count in counts)


_SIZES = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"  # of an array of numbers, and how it is transposed
_OF_A_MESH = re.compile(
    rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_SIZES}\))? \{{([^}}]*)\}}"
)
_OF_NUMBERS = re.compile(rf"replica_groups=\[([\d,]+)\]<={_SIZES}")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")


def _groups(text, devices):
    """The groups of devices among which an instruction exchanges, from its attributes. XLA writes
    them one by one, as rows of an array of numbers, or as axes of a mesh; without any, all."""
    if listed := _LISTED.search(text):
        return [[*map(int, group.split(","))] for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    if of_numbers := _OF_NUMBERS.search(text):
        shape, *order = of_numbers.groups()
        return _numbered(devices, *order).reshape(_ints(shape)).tolist()
    if of_a_mesh := _OF_A_MESH.search(text):
        mesh, *order, axes = of_a_mesh.groups()
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh))
        along = re.findall(r"'(\w+)'", axes)
        if sizes.keys() >= set(along) and ":" not in axes:
            numbers = _numbered(devices, *order).reshape([int(size) for size in sizes.values()])
            last = [list(sizes).index(name) for name in along]
            numbers = np.moveaxis(numbers, last, range(-len(last), 0))
            return numbers.reshape(-1, math.prod(int(sizes[name]) for name in along)).tolist()
    return [range(devices)]


def _numbered(devices, sizes, order):
    """0, 1, ... as an array of these sizes, transposed in this order, both as XLA writes them."""
    numbers = np.arange(devices).reshape(_ints(sizes) if sizes else devices)
    return numbers.transpose(_ints(order)) if order else numbers


def _ints(text):
    return [*map(int, text.split(","))]


def _continues(step):
    """Whether this is a later part of an asynchronous collective: on TPUs it stands in the fusion
    that starts it, in those that it runs beside, and in the one that waits for it."""
    started = any(
        '"AsyncCollectiveStart"' in other.text for other in step.home.instructions.values()
    )
    return "chain_id=" in step.instruction.text and not started


def _scatters(step):
    """Whether all that is kept of an all-reduce is a slice for each device."""
    users = step.home.users[step.instruction.name]
    for user in users:
        if user.opcode == "get-tuple-element":
            users = users + step.home.users[user.name]
    sliced = [user.opcode for user in users if user.opcode != "get-tuple-element"]
    return bool(sliced) and set(sliced) == {"dynamic-slice"}


# ---- kernels ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """A custom call of a kernel. flops: of one run; None where it is not known what it computes."""

    name: str
    runs: int
    flops: float | None


# Matrix products of the size of the scores that each attention kernel computes.
_FLASH = {"fwd": 2, "dq": 3, "dkv": 4}
_KERNEL_TARGETS = ("tpu_custom_call", "__cudnn$")


def kernels(program):
    """Every `KernelCall` of a program."""
    calls = []
    for step in program.steps:
        instruction = step.instruction
        if instruction.opcode != "custom-call":
            continue
        target = re.search(r'custom_call_target="([^"]*)"', instruction.text)[1]
        if any(part in target for part in _KERNEL_TARGETS):
            name, flops = _kernel(target, instruction)
            calls.append(KernelCall(name, step.runs, flops))
    return calls


def _kernel(target, instruction):
    """(name, FLOPs of a run or None)"""
    path = _op_name(instruction)
    layout = instruction.text.partition("operand_layout_constraints={")[2]
    operands = shapes_in(layout[: _closing(layout)])
    if target.startswith("__cudnn$fmha"):
        products = 5 if "Backward" in target else 2
        dims = json.loads(
            re.search(r'"intermediate_tensor_shape": \{[^[]*"dimensions": (\[[^]]*\])',
                      instruction.text)[1]
        )  # fmt: skip
        batch, heads, queries, keys = map(int, dims)
        window = int(re.search(r'"sliding_window_length": (\d+)', instruction.text)[1])
        pairs = queries * keys
        if '"mask_type": "CAUSAL"' in instruction.text or window:
            pairs = causal_pairs(queries, window)
        return target, products * 2 * batch * heads * pairs * operands[0][1][-1]
    if splash := re.search(r"splash_m[hq]a_(fwd|dq|dkv)", path):
        # The first operand says of each block of the scores whether it is computed; for a window
        # its last axis holds only as many blocks as a row has.
        blocks = operands[0][1]
        q = next(shape for dtype, shape in operands if dtype != "s8")
        rows, columns = blocks[-2:]
        computed = sum(min(row + 1, columns) for row in range(rows))
        pairs = computed * (q[-2] // rows) ** 2
        return splash[0], _FLASH[splash[1]] * 2 * math.prod(q[:-2]) * pairs * q[-1]
    return path.removesuffix("/pallas_call").rpartition("/")[2] or target, None


def _closing(text):
    """Where the bracket closes that is open before the text."""
    depth = 1
    for i, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if not depth:
            return i
    return len(text)


# ---- time ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Operation:
    """What takes time, summed over alike instructions.

    Attributes:
      kind: opcode. shapes: of its results, as XLA writes them. where: the operation of the model
        that it belongs to; "" if XLA does not say.
      runs: a step. time: of all runs, in the unit of what it was summed from.
    """

    kind: str
    shapes: str
    where: str
    runs: int
    time: float


def operations(times):
    """Every `Operation`, the slowest first. times: [(Step, time of all its runs)]."""
    found = defaultdict(lambda: [0, 0.0])
    for step, time in times:
        instruction = step.instruction
        key = instruction.opcode, _shapes_text(instruction.shapes), _op_name(instruction)
        found[key][0] += step.runs
        found[key][1] += time
    listed = [Operation(*key, *value) for key, value in found.items()]
    return sorted(listed, key=lambda o: -o.time)


def estimated_cycles(program):
    """[(Step, cycles of all its runs)] by the TPU compiler's own estimate, and {opcode: runs} of
    what has none.

    Kernels and communication have none and are in neither.
    """
    cycles, missing = [], defaultdict(int)
    for step in program.steps:
        if step.fused:
            continue
        if found := re.search(r'"estimated_cycles":"(\d+)"', step.instruction.text):
            cycles.append((step, step.runs * int(found[1])))
        elif step.instruction.opcode in ("sort", "scatter", "gather", "dot", "convolution"):
            missing[step.instruction.opcode] += step.runs
        elif step.instruction.opcode == "fusion" and "kind=kCustom" in step.instruction.text:
            if not any(
                other.opcode in COLLECTIVES
                for other in program.called(step.instruction).instructions.values()
            ):
                missing["custom fusion"] += step.runs
    return cycles, dict(missing)


def roofline(program, peak, bandwidth):
    """[(Step, seconds of all its runs)] if each instruction took as long as its FLOPs at `peak` or
    its memory at `bandwidth`, whichever is longer; without kernels and communication."""
    seconds = []
    for step in program.steps:
        instruction = step.instruction
        communicates = any(instruction.opcode.startswith(kind) for kind in COLLECTIVES)
        if step.fused or instruction.opcode in _FREE or communicates:
            continue
        if instruction.opcode == "custom-call" and "__cublas$" not in instruction.text:
            continue
        time = max(_flops(program, step) / peak, _memory(program, step) / bandwidth)
        seconds.append((step, step.runs * time))
    return seconds


def _flops(program, step):
    """FLOPs of the matrix products of an instruction and of what it fuses."""
    instruction = step.instruction
    if instruction.opcode == "dot":
        return _product(instruction, step.home, "lhs_contracting_dims")
    if instruction.opcode == "custom-call":
        return _product(instruction, step.home, "lhs_contracting_dimensions")
    if instruction.opcode != "fusion":
        return 0
    inner = program.called(instruction)
    return sum(
        _flops(program, Step(other, inner, 1, True))
        for other in inner.instructions.values()
        if other.opcode in ("dot", "fusion")
    )


def _product(instruction, home, key):
    lhs = home.operand(instruction, 0).shapes[0][1]
    contracted = math.prod(lhs[axis] for axis in instruction.numbers(key))
    return 2 * math.prod(instruction.shapes[0][1]) * contracted


def _memory(program, step):
    """Bytes that an instruction reads and writes. Of an array that it only slices or updates in
    part these are the parts, as with the stacked parameters and activations of scanned layers."""
    instruction, home = step.instruction, step.home
    if instruction.opcode != "fusion":
        if instruction.opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * instruction.bytes
        if instruction.opcode == "dynamic-update-slice":
            return 2 * home.operand(instruction, 1).bytes
        return instruction.bytes + home.read(instruction)
    inner = program.called(instruction)
    read = sum(
        _read(inner, other) for other in inner.instructions.values() if other.opcode == "parameter"
    )
    root = inner.instructions[inner.root]
    results = [root]
    if root.opcode == "tuple":
        results = [inner.instructions[name] for name in root.operands]
    return read + sum(_written(inner, result) for result in results)


def _read(inner, array):
    """Bytes of an array that its users inside a fusion read."""
    total = 0
    for user in inner.users[array.name]:
        if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == array.name:
            total += user.bytes
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == array.name:
            total += 0
        elif user.opcode == "scatter" and user.operands[0] == array.name:
            total += inner.operand(user, 2).bytes  # the rows that it changes
        elif user.opcode == "bitcast":
            total += _read(inner, user)
        else:
            return array.bytes
    return min(total, array.bytes)


def _written(inner, result):
    while result.opcode == "bitcast":
        result = inner.operand(result, 0)
    if result.opcode == "dynamic-update-slice":
        return inner.operand(result, 1).bytes
    if result.opcode == "scatter" and _comes_in(inner, inner.operand(result, 0)):
        return inner.operand(result, 2).bytes
    return result.bytes


def _comes_in(inner, array):
    """Whether an array is one that a fusion is given, and so can be updated where it lies."""
    while array.opcode == "bitcast":
        array = inner.operand(array, 0)
    return array.opcode == "parameter"
