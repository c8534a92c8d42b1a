"""Arguments that a graph keeps from the host, and what they have to be in each step.

Some operators of an NPU (attention, first of all) take lengths as lists on the host: a captured graph has those of its
capture, until they are updated. torch_npu ignores a key that no operator has, and a list of the wrong length is read as
it is, so that a mistake shows as wrong tokens; here everything is checked before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from devicegraph.batches import read_fields
from devicegraph.errors import CaptureError, DeviceGraphError, ReplayError

if TYPE_CHECKING:
    from devicegraph.devices import UpdatableCall

__all__ = ["InputUpdate"]

#: What an operator takes for a key: a list of integers, or int32 in host memory.
Value = list[int] | torch.Tensor


@dataclass(frozen=True)
class InputUpdate:
    """One host argument of captured operators, and where its values come from in each step.

    An engine gives its runner a tuple of them, `input_updates`. Of two that mean the same argument of the same call the
    later one counts, so that single calls can differ from the rest.

    Attributes:
        key: the argument, as torch_npu names it for updates: `actual_seq_lengths_kv`, `actual_seq_kvlen`,
            `context_lens`.
        operator: the operator's name without overload, such as `npu_fused_infer_attention_score`; None means every
            captured call that takes the key.
        as_tensor: whether the operator takes an int32 tensor in host memory instead of a list.
        calls: which of the calls that take the key, by their order in the capture, from 0; None means all.
        values: called with the static batch of the step; gives as many integers as the capture had, in a sequence or
            in a tensor in host memory. By default the field `seq_lens_cpu` of the batch.
    """

    key: str
    operator: str | None = None
    as_tensor: bool = False
    calls: tuple[int, ...] | None = None
    values: Callable[[Any], Sequence[int] | torch.Tensor] | None = None

    def value_for(self, batch: Any) -> Value:
        """The value of this step.

        Raises:
            ReplayError: `update-type`.
        """
        given = read_fields(batch, ("seq_lens_cpu",))[0] if self.values is None else self.values(batch)
        return host_value(self.key, given, as_tensor=self.as_tensor)


def host_value(key: str, given: Any, *, as_tensor: bool) -> Value:
    """Lengths in the form that an operator takes, in memory of their own: the next step writes the batch anew.

    Raises:
        ReplayError: `update-type` for what is not integers in host memory.
    """
    if isinstance(given, torch.Tensor):
        is_right = given.device.type == "cpu" and given.dim() == 1 and not given.is_floating_point()
        what = f"a tensor of {given.dtype} and shape {list(given.shape)} on `{given.device}`"
    else:
        is_right = isinstance(given, Sequence) and not isinstance(given, str)
        is_right = is_right and all(isinstance(value, int) for value in given)
        what = "no value" if given is None else f"a `{type(given).__name__}`"
    if not is_right:
        raise ReplayError(
            f"input update `{key}`: {what} is not a row of integers in host memory",
            code="update-type",
            hint="give a list, or a one-dimensional integer tensor on the CPU; reading one of the device would wait",
        )
    if as_tensor:
        return torch.as_tensor(given, device="cpu").to(torch.int32, copy=True)
    return given.tolist() if isinstance(given, torch.Tensor) else list(given)


class UpdatePlan:
    """What is updated in one graph: for each captured call, by key.

    Args:
        updates: what the engine declares.
        calls: what was captured.

    Raises:
        CaptureError: `update-unexpected` where nothing was captured that can be updated; `update-unknown-operator`,
            `update-unknown-key`, `update-unknown-call` for a declaration that means nothing; `update-missing` for a
            call that none means.
    """

    def __init__(self, updates: Sequence[InputUpdate], calls: Sequence[UpdatableCall]) -> None:
        self.calls = calls
        self._by_call: list[dict[str, InputUpdate]] = [{} for _ in calls]
        if not calls:
            raise unexpected(CaptureError)
        for update in updates:
            for index in _meant(update, calls):
                self._by_call[index][update.key] = update
        check_all_covered(CaptureError, calls, self._by_call)

    def updates_for(self, batch: Any) -> list[dict[str, Value]]:
        """The values of a step, for each call.

        Raises:
            ReplayError: `update-type`, `update-length`.
        """
        values: dict[int, Value] = {}
        for updates in self._by_call:
            for update in updates.values():
                if id(update) not in values:
                    values[id(update)] = update.value_for(batch)
        result = [{key: values[id(update)] for key, update in updates.items()} for updates in self._by_call]
        check_values(self.calls, result)
        return result


def _meant(update: InputUpdate, calls: Sequence[UpdatableCall]) -> list[int]:
    of_operator = [i for i, call in enumerate(calls) if update.operator in (None, call.operator)]
    if not of_operator:
        raise CaptureError(
            f"input update `{update.key}`: the graph has no call of `{update.operator}` that can be updated",
            code="update-unknown-operator",
            hint=f"it has calls of {_names(call.operator for call in calls)}",
        )
    with_key = [i for i in of_operator if update.key in calls[i].captured]
    if not with_key:
        raise _unknown_key(CaptureError, update.key, [calls[i] for i in of_operator])
    if update.calls is None:
        return with_key
    beyond = [number for number in update.calls if not 0 <= number < len(with_key)]
    if beyond:
        raise CaptureError(
            f"input update `{update.key}`: call {beyond[0]} is not among the {len(with_key)} that take it",
            code="update-unknown-call",
            hint=f"calls are counted from 0 to {len(with_key) - 1}, in the order of the capture",
        )
    return [with_key[number] for number in update.calls]


def for_every_call(calls: Sequence[UpdatableCall], given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checks updates that a caller gives for each call, or one for all of them, and returns one for each.

    Raises:
        ReplayError: `update-count`, `update-unknown-key`, `update-missing`, `update-type`, `update-length`.
    """
    if isinstance(given, Mapping) or not all(isinstance(update, Mapping) for update in given):
        raise ReplayError(
            "input updates are a list of mappings by key, one for each call or one for all of them", code="update-type"
        )
    updates = [dict(update) for update in given]
    if len(updates) == 1:
        updates *= len(calls)
    if len(updates) != len(calls):
        raise ReplayError(
            f"{len(updates)} input updates were given, and the graph has {len(calls)} calls that can be updated",
            code="update-count",
            hint="give one for each call, in the order of the capture, or one for all of them",
        )
    for call, update in zip(calls, updates, strict=True):
        for key in update:
            if key not in call.captured:
                raise _unknown_key(ReplayError, key, [call])
    check_all_covered(ReplayError, calls, updates)
    check_values(calls, updates)
    return updates


