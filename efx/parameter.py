"""The one way in which layers make parameters."""

import contextlib
import contextvars

import jax.numpy as jnp
from flax import errors
from flax import linen as nn

_ONLY_SHAPES = contextvars.ContextVar("only_shapes", default=False)


@contextlib.contextmanager
def only_shapes():
    """Inside, initial values are zeros, for who traces an initialisation and takes no values of it:
    noise is a third of such a trace."""
    token = _ONLY_SHAPES.set(True)
    try:
        yield
    finally:
        _ONLY_SHAPES.reset(token)


def parameter(module, name, init, shape, axes):
    """A float32 parameter of a Flax module, with the logical names of its axes.

    `module.param` traces the initial values of a parameter that is there already, at every call of
    the module, only to compare shapes: a fifth of the time that tracing a model takes. Here the
    shapes are compared.

    init: (key, shape, dtype) -> initial values.
    Raises: flax.errors.ScopeParamShapeError if there is one of another shape.
    """
    if not module.has_variable("params", name):
        if _ONLY_SHAPES.get():
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, axes)
            return module.variable("params", name, zeros, None, shape, jnp.float32).value
        boxed = nn.with_logical_partitioning(init, axes)
        return module.param(name, boxed, shape, jnp.float32)
    value = nn.unbox(module.get_variable("params", name))
    if value.shape != shape:
        raise errors.ScopeParamShapeError(name, "/".join(module.path), value.shape, shape)
    return value
