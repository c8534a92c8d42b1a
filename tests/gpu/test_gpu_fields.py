"""Groups of fields, two-batch overlap and profiles on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import devicegraph as dg
from overlapping_engine import Overlapping, eager
from waits import refusing_to_wait

if TYPE_CHECKING:
    from pathlib import Path


def runner_for(engine: Any, bs: list[int], **options: Any) -> dg.DecodeCudaGraphRunner:
    options.setdefault("registry", engine.registry)
    options.setdefault("graph_pool", dg.GraphMemoryPool(dg.get_device_adapter("cuda")))
    return dg.DecodeCudaGraphRunner(
        engine,
        config=dg.CudaGraphConfig(decode={"bs": bs}),
        num_tokens_per_bs=getattr(engine, "tokens_per_request", 1),
        **options,
    )


class Counting:
    """Returns what the counts were in the graph, beside the ids."""

    device, limits = torch.device("cuda"), dg.Limits(8, 8)

    def __init__(self, executor: Any, rank: int) -> None:
        self.registry = dg.build_decode_registry(
            device="cuda",
            max_bs=8,
            max_num_token=8,
            seq_len_fill_value=1,
            executor=executor,
            enable_num_token_non_padded=True,
            register_global_num_tokens=True,
            require_gathered_buffer=True,
            require_mlp_tp_gather=True,
            num_dp_ranks=3,
            attn_tp_size=2,
            attn_tp_rank=rank,
        )

    def forward(self, batch: Any) -> torch.Tensor:
        counts = torch.cat([batch.num_token_non_padded, batch.global_num_tokens_gpu]).to(torch.int64)
        return batch.input_ids[:, None] * 100 + counts


@pytest.mark.parametrize("where", ["host", "device", "nowhere"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("executor", ["foreach", "native", "node"])
def test_counts_in_a_graph_are_those_of_the_step_and_are_not_waited_for(executor: str, rank: int, where: str) -> None:
    with runner_for(Counting(executor, rank), [4, 8]) as runner:
        assert runner.capture().executor == executor
        outputs: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
        for bs, bucket in [(1, 4), (4, 4), (8, 8), (5, 8), (3, 4), (2, 4), (7, 8)] * 3:
            ids = torch.arange(bs, device="cuda")
            batch = dg.StaticBatch(batch_size=bs, input_ids=ids)
            if where == "device":
                batch.num_token_non_padded = torch.tensor([bs], device="cuda")
            elif where == "host":
                batch.num_token_non_padded_cpu = bs
            with refusing_to_wait():
                outputs.append((bs, bucket, ids, runner.run(batch).clone()))
        for bs, bucket, ids, output in outputs:
            share = bucket // 2
            count = sum(token < bs for token in range(rank * share, (rank + 1) * share))
            want = ids[:, None] * 100 + torch.tensor([count, bucket, bucket, bucket], device="cuda")
            assert torch.equal(output, want)


class Encoded:
    """Tells of each row what was encoded for it."""

    device, limits = torch.device("cuda"), dg.Limits(4, 4)
    registry = None

    def forward(self, batch: Any) -> torch.Tensor:
        return batch.input_ids * 100 + batch.encoder_lens


def test_encoded_lengths_are_read_on_the_host_alone() -> None:
    engine = Encoded()
    registry = dg.build_decode_registry(
        device="cuda",
        max_bs=4,
        max_num_token=4,
        seq_len_fill_value=1,
        is_encoder_decoder=True,
        encoder_len_fill_value=1,
    )
    with runner_for(engine, [4], registry=registry) as runner:
        runner.capture()
        for lengths, code in (([0, 0, 0], "graph"), ([4, 7, 1], "graph"), ([0, 7, 1], "encoder-lens-mixed")):
            batch = dg.StaticBatch(
                batch_size=3,
                input_ids=torch.arange(3, device="cuda"),
                encoder_lens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
            )
            with refusing_to_wait():
                assert runner.can_run(batch).code == "encoder-lens-unknown"
                batch.encoder_lens_cpu = lengths
                assert runner.can_run(batch).code == code
                output = runner.run(batch)
            assert output.tolist() == [100 * i + length for i, length in enumerate(lengths)]


class OnTwoStreams(Overlapping):
    """Runs the second half on a stream of its own, forked and joined in the graph."""

    def __init__(self, **options: Any) -> None:
        super().__init__("cuda", **options)
        self.side = torch.cuda.Stream()

    def forward(self, batch: Any) -> torch.Tensor:
        halves = getattr(batch, "tbo_children", None)
        if halves is None:
            return super().forward(batch)
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            second = self.attend(halves[1], self.embed(halves[1]))
        first = self.attend(halves[0], self.embed(halves[0]))
        current.wait_stream(self.side)
        return torch.cat([first, second])


@pytest.mark.parametrize("engine_class", [Overlapping, OnTwoStreams])
@pytest.mark.parametrize("tokens", [1, 3])
def test_halves_of_a_batch_overlap_and_give_what_the_whole_gives(engine_class: Any, tokens: int) -> None:
    engine = engine_class(tokens=tokens) if engine_class is OnTwoStreams else engine_class("cuda", tokens=tokens)
    with runner_for(engine, [2, 4, 8], tbo=dg.TboCudaGraphRunnerPlugin()) as runner:
        runner.capture()
        for seed, bs in enumerate([8, 1, 3, 2, 5, 8, 7, 4, 6, 1] * 3):
            batch: Any = engine.batch([tokens + (seed + i) % 9 for i in range(bs)], seed)
            batch.lengths = batch.seq_lens
            want = eager(engine, batch)
            del batch.lengths
            assert torch.equal(runner.run(batch), want)
        assert runner.metrics().hit_rate == 1.0


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_profile_of_a_capture_and_of_a_step_names_their_graphs(tmp_path: Path) -> None:
    engine = Overlapping("cuda")
    with runner_for(engine, [4], profile=tmp_path) as runner:
        runner.capture()
        assert "devicegraph decode, bucket 4: capture" in (tmp_path / "decode-rank0.json").read_text()
        with torch.profiler.profile() as profiler:
            runner.run(engine.batch([3, 4, 5]))
            torch.cuda.synchronize()
        names = {event.key for event in profiler.key_averages()}
        assert "devicegraph decode, bucket 4: replay" in names
        assert any("GraphLaunch" in name for name in names)
