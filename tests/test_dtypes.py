"""Which casts a slot takes without being asked to: those that lose nothing, and all of those."""

from __future__ import annotations

import math

import pytest
import torch

from devicegraph import CudaGraphBufferRegistry, GraphSlot, SlotError

NAMES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
#: Those that this torch has.
#: float8_e8m0fnu came with torch 2.7.
NAMES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
DTYPES = [getattr(torch, name) for name in NAMES if hasattr(torch, name)]


def telling_values(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a narrow type; of a wide one those at the edges of what others hold."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.itemsize == 1:
        return torch.arange(256).to(torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(2**16).to(torch.int32).to(torch.int16).view(dtype)
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        digits = [1 + 2.0**-k for k in range(1, 53) if 1 + 2.0**-k == float(torch.tensor(1 + 2.0**-k, dtype=dtype))]
        values = [0.0, -1.0, info.max, info.min, info.tiny, info.smallest_normal / 2, math.inf, *digits]
        return torch.tensor(values, dtype=torch.float64).to(dtype)
    info = torch.iinfo(dtype)
    edges = {sign * 2**power + near for sign in (-1, 1) for power in range(65) for near in (-1, 0, 1)}
    return torch.tensor(sorted(edge for edge in edges if info.min <= edge <= info.max), dtype=dtype)


def numbers(tensor: torch.Tensor) -> list[float]:
    """Python's numbers, which compare exactly whatever their types."""
    return (tensor.to(torch.float64) if tensor.is_floating_point() else tensor).tolist()


def loses(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether some value is another one after a cast."""
    values = telling_values(source)
    return any(
        before != after and not math.isnan(before)
        for before, after in zip(numbers(values), numbers(values.to(target)), strict=True)
    )


@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_a_cast_is_taken_where_it_loses_nothing(source: torch.dtype, target: torch.dtype) -> None:
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=1, max_num_tokens=1)
    slot = registry.register_slot(GraphSlot("x", lambda bs, tokens: (tokens,), target))
    one = torch.ones(1).to(source)
    sizes = {"raw_bs": 1, "padded_bs": 1, "raw_num_tokens": 1, "padded_num_tokens": 1}
    if loses(source, target):
        with pytest.raises(SlotError, match="narrowing-cast"):
            registry.fill_from({"x": one}, **sizes)
        slot = GraphSlot("y", lambda bs, tokens: (tokens,), target, allow_narrowing=True)
        registry.register_slot(slot)
        registry.fill_from({"y": one}, **sizes)
    else:
        registry.fill_from({"x": one}, **sizes)
    assert slot.buffer.to(torch.float64).item() == 1
