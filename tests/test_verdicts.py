"""The CPU tape keeps the table of verdicts; `tests/gpu` holds a GPU to the same one."""

from __future__ import annotations

import pytest
import torch

import devicegraph
from devicegraph.devices import GraphMemoryPool, get_device_adapter
from devicegraph.devices.tape_rules import REFUSALS
from verdicts import ALLOWED, CONSTRUCTS, RANDOM, Construct, Setting

ADAPTER = get_device_adapter("cpu")


def _capture(construct: Construct, setting: Setting) -> tuple[object, object]:
    graph = ADAPTER.graph()
    with ADAPTER.capture(
        graph, pool=GraphMemoryPool(ADAPTER), stream=ADAPTER.stream(), capture_error_mode="thread_local"
    ):
        output = construct.run(setting)
    return graph, output


def _of(*verdicts: str) -> list[object]:
    return [pytest.param(c, id=c.name) for c in CONSTRUCTS if c.verdict in verdicts]


@pytest.mark.parametrize("construct", _of(ALLOWED))
def test_an_allowed_construct_executes_nothing_in_capture_and_replays_like_eager(construct: Construct) -> None:
    captured, eager = Setting(ADAPTER), Setting(ADAPTER)
    graph, output = _capture(construct, captured)
    for name, value in vars(eager).items():
        if isinstance(value, torch.Tensor) and name != "held":
            assert torch.equal(getattr(captured, name), value), f"capturing changed `{name}`"
    for _ in range(2):
        captured.change_inputs()
        eager.change_inputs()
        graph.replay()
        assert torch.equal(output, construct.run(eager))


@pytest.mark.parametrize("construct", _of(RANDOM))
def test_a_random_construct_leaves_the_generator_alone_in_capture_and_advances_on_replay(construct: Construct) -> None:
    state = torch.get_rng_state()
    graph, output = _capture(construct, Setting(ADAPTER))
    assert torch.equal(torch.get_rng_state(), state)
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


@pytest.mark.parametrize("construct", _of(*REFUSALS))
def test_a_refused_construct_fails_with_its_code_and_leaves_the_device_usable(construct: Construct) -> None:
    stream = ADAPTER.current_stream()
    with pytest.raises(devicegraph.CaptureError) as caught:
        _capture(construct, Setting(ADAPTER))
    assert caught.value.code == construct.verdict
    assert ADAPTER.current_stream() is stream
    assert not ADAPTER.is_capturing()
    graph, output = _capture(Construct("after", lambda s: s.x + 1, ALLOWED), setting := Setting(ADAPTER))
    graph.replay()
    assert torch.equal(output, setting.x + 1)


def test_every_code_of_a_refusal_is_staged_by_a_construct() -> None:
    assert {c.verdict for c in CONSTRUCTS} - {ALLOWED, RANDOM} == set(REFUSALS) - {"no-fake-kernel"}
