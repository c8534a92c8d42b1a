"""What updates of a graph's host arguments are held to before anything is changed; `tests/npu` carries them out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devicegraph as dg
from devicegraph.backends.input_update import UpdatePlan, for_every_call, host_value

LENGTHS = dg.UpdatableCall("attention", {"lengths": [1, 1]})
CONTEXT = dg.UpdatableCall("paged_attention", {"context_lens": torch.ones(2, dtype=torch.int32)})


@pytest.mark.parametrize(
    ("call", "update", "lengths", "said"),
    [
        pytest.param(
            LENGTHS,
            dg.InputUpdate("lengths"),
            [3, 4, 5],
            "it was captured with 2 values, and 3 were given [update-length]",
            id="too many",
        ),
        pytest.param(
            LENGTHS,
            dg.InputUpdate("lengths", as_tensor=True),
            [3, 4],
            "it was captured as a `list`, and given is a `Tensor` [update-type]",
            id="a tensor for a list",
        ),
        pytest.param(
            CONTEXT,
            dg.InputUpdate("context_lens"),
            [3, 4],
            "it was captured as a `Tensor`, and given is a `list` [update-type]",
            id="a list for a tensor",
        ),
    ],
)
def test_values_of_a_declaration_that_do_not_fit_the_capture_are_errors_with_both_sides(
    call: dg.UpdatableCall, update: dg.InputUpdate, lengths: list[int], said: str
) -> None:
    plan = UpdatePlan((update,), (call,))
    with pytest.raises(dg.ReplayError) as caught:
        plan.updates_for({"seq_lens_cpu": torch.tensor(lengths)})
    assert str(caught.value).splitlines()[0] == (f"input update `{update.key}` of call 0, `{call.operator}`: {said}")


def test_a_tensor_of_another_dtype_than_was_captured_is_an_error_with_both() -> None:
    with pytest.raises(dg.ReplayError) as caught:
        for_every_call((CONTEXT,), [{"context_lens": torch.tensor([3, 4])}])
    assert str(caught.value) == (
        "input update `context_lens` of call 0, `paged_attention`: it was captured as torch.int32 on `cpu`, and "
        "torch.int64 on `cpu` was given [update-type]"
    )


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.int32, torch.int64])
def test_values_have_memory_of_their_own_since_the_next_step_writes_the_batch_anew(dtype: Any, as_tensor: bool) -> None:
    given: Any = [3, 4] if dtype is None else torch.tensor([3, 4], dtype=dtype)
    value = host_value("lengths", given, as_tensor=as_tensor)
    assert isinstance(value, torch.Tensor) is as_tensor
    given[0] = 99
    assert [int(length) for length in value] == [3, 4]


def test_one_value_is_computed_once_for_all_calls_that_take_it() -> None:
    asked: list[Any] = []
    update = dg.InputUpdate("lengths", values=lambda batch: asked.append(batch) or [3, 4])
    plan = UpdatePlan((update,), (LENGTHS,) * 3)
    assert plan.updates_for("batch") == [{"lengths": [3, 4]}] * 3
    assert asked == ["batch"]
