"""The demo's engine: blocks, batches, attention, sampling, and what requests get whoever runs beside them."""

from __future__ import annotations

import ast
import itertools
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import devicegraph as dg

transformers = pytest.importorskip("transformers", reason="needs transformers")

from devicegraph.demo import graphs  # noqa: E402
from devicegraph.demo.attention import ChunkPlan, attend_chunks, attend_uniform  # noqa: E402
from devicegraph.demo.blocks import Cache  # noqa: E402
from devicegraph.demo.engine import EAGER, Engine  # noqa: E402
from devicegraph.demo.lookup import PromptLookup  # noqa: E402
from devicegraph.demo.model import ATTENTION, Model, fuse_norms, register_attention  # noqa: E402
from devicegraph.demo.sampling import Sampling, draw  # noqa: E402
from devicegraph.demo.scheduler import Request, Scheduler  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # transformers and its dependencies deprecate things of their own

CPU = torch.device("cpu")
GRAPHS = dg.CudaGraphConfig(prefill={"backend": "breakable", "bs": [8]}, decode={"bs": [1, 2, 4]})
ONE_SIZE = GRAPHS.with_phase("decode", bs=[4])


@pytest.fixture(scope="module")
def transformer() -> Any:
    register_attention()
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=23,
        max_position_embeddings=64,
    )
    config._attn_implementation = ATTENTION
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def engine_of(transformer: Any, config: dg.CudaGraphConfig = EAGER, **changes: Any) -> Engine:
    sizes = {"max_requests": 4, "max_length": 40, "max_prefill_tokens": 8, "block_size": 4, **changes}
    return Engine(transformer, config=config, **sizes)


def prompts(*lengths: int) -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(23) for _ in range(length)] for length in lengths]


def serve(engine: Engine, asked: list[list[int]], new: int = 9, **options: Any) -> list[list[int]]:
    requests = [engine.submit(prompt, max_new_tokens=new, **options) for prompt in asked]
    for _ in engine.stream():
        pass
    return [request.generated for request in requests]


def alone(transformer: Any, prompt: list[int], new: int) -> list[int]:
    """The specification: greedy decoding of one request in one forward for each token, by another attention."""
    transformer.set_attn_implementation("eager")
    try:
        token_ids = list(prompt)
        with torch.no_grad():
            for _ in range(new):
                logits = transformer(input_ids=torch.tensor([token_ids]), use_cache=False).logits
                token_ids.append(int(logits[0, -1].argmax()))
    finally:
        transformer.set_attn_implementation(ATTENTION)
    return token_ids[len(prompt) :]


ASKED = prompts(3, 11, 1, 6, 20, 2)


@pytest.fixture(scope="module")
def answers(transformer: Any) -> list[list[int]]:
    return [alone(transformer, prompt, 9) for prompt in ASKED]


# What requests get.


def test_every_request_gets_what_it_would_get_alone(transformer: Any, answers: list[list[int]]) -> None:
    engine = engine_of(transformer, GRAPHS)
    engine.capture()
    assert serve(engine, ASKED) == answers
    for kind in ("prefill", "decode"):
        assert engine.runners[kind].metrics().hit_rate == 1.0
    assert {key.size for key in engine.runners["decode"].metrics().replays} == {1, 2, 4}
    engine.close()
    # Without graphs, and with everything in one prefill step.
    assert serve(engine_of(transformer, max_prefill_tokens=64, max_requests=6), ASKED) == answers


def test_requests_that_had_to_give_up_their_blocks_go_on_where_they_were(
    transformer: Any, answers: list[list[int]]
) -> None:
    engine = engine_of(transformer, blocks=9)
    requests = [engine.submit(prompt, max_new_tokens=9) for prompt in ASKED]
    for _ in engine.stream():
        pass
    assert [request.generated for request in requests] == answers
    assert sum(request.preemptions for request in requests) > 0
    assert engine.scheduler.free_blocks == 8


