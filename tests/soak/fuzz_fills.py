"""Batches of anything into slots of anything: a fill is what the specification says, or refuses and writes nothing."""

from __future__ import annotations

import contextlib
import sys
import types
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import devicegraph as dg
from hostile import FoundError, Index, Maps, OwnError, main, odd_objects, outcome
from naive_fill import Declared, naive_fill
from odd_tensors import not_dense, without_memory

if TYPE_CHECKING:
    import random

MAX_BS, MAX_TOKENS = 6, 12
STEPS = 24
MODES = [contextlib.nullcontext, torch.no_grad, torch.inference_mode]
#: Bits of the mantissa and of the exponent.
FLOATS = {torch.float16: (11, 5), torch.bfloat16: (8, 8), torch.float32: (24, 8), torch.float64: (53, 11)}
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32]
DTYPES = [torch.bool, *INTEGERS, *FLOATS]
ODD_OBJECTS = odd_objects()
ODD_TENSORS = [tensor for tensor, _ in not_dense().values()] + [
    *without_memory(torch.ones(3)).values(), torch.ones(3, device="meta"), torch.ones(3, dtype=torch.complex64),
]  # fmt: skip


class Plain(torch.Tensor):
    """A subclass that adds nothing."""


class Liar(torch.Tensor):
    """A subclass that says it is larger than its memory."""

    shape = property(lambda self: torch.Size([MAX_TOKENS]))  # type: ignore[assignment]

    def size(self, *_: Any) -> Any:
        return torch.Size([MAX_TOKENS])

    def stride(self, *_: Any) -> Any:
        return (1 << 40,)

    def data_ptr(self) -> int:
        return 8

    def numel(self) -> int:
        return 1 << 50


class Refuses(torch.Tensor):
    """A subclass of which nothing can be asked by operators."""

    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> Any:
        raise OwnError


class Source(NamedTuple):
    """What a batch brings for a slot, and whether it has to be taken: None where either is right."""

    value: Any
    is_right: bool | None


# The oracle


def holds(to: torch.dtype, source: torch.dtype) -> bool:
    """Whether every value of a dtype is one of another, read off the numbers of their bits."""
    if to == source or source == torch.bool:
        return True
    if to == torch.bool:
        return False
    if source in FLOATS:
        return to in FLOATS and all(own >= other for own, other in zip(FLOATS[to], FLOATS[source], strict=True))
    low, high = torch.iinfo(source).min, torch.iinfo(source).max
    if to in FLOATS:
        mantissa, exponent = FLOATS[to]
        bits = max(high.bit_length(), (-low - 1).bit_length() if low < 0 else 0)
        return bits <= mantissa and bits <= 1 << (exponent - 1)
    return torch.iinfo(to).min <= low and high <= torch.iinfo(to).max


def is_size(value: Any) -> bool:
    if isinstance(value, Index):
        value = value.value
    return isinstance(value, int) and not isinstance(value, bool)


def as_int(value: Any) -> int:
    return value.value if isinstance(value, Index) else int.__index__(value)


def are_right_sizes(sizes: dict[str, Any], declared: list[Declared]) -> bool:
    if not all(map(is_size, sizes.values())):
        return False
    raw_bs, padded_bs, raw_tokens, padded_tokens = map(as_int, sizes.values())
    if not (0 <= raw_bs <= padded_bs <= MAX_BS and 0 <= raw_tokens <= padded_tokens <= MAX_TOKENS):
        return False
    return all(
        (padded_bs if each.slot.axis == "bs" else padded_tokens) % unit_of(each) == 0
        for each in declared
        if each.slot.axis != "none"
    )


def unit_of(declared: Declared) -> int:
    return 2 if declared.rows(1) == declared.rows(0) else 1


def raw_bytes(buffer: torch.Tensor) -> torch.Tensor:
    """All memory that is behind a buffer, the gaps between its elements too."""
    return torch.tensor([], dtype=torch.uint8).set_(buffer.untyped_storage())


# What goes in


