"""The operators at which a compiled forward is split: what must run eagerly between its pieces."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from devicegraph.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._library.custom_ops import CustomOpDef
    from torch._ops import OpOverload, OpOverloadPacket

__all__ = ["register_split_op", "split_operators"]

#: Older ones have not been tried: what they trace of sizes that are not known is another matter.
OLDEST_TORCH_FOR_PIECES: Final = "2.11"

_NAME: Final = re.compile(r"\w+(::|\.)\w+(\.\w+)?")
_registered: dict[str, None] = {}


def register_split_op(operator: OpOverload | OpOverloadPacket | CustomOpDef | str) -> None:
    """Makes `tc_piecewise` split forwards at an operator, in every capture from now on.

    Args:
        operator: such as `torch.ops.engine.attention`, what `torch.library.custom_op` made, or a name,
            `engine::attention`, for one that is defined later. All overloads of it are meant. It needs a fake kernel,
            and takes what changes from step to step from `current_batch()`.

    Raises:
        BackendError: `split-op-invalid`: something else.
    """
    name = operator if isinstance(operator, str) else getattr(operator, "_qualname", None) or str(operator)
    # `engine::attention`, `engine.attention` and `engine.attention.default` are one operator.
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BackendError(
            f"`register_split_op`: {operator!r} is no operator",
            code="split-op-invalid",
            hint="give it `torch.ops.NAMESPACE.NAME`, or the name as `NAMESPACE::NAME`",
        )
    _registered["::".join(name.replace("::", ".").split(".")[:2])] = None


def split_operators() -> tuple[str, ...]:
    """The names of the registered operators, in order of registration."""
    return tuple(_registered)


@contextmanager
def also_split_at(operator: str) -> Iterator[None]:
    """Registers an operator for the block only: whether one is registered at all decides what other runners do."""
    before = _registered.copy()
    register_split_op(operator)
    try:
        yield
    finally:
        _registered.clear()
        _registered.update(before)