def test_tokens_come_as_they_are_decided_and_requests_may_join_meanwhile(
    transformer: Any, answers: list[list[int]]
) -> None:
    engine = engine_of(transformer)
    first = engine.submit(ASKED[0], max_new_tokens=9)
    second, came = None, []
    for request, token_id in engine.stream():
        assert request.generated[-1] == token_id
        came.append(request)
        if len(came) == 3:
            second = engine.submit(ASKED[1], max_new_tokens=9)
    assert second is not None
    assert [first.generated, second.generated] == answers[:2]
    assert came.index(second) < 9  # it did not wait for the first one to end
    assert came.count(first) == came.count(second) == 9


def test_a_request_ends_at_its_own_last_token_or_length(transformer: Any, answers: list[list[int]]) -> None:
    engine = engine_of(transformer)
    last = answers[1][2]
    stopped = engine.submit(ASKED[1], max_new_tokens=9, eos_token_ids={last})
    counted = engine.submit(ASKED[0], max_new_tokens=1)
    list(engine.stream())
    assert (stopped.finish, stopped.generated) == ("stop", answers[1][: answers[1].index(last) + 1])
    assert (counted.finish, counted.generated) == ("length", answers[0][:1])


@pytest.mark.parametrize(
    ("prompt", "new", "code"),
    [
        ([], 4, "prompt-empty"),
        ([1] * 38, 4, "prompt-too-long"),
        ([1], 0, "limit-invalid"),
        ([1], 1.5, "limit-invalid"),
        ([1, 23], 4, "token-unknown"),
        ([-1], 4, "token-unknown"),
    ],
)
def test_requests_that_could_never_end_are_refused(transformer: Any, prompt: list[int], new: Any, code: str) -> None:
    engine = engine_of(transformer)
    with pytest.raises(dg.ConfigError) as caught:
        engine.submit(prompt, max_new_tokens=new)
    assert caught.value.code == code
    assert engine.scheduler.is_idle


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_step_that_fails_is_made_again_and_changes_no_token(
    transformer: Any, answers: list[list[int]], kind: Any
) -> None:
    engine = engine_of(transformer)
    run, calls = engine.run[kind], itertools.count()

    def failing(batch: Any) -> Any:
        if next(calls) % 2 == 0:
            raise RuntimeError("the device is away")
        return run(batch)

    engine.run[kind] = failing
    for values in (*engine.cache.keys, *engine.cache.values):
        values.fill_(7)  # as requests before may have left it
    requests = [engine.submit(prompt, max_new_tokens=9) for prompt in ASKED]
    failures = 0
    while not engine.scheduler.is_idle:
        try:
            engine.step()
        except RuntimeError:
            failures += 1
    assert failures > 2
    assert [request.generated for request in requests] == answers


def test_a_request_that_the_cache_cannot_hold_is_refused_with_the_room_there_is(transformer: Any) -> None:
    with pytest.raises(dg.ConfigError) as caught:
        engine_of(transformer, blocks=4).submit([1] * 10, max_new_tokens=3)
    assert caught.value.message == "a prompt of 10 tokens and 3 new ones take 13, a request has 12"


def test_a_model_that_is_refused_is_as_it_was() -> None:
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=9, state_size=4)
    model = transformers.MambaForCausalLM(config)
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(dg.BackendError, match="it has no attention heads") as caught:
        Model(model)
    assert caught.value.code == "checkpoint-unusable"
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_norms_of_one_kernel_compute_what_those_of_transformers_do() -> None:
    config = transformers.Qwen3Config(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=9,
    )
    model = transformers.Qwen3ForCausalLM(config)
    before = {name: module for name, module in model.named_modules() if name.endswith("norm")}
    fuse_norms(model)
    after = {name: module for name, module in model.named_modules() if name.endswith("norm")}
    assert len(before) == len(after) == 5
    for name, norm in after.items():
        assert type(norm) is torch.nn.RMSNorm
        assert norm.weight is before[name].weight
        with torch.no_grad():
            norm.weight.normal_()
        rows = torch.randn(3, *norm.weight.shape) * 1e-3  # so small that the epsilon counts
        torch.testing.assert_close(norm(rows), before[name](rows))


