"""The registry on a GPU: the same bytes as on the CPU, without waiting for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devicegraph as dg
from waits import refusing_to_wait

DEVICE = "cuda"
MAX = 64
DTYPES = [torch.bool, torch.int32, torch.int64, torch.uint16, torch.bfloat16, torch.float32, torch.float8_e4m3fn]


def declare(device: str, seed: int, executor: Any) -> dg.CudaGraphBufferRegistry:
    """A slot of each policy and dtype, of several shapes, as the seed says."""
    registry = dg.CudaGraphBufferRegistry(device=device, max_bs=MAX, max_num_tokens=MAX, executor=executor)
    generator = torch.Generator().manual_seed(seed)

    def pick(options: list[Any]) -> Any:
        return options[int(torch.randint(len(options), (), generator=generator))]

    for index in range(12):
        shape, slice_fn = pick(
            [
                ((MAX,), None),
                ((MAX, 5), None),
                ((3, MAX), lambda buffer, n: buffer[:, :n]),
                ((20, MAX), lambda buffer, n: buffer[:, :n]),
            ]
        )
        registry.register_slot(
            dg.GraphSlot(
                f"slot{index}",
                lambda bs, tokens, shape=shape: shape,
                pick(DTYPES),
                padding_policy=pick(list(dg.PaddingPolicy)),
                pad_value=1,
                slice_fn=slice_fn,
                device=pick([None, None, None, "cpu"]),
                source_device="any",
                allow_narrowing=True,
                trailing=pick(["exact", "prefix"]) if shape == (MAX, 5) else "exact",
            )
        )
    count = dg.GraphSlot(
        "count", lambda bs, tokens: (1,), torch.int32, axis="none", value_fn=lambda c: c.raw_num_tokens
    )
    registry.register_slot(count)
    return registry


@pytest.mark.parametrize("executor", ["foreach", "native"])
@pytest.mark.parametrize("seed", range(20))
def test_fills_leave_the_bytes_that_they_leave_on_the_cpu(seed: int, executor: Any) -> None:
    here, there = declare(DEVICE, seed, executor), declare("cpu", seed, "foreach")
    generator = torch.Generator().manual_seed(seed)

    def chance(of: int) -> bool:
        return int(torch.randint(of, (), generator=generator)) == 0

    for _ in range(6):
        padded = int(torch.randint(1, MAX + 1, (), generator=generator))
        raw = int(torch.randint(0, padded + 1, (), generator=generator))
        host: dict[str, torch.Tensor] = {}
        for slot in there.slots:
            if slot.name == "count" or chance(5):
                continue
            live = list(slot.slice_for(padded, padded).shape)
            live[0 if slot.slice_fn is None else 1] = raw
            if slot.trailing == "prefix":
                live[1] = 3
            values = torch.randint(0, 100, live, generator=generator).to(torch.float32)
            host[slot.name] = values.to(DTYPES[seed % len(DTYPES)] if chance(3) else slot.dtype)
            if chance(4):
                host[slot.name] = host[slot.name].repeat_interleave(2, 0)[::2]
        batch = {name: source if chance(4) else source.to(DEVICE) for name, source in host.items()}
        sizes = {"raw_bs": raw, "padded_bs": padded, "raw_num_tokens": raw, "padded_num_tokens": padded}
        there.fill_from(host or {"nothing": 0}, **sizes)
        for _ in range(2):  # as it is prepared, and once it is
            here.fill_from(batch or {"nothing": 0}, **sizes)
        for slot, like in zip(here.slots, there.slots, strict=True):
            assert slot.buffer.cpu().view(torch.uint8).equal(like.buffer.view(torch.uint8)), (slot, sizes)


def test_neither_a_first_nor_a_later_fill_waits_for_the_device() -> None:
    registry = dg.build_decode_registry(device=DEVICE, max_bs=MAX, max_num_token=MAX, seq_len_fill_value=1)
    registry.register_slot(
        dg.GraphSlot("count", lambda bs, tokens: (1,), torch.int32, axis="none", value_fn=lambda c: c.raw_bs)
    )
    registry.register_slot(dg.GraphSlot("ids", lambda bs, tokens: (bs,), torch.int64, axis="bs"))
    batches = []
    for raw in (5, 9):
        batch = {slot.name: torch.arange(raw, device=slot.buffer.device) for slot in registry.slots}
        batch["mrope_positions"] = torch.arange(3 * raw, device=DEVICE).view(3, raw)
        batch["ids"] = batch["ids"].to(torch.int32)
        batches.append(batch)
    with refusing_to_wait():
        for _ in range(2):
            for raw, batch in zip((5, 9), batches, strict=True):
                registry.fill_from(batch, raw_bs=raw, padded_bs=16, raw_num_tokens=raw, padded_num_tokens=16)
    assert registry.get_slot("mrope_positions").buffer[2, :16].tolist() == [*range(18, 27), *[0] * 7]
    assert registry.get_slot("count").buffer.tolist() == [9]


def test_a_pinned_source_may_be_overwritten_once_the_fill_returned() -> None:
    registry = dg.CudaGraphBufferRegistry(device=DEVICE, max_bs=MAX, max_num_tokens=1 << 20)
    slot = registry.register_slot(dg.GraphSlot("ids", lambda bs, tokens: (tokens,), torch.int64, source_device="cpu"))
    source = torch.ones(1 << 20, dtype=torch.int64).pin_memory()
    torch.cuda._sleep(100_000_000)  # the copy is queued behind this
    registry.fill_from({"ids": source}, raw_bs=1, padded_bs=1, raw_num_tokens=1 << 20, padded_num_tokens=1 << 20)
    source.fill_(2)
    assert slot.buffer.eq(1).all()


def test_spellings_of_a_device_share_one_memory() -> None:
    registries = [
        dg.build_prefill_registry(device=device, max_bs=MAX, max_num_token=MAX, share_pool=True)
        for device in (DEVICE, f"{DEVICE}:{torch.cuda.current_device()}", torch.device(DEVICE))
    ]
    for name in registries[0].slot_names:
        assert len({registry.get_slot(name).buffer.data_ptr() for registry in registries}) == 1
