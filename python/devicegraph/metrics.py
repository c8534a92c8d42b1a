"""What a runner did: replays by graph and live size, eager steps by reason, real and padded rows; also for Prometheus.

A step adds to one count, that of its graph and live size. All figures follow from these counts when somebody asks.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from devicegraph.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from devicegraph.runners.shape_key import ShapeKey

__all__ = ["StepMetrics", "prometheus_text"]

#: The reasons of eager steps that other buckets could change, or that say nothing of the batch.
_REASONS_OF_SIZE: Final = (
    "disabled",
    "not-captured",
    "nothing-captured",
    "above-largest",
    "no-exact-bucket",
    "padding-too-large",
    "bucket-dropped",
)


@dataclass(frozen=True)
class StepMetrics:
    """The counts of a runner at one moment.

    Attributes:
        replays: steps that were replayed, by graph.
        eager: steps that ran eagerly, by the code of the decision.
        raw_rows: real rows in replayed steps: requests in decode, tokens in prefill.
        padded_rows: rows that were computed for nothing in replayed steps.
        recompiles: how often torch.compile has traced the forward since `capture()`; anything but 0 cost a step dearly.
        phase: the runner's phase.
        mode: what its graphs are for, where a phase has several uses: the decode runner's `mode`.
        live_sizes: for each captured graph, replayed or not, its steps by live size.
        eager_sizes: for each code in `eager`, its steps by live size, as far as the batch has one.
    """

    replays: dict[ShapeKey, int] = field(default_factory=dict)
    eager: dict[str, int] = field(default_factory=dict)
    raw_rows: int = 0
    padded_rows: int = 0
    recompiles: int = 0
    phase: str = "decode"
    mode: str | None = None
    live_sizes: dict[ShapeKey, dict[int, int]] = field(default_factory=dict)
    eager_sizes: dict[str, dict[int, int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        live_sizes: Mapping[ShapeKey, dict[int, int]],
        eager: EagerSteps,
        *,
        recompiles: int,
        phase: str,
        mode: str | None,
    ) -> StepMetrics:
        """A snapshot of counts that another thread may go on with."""
        # Copying a dictionary of integers cannot be interrupted by it; walking one can.
        copied = {key: sizes.copy() for key, sizes in live_sizes.items()}
        rows = [_rows(key, sizes) for key, sizes in copied.items()]
        return cls(
            {key: sum(sizes.values()) for key, sizes in copied.items() if sizes},
            eager.steps.copy(),
            sum(raw for raw, _ in rows),
            sum(padded for _, padded in rows),
            recompiles,
            phase,
            mode,
            copied,
            {code: sizes.copy() for code, sizes in eager.sizes.copy().items()},
        )

    @property
    def steps(self) -> int:
        """All steps."""
        return sum(self.replays.values()) + sum(self.eager.values())

    @property
    def hit_rate(self) -> float:
        """The share of steps that were replayed; 0 before the first step."""
        return sum(self.replays.values()) / self.steps if self.steps else 0.0

    @property
    def waste(self) -> float:
        """The share of computed rows that were padding, in replayed steps; 0 before the first one."""
        rows = self.raw_rows + self.padded_rows
        return self.padded_rows / rows if rows else 0.0

    @property
    def histogram(self) -> dict[int, int]:
        """The steps of each live size that buckets decide about, ascending: what `optimize_buckets` takes.

        These are the replayed steps, and the eager ones that ran so for want of a bucket or of any graph.
        """
        counts: Counter[int] = Counter()
        for sizes in (*self.live_sizes.values(), *(self.eager_sizes.get(code, {}) for code in _REASONS_OF_SIZE)):
            counts.update(sizes)
        return {size: counts[size] for size in sorted(counts) if size > 0}

    def rows(self, key: ShapeKey) -> tuple[int, int]:
        """The real and the padded rows of a graph's replays.

        Raises:
            KeyError: there is no such graph.
        """
        return _rows(key, self.live_sizes[key])

    def to_dict(self) -> dict[str, Any]:
        """The counts as plain values; keys as dictionaries of what is set in them."""
        return {
            "phase": self.phase,
            "mode": self.mode,
            "steps": self.steps,
            "hit_rate": self.hit_rate,
            "waste": self.waste,
            "raw_rows": self.raw_rows,
            "padded_rows": self.padded_rows,
            "recompiles": self.recompiles,
            "graphs": [
                {
                    "key": key.to_dict(),
                    "replays": sum(sizes.values()),
                    "raw_rows": self.rows(key)[0],
                    "padded_rows": self.rows(key)[1],
                    "live_sizes": {str(size): count for size, count in sorted(sizes.items())},
                }
                for key, sizes in self.live_sizes.items()
            ],
            "eager": self.eager,
            "eager_sizes": {
                code: {str(size): count for size, count in sorted(sizes.items())}
                for code, sizes in self.eager_sizes.items()
            },
        }

    def to_json(self) -> str:
        """The counts as JSON text."""
        return json.dumps(self.to_dict())

    def to_prometheus(self, labels: Mapping[str, object] | None = None) -> str:
        """The counts in the text format of Prometheus; see `prometheus_text`."""
        return prometheus_text([self], labels)


class EagerSteps:
    """The eager steps of a runner, by the code of the decision."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}
        #: By code and live size, where the batch has one.
        self.sizes: dict[str, dict[int, int]] = {}

    def count(self, code: str, size: int | str) -> None:
        """Counts a step; a size that is text is none."""
        self.steps[code] = self.steps.get(code, 0) + 1
        if not isinstance(size, str):
            sizes = self.sizes.setdefault(code, {})
            sizes[size] = sizes.get(size, 0) + 1


