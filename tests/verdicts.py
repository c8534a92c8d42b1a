"""What a capture allows and what it refuses: the one table that the CPU tape and a GPU are both held to.

Each construct is a function of a `Setting` that is captured once. A verdict is `ALLOWED` (replays equal eager runs on
the inputs of the moment), `RANDOM` (allowed, and two replays differ), or the code of the refusal; a device other than
the tape does not tell codes, and the same construct must fail there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from devicegraph import CaptureError, GraphMemoryPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from devicegraph import DeviceAdapter

ALLOWED = "allowed"
RANDOM = "random"


class Setting:
    """The tensors and device objects that constructs work on; two settings of one seed are equal."""

    def __init__(self, adapter: DeviceAdapter, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        device = adapter.device
        self.adapter, self.device = adapter, device
        self.x = torch.randn(8, 4, generator=generator).to(device)
        self.y = torch.randn(8, 4, generator=generator).to(device)
        self.weight = torch.randn(4, 4, generator=generator).to(device)
        self.square = self.weight @ self.weight.t() + 4 * torch.eye(4, device=device)
        self.index = torch.tensor([3, 1, 0, 2, 5, 4, 7, 6], device=device)
        self.mask = torch.tensor([1, 0, 1, 0, 0, 1, 1, 0], dtype=torch.bool, device=device)
        self.counts = torch.tensor([1, 2, 1, 0, 1, 1, 1, 1], device=device)
        self.n = torch.tensor(3, device=device)
        self.buffer = torch.zeros(8, 4, device=device)
        self.pageable = torch.randn(8, 4, generator=generator)
        self.pinned = torch.randn(8, 4, generator=generator)
        self.pinned_out = torch.zeros(8, 4)
        self.host_scalar = torch.tensor(2.0)
        self.host_index = torch.tensor([0, 2])
        if device.type == "cpu":
            for tensor in (self.pageable, self.host_scalar, self.host_index):
                adapter.declare_host(tensor)
            for tensor in (self.pinned, self.pinned_out):
                adapter.declare_host(tensor, pinned=True)
        else:
            self.pinned, self.pinned_out = self.pinned.pin_memory(), self.pinned_out.pin_memory()
        self.generator = torch.Generator(device=device)
        self.default_generator = torch.default_generator
        if device.type == "cuda":
            self.default_generator = torch.cuda.default_generators[torch.cuda.current_device()]
        self.side = adapter.stream()
        self.recorded = adapter.event()
        self.recorded.record()
        self.event = adapter.event()

    def change_inputs(self) -> None:
        """What a serving step does between replays: new values at the same addresses."""
        self.x.add_(1)
        self.pinned.mul_(2)


class Construct(NamedTuple):
    name: str
    run: Callable[[Setting], Any]
    verdict: str


CONSTRUCTS: list[Construct] = []


def construct(verdict: str) -> Callable[[Callable[[Setting], Any]], Callable[[Setting], Any]]:
    def register(run: Callable[[Setting], Any]) -> Callable[[Setting], Any]:
        CONSTRUCTS.append(Construct(run.__name__, run, verdict))
        return run

    return register


def _table(verdict: str, **constructs: Callable[[Setting], Any]) -> None:
    CONSTRUCTS.extend(Construct(name, run, verdict) for name, run in constructs.items())


_table(
    "host-read",
    item=lambda s: s.n.item(),
    tolist=lambda s: s.x.tolist(),
    cpu=lambda s: s.x.cpu(),
    bool_of_a_comparison=lambda s: bool(s.n > 2),
    int_of_a_tensor=lambda s: int(s.n),
    float_of_a_tensor=lambda s: float(s.n),
    index_of_a_list=lambda s: list(range(8))[s.n],
    numpy=lambda s: s.x.numpy(),
    repr_of_a_tensor=lambda s: repr(s.x),
    format_of_a_tensor=lambda s: f"{s.n}",
    if_on_values=lambda s: s.x if (s.x > 0).all() else s.y,
    membership=lambda s: 3 in s.index,
    is_nonzero=lambda s: torch.is_nonzero(s.n),
    index_by_a_tensor_without_dimensions=lambda s: s.x[s.n],
    slice_by_a_tensor=lambda s: s.x[: s.n],
    arange_to_a_tensor=lambda s: torch.arange(s.n, device=s.device),
    full_of_a_tensor=lambda s: torch.full((2,), s.n, device=s.device),
    equal=lambda s: torch.equal(s.x, s.y),
    allclose=lambda s: torch.allclose(s.x, s.y),
    one_hot_without_classes=lambda s: F.one_hot(s.index),
    inverse_checked=lambda s: torch.linalg.inv(s.square),
    solve_checked=lambda s: torch.linalg.solve(s.square, s.weight),
    cholesky_checked=lambda s: torch.linalg.cholesky(s.square),
    tensor_split_at_device_indices=lambda s: s.x.tensor_split(s.counts[:2]),
)
_table(
    "data-dependent-shape",
    nonzero=lambda s: s.mask.nonzero(),
    argwhere=lambda s: torch.argwhere(s.mask),
    where_with_one_argument=lambda s: torch.where(s.mask),
    read_by_mask=lambda s: s.x[s.mask],
    masked_select=lambda s: s.x.masked_select(s.mask[:, None]),
    write_by_mask_a_device_scalar=lambda s: s.x.clone().index_put_((s.mask,), s.x[0, 0]),
    write_by_mask_a_row=lambda s: s.x.clone().index_put_((s.mask,), s.x[0]),
    write_by_mask_rows=lambda s: s.x.clone().index_put_((s.mask,), s.y[:4]),
    unique=lambda s: s.index.unique(),
    unique_consecutive=lambda s: s.index.unique_consecutive(),
    repeat_interleave_by_counts=lambda s: s.x.repeat_interleave(s.counts, 0),
    combinations=lambda s: torch.combinations(s.index[:4]),
)
_table(
    "host-copy",
    to_the_host=lambda s: s.x.to("cpu"),
    literal_on_the_device=lambda s: s.x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=s.device),
    scalar_literal_on_the_device=lambda s: s.x + torch.tensor(2.0, device=s.device),
    new_tensor_literal=lambda s: s.x + s.x.new_tensor([1.0, 2.0, 3.0, 4.0]),
    as_tensor_of_host_memory=lambda s: torch.as_tensor(s.pageable, device=s.device) + 1,
    pageable_to_device=lambda s: s.pageable.to(s.device) + 1,
    pageable_to_device_non_blocking=lambda s: s.pageable.to(s.device, non_blocking=True) + 1,
    pinned_to_device_blocking=lambda s: s.pinned.to(s.device) + 1,
    copy_from_pageable=lambda s: s.buffer.copy_(s.pageable),
    copy_from_pageable_non_blocking=lambda s: s.buffer.copy_(s.pageable, non_blocking=True),
    copy_from_pinned_strided=lambda s: s.buffer[:4].copy_(s.pinned[::2], non_blocking=True),
    copy_from_pinned_blocking=lambda s: s.buffer.copy_(s.pinned),
    copy_to_pageable=lambda s: s.pageable.copy_(s.x),
    copy_to_pageable_non_blocking=lambda s: s.pageable.copy_(s.x, non_blocking=True),
    copy_to_pinned_blocking=lambda s: s.pinned_out.copy_(s.x),
    computed_on_the_host_then_moved=lambda s: s.x[:2, 0] + (s.host_index * 2).to(s.device),
    index_by_a_list=lambda s: s.x[[0, 2]],
    index_by_a_host_tensor=lambda s: s.x[s.host_index],
    bincount=lambda s: torch.bincount(s.index, minlength=16),
    singular_values=lambda s: torch.linalg.svd(s.square)[1],
)
_table(
    "device-mismatch",
    arithmetic_with_a_host_vector=lambda s: s.x * s.pageable,
    arithmetic_with_a_factory_without_device=lambda s: s.x + torch.zeros(8, 4),
    arithmetic_with_a_window_without_device=lambda s: s.x[:, 0] * torch.hann_window(8),
    arithmetic_with_a_factory_on_the_host=lambda s: s.x + torch.zeros(8, 4, device="cpu"),
    arithmetic_with_a_likeness_on_the_host=lambda s: s.x + torch.zeros_like(s.x, device="cpu"),
    host_scalar_written_by_a_device_scalar=lambda s: s.host_scalar.add_(s.x[0, 0]),
)
_table("unregistered-generator", draw_from_a_generator=lambda s: torch.rand(8, device=s.device, generator=s.generator))
_table(
    ALLOWED,
    arithmetic=lambda s: (s.x * 2 + s.y).relu(),
    matmul=lambda s: s.x @ s.weight,
    where_with_three_arguments=lambda s: torch.where(s.mask[:, None], s.x, s.y),
    where_with_a_number=lambda s: torch.where(s.mask[:, None], s.x, 0.0),
    masked_fill=lambda s: s.x.masked_fill(s.mask[:, None], 1.0),
    masked_scatter=lambda s: s.x.masked_scatter(s.mask[:, None], s.y),
    read_by_index=lambda s: s.x[s.index],
    write_by_index=lambda s: s.buffer.index_put_((s.index,), s.x),
    accumulate_by_index=lambda s: torch.zeros_like(s.x).index_put_((s.index,), s.x, accumulate=True),
    index_add=lambda s: torch.zeros_like(s.x).index_add_(0, s.index, s.x),
    scatter=lambda s: torch.zeros_like(s.x).scatter_(0, s.index[:, None].expand(8, 4), s.x),
    gather=lambda s: s.x.gather(0, s.index[:, None].expand(8, 4)),
    take_along_an_order=lambda s: torch.take_along_dim(s.x, s.x.argsort(0), 0),
    embedding=lambda s: F.embedding(s.index, s.x),
    repeat_interleave_with_size=lambda s: s.x.repeat_interleave(s.counts, 0, output_size=8),
    repeat_interleave_by_a_number=lambda s: s.x.repeat_interleave(2, 0),
    nonzero_of_fixed_size=lambda s: torch.nonzero_static(s.mask, size=4),
    count_nonzero=lambda s: torch.count_nonzero(s.mask),
    one_hot_with_classes=lambda s: F.one_hot(s.index, 8),
    assert_on_the_device=lambda s: (torch._assert_async((s.index >= 0).all()), s.x + 1)[1],
    is_in=lambda s: torch.isin(s.index, s.index[:3]),
    inverse_unchecked=lambda s: torch.linalg.inv_ex(s.square)[0],
    sort=lambda s: s.x.sort(0)[0],
    topk=lambda s: s.x.topk(2)[0],
    argmax=lambda s: s.x.argmax(-1),
    cumsum=lambda s: s.x.cumsum(0),
    median=lambda s: s.x.median(),
    searchsorted=lambda s: torch.searchsorted(s.x[:, 0].sort()[0], s.y[:, 0].contiguous()),
    attention=lambda s: F.scaled_dot_product_attention(*[s.x.view(1, 1, 8, 4)] * 3, is_causal=True),
    attention_in_half_precision=lambda s: F.scaled_dot_product_attention(
        *[s.x.view(1, 1, 8, 4).expand(1, 1, 8, 4).repeat(1, 1, 1, 2).bfloat16()] * 3, is_causal=True
    ),
    attention_with_a_mask=lambda s: F.scaled_dot_product_attention(
        *[s.x.view(1, 1, 8, 4)] * 3, attn_mask=s.mask.view(1, 1, 1, 8)
    ),
    rms_norm=lambda s: F.rms_norm(s.x, (4,)),
    convolution=lambda s: F.conv1d(s.x[None], torch.ones(2, 8, 3, device=s.device)),
    views=lambda s: s.x.view(4, 8).t().reshape(-1)[3:].unsqueeze(0) + 1,
    split_by_numbers=lambda s: s.x.split([2, 6])[1] + 1,
    tensor_split_at_host_indices=lambda s: s.x.tensor_split(s.host_index + 1)[1] + 1,
    iteration=lambda s: torch.stack([row * 2 for row in s.x]),
    concatenate=lambda s: torch.cat([s.x, s.y]),
    pad=lambda s: F.pad(s.x, (0, 0, 0, 4)),
    cast=lambda s: s.x.to(torch.bfloat16),
    to_its_own_device=lambda s: s.x.to(s.device) + 1,
    copy_with_a_cast=lambda s: torch.empty(8, 4, device=s.device, dtype=torch.float64).copy_(s.x),
    grouped_copy=lambda s: (torch._foreach_copy_([s.buffer], [s.x]), s.buffer)[1],
    factories_on_the_device=lambda s: (
        s.x[:, 0] + torch.arange(8, device=s.device) + torch.full((8,), 2.0, device=s.device)
    ),
    fill_with_a_device_scalar=lambda s: s.buffer.fill_(s.n),
    set_to_another_memory=lambda s: torch.empty(0, device=s.device).set_(s.x) + 1,
    host_scalar_in_arithmetic=lambda s: s.x * s.host_scalar,
    host_value_read_on_the_host=lambda s: s.x[: int(s.host_index.max()) + 1] + 0,
    literal_on_the_host=lambda s: s.x + torch.tensor([1.0, 2.0]).max().item(),
    copy_from_pinned_non_blocking=lambda s: s.buffer.copy_(s.pinned, non_blocking=True),
    pinned_to_device_non_blocking=lambda s: s.pinned.to(s.device, non_blocking=True) + 1,
    copy_to_pinned_non_blocking=lambda s: (s.pinned_out.copy_(s.x, non_blocking=True), s.x + 1)[1],
    pinned_to_device_as_another_type=lambda s: s.pinned.to(s.device, torch.float64, non_blocking=True) + 1,
    pinned_to_where_another_tensor_is=lambda s: s.pinned.to(s.x, non_blocking=True) + 1,
    to_the_host_as_another_type=lambda s: (s.x.to("cpu", torch.float64, True), s.x + 1)[1],
    value_of_a_factory_on_the_host=lambda s: s.x[: int(torch.arange(3, device="cpu").max())] + 0,
    to_the_host_non_blocking=lambda s: (s.x.to("cpu", non_blocking=True), s.x + 1)[1],
    data_pointer=lambda s: (s.x.data_ptr(), s.x + 1)[1],
)
_table(
    RANDOM,
    rand=lambda s: torch.rand(8, device=s.device),
    randn_like=lambda s: torch.randn_like(s.x),
    dropout=lambda s: F.dropout(s.x, 0.5, training=True),
    randint=lambda s: torch.randint(0, 1 << 30, (8,), device=s.device),
    randperm=lambda s: torch.randperm(64, device=s.device),
    rand_of_the_default_generator=lambda s: torch.rand(8, device=s.device, generator=s.default_generator),
    multinomial=lambda s: torch.multinomial(torch.ones(8, 64, device=s.device), 4),
    exponential=lambda s: torch.empty(8, device=s.device).exponential_(),
)
_table(
    "synchronize",
    synchronize=lambda s: s.adapter.synchronize(),
    synchronize_a_stream=lambda s: s.adapter.current_stream().synchronize(),
    synchronize_an_event=lambda s: s.recorded.synchronize(),
    query_an_event=lambda s: s.recorded.query(),
    query_an_event_of_the_capture=lambda s: (s.event.record(), s.event.query()),
)


@construct(ALLOWED)
def write_by_mask_a_number(s: Setting) -> torch.Tensor:
    out = s.x.clone()
    out[s.mask] = 0.0
    return out


@construct(ALLOWED)
def write_by_mask_a_host_scalar(s: Setting) -> torch.Tensor:
    out = s.x.clone()
    out[s.mask] = s.host_scalar
    return out


@construct("host-copy")
def write_by_a_list(s: Setting) -> None:
    s.buffer[[0, 2]] = 1.0


@construct(ALLOWED)
def in_place_on_a_slice(s: Setting) -> torch.Tensor:
    s.buffer[2:6, 1:3].add_(s.x[2:6, 1:3])
    return s.buffer[2:6] + 0


@construct(ALLOWED)
def autocast(s: Setting) -> torch.Tensor:
    with torch.autocast(s.device.type, dtype=torch.bfloat16):
        return s.x @ s.weight


@construct(ALLOWED)
def inference_mode(s: Setting) -> torch.Tensor:
    with torch.inference_mode():
        return (s.x @ s.weight).reshape(-1)


@construct(ALLOWED)
def named_range_of_the_profiler(s: Setting) -> torch.Tensor:
    with torch.profiler.record_function("range"):
        return s.x + 1


@construct(ALLOWED)
def output_given_without_a_size(s: Setting) -> torch.Tensor:
    return torch.add(s.x, s.y, out=torch.empty(0, device=s.device))


@construct(ALLOWED)
def record_an_event(s: Setting) -> torch.Tensor:
    s.event.record()
    return s.x + 1


@construct(ALLOWED)
def side_stream_forked_and_joined(s: Setting) -> torch.Tensor:
    capturing = s.adapter.current_stream()
    s.side.wait_stream(capturing)
    with s.adapter.stream_context(s.side):
        doubled = s.x * 2
    capturing.wait_stream(s.side)
    return doubled + 1


@construct("unjoined-stream")
def side_stream_not_joined(s: Setting) -> torch.Tensor:
    s.side.wait_stream(s.adapter.current_stream())
    with s.adapter.stream_context(s.side):
        s.held = s.x * 2
    return s.x + 1


@construct("foreign-stream")
def side_stream_not_forked(s: Setting) -> torch.Tensor:
    with s.adapter.stream_context(s.side):
        s.held = s.x * 2
    return s.x + 1


@construct("uncaptured-event")
def wait_for_an_event_from_outside(s: Setting) -> torch.Tensor:
    s.adapter.current_stream().wait_event(s.recorded)
    return s.x + 1


@construct("nested-capture")
def capture_inside_a_capture(s: Setting) -> None:
    inner = s.adapter.graph()
    with s.adapter.capture(
        inner, pool=GraphMemoryPool(s.adapter), stream=s.adapter.stream(), capture_error_mode="thread_local"
    ):
        s.held = s.x * 2


def of(*verdicts: str) -> list[Any]:
    """The constructs with one of these verdicts, as parameters of a test."""
    return [pytest.param(c, id=c.name) for c in CONSTRUCTS if c.verdict in verdicts]


def capture(adapter: DeviceAdapter, construct: Construct, setting: Setting) -> tuple[Any, Any]:
    graph = adapter.graph()
    pool = GraphMemoryPool(adapter)
    adapter.synchronize()
    with adapter.capture(graph, pool=pool, stream=adapter.stream(), capture_error_mode="thread_local"):
        output = construct.run(setting)
    return graph, output


def check_allowed(adapter: DeviceAdapter, construct: Construct) -> None:
    """A capture executes nothing, and each replay gives what an eager run on the inputs of the moment gives."""
    captured, eager = Setting(adapter), Setting(adapter)
    construct.run(Setting(adapter))  # what a device makes lazily must be there, as after a runner's warm-ups
    graph, output = capture(adapter, construct, captured)
    for name, value in vars(eager).items():
        if isinstance(value, torch.Tensor) and name != "held":
            assert torch.equal(getattr(captured, name), value), f"capturing changed `{name}`"
    for _ in range(2):
        captured.change_inputs()
        eager.change_inputs()
        graph.replay()
        want = construct.run(eager)
        adapter.synchronize()
        assert torch.equal(output, want)


def check_random(adapter: DeviceAdapter, construct: Construct) -> None:
    """A capture leaves the generator alone; replays advance it; the same seed gives the same numbers again."""
    construct.run(Setting(adapter))
    get_state = torch.get_rng_state if adapter.type == "cpu" else torch.get_device_module(adapter.type).get_rng_state
    setting = Setting(adapter)
    state = get_state()
    graph, output = capture(adapter, construct, setting)
    assert torch.equal(get_state(), state)
    graph.replay()
    first = output.clone()
    graph.replay()
    assert not torch.equal(output, first)
    torch.manual_seed(7)
    graph.replay()
    first.copy_(output)
    torch.manual_seed(7)
    graph.replay()
    assert torch.equal(output, first)


def check_refused(adapter: DeviceAdapter, construct: Construct) -> Exception:
    """The construct fails, and the device is as it was: the stream, and the ability to capture."""
    stream = adapter.current_stream()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - every device has exceptions of its own
        capture(adapter, construct, Setting(adapter))
    assert adapter.current_stream() == stream
    assert not adapter.is_capturing()
    setting = Setting(adapter)
    graph, output = capture(adapter, Construct("after", lambda s: s.x + 1, ALLOWED), setting)
    graph.replay()
    assert torch.equal(output, setting.x + 1)
    assert isinstance(caught.value, CaptureError) or adapter.type != "cpu"
    return caught.value