# Speculation.


@pytest.mark.parametrize("config", [EAGER, ONE_SIZE], ids=["eager", "graphs"])
def test_prompt_lookup_changes_no_token_and_saves_steps(transformer: Any, config: dg.CudaGraphConfig) -> None:
    repeating = [[5, 6, 7, 8] * 3, *ASKED]
    # What a greedy model says becomes a loop soon, which is what look-ups are good at.
    expected = serve(engine_of(transformer), repeating, new=18)
    engine = engine_of(transformer, config, proposals=3)
    engine.capture()
    assert serve(engine, repeating, new=18) == expected
    assert 0 < engine.accepted <= engine.proposed
    assert engine.accepted > engine.steps_verified  # more than a token for each step
    if config is ONE_SIZE:
        metrics = engine.runners["verify"].metrics()
        assert (metrics.hit_rate, metrics.mode) == (1.0, "target_verify")
    engine.close()


@pytest.mark.parametrize(("config", "layers"), [(EAGER, 1), (EAGER, 2), (ONE_SIZE, 1)])
def test_a_draft_of_fewer_layers_changes_no_token_and_one_of_all_is_always_right(
    transformer: Any, answers: list[list[int]], config: dg.CudaGraphConfig, layers: int
) -> None:
    engine = engine_of(transformer, config, proposals=3, draft_layers=layers)
    engine.capture()
    requests = [engine.submit(prompt, max_new_tokens=9) for prompt in ASKED]
    drawing = engine.submit(ASKED[0], max_new_tokens=9, sampling=Sampling(temperature=1, seed=1))
    list(engine.stream())
    assert [request.generated for request in requests] == answers
    assert len(drawing.generated) == 9
    assert 0 < engine.accepted <= engine.proposed
    assert layers == 1 or engine.accepted == engine.proposed
    if config is ONE_SIZE:
        assert engine.runners["draft"].metrics().hit_rate == 1.0
    engine.close()
    assert len(transformer.model.layers) == 2


@pytest.mark.parametrize("layers", [-1, 0, 3])
def test_layers_that_the_model_has_not_draft_nothing(transformer: Any, layers: int) -> None:
    with pytest.raises(dg.ConfigError, match=rf"{layers} layers cannot draft, the model has 2 \[limit-invalid\]"):
        engine_of(transformer, proposals=3, draft_layers=layers)


def test_requests_that_draw_take_part_in_steps_that_verify_others(transformer: Any) -> None:
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=3)
    plain, guessing = engine_of(transformer), engine_of(transformer, proposals=3)
    found = []
    for engine in (plain, guessing):
        drawn = engine.submit(ASKED[0], max_new_tokens=12, sampling=sampling)
        greedy = engine.submit([5, 6, 7, 8] * 3, max_new_tokens=20)
        list(engine.stream())
        found.append((drawn.generated, greedy.generated))
    assert found[0] == found[1]
    assert guessing.steps_verified > 0


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 4))
def test_a_look_up_proposes_what_followed_the_last_such_run(token_ids: list[int], count: int) -> None:
    def naive(seen: list[int]) -> list[int]:
        for length in (3, 2):
            for end in range(len(seen) - 1, length - 1, -1):
                if seen[end - length : end] == seen[-length:]:
                    return seen[end : end + count]
        return []

    lookup = PromptLookup()
    for end in range(1, len(token_ids) + 1):
        assert lookup.propose(token_ids[:end], count) == naive(token_ids[:end])


# Drawing.


