"""A client as strict type checkers see it: what an engine passes is what the signatures take, and it runs.

`mypy --strict` reads this file together with the package: each call here is one that the annotations must allow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist

import devicegraph as dg
from devicegraph import FillContext, GraphSlot, PaddingPolicy, PhaseConfig, SlotError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Scalar:
    """An integer of another library."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __index__(self) -> int:
        return self._number


class ComputedBatch:
    """A batch whose fields cannot be assigned."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    @property
    def batch_size(self) -> int:
        return self._rows

    @property
    def input_ids(self) -> torch.Tensor:
        return torch.arange(self._rows)

    @property
    def hidden(self) -> torch.Tensor | None:
        return None


class NamedBatch(NamedTuple):
    input_ids: torch.Tensor
    batch_size: int = 2


@dataclass(frozen=True)
class FrozenBatch:
    input_ids: torch.Tensor
    batch_size: int = 2


class DictBatch(TypedDict):
    input_ids: torch.Tensor


def rows_of_tokens(max_bs: int, max_num_tokens: int) -> list[int]:
    return [max_num_tokens]


def rows_of_requests(max_bs: int, max_num_tokens: int) -> tuple[int, int]:
    return max_bs, 2


def size_of_one(max_bs: int, max_num_tokens: int) -> torch.Size:
    return torch.Size([1])


def size_of_scalar(max_bs: int, max_num_tokens: int) -> tuple[Scalar]:
    return (Scalar(1),)


def counts(context: FillContext) -> list[int]:
    return [context.raw_num_tokens] * context.raw_bs


def shares(context: FillContext) -> tuple[float, ...]:
    return (1.5,) * context.raw_bs


def flags(context: FillContext) -> Sequence[bool]:
    return [True] * context.raw_bs


def count(context: FillContext) -> int:
    return context.raw_num_tokens


def hidden(batch: ComputedBatch, context: FillContext) -> torch.Tensor | None:
    return batch.hidden


def scale(buffer: torch.Tensor, batch: ComputedBatch, context: FillContext) -> None:
    buffer.mul_(1)


def scaled(buffer: torch.Tensor, batch: object, context: FillContext) -> torch.Tensor:
    return buffer.mul_(1)


def columns(buffer: torch.Tensor, size: int) -> torch.Tensor:
    return buffer[:, :size]


def slots() -> list[GraphSlot]:
    return [
        GraphSlot("input_ids", rows_of_tokens, torch.int64, padding_policy=PaddingPolicy.ZERO, required=True),
        GraphSlot("planes", lambda bs, tokens: (3, tokens), torch.int64, slice_fn=columns, source_fn=hidden),
        GraphSlot("cut", lambda bs, tokens: [3, tokens], torch.int64, slice_fn=lambda buffer, size: buffer[:, :size]),
        GraphSlot("pages", rows_of_requests, torch.int32, axis="bs", pad_value=-1, trailing="prefix", post_fill=scale),
        GraphSlot("scaled", rows_of_tokens, torch.float32, copy_from_fb=False, post_fill=scaled),
        GraphSlot("doubled", rows_of_tokens, torch.float32, post_fill=lambda buffer, batch, context: buffer.mul_(2)),
        GraphSlot("counts", lambda bs, _: (bs,), torch.int32, axis="bs", value_fn=counts),
        GraphSlot("shares", lambda bs, _: (bs,), torch.float32, axis="bs", value_fn=shares),
        GraphSlot("flags", lambda bs, _: (bs,), torch.bool, axis="bs", value_fn=flags),
        GraphSlot("count", size_of_one, torch.int32, axis="none", value_fn=count),
        GraphSlot("ratio", size_of_scalar, torch.float32, axis="none", value_fn=lambda context: 0.5),
        GraphSlot("pair", lambda *_: (2,), torch.int32, axis="none", value_fn=lambda context: [context.raw_bs, 1]),
        GraphSlot("lengths", lambda bs, _: (bs,), torch.int64, axis="bs", device="cpu", source_device="any"),
    ]


def test_a_strict_client_fills_and_shows_buffers() -> None:
    registry = dg.CudaGraphBufferRegistry(device=torch.device("cpu"), max_bs=Scalar(4), max_num_tokens=8)
    for slot in slots():
        registered: GraphSlot = registry.register_slot(slot)
        assert registered is slot
    batches: list[Any] = [
        ComputedBatch(2), NamedBatch(torch.arange(2)), FrozenBatch(torch.arange(2)),
        DictBatch(input_ids=torch.arange(2)),
    ]  # fmt: skip
    registry.fill_from(batches[0], raw_bs=Scalar(2), padded_bs=4, raw_num_tokens=2, padded_num_tokens=Scalar(4))
    views: dict[str, torch.Tensor] = registry.views(padded_bs=Scalar(4), padded_num_tokens=4)
    assert views["input_ids"].tolist() == [0, 1, 0, 0]
    assert views["counts"].tolist() == [2, 2, 0, 0]
    plain = dg.CudaGraphBufferRegistry(device="cpu", max_bs=4, max_num_tokens=8)
    ids = plain.register_slot(
        GraphSlot("input_ids", rows_of_tokens, torch.int64), bind=torch.zeros(8, dtype=torch.int64)
    )
    for batch in batches[1:]:
        plain.fill_from(batch, raw_bs=2, padded_bs=2, raw_num_tokens=2, padded_num_tokens=2, pp_proxy_tensors=None)
        shown = plain.extract_buffer(padded_bs=2, padded_num_tokens=Scalar(2), forward_batch_template=batch)
        assert type(shown) is type(batch)
        missing: tuple[str, ...] = plain.missing_required(plain.presence(batch))
        assert missing == ()
    cut: torch.Tensor = ids.slice_for(2, Scalar(2))
    assert cut.tolist() == [0, 1]
    names: tuple[str, ...] = plain.slot_names
    assert names == ("input_ids",)
    assert plain.has_slot(names[0])
    dg.reset_index_buffers(registry, plain)


def test_a_strict_client_declares_the_usual_slots_and_shares_memory() -> None:
    own = {"input_ids": torch.zeros(8, dtype=torch.int64)}
    decode = dg.build_decode_registry(
        device="cpu", max_bs=Scalar(8), max_num_token=8, seq_len_fill_value=1, share_pool=True, source=own
    )
    prefill = dg.build_prefill_registry(device="cpu", max_bs=8, max_num_token=Scalar(8), cache_loc_dtype=torch.int32)
    eager = dg.build_eager_registry(device=torch.device("cpu"), max_bs=8, max_num_token=8)
    assert decode.get_slot("input_ids").buffer is own["input_ids"]
    assert prefill.max_num_tokens == eager.max_num_tokens == 8

    @dataclass
    class Buffers(dg.ForwardInputBuffers):
        input_ids: torch.Tensor
        extra: Mapping[str, torch.Tensor]

    buffers = Buffers(torch.zeros(3), {"a": torch.zeros(3)})
    buffers.share_buffers()
    shared: torch.Tensor = dg.share_input_buffer("input_ids", torch.ones(3))
    assert shared.data_ptr() == buffers.input_ids.data_ptr()
    pool = dg.InputBufferPool(private_devices=["npu"])
    assert pool.share("x", torch.ones(3), owner="client").tolist() == [1, 1, 1]
    dg.grouped_foreach_copy_([shared], (torch.ones(3),))


class PhaseDict(TypedDict, total=False):
    backend: str
    max_bs: int


def bytes_of(size: int) -> int:
    return 10 * size


def test_a_strict_client_configures_phases_and_buckets() -> None:
    sizes: dict[str, int] = {"max_bs": 8}
    phase: PhaseDict = {"backend": "full", "max_bs": 8}
    config = dg.CudaGraphConfig(decode=phase, prefill=PhaseConfig(bs=range(4, 9, 4)), padding=False)
    assert config == dg.CudaGraphConfig.from_dict({"decode": sizes, "prefill": {"bs": (4, 8)}, "padding": False})
    by_name: dict[str, PhaseConfig] = {name: config[name] for name in config}
    assert (list(by_name), len(config), "decode" in config) == (["decode", "prefill"], 2, True)
    changed = config.with_phase("decode", max_bs=Scalar(4)).with_phase(
        "prefill", bs=[Scalar(2), 4], tc_compiler="eager"
    )
    kept: tuple[int, ...] | None = changed.prefill.bs
    assert kept == (2, 4)
    assert changed.decode.max_bs == 4
    table = {1: 10, 2: 20, 4: 40}
    for weights in (10, Scalar(10), table, bytes_of, lambda size: 10 * size):
        buckets = dg.decode_buckets(Scalar(4), limit=Scalar(8), max_bytes=1000, bytes_per_size=weights)
        assert buckets.sizes == (1, 2, 4)
    fitting: int | None = dg.Buckets([Scalar(1), 4]).fit(Scalar(3))
    assert fitting == 4
    assert dg.prefill_buckets(bs=changed.prefill.bs).sizes == kept


def test_a_strict_client_audits_a_forward() -> None:
    model = torch.nn.Linear(4, 4)
    table = torch.ones(4)

    def forward(batch: NamedBatch) -> torch.Tensor:
        output: torch.Tensor = model(batch.input_ids * table)
        return output

    report: dg.AuditReport = dg.audit(forward, NamedBatch(torch.ones(2, 4)), constants={"table": [table]}, device="cpu")
    findings: tuple[dg.AuditFinding, ...] = report.findings
    places = [(finding.module, finding.file, finding.line) for finding in findings]
    assert (report.ok, places) == (True, [])
    assert {finding.code for finding in findings} <= set(dg.AUDIT_CODES)


def test_a_strict_client_gives_its_engine_ranks() -> None:
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)

    class Engine:
        device, limits = torch.device("cpu"), dg.Limits(max_bs=2, max_num_tokens=2)
        votes_each_step = False

        def __init__(self, ranks: dg.RankGroup) -> None:
            self.barrier, self.rank = ranks.barrier, ranks.rank
            self.vote: Callable[[dg.Proposal], dg.Proposal] = ranks.vote

        def forward(self, batch: dg.StaticBatch) -> torch.Tensor:
            return torch.ones(batch.batch_size)

    with dg.RankGroup(dist.group.WORLD, limit_s=30) as ranks:
        runner = dg.DecodeCudaGraphRunner(Engine(ranks), config=dg.CudaGraphConfig())
        ranks.check_plan(runner)
        runner.capture()
    ranks.close(runner, communicators=[dist.group.WORLD])
    assert not dist.is_initialized()


def test_a_strict_client_reads_what_an_error_says() -> None:
    try:
        GraphSlot("ids", rows_of_tokens, torch.int64, pad_value=0.5)
    except SlotError as error:
        told: tuple[str, str | None, str | None] = (error.code, error.slot, error.hint)
        assert told == ("bad-pad-value", "ids", None)
    try:
        PhaseConfig(max_bs=0)
    except dg.ConfigError as error:
        codes: list[str] = [issue.code for issue in error.issues]
        assert codes == ["out-of-range"]
