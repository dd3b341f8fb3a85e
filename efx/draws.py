"""Initial values, by one compiled program for all parameters that are drawn alike.

An initialisation is one program in which every parameter has random numbers of its own, and XLA
compiles the same ones anew for each layer: of a deep model that takes longer than its training
step. Parameters of one shape differ in a number only, by which flax tells their keys apart. So what
each output of an initialisation is made of is cut out of the traced program; pieces that are equal
but for those numbers are one program that is called with each of them, and what draws nothing is
one more.
"""

import functools

import jax
import numpy as np
from jax.extend import core

# The primitive that makes a parameter's key of the model's, and the place of the parameter's number
# among its arguments.
_FOLD, _NUMBER = "random_fold_in", 1
_programs = {}  # (form, shapes of the arguments, shardings): compiled for this process


def by_pieces(function, shardings, *arguments):
    """`jax.jit(function, out_shardings=shardings)(*arguments)`, bit for bit.

    arguments: arrays or numbers.
    """
    plan = _Plan(function, [np.asarray(argument) for argument in arguments])
    shardings = jax.tree.broadcast(shardings, jax.tree.unflatten(plan.structure, plan.results))
    shardings, results = jax.tree.leaves(shardings), [None] * plan.structure.num_leaves
    for places, piece, numbers in plan.calls:
        draw = _compiled(plan, piece, tuple(shardings[place] for place in places))
        drawn = draw(plan.given, [np.uint32(number) for number in numbers])
        for place, result in zip(places, drawn, strict=True):
            results[place] = result
    return jax.tree.unflatten(plan.structure, results)


class _Plan:
    """How the outputs of a function are drawn.

    Attributes:
      structure: of the outputs; results: their variables.
      given: the constants of the function and its arguments, which all pieces get.
      pieces: one for each form, and last that which draws nothing.
      calls: [places of the outputs that a call gives, number of its piece, numbers for this].
    """

    def __init__(self, function, arguments):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        self.structure, self.results = jax.tree.structure(shapes), closed.jaxpr.outvars
        self.given, self.pieces, self.calls = [*closed.consts, *arguments], [], []
        of_form, rest = {}, []
        for place in range(len(self.results)):
            piece = _Piece(closed.jaxpr, [place])
            if not piece.numbers:
                rest.append(place)
                continue
            if piece.form not in of_form:
                of_form[piece.form] = len(self.pieces)
                self.pieces.append(piece)
            self.calls.append(([place], of_form[piece.form], piece.numbers))
        if rest:
            self.calls.append((rest, len(self.pieces), []))
            self.pieces.append(_Piece(closed.jaxpr, rest))


def _compiled(plan, number, shardings):
    """The compiled (given, numbers) -> outputs of a piece, from an equal one if there was one."""
    piece = plan.pieces[number]
    shapes = tuple((np.shape(x), jax.dtypes.result_type(x)) for x in plan.given)
    key = piece.form, shapes, shardings
    if key not in _programs:
        _programs[key] = jax.jit(piece.draw, out_shardings=list(shardings))
    return _programs[key]


class _Piece:
    """What some outputs of a program need of it.

    Attributes:
      numbers: of its `_FOLD`s, where they are constants.
      form: what pieces have in common that differ in `numbers` only.
    """

    def __init__(self, jaxpr, places):
        self._jaxpr, self._outputs = jaxpr, [jaxpr.outvars[place] for place in places]
        needed, equations = {v for v in self._outputs if not isinstance(v, core.Literal)}, []
        for equation in reversed(jaxpr.eqns):
            if needed.intersection(equation.outvars):
                equations.append(equation)
                needed.update(v for v in equation.invars if not isinstance(v, core.Literal))
        self._equations = equations[::-1]
        self.numbers = [int(e.invars[_NUMBER].val) for e in equations[::-1] if _numbered(e)]

    def draw(self, given, numbers):
        """The outputs, from what the whole program is given."""
        program, equations, inputs = self._jaxpr, list(self._equations), []
        for i, equation in enumerate(equations):
            if _numbered(equation):
                operands = list(equation.invars)
                inputs.append(core.Var(operands[_NUMBER].aval))
                operands[_NUMBER] = inputs[-1]
                equations[i] = equation.replace(invars=operands)
        inputs = [*program.constvars, *program.invars, *inputs]
        names = program.debug_info._replace(arg_names=None, result_paths=None)
        jaxpr = core.Jaxpr([], inputs, self._outputs, equations, debug_info=names)
        return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, []))(*given, *numbers)

    @functools.cached_property
    def form(self):
        inputs = [*self._jaxpr.constvars, *self._jaxpr.invars]
        names = {variable: number for number, variable in enumerate(inputs)}

        def name(variable):
            if isinstance(variable, core.Literal):
                return f"{np.asarray(variable.val).tolist()!r} {variable.aval}"
            return names.setdefault(variable, len(names))

        lines = []
        for equation in self._equations:
            operands = [name(v) for v in equation.invars]
            if _numbered(equation):
                operands[_NUMBER] = str(equation.invars[_NUMBER].aval)
            settings = tuple((key, _settings(value)) for key, value in equation.params.items())
            outputs = tuple(name(v) for v in equation.outvars)
            lines.append((equation.primitive.name, tuple(operands), settings, outputs))
        return tuple(lines), tuple(name(v) for v in self._outputs)


def _numbered(equation):
    """Whether an equation makes a key of a number that is written in the program."""
    return equation.primitive.name == _FOLD and isinstance(equation.invars[_NUMBER], core.Literal)


def _settings(value):
    """A setting of an equation, to be compared. Constants inside of a program do not show in its
    text; programs that have some are equal if they are one."""
    if isinstance(value, core.ClosedJaxpr):
        return str(value.jaxpr), value if value.consts else None
    return str(value)
