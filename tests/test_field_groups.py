"""The groups of fields that options of the factories add: dtypes, padding, counts, and what does not go together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import devicegraph as dg
from layout_tables import DECODE, PREFILL, SIZES, table

B, T, TOKENS = 4, 8, 2
ENCODER = {"encoder_lens": ("[4] int32 by bs", "FILL_SENTINEL 3")}
MAMBA = {
    "mamba_track_indices": ("[4] int64 by bs", "ZERO"),
    "mamba_track_mask": ("[4] bool by bs", "ZERO"),
    "mamba_track_seqlens": ("[4] int32 by bs", "ZERO"),
}
COUNT = {"num_token_non_padded": ("[1] int32 by none", "KEEP_PAD")}
GLOBAL = dict.fromkeys(
    ("global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu"), ("[1] int32 by none", "KEEP_PAD")
)
RANKED = dict.fromkeys(GLOBAL, ("[3] int32 by none", "KEEP_PAD"))
PROXIES = {
    "pp_proxy_tensors.hidden_states": ("[4, 5] float32 by tokens", "ZERO"),
    "pp_proxy_tensors.residual": ("[4, 2, 3] float32 by tokens", "ZERO"),
}
ROWS = {"hidden_states": (5,), "residual": (2, 3)}
MULTIMODAL = {
    "mrope_positions": ("[3, 8] int64 by tokens", "ZERO"),
    "input_embeds": ("[8, 6] bfloat16 by tokens", "ZERO"),
}
BY_REQUEST = [
    ({"is_encoder_decoder": True, "encoder_len_fill_value": 3}, ENCODER),
    ({"enable_mamba_track": True}, MAMBA),
]
BY_RANK: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"enable_num_token_non_padded": True}, COUNT),
    ({"register_global_num_tokens": True}, GLOBAL),
    ({"register_global_num_tokens": True, "require_mlp_tp_gather": True, "num_dp_ranks": 3}, RANKED),
    ({"pp_proxy": ROWS, "attn_tp_size": 2}, PROXIES),
]


def build(phase: str, **options: Any) -> dg.CudaGraphBufferRegistry:
    if phase == "decode":
        return dg.build_decode_registry(**SIZES, seq_len_fill_value=1, **options)
    return {"prefill": dg.build_prefill_registry, "eager": dg.build_eager_registry}[phase](**SIZES, **options)


@pytest.mark.parametrize(("options", "group"), [*BY_REQUEST, *BY_RANK])
def test_an_option_adds_its_group_and_nothing_else(options: dict[str, Any], group: dict[str, Any]) -> None:
    eager = {**DECODE, "input_ids": PREFILL["input_ids"]}
    phases = {"decode": DECODE, "eager": eager} | ({"prefill": PREFILL} if (options, group) in BY_RANK else {})
    for phase, usual in phases.items():
        registry = build(phase, **options)
        assert table(registry) == {**usual, **group}
        for name in group:
            slot = registry.get_slot(name)
            assert (slot.buffer == (3 if name == "encoder_lens" else 0)).all()


def test_a_multimodal_prefill_has_planes_and_embeddings_that_the_engine_writes() -> None:
    registry = build("prefill", is_multimodal=True, hidden_size=6, embed_dtype=torch.bfloat16)
    assert table(registry) == {**PREFILL, **MULTIMODAL}
    embeds = registry.get_slot("input_embeds").buffer
    embeds.fill_(7)
    registry.fill_from({}, raw_bs=1, padded_bs=1, raw_num_tokens=3, padded_num_tokens=6)
    assert embeds[:, 0].tolist() == [7, 7, 7, 0, 0, 0, 7, 7]


# Any sequence of batches, against the rule of each group written out.


def expect(
    before: dict[str, torch.Tensor], batch: Any, sizes: dict[str, int], options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """What the buffers of all groups hold after a fill, one row at a time."""
    bs, tokens, padded = sizes["raw_bs"], sizes["raw_num_tokens"], sizes["padded_num_tokens"]
    after = {name: buffer.clone() for name, buffer in before.items()}
    for name in (*ENCODER, *MAMBA):
        source = batch.get(name)
        for row in range(sizes["padded_bs"]):
            is_live = source is not None and row < bs
            after[name][row] = source[row] if is_live else options["encoder_len_fill_value"] * (name == "encoder_lens")
    for name in PROXIES:
        proxies = batch.get("pp_proxy_tensors")
        rows = padded // options["attn_tp_size"]
        if proxies is not None or not batch:
            source = None if proxies is None else proxies[name.partition(".")[2]]
            for row in range(rows):
                after[name][row] = source[row] if source is not None and row < len(source) else 0
    own, number = batch.get("num_token_non_padded"), batch.get("num_token_non_padded_cpu")
    if options["require_gathered_buffer"]:
        live = number if number is not None else int(own) if own is not None else tokens
        share = padded // options["attn_tp_size"]
        mine = range(options["attn_tp_rank"] * share, (options["attn_tp_rank"] + 1) * share)
        after["num_token_non_padded"][0] = sum(token < live for token in mine)
        for name in GLOBAL:
            after[name][:] = padded
    else:
        live = int(own) if own is not None else number if number is not None else tokens
        after["num_token_non_padded"][0] = live
        for name in GLOBAL:
            after[name][:] = batch.get(name, before[name])
    return after


@st.composite
def batches(draw: st.DrawFn, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    padded_bs = draw(st.integers(0, B))
    bs = draw(st.integers(0, padded_bs))
    tokens, padded = bs * TOKENS, padded_bs * TOKENS
    sizes = {"raw_bs": bs, "padded_bs": padded_bs, "raw_num_tokens": tokens, "padded_num_tokens": padded}
    if draw(st.integers(0, 4)) == 0:
        return {}, {**sizes, "raw_bs": 0, "raw_num_tokens": 0}

    def numbers(count: int, dtype: torch.dtype) -> torch.Tensor:
        drawn = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
        return torch.tensor(drawn, dtype=torch.int64).to(dtype)

    sent = draw(st.integers(0, padded // options["attn_tp_size"]))
    live = draw(st.integers(0, padded))
    count_dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    could: dict[str, Any] = {
        "encoder_lens": numbers(bs, torch.int32),
        "mamba_track_indices": numbers(bs, torch.int64),
        "mamba_track_mask": numbers(bs, torch.bool),
        "mamba_track_seqlens": numbers(bs, torch.int32),
        "num_token_non_padded": torch.tensor(live, dtype=count_dtype).reshape(draw(st.sampled_from([(), (1,)]))),
        "num_token_non_padded_cpu": draw(st.integers(0, padded)),
        "pp_proxy_tensors": {name: torch.rand(sent, *shape) for name, shape in ROWS.items()},
        **{name: numbers(3, torch.int32) for name in GLOBAL},
    }
    fields = {name: value for name, value in could.items() if draw(st.booleans())}
    return {"batch_size": bs, **fields}, sizes


@pytest.mark.parametrize("executor", ["foreach", "native"])
@pytest.mark.parametrize("is_gathered", [False, True])
def test_every_fill_equals_the_rule_of_each_group(is_gathered: bool, executor: Any) -> None:
    @settings(max_examples=15)
    @given(st.data(), st.integers(0, 1))
    def check(data: st.DataObject, rank: int) -> None:
        options: dict[str, Any] = {
            "encoder_len_fill_value": 3,
            "require_gathered_buffer": is_gathered,
            "attn_tp_size": 2,
            "attn_tp_rank": rank,
        }
        registry = build(
            "decode",
            **options,
            is_encoder_decoder=True,
            enable_mamba_track=True,
            enable_num_token_non_padded=True,
            register_global_num_tokens=True,
            require_mlp_tp_gather=True,
            num_dp_ranks=3,
            num_tokens_per_bs=TOKENS,
            pp_proxy=ROWS,
            executor=executor,
        )
        names = (*ENCODER, *MAMBA, *COUNT, *GLOBAL, *PROXIES)
        for _ in range(3):
            batch, sizes = data.draw(batches(options))
            before = {name: registry.get_slot(name).buffer.clone() for name in names}
            given_batch = SimpleNamespace(**batch) if batch and data.draw(st.booleans()) else batch
            registry.fill_from(given_batch, **sizes)
            for name, want in expect(before, batch, sizes, options).items():
                assert torch.equal(registry.get_slot(name).buffer, want), name

    check()


@pytest.mark.parametrize("counts", [{}, {"register_global_num_tokens": True}, {"enable_num_token_non_padded": True}])
def test_a_gathered_buffer_makes_buckets_of_equal_shares_whatever_is_counted(counts: dict[str, Any]) -> None:
    for phase in ("decode", "prefill", "eager"):
        assert build(phase, attn_tp_size=4, require_gathered_buffer=True, **counts).alignment == (1, 4)
        assert build(phase, attn_tp_size=4, **counts).alignment == (1, 1)
    engine = SimpleNamespace(device="cpu", limits=dg.Limits(B, T), forward=lambda batch: batch.input_ids)
    registry = build("decode", attn_tp_size=4, require_gathered_buffer=True, **counts)
    config = dg.CudaGraphConfig(decode={"bs": [1, 2, 4]})
    assert list(dg.DecodeCudaGraphRunner(engine, config=config, registry=registry).buckets) == [4]
    spec = dg.DecodeCudaGraphRunner(engine, config=config, registry=registry, num_tokens_per_bs=TOKENS)
    assert list(spec.buckets) == [2, 4]


def test_a_count_on_the_host_is_written_by_the_fill_itself() -> None:
    """A number costs no operator; a count that only the device knows is computed there."""
    registry = build("decode", enable_num_token_non_padded=True, require_gathered_buffer=True, executor="native")
    sizes = {"raw_bs": 2, "padded_bs": 4, "raw_num_tokens": 2, "padded_num_tokens": 4}
    batch = {"positions": torch.tensor([1, 2]), "num_token_non_padded_cpu": 2}
    registry.fill_from(batch, **sizes)
    seen: list[str] = []

    class Operators(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    for live in (1, 2, 0):
        with Operators():
            registry.fill_from({**batch, "num_token_non_padded_cpu": live}, **sizes)
        assert registry.get_slot("num_token_non_padded").buffer.tolist() == [live]
    assert "clamp" not in seen
    with Operators():
        registry.fill_from({"num_token_non_padded": torch.tensor(2)}, **sizes)
    assert "clamp" in seen


# The engine's own buffers.


def test_all_groups_adopt_the_engines_own_buffers_and_proxies_take_their_form_from_them() -> None:
    class Proxies:
        def __init__(self) -> None:
            self.tensors = {"hidden": torch.full((4, 6), 5.0, dtype=torch.bfloat16), "residual": torch.ones(4, 6)}

    own = SimpleNamespace(
        encoder_lens=torch.full((4,), 9, dtype=torch.int32),
        num_token_non_padded=torch.zeros(1, dtype=torch.int32),
        pp_proxy_tensors=Proxies(),
    )
    registry = build("decode", is_encoder_decoder=True, enable_num_token_non_padded=True, attn_tp_size=2, source=own)
    assert registry.get_slot("encoder_lens").buffer is own.encoder_lens
    assert own.encoder_lens.tolist() == [9] * 4
    assert registry.get_slot("num_token_non_padded").buffer is own.num_token_non_padded
    for name, tensor in own.pp_proxy_tensors.tensors.items():
        assert registry.get_slot(f"pp_proxy_tensors.{name}").buffer is tensor
    registry.fill_from(
        {"batch_size": 1},
        raw_bs=1,
        padded_bs=2,
        raw_num_tokens=1,
        padded_num_tokens=2,
        pp_proxy_tensors={"hidden": torch.ones(1, 6, dtype=torch.bfloat16), "residual": torch.zeros(1, 6)},
    )
    assert own.pp_proxy_tensors.tensors["hidden"][:, 0].tolist() == [1, 5, 5, 5]
    assert not build("decode", source=SimpleNamespace(pp_proxy_tensors=None)).has_slot("pp_proxy_tensors.hidden")


def test_named_shapes_come_before_the_sources_and_their_dtype_is_given() -> None:
    own = {"pp_proxy_tensors": {"hidden_states": torch.zeros(8, 5, dtype=torch.float16), "other": torch.zeros(8)}}
    options: dict[str, Any] = {"pp_proxy": {"hidden_states": (5,), "residual": (5,)}, "pp_proxy_dtype": torch.float16}
    registry = build("prefill", **options, source=own)
    assert registry.get_slot("pp_proxy_tensors.hidden_states").buffer is own["pp_proxy_tensors"]["hidden_states"]
    assert registry.get_slot("pp_proxy_tensors.residual").buffer.dtype == torch.float16
    assert not registry.has_slot("pp_proxy_tensors.other")


# What does not go together, refused before anything is allocated.

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "`require_mlp_tp_gather` needs `num_dp_ranks`, for how many ranks there are counts [option-missing]": (
        {"require_mlp_tp_gather": True},
        "decode prefill eager",
    ),
    "`num_dp_ranks`: 0 is no count [bad-option]\n\nhint: use 1 or more": ({"num_dp_ranks": 0}, "decode prefill eager"),
    "`attn_tp_size`: 0 is no count [bad-option]\n\nhint: use 1 or more": ({"attn_tp_size": 0}, "decode prefill eager"),
    "`attn_tp_rank`: 2 is none of 2 ranks [bad-option]\n\nhint: number the ranks from 0 to `attn_tp_size - 1`": (
        {"attn_tp_size": 2, "attn_tp_rank": 2},
        "decode prefill eager",
    ),
    "`max_num_token`: 8 tokens are no equal shares for 3 ranks [bucket-not-divisible]\n\n"
    "hint: take a multiple of `attn_tp_size`": ({"attn_tp_size": 3, "pp_proxy": ROWS}, "decode prefill eager"),
    "`max_num_token`: 8 tokens are no equal shares for 5 ranks [bucket-not-divisible]\n\n"
    "hint: take a multiple of `attn_tp_size`": (
        {"attn_tp_size": 5, "require_gathered_buffer": True},
        "decode prefill eager",
    ),
    "`max_num_token`: 8 tokens are no 3 for each of 4 requests [bad-option]\n\n"
    "hint: it is `max_bs * num_tokens_per_bs`": ({"num_tokens_per_bs": 3}, "decode"),
    "`pp_proxy` names no tensor [bad-option]\n\nhint: leave it out where no stage comes before": (
        {"pp_proxy": {}},
        "decode prefill eager",
    ),
    "`pp_proxy`: `hidden`: `(2.5,)` is no shape of a row [bad-option]\n\n"
    "hint: give a sequence of sizes, as `(4096,)`": ({"pp_proxy": {"hidden": (2.5,)}}, "decode prefill eager"),
    "`is_multimodal` needs `hidden_size` and `embed_dtype`, which give `input_embeds` its shape [option-missing]": (
        {"is_multimodal": True, "hidden_size": 4},
        "prefill",
    ),
    "slot `encoder_lens`: `0.5` is no `int32` [bad-pad-value]": (
        {"is_encoder_decoder": True, "encoder_len_fill_value": 0.5},
        "decode eager",
    ),
    "slot `pp_proxy_tensors.hidden`: a `int` cannot be its buffer [not-a-tensor]\n\nhint: bind a dense tensor": (
        {"source": {"pp_proxy_tensors": {"hidden": 5}}},
        "decode prefill eager",
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_options_that_do_not_go_together_are_refused_before_anything_is_allocated(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, phases = WRONG[message]
    monkeypatch.setattr(torch, "full", lambda *args, **kwargs: pytest.fail("a buffer was allocated"))
    for phase in phases.split():
        with pytest.raises(dg.SlotError) as caught:
            build(phase, **options)
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("batch", "padded", "code"),
    [
        ({"num_token_non_padded": torch.tensor([1, 2])}, 4, "wrong-shape"),
        ({"num_token_non_padded": 2}, 4, "wrong-shape"),
        ({"num_token_non_padded_cpu": 1.5}, 4, "not-a-size"),
        ({"num_token_non_padded_cpu": 1}, 3, "bucket-not-divisible"),
        ({"pp_proxy_tensors": {"hidden_states": torch.zeros(2, 5)}}, 4, "field-missing"),
        ({"pp_proxy_tensors": torch.zeros(2, 5)}, 4, "not-a-tensor"),
        ({"pp_proxy_tensors": {name: torch.zeros(3, *row) for name, row in ROWS.items()}}, 4, "too-many-rows"),
        ({"encoder_lens": torch.zeros(1, dtype=torch.int64)}, 4, "narrowing-cast"),
    ],
)  # fmt: skip
def test_a_field_that_does_not_fit_its_group_is_refused_and_nothing_written(
    batch: dict[str, Any], padded: int, code: str
) -> None:
    registry = build(
        "decode",
        is_encoder_decoder=True,
        enable_num_token_non_padded=True,
        require_gathered_buffer=True,
        attn_tp_size=2,
        pp_proxy=ROWS,
    )
    before = [slot.buffer.fill_(1).clone() for slot in registry.slots]
    with pytest.raises(dg.SlotError) as caught:
        registry.fill_from(batch, raw_bs=1, padded_bs=padded, raw_num_tokens=1, padded_num_tokens=padded)
    assert caught.value.code == code
    assert all(torch.equal(slot.buffer, kept) for slot, kept in zip(registry.slots, before, strict=True))