def test_draws_depend_on_the_request_alone(transformer: Any) -> None:
    def answer(engine: Engine, seed: int, beside: int) -> list[int]:
        for prompt in ASKED[:beside]:
            engine.submit(prompt, max_new_tokens=5, sampling=Sampling(temperature=1.5, seed=99))
        request = engine.submit(ASKED[3], max_new_tokens=12, sampling=Sampling(temperature=1.5, seed=seed))
        list(engine.stream())
        return request.generated

    engine = engine_of(transformer)
    assert answer(engine, 1, beside=0) == answer(engine, 1, beside=3)
    assert answer(engine, 1, beside=0) != answer(engine, 2, beside=0)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.floats(0.1, 3), st.floats(0.05, 1))
def test_a_draw_is_where_its_number_falls_among_the_likeliest_tokens(
    seed: int, temperature: float, top_p: float
) -> None:
    logits = torch.randn(4, 11, generator=torch.Generator().manual_seed(seed))
    sampling = Sampling(temperature, top_p, seed)
    drawn = draw(logits, [sampling] * 4, [random.Random(seed + row) for row in range(4)]).tolist()
    for row, token_id in enumerate(drawn):
        shares = [math.exp(value / temperature) for value in logits[row].tolist()]
        likeliest = sorted(range(11), key=lambda token: -shares[token])
        kept, before = [], 0.0
        for token in likeliest:
            if before < top_p:
                kept.append(token)
            before += shares[token] / sum(shares)
        assert token_id in kept
        place = random.Random(seed + row).random() * sum(shares[token] for token in kept)
        below = sum(shares[token] for token in kept[: kept.index(token_id)])
        assert below - 1e-3 * sum(shares) <= place <= below + shares[token_id] + 1e-3 * sum(shares)


@pytest.mark.parametrize(
    "sampling", [Sampling(1e-50), Sampling(1e-38), Sampling(1, 1e-50), Sampling(1, 1e-7)], ids=repr
)
def test_the_narrowest_draw_is_of_the_likeliest_token(sampling: Sampling) -> None:
    logits = 9 * torch.randn(50, 23, generator=torch.Generator().manual_seed(0))
    drawn = draw(logits, [sampling] * 50, [random.Random(row) for row in range(50)])
    assert torch.equal(drawn, logits.argmax(-1))
    nothing = draw(torch.full((1, 23), math.nan), [sampling], [random.Random(0)])
    assert 0 <= int(nothing) < 23  # a model that is broken breaks no other request


@pytest.mark.parametrize("options", [{"temperature": -1}, {"temperature": math.nan}, {"top_p": 0}, {"top_p": 1.1}])
def test_sampling_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(dg.ConfigError) as caught:
        Sampling(**options)
    assert caught.value.code == "sampling-invalid"


# Blocks and batches.


