"""Verifying the graphs of a runner: a replay gives what eager gives, padding moves nothing, nothing stale is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from devicegraph.batches import read_fields, replaced, showing_proxies
from devicegraph.errors import CaptureError, DeviceGraphError
from devicegraph.verifying.proofs import Proofs, Step
from devicegraph.verifying.report import SkippedBatch, VerifyReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from devicegraph.runners.base import BaseCudaGraphRunner
    from devicegraph.runners.shape_key import ShapeKey
    from devicegraph.slots import HostValue

__all__ = ["TOLERANCES", "verify"]

#: How far a replay may be from eager, as a share of the largest magnitude in the tensor; other dtypes are exact, but
#: for the 8-bit ones, which get the last. A forward on padded rows may run other kernels than one on the live rows.
TOLERANCES: Final = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def verify(
    runner: BaseCudaGraphRunner,
    batches: Iterable[Any],
    *,
    state: Mapping[str, torch.Tensor] | None = None,
    poisons: Mapping[str, Sequence[HostValue]] | None = None,
    tolerances: Mapping[torch.dtype, float] | None = None,
) -> VerifyReport:
    """Proves the graphs of a runner on live batches, each batch in every graph that has room for it.

    For each batch and graph:

    - `eager`: the output with the real rows, and the state, are what an eager step on the live batch gives, within the
      tolerance of each dtype.
    - `repeat`: a second replay gives the same bits. Where it does not, nothing finer can be told.
    - `padding`: with poison in the padded rows of all slots, and in the reserved row of the state, real rows and all
      other rows of the state keep their bits; done with two poisons. What moves them is found slot by slot.
    - `stale`: with poison in every buffer before the fill, the fill overwrites all that it has to, and nothing that it
      left moves anything; done with two poisons.

    Poison is valid for whoever reads it: numbers with a point that are far from what models compute with, both
    booleans, and integers that the slot has in `batches` or that its buffer starts with, so that no index is out of
    range. So several batches with different values prove more than one. Integer slots whose padding every fill writes
    (`ZERO`, `FILL_SENTINEL`) may be what rows are written by: where poison in one of them moves the state, the values
    next to its padding are tried, and where these move it too the slot is left at its padding, and the report says so
    (`held`). Where nothing is known of state they are all left at it.

    A hook or a forward that raises ends the verification; buffers and state are put back then, too. Steps are not
    counted in the metrics. `can_run` and `pre_replay` are called once for each batch. Waits for the device, often.

    Args:
        runner: captured, not paused.
        batches: live batches, as for `run`. They are not changed.
        state: all that the forward writes beside its output, such as the key-value cache, by name: tensors, or views of
            them, whose first dimension has the rows and whose first row is reserved for padding. By default what the
            engine's `state_tensors()` gives; `{}` says that it writes nothing else. Three copies are held; where that
            is too much, give views of as many rows as the batches use. State that is not given is written by every
            launch, as a step would do it.
        poisons: for a slot, two values for its padded rows that differ and are valid there, or none to leave it out.
            For slots whose values are bound to each other, such as cumulative lengths.
        tolerances: for a dtype, another one than in `TOLERANCES`.

    Returns:
        A report to print; it is true where everything that could be proved was, and something was.

    Raises:
        ReplayError: the runner is closed or paused.
        SlotError: `bad-state`, `bad-value` or `unknown-slot` for an argument; a batch with a field that does not fit.
    """
    runner._check_running()
    pre_replay = runner.hooks.pre_replay
    proofs = Proofs(runner, state, poisons or {}, {**TOLERANCES, **(tolerances or {})})
    steps, skipped = [], []
    for number, batch in enumerate(batches):
        if pre_replay is not None:
            pre_replay(batch)
        decision = runner.can_run(batch)
        if decision.key is None:
            skipped.append(SkippedBatch(number, decision.code))
            continue
        bs, num_tokens = runner._sizes(batch)
        size = runner._live_size(bs, num_tokens)
        keys = [
            key
            for key in runner.graphs
            if key.size >= int(size)
            and key._replace(size=0) == decision.key._replace(size=0)
            and runner.backend.can_run(batch, key)  # type: ignore[union-attr]
        ]
        steps.append(Step(number, batch, bs, num_tokens, keys, batch))
    return proofs.run(steps, skipped)


def verify_capture(runner: BaseCudaGraphRunner) -> VerifyReport:
    """Proves each graph on the engine's `verify_batches()`, or else on an idle batch of half its size.

    The rows of an idle batch are padding themselves, so that integers have one valid value only: what padded indices
    and lengths do to real rows shows on live batches only.

    Raises:
        CaptureError: `verify-failed`: the engine does not run eagerly on an idle batch.
    """
    if runner.hooks.verify_batches is not None:
        return verify(runner, runner.hooks.verify_batches())
    proofs = Proofs(runner, None, {}, dict(TOLERANCES))
    steps = [_idle_step(runner, number, key) for number, key in enumerate(runner.graphs)]
    try:
        return proofs.run(steps, [])
    except DeviceGraphError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{runner.phase}: the graphs cannot be verified on idle batches: {type(error).__name__}: {error}",
            code="verify-failed",
            hint="give the engine `verify_batches()`: live batches, which have what an eager step needs",
            phase=runner.phase,
        ) from error


def _idle_step(runner: BaseCudaGraphRunner, number: int, key: ShapeKey) -> Step:
    """An idle batch that takes half of a graph's rows, or all of them where half of them cannot be compared.

    That is where the forward does not run at that size, and where an output is a rank's share of the whole bucket.
    """
    is_share = runner.share_rows(key.size) is not None and None in (runner.graphs[key].axes or ())
    half = 0 if is_share else key.size // 2
    with torch.no_grad():
        if half:
            try:
                runner.run_idle(half, key.variant_label)
            except Exception:
                half = 0
        size = half or key.size
        idle = runner._idle_batch(key._replace(size=size))
    bs, num_tokens = runner._padded_sizes(size, runner._idle_requests(size))
    # The rows are views of the buffers that are to be poisoned. What a fill computes is left out, as it would be taken
    # for the batch's own; an eager step finds what the replay will have computed.
    slots = [slot for slot in runner.buffer_registry.slots if "." not in slot.name and slot.copy_from_fb]
    own: dict[str, torch.Tensor | None] = {}
    computed = []
    for slot, rows in zip(slots, read_fields(idle, [slot.name for slot in slots]), strict=True):
        if isinstance(rows, torch.Tensor):
            own[slot.name] = rows.clone() if slot.value_fn is None else None
            computed += [] if slot.value_fn is None else [slot]
    sent = runner.buffer_registry.group("pp_proxy_tensors", padded_bs=bs, padded_num_tokens=num_tokens)
    batch = showing_proxies(replaced(idle, own, {}), {name: rows.clone() for name, rows in sent.items()})
    runner._fill_now(batch, key, bs, num_tokens)
    shown = {slot.name: slot.slice_for(bs, num_tokens).clone() for slot in computed}
    return Step(number, batch, bs, num_tokens, [key], replaced(batch, shown, {}))
