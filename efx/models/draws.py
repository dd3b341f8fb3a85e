"""Initial values, by one compiled program for all parameters that are drawn alike.

An initialisation is one program in which every parameter has random numbers of its own, and XLA
compiles the same ones anew for each layer: of a deep model that takes longer than its training
step. Parameters of one shape differ in a number only, by which flax tells their keys apart. So what
each output of an initialisation is made of is cut out of the traced program; pieces that are equal
but for those numbers are one program that is called with each of them, and what draws nothing is
one more.
"""

import jax
import numpy as np
from jax.extend import core

# The primitive that makes a parameter's key of the model's, and the place of the parameter's number
# among its arguments.
_FOLD, _NUMBER = "random_fold_in", 1
_programs = {}  # (form, shapes of the arguments, sharding): compiled for this process


def by_pieces(function, shardings, *arguments):
    """`jax.jit(function, out_shardings=shardings)(*arguments)`, bit for bit.

    Args:
      arguments: arrays or numbers.
    """
    arguments = [np.asarray(argument) for argument in arguments]
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    given = [*closed.consts, *arguments]
    results, rest = [None] * len(closed.jaxpr.outvars), []
    shardings = jax.tree.leaves(jax.tree.broadcast(shardings, shapes))
    for place, sharding in enumerate(shardings):
        piece = _Piece(closed.jaxpr, [place])
        if not piece.numbers:
            rest.append(place)
            continue
        (results[place],) = piece.program(given, [sharding])(given, piece.numbers)
    if rest:
        kept = [shardings[place] for place in rest]
        piece = _Piece(closed.jaxpr, rest)
        for place, result in zip(rest, piece.program(given, kept)(given, []), strict=True):
            results[place] = result
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


class _Piece:
    """What some outputs of a program need of it.

    Attributes:
      numbers: of its `_FOLD`s, where they are constants.
    """

    def __init__(self, jaxpr, places):
        self._jaxpr, self._outputs = jaxpr, [jaxpr.outvars[place] for place in places]
        needed, equations = {v for v in self._outputs if not isinstance(v, core.Literal)}, []
        for equation in reversed(jaxpr.eqns):
            if needed.intersection(equation.outvars):
                equations.append(equation)
                needed.update(v for v in equation.invars if not isinstance(v, core.Literal))
        self._equations = equations[::-1]
        self.numbers = [np.asarray(e.invars[_NUMBER].val) for e in equations[::-1] if _numbered(e)]

    def program(self, given, shardings):
        """The compiled (given, numbers) -> outputs, from an equal piece if there was one."""
        shapes = tuple((np.shape(value), jax.dtypes.result_type(value)) for value in given)
        key = self._form(), shapes, tuple(shardings)
        if key not in _programs:
            evaluate = core.jaxpr_as_fun(core.ClosedJaxpr(self._with_numbers_as_inputs(), []))

            def draw(given, numbers):
                return evaluate(*given, *numbers)

            _programs[key] = jax.jit(draw, out_shardings=shardings)
        return _programs[key]

    def _with_numbers_as_inputs(self):
        program, equations, numbers = self._jaxpr, list(self._equations), []
        for i, equation in enumerate(equations):
            if _numbered(equation):
                operands = list(equation.invars)
                numbers.append(core.Var(operands[_NUMBER].aval))
                operands[_NUMBER] = numbers[-1]
                equations[i] = equation.replace(invars=operands)
        inputs = [*program.constvars, *program.invars, *numbers]
        names = program.debug_info._replace(arg_names=None, result_paths=None)
        return core.Jaxpr([], inputs, self._outputs, equations, debug_info=names)

    def _form(self):
        """What pieces have in common that differ in `numbers` only."""
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
    return equation.primitive.name == _FOLD and isinstance(equation.invars[_NUMBER], core.Literal)


def _settings(value):
    """A setting of an equation, to be compared. Constants inside of a program do not show in its
    text; programs that have some are equal if they are one."""
    if isinstance(value, core.ClosedJaxpr):
        return str(value.jaxpr), value if value.consts else None
    return str(value)
