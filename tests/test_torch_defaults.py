"""What an engine sets as torch's default device and dtype reaches nothing that this package makes."""

from __future__ import annotations

import ast
import random
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

import devicegraph as dg
from devicegraph.backends.input_update import host_value
from devicegraph.demo.sampling import Sampling, draw

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")
PACKAGE = Path(dg.__file__).parent
#: Programs, in whose process there is no other engine.
PROGRAMS = {"bench", "demo"}
FACTORIES = {
    "arange", "as_tensor", "empty", "empty_strided", "full", "ones", "rand", "randint", "randn", "tensor", "zeros"
}  # fmt: skip


@pytest.fixture
def odd_defaults() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(dtype)


def test_every_tensor_is_made_on_a_device_that_the_code_names() -> None:
    unnamed = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in PROGRAMS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        if "device" not in {keyword.arg for keyword in node.keywords}
    ]
    assert unnamed == []


@pytest.mark.parametrize("executor", ["foreach", "auto"])
@pytest.mark.usefixtures("odd_defaults")
def test_fills_are_what_they_are_without(executor: str) -> None:
    registry = dg.CudaGraphBufferRegistry(device="cpu", max_bs=4, max_num_tokens=4, executor=executor)
    sentinel = dg.PaddingPolicy.FILL_SENTINEL
    registry.register_slot(dg.GraphSlot("a", _by_token, torch.int64, padding_policy=sentinel, pad_value=7))
    registry.register_slot(dg.GraphSlot("one", _by_token, torch.float32, value_fn=lambda context: 257))
    registry.register_slot(dg.GraphSlot("each", _by_token, torch.float32, value_fn=lambda context: [257, 0.1]))
    batch = {"a": torch.tensor([1, 2], device=CPU)}
    registry.fill_from(batch, raw_bs=2, padded_bs=4, raw_num_tokens=2, padded_num_tokens=4)
    wanted = torch.tensor([257, 0.1, 0, 0], dtype=torch.float32, device=CPU)
    assert registry.get_slot("a").buffer.tolist() == [1, 2, 7, 7]
    assert registry.get_slot("one").buffer.tolist() == [257, 257, 0, 0]
    assert torch.equal(registry.get_slot("each").buffer, wanted)


def _by_token(bs: int, tokens: int) -> tuple[int]:
    return (tokens,)


class Engine:
    device, limits = CPU, dg.Limits(max_bs=8, max_num_tokens=8)

    def forward(self, batch: object) -> torch.Tensor:
        halves = getattr(batch, "tbo_children", None) or [batch]
        return torch.cat([half.input_ids * 10 + half.seq_lens for half in halves])


def batch_of(size: int) -> SimpleNamespace:
    numbers = torch.arange(size, device=CPU)
    return SimpleNamespace(batch_size=size, input_ids=numbers, seq_lens=numbers + 1)


@pytest.mark.parametrize("backend", ["full", "breakable"])
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.usefixtures("odd_defaults")
def test_captures_replays_and_proofs_are_what_they_are_without(backend: str, overlaps: bool) -> None:
    registry = dg.build_decode_registry(
        device=CPU, max_bs=8, max_num_token=8, seq_len_fill_value=1, enable_num_token_non_padded=True
    )
    plugin = dg.TboCudaGraphRunnerPlugin() if overlaps else None
    config = dg.CudaGraphConfig(decode={"bs": [4, 8], "backend": backend})
    with dg.DecodeCudaGraphRunner(Engine(), config=config, registry=registry, tbo=plugin) as runner:
        runner.capture()
        assert runner.run(batch_of(3)).tolist() == [1, 12, 23]
        assert dg.verify(runner, [batch_of(3), batch_of(6)])
        assert not runner.audit().findings


@pytest.mark.usefixtures("odd_defaults")
def test_host_values_of_an_update_stay_on_the_host() -> None:
    value = host_value("lengths", [3, 4], as_tensor=True)
    assert (value.device, value.dtype, value.tolist()) == (CPU, torch.int32, [3, 4])


def test_the_demo_draws_the_same_tokens() -> None:
    def drawn() -> list[int]:
        sources = [random.Random(row) for row in range(64)]
        token_ids: list[int] = draw(logits, [Sampling(temperature=1)] * 64, sources).tolist()
        return token_ids

    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(0))
    wanted, before = drawn(), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert drawn() == wanted
    finally:
        torch.set_default_dtype(before)