def a_slot(draw: random.Random, name: str) -> tuple[Declared, dict[str, Any]]:
    axis = draw.choice(["bs", "tokens", "tokens", "none"])
    capacity = MAX_BS if axis == "bs" else MAX_TOKENS
    base, step, unit = draw.choice([(0, 1, 1), (0, 1, 1), (0, 1, 1), (1, 1, 1), (0, 1, 2), (0, 3, 2)])
    shape = [draw.randint(1, 3) for _ in range(draw.randrange(3))]
    dim = draw.randint(0, len(shape))
    shape.insert(dim, 3 if axis == "none" else base + step * (capacity // unit))
    trailing = "prefix" if draw.random() < 0.3 and (axis == "none" or dim < len(shape) - 1) else "exact"
    origins = ["field"] * 4 + ["source_fn", "elsewhere"] + ["value_fn"] * (len(shape) == 1 and trailing == "exact")
    origin = draw.choice(origins)
    given: dict[str, Any] = {}

    def give(*_: object) -> Any:
        if given[name] is OwnError:
            raise OwnError
        return given[name]

    slot = dg.GraphSlot(
        name,
        lambda bs, tokens: tuple(shape),
        draw.choice(DTYPES),
        axis=axis,
        padding_policy=dg.PaddingPolicy.KEEP_PAD if axis == "none" else draw.choice(list(dg.PaddingPolicy)),
        pad_value=draw.randint(0, 1),
        slice_fn=None
        if axis == "none" or (dim == 0 and (base, step, unit) == (0, 1, 1))
        else lambda buffer, n: buffer.narrow(dim, 0, base + step * (n // unit)),
        source_fn=give if origin == "source_fn" else None,
        value_fn=give if origin == "value_fn" else None,
        copy_from_fb=origin != "elsewhere",
        required=origin == "field" and draw.random() < 0.2,
        allow_narrowing=draw.random() < 0.6,
        source_device=draw.choice([None, None, "cpu", "any"]),
        trailing=trailing,
    )
    return Declared(slot, dim, (lambda n: 0) if axis == "none" else lambda n: base + step * (n // unit)), given


def a_tensor(draw: random.Random, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Values in memory of some order of dimensions, with gaps, from somewhere in a storage."""
    values = torch.randint(0, 120, shape, generator=torch.Generator().manual_seed(draw.getrandbits(30)))
    values = (values > 60) if dtype == torch.bool else values.to(dtype)
    if draw.random() < 0.4:
        return values
    order = draw.sample(range(len(shape)), len(shape))
    gap, offset = draw.choice([0, 0, 1]), draw.choice([0, 0, 1, 3])
    memory = torch.zeros(offset + values.numel() * (1 + gap), dtype=dtype)[offset:]
    view = memory.view([*(shape[dim] for dim in order), 1 + gap]).select(-1, 0)
    return view.permute([order.index(dim) for dim in range(len(shape))]).copy_(values)


def dressed(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, as another class or of another mode."""
    match draw.randrange(12):
        case 0:
            return tensor.as_subclass(Plain)
        case 1:
            return torch.nn.Parameter(tensor, requires_grad=False)
        case 2 if tensor.is_floating_point():
            return tensor.clone().requires_grad_()
        case 3:
            with torch.inference_mode():
                return tensor.clone()
        case 4 if tensor.ndim and tensor.shape[-1]:
            return tensor[..., :1].expand(tensor.shape)
    return tensor


def good_shape(draw: random.Random, declared: Declared, raw: int, padded: int) -> list[int]:
    slot = declared.slot
    shape = list(slot.shape_fn(MAX_BS, MAX_TOKENS))
    if slot.axis != "none":
        shape[declared.dim] = draw.randint(0, declared.rows(padded)) if slot.source_fn else declared.rows(raw)
    if slot.trailing == "prefix":
        shape[-1] = draw.randint(0, shape[-1])
    return shape


def a_number(draw: random.Random, declared: Declared, raw: int, padded: int) -> Source:
    slot = declared.slot
    most = slot.shape_fn(MAX_BS, MAX_TOKENS)[0] if slot.axis == "none" else declared.rows(padded)
    least = most if slot.axis == "none" else min(declared.rows(raw), most)
    match draw.randrange(8):
        case 0 if least > 0:
            return Source([1] * (least - 1), False)
        case 1:
            return Source([1] * (most + 1), False)
        case 2:
            return Source(draw.choice(["x", object(), [[1]], ["x"] * most, {}, b"1"]), None if most == 0 else False)
        case 3 if slot.dtype in INTEGERS and least > 0:
            return Source(draw.choice([float("nan"), 1 << 70, 0.5, torch.iinfo(slot.dtype).max + 1]), False)
        case 4:
            return Source(OwnError, False)
    return Source(draw.choice([1, 0, [1] * draw.randint(least, most), (0,) * most]), True)


def a_source(draw: random.Random, declared: Declared, raw: int, padded: int, buffers: list[torch.Tensor]) -> Source:
    """What a batch brings for a slot; sizes are right."""
    slot = declared.slot
    if slot.value_fn is not None:
        return a_number(draw, declared, raw, padded)
    shape = good_shape(draw, declared, raw, padded)
    own = slot.buffer
    assert own is not None
    kind = draw.random()
    if kind < 0.55:
        dtype = slot.dtype if draw.random() < 0.6 else draw.choice(DTYPES)
        return Source(dressed(draw, a_tensor(draw, shape, dtype)), slot.allow_narrowing or holds(slot.dtype, dtype))
    if kind < 0.7:
        return Source(None, slot.source_fn is not None or not slot.required)
    if kind < 0.78:  # another shape
        other = list(shape)
        match draw.randrange(4):
            case 0 if other:
                place = draw.randrange(len(other))
                other[place] += draw.choice([1, -1, 2, 7])
                other[place] = max(other[place], 0)
            case 1:
                other.insert(draw.randint(0, len(other)), draw.choice([1, 0, 3]))
            case 2 if other:
                other.pop()
            case _:
                other = [1]
        return Source(a_tensor(draw, other, slot.dtype), is_right_shape(declared, other, raw, padded))
    if kind < 0.84:
        return Source(draw.choice(ODD_TENSORS), False)
    if kind < 0.89:
        value = draw.choice(ODD_OBJECTS)
        return Source(value, False)
    if kind < 0.92:
        match draw.randrange(4):
            case 3:
                return Source(OwnError, False)
            case 0:
                return Source(torch.ones(max(shape[0], 1) if shape else 1, dtype=slot.dtype).as_subclass(Liar), None)
            case 1:
                return Source(torch.ones(shape, dtype=slot.dtype).as_subclass(Refuses), None)
            case _:
                return Source(a_tensor(draw, shape, slot.dtype)[...].as_subclass(Plain), True)
    rows = own
    for dim, size in enumerate(shape):
        if size > rows.shape[dim]:
            return Source(a_tensor(draw, shape, slot.dtype), True)
        rows = rows.narrow(dim, 0, size)
    if kind < 0.96:  # the slot's own rows, which change nothing
        narrower = slot.trailing == "prefix" and rows.shape[-1] != own.shape[-1]
        return Source(rows, rows.numel() == 0 or not narrower)
    other = draw.choice(buffers)
    if draw.random() < 0.5 or rows.numel() == 0:
        return aliased(other, declared, shape)
    for dim, size in enumerate(shape):
        if 0 < size < own.shape[dim]:  # its own rows, one further
            shifted = own.narrow(dim, 1, size)
            for other_dim, extent in enumerate(shape):
                shifted = shifted if other_dim == dim else shifted.narrow(other_dim, 0, extent)
            return Source(shifted, False)
    return Source(rows, not (slot.trailing == "prefix" and rows.shape[-1] != own.shape[-1]))


def aliased(buffer: torch.Tensor, declared: Declared, shape: list[int]) -> Source:
    """A source of the right shape in the memory of a buffer, a byte's view of it where the dtype is another."""
    slot = declared.slot
    flat = raw_bytes(buffer)
    size = torch.empty(0, dtype=slot.dtype).element_size()
    count = 1
    for extent in shape:
        count *= extent
    if count == 0 or count * size > len(flat):
        return Source(torch.zeros(shape, dtype=slot.dtype), True)
    view = flat[: count * size]
    if view.data_ptr() % size:
        return Source(torch.zeros(shape, dtype=slot.dtype), True)
    view = view.view(slot.dtype).view(shape)
    own = slot.buffer
    assert own is not None
    in_place = (
        view.data_ptr() == own.data_ptr()
        and all(n == 1 or a == b for n, a, b in zip(shape, view.stride(), own.stride(), strict=True))
        and (slot.trailing == "exact" or shape[-1] == own.shape[-1])
    )
    # A storage may have gaps before its buffer's first element: a source there touches nothing.
    first = min(own.data_ptr(), buffer.data_ptr())
    return Source(view, True if in_place else False if first == view.data_ptr() else None)


def is_right_shape(declared: Declared, shape: list[int], raw: int, padded: int) -> bool:
    slot = declared.slot
    wanted = list(slot.shape_fn(MAX_BS, MAX_TOKENS))
    if len(shape) != len(wanted):
        return False
    if slot.axis != "none":
        if slot.source_fn is not None:
            wanted[declared.dim] = shape[declared.dim] if shape[declared.dim] <= declared.rows(padded) else -1
        else:
            wanted[declared.dim] = declared.rows(raw)
    if slot.trailing == "prefix" and shape[-1] <= wanted[-1]:
        wanted[-1] = shape[-1]
    return shape == wanted


def some_sizes(draw: random.Random) -> dict[str, Any]:
    padded_bs, padded_tokens = 2 * draw.randint(0, MAX_BS // 2), 2 * draw.randint(0, MAX_TOKENS // 2)
    raw_bs, raw_tokens = draw.randint(0, padded_bs), draw.randint(0, padded_tokens)
    if draw.random() < 0.05:
        raw_bs = raw_tokens = 0
    sizes: dict[str, Any] = {
        "raw_bs": raw_bs, "padded_bs": padded_bs, "raw_num_tokens": raw_tokens, "padded_num_tokens": padded_tokens,
    }  # fmt: skip
    if draw.random() < 0.1:
        sizes[draw.choice(list(sizes))] = draw.choice(
            [True, False, 2.0, "2", None, Index(2), Index(True), 1 << 40, 1 << 63, 1 << 64, -1, 3, MAX_TOKENS + 2]
        )
    return sizes


def a_batch(draw: random.Random, fields: dict[str, Any]) -> Any:
    """The fields as a batch of some kind; `OwnError` as a value is raised where it is read."""
    if any(value is OwnError for value in fields.values()):

        class Broken:
            def __getattr__(self, name: str) -> Any:
                if fields.get(name) is OwnError:
                    raise OwnError
                raise AttributeError(name)

        broken = Broken()
        vars(broken).update({name: value for name, value in fields.items() if value is not OwnError})
        return broken
    match draw.randrange(5):
        case 0:
            return types.SimpleNamespace(**fields)
        case 1:
            return Maps(["not", "these"], **{name: fields.get(name) for name in [*fields, *NAMES]})
        case 2:

            class Lazy:
                def __getattr__(self, name: str) -> Any:
                    if name not in fields:
                        raise AttributeError(name)
                    return fields[name]

            return Lazy()
        case 3:
            return types.MappingProxyType(fields)
    return fields


NAMES = [f"slot{index}" for index in range(4)]


def bound_to(draw: random.Random, slot: dg.GraphSlot) -> torch.Tensor | None:
    if draw.random() < 0.6:
        return None
    shape = list(slot.shape_fn(MAX_BS, MAX_TOKENS))
    return a_tensor(draw, shape, slot.dtype)


def case(draw: random.Random) -> Counter[str]:
    """A registry, and so many fills of it."""
    words: Counter[str] = Counter()
    executor = draw.choice(["auto", "foreach", "native"])
    registry = dg.CudaGraphBufferRegistry(device="cpu", max_bs=MAX_BS, max_num_tokens=MAX_TOKENS, executor=executor)
    made = [a_slot(draw, name) for name in NAMES[: draw.randint(1, 4)]]
    declared = [each for each, _ in made]
    given = {each.slot.name: values for each, values in made}
    for each in declared:
        registry.register_slot(each.slot, bind=bound_to(draw, each.slot))
    buffers = [each.slot.buffer for each in declared if each.slot.buffer is not None]
    for _ in range(STEPS):
        words[step(draw, registry, declared, given, buffers)] += 1
    return words


def step(
    draw: random.Random,
    registry: dg.CudaGraphBufferRegistry,
    declared: list[Declared],
    given: dict[str, dict[str, Any]],
    buffers: list[torch.Tensor],
) -> str:
    sizes = some_sizes(draw)
    are_right = are_right_sizes(sizes, declared)
    ints = list(map(as_int, sizes.values())) if are_right else [0, 0, 0, 0]
    sources: dict[str, Source] = {}
    for each in declared:
        raw, padded = (ints[0], ints[1]) if each.slot.axis == "bs" else (ints[2], ints[3])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            source = a_source(draw, each, raw, padded, buffers)
        if source.value is None and each.slot.required and not (ints[0] or ints[2]):
            source = Source(None, True)
        sources[each.slot.name] = source
        given[each.slot.name][each.slot.name] = source.value
    fields = {
        each.slot.name: sources[each.slot.name].value
        for each in declared
        if each.slot.is_plain and (sources[each.slot.name].value is not None or draw.random() < 0.5)
    }
    is_unread = not fields and draw.random() < 0.3
    batch: Any = {} if is_unread else a_batch(draw, fields or {"other": 1})
    unread = isinstance(batch, dict) and not batch
    verdicts = [
        True
        if not each.slot.copy_from_fb or (unread and each.slot.value_fn is None and each.slot.source_fn is not None)
        else sources[each.slot.name].is_right
        for each in declared
    ]
    if draw.random() < 0.3:
        for buffer in buffers:
            raw_bytes(buffer).fill_(draw.choice([0, 1, 0x5A]) if buffer.dtype != torch.bool else 1)
    before = [raw_bytes(buffer).clone() for buffer in buffers]
    mode = draw.choice(MODES)

    def fill() -> None:
        with mode():
            registry.fill_from(batch, **sizes)

    _, error = outcome(fill)
    right = are_right and all(verdict is not False for verdict in verdicts)
    if error is None and not right:
        raise FoundError(f"accepted: {told(sizes, declared, sources)}")
    if error is not None:
        if right and None not in verdicts:
            raise FoundError(f"refused: {error}: {told(sizes, declared, sources)}")
        for was, buffer in zip(before, buffers, strict=True):
            if not torch.equal(raw_bytes(buffer), was):
                raise FoundError(f"written in spite of {error!r}: {told(sizes, declared, sources)}")
        return "refused"
    if None not in verdicts:
        check_values(declared, sources, before, ints, unread)
    return "accepted"


def check_values(
    declared: list[Declared], sources: dict[str, Source], before: list[torch.Tensor], ints: list[int], unread: bool
) -> None:
    for each, was in zip(declared, before, strict=True):
        slot = each.slot
        assert slot.buffer is not None
        raw, padded = (ints[0], ints[1]) if slot.axis == "bs" else (ints[2], ints[3])
        wanted = torch.empty(0, dtype=slot.dtype).set_(
            was.untyped_storage(), slot.buffer.storage_offset(), slot.buffer.shape, slot.buffer.stride()
        )
        source = None if not slot.copy_from_fb or (unread and slot.value_fn is None) else sources[slot.name].value
        if slot.value_fn is not None:
            rows = wanted.shape[0] if slot.axis == "none" else each.rows(raw)
            source = torch.tensor([source] * rows if isinstance(source, int) else source, dtype=slot.dtype)
        elif source is not None and source.untyped_storage().data_ptr() == slot.buffer.untyped_storage().data_ptr():
            source = torch.empty(0, dtype=source.dtype).set_(
                was.clone().untyped_storage(), source.storage_offset(), source.shape, source.stride()
            )
        with torch.no_grad():
            source = None if source is None else source.as_subclass(torch.Tensor)
            naive_fill(each, wanted, source, raw, padded, unread)
        if not torch.equal(was, raw_bytes(slot.buffer)):
            raise FoundError(
                f"slot {slot.name} holds {slot.buffer}, not {wanted}: {told({'ints': ints}, declared, sources)}"
            )


def told(sizes: dict[str, Any], declared: list[Declared], sources: dict[str, Source]) -> str:
    def of(value: Any) -> str:
        if type(value) in (torch.Tensor, Plain, torch.nn.Parameter):
            return f"{value.dtype} {list(value.shape)} {value.stride()} at {value.data_ptr():x}"
        return type(value).__name__

    slots = [
        f"{each.slot!r} {each.slot.trailing} required={each.slot.required} narrow={each.slot.allow_narrowing} "
        f"dim={each.dim} <- {of(sources[each.slot.name].value)} {sources[each.slot.name].is_right}"
        for each in declared
    ]
    return f"{sizes}\n" + "\n".join(slots)


if __name__ == "__main__":
    main("fuzz_fills", case, 20_000)
