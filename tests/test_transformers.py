"""transformers' continuous batching on the runners: its own tokens, counted steps, everything put back."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import devicegraph as dg

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("psutil", reason="transformers needs psutil, to know the memory of a CPU")

from transformers.generation.continuous_batching import continuous_api  # noqa: E402
from transformers.generation.continuous_batching.input_outputs import (  # noqa: E402
    ContinuousBatchingAsyncIOs,
    HostDeviceIOPair,
)
from transformers.generation.continuous_batching.utils import build_attention_mask  # noqa: E402

from continuous_batching import PROMPTS, greedy, manager_of, model_of, own, serve, tokens  # noqa: E402
from devicegraph.integrations import paged  # noqa: E402
from devicegraph.integrations.transformers import ContinuousBatchingGraphs, enable  # noqa: E402

#: Batches with a long prompt have 32 query tokens and 18, which is more than the largest bucket.
ONE_GRAPH = dg.CudaGraphConfig(decode={"bs": [8]})
NO_GRAPHS = dg.CudaGraphConfig(decode={"backend": "disabled"})


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of()


@pytest.fixture(scope="module")
def wanted(model: Any) -> list[list[int]]:
    return own(model)


@pytest.mark.parametrize(
    ("kind", "attention", "sizes", "keys"),
    [("Qwen3", "paged|sdpa", (4, 16), (96, 416)), ("Llama", "paged|eager", (8,), (416,))],
    ids=["qwen3-sdpa", "llama-eager"],
)
def test_continuous_batching_gives_its_own_tokens_and_replays_what_fits_a_bucket(
    kind: str, attention: str, sizes: tuple[int, ...], keys: tuple[int, ...]
) -> None:
    model = model_of(kind, attention)
    manager = manager_of(model)
    # A cache of 48 blocks of 8, and a batch's own tokens: what is asked for beyond these 416 is cut to them.
    asked = [min(keys), 1024]
    with enable(manager, config=dg.CudaGraphConfig(decode={"bs": list(sizes)}), key_sizes=asked) as graphs:
        got = tokens(serve(manager))
        metrics = graphs.runner.metrics()
    assert got == own(model)
    assert all(len(each) == 8 for each in got)
    labels = {f"keys {most}" for most in keys}
    assert {(each.key.size, each.key.variant_label) for each in graphs.report.captured} == {
        (size, label) for size in sizes for label in labels
    }
    assert {key.variant_label for key in metrics.replays} == labels
    assert metrics.eager == {"above-largest": 2}
    assert metrics.hit_rate > 0.7
    assert metrics.padded_rows > 0


def test_batches_with_prompts_replay_where_their_tokens_fit_a_bucket(model: Any) -> None:
    prompts = [[1, 2, 3], [5], [4, 5, 6, 7, 8]]
    manager = manager_of(model)
    with enable(manager, config=dg.CudaGraphConfig(decode={"bs": [16]})) as graphs:
        got = tokens(serve(manager, prompts))
        assert graphs.runner.metrics().eager == {}
    assert got == tokens(serve(manager_of(model), prompts))


def test_sessions_follow_each_other_on_kept_graphs_and_on_new_ones(model: Any, wanted: list[list[int]]) -> None:
    manager = manager_of(model)
    with enable(manager, config=ONE_GRAPH) as graphs:
        runner = graphs.runner
        assert tokens(serve(manager, keep=True)) == wanted
        first = runner.metrics().steps
        # The blocks of the session before are shared with this one, as they are without graphs.
        again = model.generate_batch(PROMPTS, generation_config=greedy(), persistent_manager=True, warmup=False)
        assert tokens(list(again.values())) == wanted
        assert graphs.runner is runner
        assert runner.metrics().steps > first
        model.init_continuous_batching()
        manager.start()
        manager.stop()  # drops the processor, and with it what the graphs were captured over
        model.destroy_cached_continuous_batching_manager()
        assert tokens(serve(manager)) == wanted
        assert graphs.runner is not runner
        assert graphs.runner.metrics().hit_rate > 0.7


def test_log_probabilities_come_through(model: Any) -> None:
    manager = manager_of(model, return_logprobs=True)
    with enable(manager, config=ONE_GRAPH):
        got = serve(manager)
    for mine, theirs in zip(got, serve(manager_of(model, return_logprobs=True)), strict=True):
        assert mine.generated_tokens == theirs.generated_tokens
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def test_sampling_and_processors_that_are_the_same_for_all_requests_are_captured(
    model: Any, wanted: list[list[int]]
) -> None:
    manager = manager_of(model, only_best())
    with enable(manager, config=ONE_GRAPH) as graphs:
        assert manager.logit_processor.do_processing
        assert tokens(serve(manager)) == wanted
        assert graphs.runner.metrics().hit_rate > 0.7


def only_best(**options: Any) -> Any:
    """Sampling that has no choice."""
    return transformers.GenerationConfig(max_new_tokens=8, do_sample=True, top_k=1, eos_token_id=-1, **options)


def test_forks_give_their_own_tokens_and_requests_without_any_run_eagerly(model: Any) -> None:
    # Until it is forked, a prompt of one token has none in its batch: so there are more requests than query tokens.
    generation, prompts = only_best(num_return_sequences=3), [[5], [7], [1, 2, 3]]
    manager = manager_of(model, generation)
    with enable(manager, config=ONE_GRAPH) as graphs:
        got = tokens(serve(manager, prompts))
        metrics = graphs.runner.metrics()
    assert len(got) == 9
    assert got == tokens(serve(manager_of(model, generation), prompts))
    assert metrics.eager == {"variant-unknown": 1}


def test_a_cache_that_runs_full_gives_its_own_tokens(model: Any) -> None:
    prompts = [[3, 4], [9] * 24, [8] * 20, [5], [6] * 30, [7] * 12]
    manager = manager_of(model, num_blocks=8)
    with enable(manager, config=ONE_GRAPH) as graphs:
        assert tokens(serve(manager, prompts)) == tokens(serve(manager_of(model, num_blocks=8), prompts))
        assert graphs.runner.metrics().replays


@pytest.mark.parametrize(
    ("config", "keys", "reasons"),
    [
        (ONE_GRAPH, [8], {"above-largest", "variant-unknown"}),
        (dg.CudaGraphConfig(decode={"bs": [1]}), None, {"above-largest"}),
        (NO_GRAPHS, None, {"disabled"}),
    ],
    ids=["keys", "buckets", "disabled"],
)
def test_what_has_no_graph_runs_eagerly_and_says_why(
    config: dg.CudaGraphConfig, keys: list[int] | None, reasons: set[str], model: Any, wanted: list[list[int]]
) -> None:
    manager = manager_of(model)
    with enable(manager, config=config, key_sizes=keys) as graphs:
        assert tokens(serve(manager)) == wanted
        assert set(graphs.runner.metrics().eager) == reasons


def test_where_no_buckets_are_named_they_reach_as_far_as_the_requests_of_a_batch(model: Any) -> None:
    manager = manager_of(model, max_requests_per_batch=2)
    with enable(manager, config=NO_GRAPHS) as graphs:
        assert list(graphs.runner.buckets) == [1, 2]


def test_the_static_tensors_of_transformers_are_adopted(model: Any) -> None:
    manager = manager_of(model)
    with enable(manager, config=NO_GRAPHS) as graphs:
        inputs = manager.batch_processor.inputs_and_outputs
        registry = graphs.runner.buffer_registry
        for name in ("input_ids", "position_ids", "logits_indices"):
            assert registry.get_slot(name).buffer.data_ptr() == getattr(inputs, name).data_ptr()
        assert registry.get_slot("read_index").buffer.data_ptr() == inputs.read_index_storage.data_ptr()


def test_closing_puts_everything_back(model: Any, wanted: list[list[int]]) -> None:
    manager = manager_of(model)
    manager.warmup()
    processor = manager.batch_processor
    inputs = processor.inputs_and_outputs
    before = {**vars(manager)}, {**vars(processor)}, {**vars(inputs)}
    graphs = enable(manager, config=ONE_GRAPH)
    assert processor.model_runner is not before[1]["model_runner"]
    assert inputs.attention_mask is None
    graphs.close()
    graphs.close()
    assert (vars(manager), vars(processor)) == before[:2]
    assert vars(inputs).keys() == before[2].keys()
    assert inputs.attention_mask is before[2]["attention_mask"]
    with pytest.raises(dg.ReplayError, match=r"\[closed\]"):
        graphs.verify()
    assert tokens(serve(manager)) == wanted


def test_leaving_the_block_stops_a_manager_that_runs(model: Any) -> None:
    manager = manager_of(model)
    with enable(manager, config=NO_GRAPHS) as graphs:
        manager.start()
        with pytest.raises(dg.ReplayError, match="taken from a manager that is running") as refused:
            graphs.close()
        assert refused.value.code == "manager-running"
        with pytest.raises(dg.ReplayError, match="put under a manager that is running"):
            enable(manager)
    assert not manager.is_running()
    assert "_create_batch_processor" not in vars(manager)


def test_an_error_in_the_block_stops_the_manager_too(model: Any) -> None:
    manager = manager_of(model)

    def fail() -> None:
        with enable(manager, config=NO_GRAPHS):
            manager.start()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not manager.is_running()
    assert "_create_batch_processor" not in vars(manager)


def test_a_forward_that_cannot_be_captured_leaves_the_manager_as_it_was() -> None:
    model = model_of()
    plain = model.forward

    def looks_at_values(**kwargs: Any) -> Any:
        output = plain(**kwargs)
        assert output.logits.sum() < 1e9
        return output

    model.forward = looks_at_values
    manager = manager_of(model)
    before = {**vars(manager)}
    with pytest.raises(dg.CaptureError):
        enable(manager, config=ONE_GRAPH)
    assert vars(manager) == before
    assert all(tokens(serve(manager)))


def test_a_manager_has_graphs_once(model: Any) -> None:
    manager = manager_of(model)
    with enable(manager, config=NO_GRAPHS), pytest.raises(dg.ReplayError, match="has graphs already"):
        enable(manager)


def test_a_close_that_fails_has_put_everything_back_and_lets_go_when_it_is_called_again(model: Any) -> None:
    manager = manager_of(model)
    graphs = enable(manager, config=ONE_GRAPH, key_sizes=[64])
    ours = manager.batch_processor.model_runner
    with mock.patch.object(type(graphs.runner), "close", side_effect=RuntimeError("the device is away")):
        with pytest.raises(RuntimeError, match="away"):
            graphs.close()
        assert manager.batch_processor.model_runner is not ours
        assert manager.batch_processor.inputs_and_outputs.attention_mask is not None
        assert "_create_batch_processor" not in vars(manager)
    graphs.close()
    graphs.close()
    assert not graphs.runner.graphs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"manager": "manager"}, "is no `ContinuousBatchingManager`"),
        ({"config": {"decode": {}}}, "is no `CudaGraphConfig`"),
        ({"key_sizes": [0]}, "key_sizes: 0 is not an integer from 1"),
        ({"key_sizes": []}, "key_sizes: there is none"),
        ({"keep_batches": -1}, "keep_batches: -1 is not an integer from 1"),
    ],
    ids=str,
)
def test_arguments_are_checked_before_anything_is_made(options: dict[str, Any], message: str, model: Any) -> None:
    manager = manager_of(model)
    before = {**vars(manager)}
    with pytest.raises(dg.ConfigError, match=message):
        enable(**{"manager": manager, **options})
    assert vars(manager) == before


def test_what_has_no_graphs_is_refused_all_at_once() -> None:
    layers = ["full_attention", "sliding_attention"]
    model = model_of(num_hidden_layers=2, use_sliding_window=True, sliding_window=8, layer_types=layers)
    generation = transformers.GenerationConfig(do_sample=True, temperature=0.7, eos_token_id=-1)
    manager = manager_of(model, generation, per_request_processors=True)
    manager.warmup()
    manager.batch_processor.model_runner._compiled_varlen = lambda *_: None
    model.set_attn_implementation("sdpa")
    before = {**vars(manager)}
    with pytest.raises(dg.BackendError) as refused:
        enable(manager)
    assert refused.value.code == "mode-not-covered"
    assert refused.value.message == (
        "continuous batching is set up with what has no graphs here: attention by `sdpa`, which is none of "
        "`paged|sdpa`, `paged|eager`; layers with a sliding window; a forward under `torch.compile`; processors of "
        "logits with values for each request"
    )
    assert refused.value.hint == "let transformers run on its own graphs"
    assert vars(manager) == before


def test_attention_that_has_no_graphs_can_be_had_with_others(model: Any) -> None:
    manager = manager_of(model)
    manager.warmup()
    model.set_attn_implementation("sdpa")
    try:
        with pytest.raises(dg.BackendError) as refused:
            enable(manager)
    finally:
        model.set_attn_implementation("paged|sdpa")
    assert refused.value.hint == (
        "load the model with attn_implementation=`paged|sdpa`, or let transformers run on its own graphs"
    )


def test_a_model_in_the_place_of_its_manager_is_not_printed_whole(model: Any) -> None:
    with pytest.raises(dg.ConfigError) as refused:
        enable(model)
    assert len(refused.value.message) < 120


def test_another_version_is_refused_by_name(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = manager_of(model)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.18.0")
    with pytest.raises(dg.BackendError) as refused:
        enable(manager)
    assert str(refused.value) == (
        "transformers 5.18.0 is not one that this was seen working with: 5.17.0 [transformers-version]\n\n"
        "hint: install transformers 5.17.0, or let it run on its own graphs"
    )


def test_the_integration_can_be_imported_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    spec = importlib.util.find_spec("devicegraph.integrations.transformers")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(dg.BackendError, match="transformers is not installed") as refused:
        module.enable(object())
    assert refused.value.code == "transformers-version"


def test_kept_batches_prove_the_graphs_and_find_a_leak(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def verified() -> tuple[dg.VerifyReport, dg.AuditReport]:
        manager = manager_of(model)
        with enable(manager, config=ONE_GRAPH, key_sizes=[64], keep_batches=2) as graphs:
            serve(manager, PROMPTS[2:], keep=True)
            cache = manager.batch_processor.cache
            report = graphs.verify()
            audit = graphs.runner.audit(constants=(cache.key_cache, cache.value_cache))
        model.destroy_cached_continuous_batching_manager()
        return report, audit

    report, audit = verified()
    assert report, report
    assert not audit.findings, audit
    # Without a mask a row sees what padding reads, too.
    masked = paged.attention_mask
    monkeypatch.setattr(paged, "attention_mask", lambda batch, dtype: torch.zeros_like(masked(batch, dtype)))
    assert not verified()[0]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=4), st.integers(0, 3))
def test_the_mask_is_that_of_transformers(lengths: list[tuple[int, int]], padding: int) -> None:
    starts_q, starts_k, positions = [0], [0], []
    for queries, past in lengths:
        starts_q.append(starts_q[-1] + queries)
        starts_k.append(starts_k[-1] + past + queries)
        positions += range(past, past + queries)
    queries, keys = starts_q[-1], starts_k[-1]
    wanted = torch.full((1, 1, queries, keys + padding), torch.finfo(torch.float32).min)
    build_attention_mask(wanted, starts_q, starts_k)
    behind = [paged.BEHIND_ALL] * padding
    batch = paged.PagedBatch(
        input_ids=torch.zeros(queries + padding, dtype=torch.int32),
        position_ids=torch.tensor(positions + [0] * padding, dtype=torch.int32),
        write_index=torch.zeros(queries + padding, dtype=torch.int64),
        cu_seq_lens_q=torch.tensor(starts_q + behind, dtype=torch.int32),
        cu_seq_lens_k=torch.tensor(starts_k + behind, dtype=torch.int32),
        logits_indices=torch.zeros(queries + padding, dtype=torch.int32),
        read_index=torch.zeros(keys + padding, dtype=torch.int64),
    )
    mask = paged.attention_mask(batch, torch.float32)
    assert mask.shape == (1, 1, queries + padding, keys + padding)
    assert torch.equal(mask[:, :, :queries], wanted)


class Queue:
    """Where there is only the host, nothing is ever waited for: all work is done when it is queued."""

    def synchronize(self) -> None: ...
    def record_event(self, event: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...


class HostOnlyIOs(ContinuousBatchingAsyncIOs):
    """Asynchronous inputs and outputs without CUDA's streams and events, which their constructor insists on."""

    def __init__(self, **options: Any) -> None:
        self.current_pair = 0
        self.io_pairs = [HostDeviceIOPair(**options) for _ in range(2)]
        for pair in self.io_pairs:
            pair.h2d_over = pair.compute_over = pair.d2h_over = Queue()
        self.h2d_stream = self.d2h_stream = self.compute_stream = Queue()
        self.max_batch_tokens = options["cache"].max_batch_tokens


def test_asynchronous_batching_has_one_set_of_graphs(
    model: Any, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuous_api, "ContinuousBatchingAsyncIOs", HostOnlyIOs)
    assert own(model, use_async_batching=True) == wanted
    manager = manager_of(model, use_async_batching=True)
    with enable(manager, config=ONE_GRAPH) as graphs:
        pairs = manager.batch_processor.inputs_and_outputs.io_pairs
        assert all(io.attention_mask is None for pair in pairs for io in (pair.host_io, pair.device_io))
        assert tokens(serve(manager)) == wanted
        metrics = graphs.runner.metrics()
    assert metrics.hit_rate > 0.7
    assert len(graphs.report.captured) == 1
    assert all(io.attention_mask is not None for pair in pairs for io in (pair.host_io, pair.device_io))


def test_the_handle_is_what_enable_returns(model: Any) -> None:
    manager = manager_of(model)
    with enable(manager, config=NO_GRAPHS) as graphs:
        assert isinstance(graphs, ContinuousBatchingGraphs)
        assert graphs.manager is manager
        assert graphs.report.note == "the phase is disabled"
