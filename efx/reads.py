"""In which precision a program reads its arguments.

Parameters are float32, and a model of bfloat16 converts each of them where it multiplies with it. A
training step reads them once for many tokens. A program that is called for every few tokens, as
decoding is, spends its time on reading parameters; given those converted that it converts itself,
it reads half as much and computes the same bits.
"""

import jax
from jax.extend import core

# What changes the places of numbers and no number: to convert before is to convert after.
_MOVES = (
    "broadcast_in_dim", "copy", "dynamic_slice", "expand_dims", "gather", "reshape", "slice",
    "sharding_constraint", "squeeze", "transpose",
)  # fmt: skip
_CALLS = ("closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat2")


def only_as(dtype, function, *arguments):
    """Of each leaf of the first argument, whether all that a function does with it is to convert it
    to `dtype`, its places changed or not. No is the answer where that cannot be told.

    Args:
      arguments: of the function, arrays or their shapes.
    """
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    leaves = jax.tree.leaves(arguments[0])
    whole = _read_whole(jaxpr, dtype)[: len(leaves)]
    return [not as_it_is for as_it_is in whole]


def _read_whole(jaxpr, dtype):
    """Of each argument, whether something other than its conversion is read."""
    whole = {variable for variable in jaxpr.outvars if not isinstance(variable, core.Literal)}
    for equation in reversed(jaxpr.eqns):
        operands = zip(equation.invars, _whole_operands(equation, whole, dtype), strict=True)
        for operand, is_whole in operands:
            if is_whole and not isinstance(operand, core.Literal):
                whole.add(operand)
    return [variable in whole for variable in jaxpr.invars]


def _whole_operands(equation, whole, dtype):
    """Of each operand, whether this equation reads more of it than its conversion.

    Args:
      whole: variables of which what comes after the equation does.
    """
    name, params, count = equation.primitive.name, equation.params, len(equation.invars)
    if name == "convert_element_type" and params["new_dtype"] == dtype:
        return [False]
    if name in _MOVES:
        return [equation.outvars[0] in whole, *[True] * (count - 1)]
    if name in _CALLS:
        inner = params["call_jaxpr" if name.startswith("custom") else "jaxpr"]
        return _read_whole(getattr(inner, "jaxpr", inner), dtype)
    if name == "cond":
        branches = [_read_whole(branch.jaxpr, dtype) for branch in params["branches"]]
        return [True, *map(any, zip(*branches, strict=True))]
    # What a loop carries is another value at every turn.
    if name == "while":
        of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
        test = _read_whole(params["cond_jaxpr"].jaxpr, dtype)[:of_test]
        body = _read_whole(params["body_jaxpr"].jaxpr, dtype)[:of_body]
        return [*test, *body, *[True] * (count - of_test - of_body)]
    if name == "scan":
        jaxpr = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
        # JAX 0.10 and 0.11 tell these numbers otherwise. What a scan takes slices of, or stacks,
        # has an axis more outside of it.
        carried = _as_many_axes(equation.outvars, jaxpr.outvars)
        constants = _as_many_axes(equation.invars, jaxpr.invars) - carried
        inner = _read_whole(jaxpr, dtype)
        return [*inner[:constants], *[True] * carried, *inner[constants + carried :]]
    return [True] * count


def _as_many_axes(outside, inside):
    """How many of the variables outside of a loop have as many axes as those inside."""
    pairs = zip(outside, inside, strict=True)
    return sum(outer.aval.ndim == inner.aval.ndim for outer, inner in pairs)
