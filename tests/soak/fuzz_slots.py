"""Declarations of anything: slots, buffers, pools and copies are made right, or refused with nothing changed."""

from __future__ import annotations

import sys
import types
import warnings
from collections import namedtuple
from dataclasses import make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import devicegraph as dg
from devicegraph import _core
from hostile import FoundError, Index, Lists, Maps, OwnError, Raises, main, odd_objects, outcome
from odd_tensors import not_dense, without_memory

if TYPE_CHECKING:
    import random

ODD = odd_objects()
DTYPES = [torch.int64, torch.int32, torch.float32, torch.bool, torch.uint8, torch.float64, torch.bfloat16]
MAX_BS, MAX_TOKENS = 4, 8


def a_tensor(draw: random.Random) -> torch.Tensor:
    """A buffer of some kind, most of them of the shape and type that slots here have."""
    tensor = torch.zeros(draw.choice([MAX_TOKENS, MAX_TOKENS, MAX_BS, 0, 3]), dtype=draw.choice(DTYPES))
    match draw.randrange(14):
        case 0:
            return tensor[::2]
        case 1:
            return torch.zeros(1, dtype=tensor.dtype).expand(MAX_TOKENS)
        case 2:
            return torch.zeros(MAX_TOKENS, requires_grad=True)
        case 3:
            with torch.inference_mode():
                return torch.zeros(MAX_TOKENS, dtype=torch.int64)
        case 4:
            return torch.zeros(MAX_TOKENS, dtype=torch.int64, device="meta")
        case 5:
            return torch.zeros(MAX_TOKENS, dtype=draw.choice([torch.complex64, torch.float8_e5m2]))
        case 6:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return draw.choice([value for value, _ in not_dense().values()])
        case 7:
            return draw.choice(list(without_memory(torch.zeros(MAX_TOKENS)).values()))
        case 8:
            return torch.zeros(2, MAX_TOKENS).t()
        case 9:
            return torch.zeros(2, 2, 2, dtype=torch.int64)
    return tensor


def a_shape(draw: random.Random) -> Any:
    if draw.random() < 0.3:
        return draw.choice(ODD)
    sizes = [MAX_BS, MAX_TOKENS, 2 * MAX_TOKENS, 0, 1, 3, -1, True, Index(8), 2**62, 2**63, 2**64, 2.0]
    return draw.choice([list, tuple])(draw.choice(sizes) for _ in range(draw.randrange(4)))