class Echo:
    """In place of a model: writes what it is given where it is told to, and checks that a request reads that."""

    def __init__(self, cache: Cache) -> None:
        self.size, self.held = cache.block_size, [None] * (cache.blocks * cache.block_size)

    def write(self, batch: Any) -> None:
        for token, position, place in zip(
            batch.input_ids.tolist(), batch.positions.tolist(), batch.out_cache_loc.tolist(), strict=True
        ):
            self.held[place] = (token, position)

    def read(self, table: list[int], length: int) -> list[Any]:
        places = (table[position // self.size] * self.size + position % self.size for position in range(length))
        return [self.held[place] for place in places]


def _next(request: Request) -> int:
    return -2 - len(request.token_ids)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 14), st.integers(1, 8)), min_size=1, max_size=8),
    st.integers(6, 20),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_a_request_finds_its_own_tokens_in_its_blocks_and_all_blocks_come_back(
    sizes: list[tuple[int, int]], blocks: int, max_prefill_tokens: int, max_requests: int, proposals: int
) -> None:
    cache = Cache(layers=1, blocks=blocks, block_size=4, heads=1, width=1, dtype=torch.float32, device=CPU)
    model = Echo(cache)
    scheduler = Scheduler(
        cache,
        max_requests=max_requests,
        max_length=24,
        max_prefill_tokens=max_prefill_tokens,
        proposals=proposals,
    )
    requests = []
    for number, (length, new) in enumerate(sizes):
        request = Request([100 * number + i for i in range(length)], length, new)
        if request.limit <= (blocks - 1) * 4:
            scheduler.submit(request)
            requests.append(request)
    for _ in range(2000):
        if scheduler.is_idle:
            break
        prefill = scheduler.prefill_batch()
        if prefill is not None:
            batch, deciding = prefill
            assert len(batch.input_ids) == sum(length for _, length in batch.chunks) <= max_prefill_tokens
            assert len(batch.decides) == len(deciding)
            scheduler.prefilled()
            count = 1
        else:
            scheduler.make_room(1 + proposals)
            deciding = scheduler.decoding.copy()
            if not deciding:
                continue
            # The first proposal is right, the others are not.
            proposed = [[_next(request), *[-1] * (proposals - 1)] for request in deciding] if proposals else None
            batch = scheduler.decode_batch(proposed)
            count = min(1 + proposals, 2)
            assert batch.seq_lens.tolist() == [len(request.token_ids) + proposals for request in deciding]
        assert len(scheduler.running) <= max_requests
        held = [block for request in scheduler.running for block in request.blocks]
        assert 0 not in held
        assert len(set(held)) == len(held)
        model.write(batch)
        for request in deciding:
            found = model.read(request.blocks, len(request.token_ids))
            assert found == [(token, position) for position, token in enumerate(request.token_ids)]
        if prefill is None:
            for request, table in zip(deciding, batch.block_tables.tolist(), strict=True):
                assert table == request.blocks + [0] * (len(table) - len(request.blocks))
        for request in deciding:
            scheduler.append(request, [_next(request)] * count)
    assert scheduler.is_idle
    assert all(len(request.token_ids) == request.limit for request in requests)
    assert scheduler.free_blocks == blocks - 1


# Attention.


