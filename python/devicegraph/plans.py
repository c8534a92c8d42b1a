"""What ranks must have alike to capture and choose the same graphs, and where they differ."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from devicegraph._core import __version__
from devicegraph.parallel import named
from devicegraph.slots import buffer_of, name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from devicegraph.runners.base import BaseCudaGraphRunner
    from devicegraph.slots import GraphSlot

#: Values as text by what they are: comparing text takes a NaN for equal to itself.
Plan = dict[str, str]


class Difference(NamedTuple):
    """One thing that is not the same on all ranks.

    Attributes:
        path: what.
        values: who has it how, the value of most ranks last.
        ranks: those that are not like most; of two halves, those without the first rank.
    """

    path: str
    values: tuple[tuple[str, tuple[int, ...]], ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"`{self.path}`: {'; '.join(f'{value} on {named(ranks)}' for value, ranks in self.values)}"


def plan_of(runners: Iterable[BaseCudaGraphRunner]) -> Plan:
    """The plan of a rank for all its runners."""
    plan = {"devicegraph": __version__}
    seen: Counter[str] = Counter()
    for runner in runners:
        name = runner.purpose
        seen[name] += 1
        name = name if seen[name] == 1 else f"{name} {seen[name]}"
        plan.update((f"{name}.{path}", value) for path, value in _plan_of(runner).items())
    return plan


def _plan_of(runner: BaseCudaGraphRunner) -> Plan:
    limits, config = runner.model_runner.limits, runner.config
    phase = config.to_dict(full=True)[runner.phase]
    values = {
        **{f"config.{key}": value for key, value in phase.items()},
        "config.padding": config.padding,
        "backend": "disabled" if runner.backend is None else runner.backend.name,
        "limits.max_bs": limits.max_bs,
        "limits.max_num_tokens": limits.max_num_tokens,
        "buckets": list(runner.buckets),
        "token_alignment": runner.buffer_registry.token_alignment,
        "order": runner.order,
        "votes": None if runner.hooks.vote is None else "each step" if runner.hooks.votes_each_step else "captures",
        "variants": list(runner.hooks.variants),
        **{
            name: getattr(runner, name) for name in ("num_tokens_per_bs", "max_padding_factor") if hasattr(runner, name)
        },
    }
    if getattr(runner, "tbo", None) is not None:
        values["tbo"] = True
    plan = {path: json.dumps(value) for path, value in values.items()}
    for slot in runner.buffer_registry.slots:
        plan[f"slots.{slot.name}"] = _described(slot)
    return plan


def _described(slot: GraphSlot) -> str:
    where = " on the host" if slot.is_host else ""
    parts = [
        f"{name_of(slot.dtype)} {list(buffer_of(slot).shape)}{where}",
        f"axis {slot.axis}",
        f"{slot.padding_policy.name} {slot.pad_value}",
    ]
    parts += ["required"] if slot.required else []
    parts += [f"by `{origin}`" for origin in ("source_fn", "value_fn") if getattr(slot, origin) is not None]
    parts += [] if slot.copy_from_fb else ["not copied"]
    return ", ".join(parts)


def as_text(plan: Plan) -> str:
    """For `differences`, in another process."""
    return json.dumps(plan)


def differences(plans: Mapping[int, str]) -> list[Difference]:
    """Where the plans of ranks differ, by path in the order of the first plan that has it.

    Args:
        plans: `as_text` of each rank's.
    """
    read = {rank: json.loads(text) for rank, text in plans.items()}
    found = []
    for path in dict.fromkeys(path for plan in read.values() for path in plan):
        holders: dict[str, list[int]] = {}
        for rank, plan in read.items():
            holders.setdefault(plan.get(path, "nothing"), []).append(rank)
        if len(holders) > 1:
            usual = max(holders, key=lambda value: len(holders[value]))  # the first of equals is the first rank's
            values = sorted(holders.items(), key=lambda item: item[0] == usual)
            odd = sorted(rank for value, ranks in holders.items() if value != usual for rank in ranks)
            found.append(Difference(path, tuple((value, tuple(ranks)) for value, ranks in values), tuple(odd)))
    return found