def a_cut(draw: random.Random) -> Any:
    """A `slice_fn`, good or not."""
    wrong = draw.choice([*ODD, torch.zeros(4)])
    return draw.choice([
        lambda buffer, n: buffer[:n], lambda buffer, n: buffer[: n + 1], lambda buffer, n: buffer[:, :n],
        lambda buffer, n: buffer[: n // 2], lambda buffer, n: buffer[n:], lambda buffer, n: buffer[:n].clone(),
        lambda buffer, n: buffer[: n * n], lambda buffer, n: buffer.flip(0)[:n], lambda buffer, n: wrong,
        lambda buffer, n: buffer, lambda buffer, n: buffer[: 1 if n == 3 else n], lambda buffer, n: buffer.view(-1)[:n],
        lambda buffer, n: buffer.to("meta")[:n], lambda buffer, n: draw.choice(ODD),
    ])  # fmt: skip


def a_declaration(draw: random.Random) -> tuple[str, dict[str, Any]]:
    shape = draw.choice([(MAX_TOKENS,), (MAX_TOKENS,), (3, MAX_TOKENS), (MAX_BS, 2)])
    shape_fn: Any = lambda bs, tokens: shape  # noqa: E731
    if draw.random() < 0.3:
        given = a_shape(draw)
        shape_fn = lambda bs, tokens: given  # noqa: E731
    options: dict[str, Any] = {"shape_fn": shape_fn, "dtype": draw.choice(DTYPES)}
    if shape == (MAX_BS, 2):
        options["axis"] = "bs"
    if shape[0] == 3 or draw.random() < 0.2:
        options["slice_fn"] = a_cut(draw) if draw.random() < 0.5 else lambda buffer, n: buffer[:, :n]
    for name, good in (
        ("axis", ["bs", "tokens", "none"]), ("padding_policy", list(dg.PaddingPolicy)),
        ("pad_value", [0, 1, -1, 300, 0.5]),
        ("trailing", ["exact", "prefix"]), ("source_device", ["cpu", "any", None]),
        ("device", ["cpu", "meta", None, "cuda:9"]),
        ("required", [True]), ("allow_narrowing", [True]), ("copy_from_fb", [False]), ("enabled", [False]),
        ("value_fn", [lambda context: 1]), ("source_fn", [lambda batch, context: None]), ("buffer", [None]),
        ("post_fill", [lambda *_: None]), ("dtype", DTYPES),
    ):  # fmt: skip
        chance = draw.random()
        if chance < 0.12:
            options[name] = draw.choice(good)
        elif chance < 0.14:
            options[name] = draw.choice(ODD)
    if draw.random() < 0.1:
        options["buffer"] = a_tensor(draw)
    name = draw.choice(["ids", "ids", "lens", "a.b", "batch_size", "not a name", *(ODD if draw.random() < 0.1 else [])])
    return name, options


def a_registry(draw: random.Random) -> Any:
    options: dict[str, Any] = {"device": "cpu", "max_bs": MAX_BS, "max_num_tokens": MAX_TOKENS}
    if draw.random() < 0.5:
        options["share_pool"] = True
    if draw.random() < 0.4:
        options["executor"] = draw.choice(["foreach", "native", "auto"])
    if draw.random() < 0.1:
        options[draw.choice([*options, "executor", "share_pool"])] = draw.choice(ODD)
    return dg.CudaGraphBufferRegistry(**options)


#: What torch says of a buffer that no memory could hold.
OUT_OF_MEMORY = (RuntimeError, MemoryError)


def declares(draw: random.Random) -> str:
    registry, error = outcome(lambda: a_registry(draw))
    if error is not None:
        return "refused"
    pool = len(dg.input_buffer_pool)
    for _ in range(draw.randint(1, 4)):
        name, options = a_declaration(draw)
        before = registry.slot_names
        slot, error = outcome(lambda: dg.GraphSlot(name, **options))  # noqa: B023  # called at once
        if error is None:
            bind = a_tensor(draw) if draw.random() < 0.3 else draw.choice(ODD) if draw.random() < 0.1 else None
            kept = (
                bind.clone() if type(bind) is torch.Tensor and bind.layout is torch.strided and is_real(bind) else None
            )
            _, error = outcome(lambda: registry.register_slot(slot, bind=bind), *own_fault(options))  # noqa: B023
            if kept is not None and not torch.equal(kept, bind):
                raise FoundError(f"{options!r}: the bound tensor was written")
        if error is not None:
            if registry.slot_names != before:
                raise FoundError(f"{options!r}: {error!r}, and the slots are {registry.slot_names}")
            if slot is not None and (slot._layout is not None):
                raise FoundError(f"{options!r}: {error!r}, and the slot is registered")
        elif slot.enabled:
            buffer = slot.buffer
            assert buffer.dtype == slot.dtype
            assert registry.slot_names == (*before, slot.name)
            rows = slot.slice_for(registry.max_bs, registry.max_num_tokens)
            assert rows.data_ptr() == buffer.data_ptr()
    uses(draw, registry)
    if len(dg.input_buffer_pool) > pool + 4:
        raise FoundError("the pool grows")
    return "refused" if error else "accepted"


def is_real(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and not tensor.is_nested and tensor.untyped_storage().nbytes() > 0


def own_fault(options: dict[str, Any]) -> tuple[type[BaseException], ...]:
    """What functions of the slot raise of their own accord, and what torch says of buffers that no memory holds."""
    return (IndexError, *OUT_OF_MEMORY, TypeError) if "slice_fn" in options else OUT_OF_MEMORY


def a_template(draw: random.Random) -> Any:
    ids = torch.arange(3)
    named = namedtuple("named", ["ids", "batch_size"])  # noqa: PYI024
    return draw.choice([
        {}, {"ids": ids}, types.SimpleNamespace(ids=ids), named(ids, 3), Maps(["ids"], ids=ids), None, 3, object(),
        types.MappingProxyType({"ids": ids}), make_dataclass("Frozen", ["ids"], frozen=True)(ids), Raises(),
        dict, "ids",
        make_dataclass("Slotted", ["ids"], slots=True)(ids), [ids], {1: ids}, Lists(2, ids),
    ])  # fmt: skip


def uses(draw: random.Random, registry: Any) -> None:
    """What there is to ask of a registry, with what nobody should ask."""
    sizes = [0, 1, 4, 8, 9, -1, True, 2.0, None, Index(2), 2**63, *ODD[:6]]
    template = a_template(draw)
    buckets = {"padded_bs": draw.choice(sizes), "padded_num_tokens": draw.choice(sizes)}
    fill = {"raw_bs": draw.choice(sizes), "raw_num_tokens": draw.choice(sizes), **buckets}
    calls = [
        lambda: registry.views(**buckets),
        lambda: registry.extract_buffer(forward_batch_template=template, **buckets),
        lambda: registry.fill_from(template, **fill),
        lambda: registry.get_slot(draw.choice(ODD)),
        lambda: registry.register_slot(draw.choice(ODD)),
        registry.reset_index_buffers,
        lambda: repr(registry),
    ]
    for call in draw.sample(calls, 3):
        # Slots may lie on `meta`, whose memory cannot be filled; names may be of any kind.
        outcome(call, TypeError, *own_fault({"slice_fn": 1} if any(slot.slice_fn for slot in registry.slots) else {}))


def pools(draw: random.Random) -> str:
    pool = dg.InputBufferPool()
    kept: list[Any] = []
    words = "refused"
    for _ in range(4):
        name = draw.choice(["a", "b", "a", draw.choice(ODD)])
        tensor = a_tensor(draw) if draw.random() < 0.9 else draw.choice(ODD)
        before = len(pool)
        got, error = outcome(lambda: pool.share(name, tensor))  # noqa: B023
        if error is not None:
            assert len(pool) == before
            continue
        assert got.shape == tensor.shape
        assert got.dtype == tensor.dtype
        if not got.is_meta:
            got.zero_()
        kept.append(got)
        words = "accepted"
    assert str(pool) or not len(pool)
    return words


def copies(draw: random.Random) -> str:
    """A grouped copy writes what `copy_` writes, or nothing."""
    lists = []
    for _ in range(2):
        items: Any = [a_tensor(draw) for _ in range(draw.randrange(4))]
        if draw.random() < 0.15:
            items.append(draw.choice(ODD))
        lists.append(draw.choice(ODD) if draw.random() < 0.04 else items)
    dsts, srcs = lists
    both = type(dsts) is list and type(srcs) is list
    real = (
        [dst for dst in dsts if type(dst) is torch.Tensor and dst.layout is torch.strided and is_real(dst)]
        if both
        else []
    )
    before = [dst.detach().clone() for dst in real]
    with torch.no_grad():
        # Fake tensors are not for copying into real ones, which they say by an assertion of their own.
        _, error = outcome(lambda: dg.grouped_foreach_copy_(dsts, srcs), TypeError, AssertionError, *OUT_OF_MEMORY)
    if isinstance(error, dg.DeviceGraphError):
        for was, dst in zip(before, real, strict=True):
            if not torch.equal(was, dst.detach()):
                raise FoundError(f"{error!r}, and {dst} was written")
    odd = both and any(
        type(each).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        for each in [*dsts, *srcs]
        if isinstance(each, torch.Tensor)
    )
    if isinstance(error, (RuntimeError, AssertionError)) and not isinstance(error, dg.DeviceGraphError) and not odd:
        raise FoundError(f"{dsts!r} <- {srcs!r}: {error!r}")
    return "refused" if error else "accepted"


def layouts(draw: random.Random) -> str:
    """The core's own classes, from Python: they refuse, and never panic."""
    number = lambda: draw.choice([0, 1, 2, 3, 8, 2**31, 2**62, 2**63 - 1, 2**64 - 1])  # noqa: E731
    sizes = lambda: [number() for _ in range(draw.randrange(4))]  # noqa: E731
    shape = draw.choice([[8], [8, 2], [3, 8], sizes()])
    strides = draw.choice([[1], [2, 1], [8, 1], sizes(), [1] * len(shape)])
    rows = draw.choice([(0, 1, 1), (number(), number(), number())])
    words = (TypeError, ValueError, OverflowError)

    def layout() -> Any:
        return _core.SlotLayout(
            "a", axis=draw.choice(["bs", "tokens", "none"]), policy=draw.choice(["zero", "fill_sentinel", "keep_pad"]),
            dtype=draw.choice(["int64", "bool", "float8_e5m2", "x"]), shape=shape, strides=strides,
            dim=draw.choice([0, 1, number()]), rows=rows, capacity=draw.choice([8, number()]),
            feed=draw.choice(["field", "function", "elsewhere"]), device="cpu", source_device="own", required=False,
            allow_narrowing=draw.random() < 0.5, prefix=draw.random() < 0.3,
        )  # fmt: skip

    made, error = outcome(layout, *words)
    if error is not None:
        return "refused"
    planner = _core.FillPlanner([made], max_bs=number(), max_num_tokens=number())
    source = (
        "int64", draw.choice([shape, sizes()]), "cpu", draw.choice([strides, sizes()]),
    )  # fmt: skip
    padded = draw.choice([8, 4, number() & (2**63 - 1)])
    raw = draw.choice([padded, 0, min(3, padded)])
    many = len(shape) > 1 and max(shape) > 1 << 20  # a region of so many runs is no memory's
    if not many:
        outcome(
            lambda: repr(planner.plan(
                [draw.choice([source, None])], raw_bs=raw, padded_bs=padded, raw_num_tokens=raw,
                padded_num_tokens=padded, unread=False,
            ).groups),
            *words,
        )  # fmt: skip
    outcome(lambda: made.padded_rows(padded, padded), *words)
    outcome(lambda: made.live_rows(number(), number()), *words)
    ledgers(draw, number)
    return "accepted"


def ledgers(draw: random.Random, number: Any) -> None:
    ledger = _core.PoolLedger()
    for _ in range(3):
        shape = draw.choice([[8], [2, 4], [number(), number()]])
        outcome(
            lambda: ledger.join(
                "a", dtype=draw.choice(["int64", "x"]), device=draw.choice(["cpu", "cuda", "cuda:1", "", "x:x"]),
                current_index=draw.choice([0, 5]), shape=shape, policy=draw.choice(["zero", "fill_once", "x"]), pad=b"",  # noqa: B023
                rewrites=True, fed=True, owner="me",
            ),
            TypeError, ValueError, OverflowError,
        )  # fmt: skip
        outcome(lambda: ledger.leave(draw.choice([0, 1, number()])), TypeError, ValueError, OverflowError)
        assert ledger.total_bytes >= 0
        assert str(ledger) or not len(ledger)


def case(draw: random.Random) -> str:
    return draw.choice([declares, declares, declares, pools, copies, layouts, layouts])(draw)


__all__ = ["OwnError", "case"]

if __name__ == "__main__":
    main("fuzz_slots", case, 20_000)