def reference(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """The last queries of a request over all of it, one token and head at a time."""
    output = torch.zeros_like(query)
    count, heads = query.shape[:2]
    group = heads // keys.shape[1]
    for token in range(count):
        end = len(keys) - count + token + 1
        for head in range(heads):
            weights = (keys[:end, head // group] @ query[token, head] * scale).softmax(0)
            output[token, head] = weights @ values[:end, head // group]
    return output


def paged(lengths: list[int], heads: int, width: int, block_size: int) -> tuple[Cache, torch.Tensor, list[Any]]:
    """A cache, the block tables of requests, and what each of them has in order; all else is what nobody may use."""
    torch.manual_seed(len(lengths))
    wide = -(-max(lengths) // block_size)
    cache = Cache(
        layers=1,
        blocks=1 + wide * len(lengths),
        block_size=block_size,
        heads=heads,
        width=width,
        dtype=torch.float32,
        device=CPU,
    )
    tables = (torch.randperm(wide * len(lengths)) + 1).view(len(lengths), wide).int()
    held = []
    for tensor in (cache.keys[0], cache.values[0]):
        tensor.fill_(math.nan)
    for table, length in zip(tables, lengths, strict=True):
        held.append(tuple(torch.randn(2, length, heads, width)))
        where = cache.locations(table[None], torch.arange(length)[None])[0]
        cache.write(0, where, *(rows.transpose(0, 1) for rows in held[-1]))
    return cache, tables, held


# The longer ones are long enough for several programs to share the keys of a request.
UNIFORM = [(4, 2, 16, 1, 64), (9, 3, 20, 3, 260), (2, 2, 16, 18, 70), (20, 1, 8, 2, 300)]
CHUNKS = [(0, 5), (30, 40), (0, 1), (7, 16)]


def uniform_case(
    query_heads: int, heads: int, width: int, count: int, longest: int
) -> tuple[torch.Tensor, Cache, Any, Any, Any]:
    lengths = [count, longest, 20, 64]
    cache, tables, held = paged(lengths, heads, width, block_size=16)
    query = torch.randn(query_heads, len(lengths) * count, width).transpose(0, 1)
    parts = zip(query.split(count), held, strict=True)
    return query, cache, tables, torch.tensor(lengths), torch.cat([reference(part, *mine, 0.3) for part, mine in parts])


def chunk_case() -> tuple[torch.Tensor, Cache, torch.Tensor, torch.Tensor]:
    cache, tables, held = paged([start + length for start, length in CHUNKS], 2, 16, block_size=8)
    query = torch.randn(6, 62 + 3, 16).transpose(0, 1)
    parts = zip(query[:62].split([length for _, length in CHUNKS]), held, strict=True)
    padding = torch.zeros(3, 6, 16)
    return query, cache, tables, torch.cat([*(reference(part, *mine, 0.3) for part, mine in parts), padding])


@pytest.mark.parametrize("case", UNIFORM)
def test_attention_of_equally_many_tokens_is_that_of_each_request_whatever_else_is_in_its_blocks(
    case: tuple[int, int, int, int, int],
) -> None:
    query, cache, tables, seq_lens, expected = uniform_case(*case)
    torch.testing.assert_close(attend_uniform(query, cache, 0, tables, seq_lens, 0.3), expected)


def test_attention_of_chunks_is_that_of_each_prompt_and_leaves_padding_zero() -> None:
    query, cache, tables, expected = chunk_case()
    torch.testing.assert_close(attend_chunks(query, cache, 0, tables, ChunkPlan(CHUNKS, CPU), 0.3), expected)


def test_the_kernel_computes_what_plain_attention_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted on the CPU, which Triton decides when it is imported: in a process of its own."""
    # Older interpreters cannot take the ends of a loop from memory, with NumPy 2.4 and newer.
    pytest.importorskip("triton", minversion="3.7", reason="needs Triton 3.7")
    calls, wanted = [], []
    for query, cache, tables, seq_lens, expected in map(uniform_case, *zip(*UNIFORM, strict=True)):
        calls.append((query, cache.keys[0], cache.values[0], tables, seq_lens, 0.3))
        wanted.append(expected)
    monkeypatch.setattr("devicegraph.demo.attention.uses_kernel", lambda device: True)
    query, cache, tables, expected = chunk_case()
    plan = ChunkPlan(CHUNKS, CPU).on_device
    assert plan is not None
    seq_lens, *rest = plan
    calls.append((query, cache.keys[0], cache.values[0], tables, seq_lens, 0.3, *rest))
    torch.save(calls, tmp_path / "calls")
    program = """
import sys, torch
from devicegraph.demo.kernels import launch
torch.save([launch(*call) for call in torch.load(sys.argv[1])], sys.argv[2])
"""
    command = [sys.executable, "-c", program, str(tmp_path / "calls"), str(tmp_path / "found")]
    subprocess.run(command, check=True, env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    for found, want in zip(torch.load(tmp_path / "found"), [*wanted, expected], strict=True):
        torch.testing.assert_close(found, want)


# What the integration promises.

DEMO = Path(graphs.__file__).parent


def test_all_that_an_engine_needs_for_graphs_is_one_short_file() -> None:
    assert len((DEMO / "graphs.py").read_text(encoding="utf-8").splitlines()) < 150
    for name in ("attention", "batches", "blocks", "kernels", "lookup", "model", "sampling", "scheduler"):
        tree = ast.parse((DEMO / f"{name}.py").read_text(encoding="utf-8"))
        modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        ours = {module for module in modules if module.startswith("devicegraph") and ".demo" not in module}
        assert ours <= {"devicegraph.errors"}, name