def _rows(key: ShapeKey, sizes: Mapping[int, int]) -> tuple[int, int]:
    raw = sum(size * count for size, count in sizes.items())
    return raw, key.size * sum(sizes.values()) - raw


#: Each family: its type, and what it counts.
_FAMILIES: Final = {
    "devicegraph_replays_total": ("counter", "Steps that were replayed through a captured graph."),
    "devicegraph_eager_steps_total": ("counter", "Steps that ran eagerly, by the code of the reason."),
    "devicegraph_raw_rows_total": ("counter", "Real rows in replayed steps: requests in decode, tokens in prefill."),
    "devicegraph_padded_rows_total": ("counter", "Rows computed for nothing in replayed steps."),
    "devicegraph_recompiles_total": ("counter", "Traces of torch.compile since the capture."),
    "devicegraph_graphs": ("gauge", "Captured graphs."),
}
_LABEL_NAME: Final = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*\Z")
_OWN_LABELS: Final = ("phase", "mode", "bucket", "variant", "stream", "attention", "reason")


def prometheus_text(metrics: Iterable[StepMetrics], labels: Mapping[str, object] | None = None) -> str:
    """The counts of several runners as one page in the text format of Prometheus, version 0.0.4.

    Counters begin again at 0 when a runner captures anew, which Prometheus takes for the restart of a process. Graphs
    that were never replayed are there with 0. May be called while another thread runs steps.

    Args:
        metrics: what each runner's `metrics()` gave; of one phase and mode no more than one.
        labels: put on every series, such as `{"rank": 0}`.

    Raises:
        ConfigError: `label-invalid`: a name that Prometheus does not take or that is one of this package's;
            `series-repeated`: two runners that no label tells apart.
    """
    for name in labels or {}:
        given: object = name
        if not isinstance(given, str) or not _LABEL_NAME.match(given) or given in _OWN_LABELS:
            raise ConfigError(
                f"labels: `{name}` cannot be the name of a label",
                code="label-invalid",
                hint=f"use letters, digits and underscores, and none of {', '.join(_OWN_LABELS)}",
            )
    values: dict[str, dict[str, int]] = {family: {} for family in _FAMILIES}
    for one in metrics:
        for family, own, value in _series(one):
            series = ",".join(f'{name}="{_escape(str(text))}"' for name, text in {**own, **(labels or {})}.items())
            if series in values[family]:
                raise ConfigError(
                    f"metrics: two runners have the series `{{{series}}}`",
                    code="series-repeated",
                    hint="write a page for each of them, with a label that tells them apart",
                )
            values[family][series] = value
    lines = []
    for family, (kind, about) in _FAMILIES.items():
        if values[family]:
            lines += [f"# HELP {family} {about}", f"# TYPE {family} {kind}"]
            lines += [f"{family}{{{series}}} {value}" for series, value in values[family].items()]
    return "".join(f"{line}\n" for line in lines)


def _series(metrics: StepMetrics) -> Iterator[tuple[str, dict[str, str], int]]:
    runner = {"phase": metrics.phase} | ({} if metrics.mode in (None, metrics.phase) else {"mode": str(metrics.mode)})
    for key, sizes in metrics.live_sizes.items():
        graph = {**runner, "bucket": str(key.size), "variant": key.variant_label or ""}
        # An empty label is none to Prometheus; the rare ones are left out.
        graph |= {} if key.stream_idx is None else {"stream": str(key.stream_idx)}
        graph |= {} if key.attention_variant is None else {"attention": key.attention_variant}
        raw, padded = _rows(key, sizes)
        yield "devicegraph_replays_total", graph, sum(sizes.values())
        yield "devicegraph_raw_rows_total", graph, raw
        yield "devicegraph_padded_rows_total", graph, padded
    for code, count in metrics.eager.items():
        yield "devicegraph_eager_steps_total", {**runner, "reason": code}, count
    yield "devicegraph_recompiles_total", runner, metrics.recompiles
    yield "devicegraph_graphs", runner, len(metrics.live_sizes)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
