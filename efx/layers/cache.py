"""Variables of the decoding cache."""

from flax import linen as nn


def variables(module, tag, **makers):
    """{name: variable} of the collection `cache`, each made by its function where it is missing.

    With a tag, which tells apart the uses of a layer that is used several times, they lie one
    level deeper, under the tag: their own names say what they hold, whatever the use.
    """
    if not tag:
        return {name: module.variable("cache", name, make) for name, make in makers.items()}
    return _Tagged(name=tag, parent=module)(makers)


class _Tagged(nn.Module):
    """A place for variables of one use of a layer."""

    @nn.compact
    def __call__(self, makers):
        return variables(self, "", **makers)