def check_all_covered(
    kind: type[DeviceGraphError], calls: Sequence[UpdatableCall], updates: Sequence[Mapping[str, Any]]
) -> None:
    """Refuses updates that leave a call as the last step left it."""
    for number, (call, update) in enumerate(zip(calls, updates, strict=True)):
        if not update:
            raise kind(
                f"call {number} of {len(calls)}, `{call.operator}`, has no input update and would keep old values",
                code="update-missing",
                hint=f"it takes {_names(call.captured)}",
            )


def check_values(calls: Sequence[UpdatableCall], updates: Sequence[Mapping[str, Any]]) -> None:
    """Refuses values of another form or length than those captured."""
    for number, (call, update) in enumerate(zip(calls, updates, strict=True)):
        for key, value in update.items():
            captured = call.captured[key]
            where = f"input update `{key}` of call {number}, `{call.operator}`: "
            if isinstance(value, torch.Tensor) != isinstance(captured, torch.Tensor):
                raise ReplayError(
                    f"{where}it was captured as a `{type(captured).__name__}`, and given is a `{type(value).__name__}`",
                    code="update-type",
                )
            if isinstance(captured, torch.Tensor) and (value.dtype, value.device) != (captured.dtype, captured.device):
                raise ReplayError(
                    f"{where}it was captured as {captured.dtype} on `{captured.device}`, and {value.dtype} on "
                    f"`{value.device}` was given",
                    code="update-type",
                )
            if len(value) != len(captured):
                raise ReplayError(
                    f"{where}it was captured with {len(captured)} values, and {len(value)} were given",
                    code="update-length",
                    hint="lengths are padded to the bucket, as the slot `seq_lens_cpu` is",
                )


def unexpected(kind: type[DeviceGraphError]) -> DeviceGraphError:
    """The error for an update of a graph that has nothing to update."""
    return kind(
        "an input update was given, and the graph has no call that can be updated",
        code="update-unexpected",
        hint="operators that can be are those with a handler, see `torch_npu.npu.register_npu_graph_handler`",
    )


def _unknown_key(kind: type[DeviceGraphError], key: str, calls: Sequence[UpdatableCall]) -> DeviceGraphError:
    keys = {name: None for call in calls for name in call.captured}
    return kind(
        f"input update `{key}`: no such host argument was captured for {_names(call.operator for call in calls)}",
        code="update-unknown-key",
        hint=f"captured were {_names(keys)}" if keys else "it was captured with none",
    )


def _names(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))
