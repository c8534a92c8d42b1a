"""`devicegraph bench start`: what an engine pays before its first step: import, configuration, plans, look-ups.

The import is that of a fresh interpreter, less what the interpreter itself takes, with the modules that an argument
parser needs. No torch is loaded by it.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from devicegraph._core import FillPlanner
from devicegraph.bench.fill import Case, fields_of, registry_of
from devicegraph.bench.measuring import Result, Spread, Table, take_turns
from devicegraph.buckets import Buckets, decode_buckets
from devicegraph.config import CudaGraphConfig
from devicegraph.slots import layout_of, row_major

if TYPE_CHECKING:
    from collections.abc import Callable

    from devicegraph.devices import DeviceAdapter

CONFIG: Final = (
    '{"decode": {"backend": "full", "bs": [1, 2, 4, 8, 16, 32, 64]}, '
    '"prefill": {"backend": "breakable", "max_bs": 2048}, "padding": true}'
)
#: In microseconds.
BUDGETS: Final = {
    "import devicegraph, its parser and configuration": 30_000.0,
    "parse and validate a configuration": 20.0,
    "plan one size": 5.0,
}


def import_microseconds(code: str) -> float:
    """Wall time of a fresh interpreter that runs a line."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return (time.perf_counter() - begun) * 1e6


def call_microseconds(call: Callable[[], Any], calls: int) -> float:
    """Wall time of one of several calls."""
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begun) / calls * 1e6


def plan_of(adapter: DeviceAdapter) -> Callable[[], Any]:
    """A call that plans one size of eight slots."""
    case = Case(8, 64, 64)
    registry = registry_of(fields_of(case), case, adapter.device)
    planner = FillPlanner([layout_of(slot) for slot in registry.slots], max_bs=512, max_num_tokens=512)
    where = str(adapter.device)
    described: list[Any] = []
    for field in fields_of(case):
        shape = field.shape(case.raw_bs, case.raw_num_tokens)
        described.append(("int64", shape, "cpu" if field.is_host else where, row_major(shape)))
    return lambda: planner.plan(described, **case.sizes(), unread=False)


def buckets_of(count: int) -> Buckets:
    """As many buckets as asked for, each a size larger than the one before."""
    return decode_buckets(count, bs=list(range(1, count + 1)))


def measure(adapter: DeviceAdapter, *, small: bool = False, rounds: int | None = None) -> Result:
    """All of it.

    Args:
        adapter: the device that is planned for.
        small: few rounds and calls: to see that all of it runs.
        rounds: 11 by default.
    """
    rounds, calls = rounds or (1 if small else 11), 10 if small else 2000
    imported = "import sys, devicegraph.args, devicegraph.buckets; assert 'torch' not in sys.modules"
    few, many = buckets_of(1), buckets_of(512)
    names = list(BUDGETS)
    times = take_turns(
        {
            "interpreter": partial(import_microseconds, "import sys, argparse"),
            names[0]: partial(import_microseconds, imported),
            names[1]: partial(call_microseconds, partial(CudaGraphConfig.from_json, CONFIG), calls),
            names[2]: partial(call_microseconds, plan_of(adapter), calls),
            "structures for 512 buckets": partial(call_microseconds, partial(buckets_of, 512), max(calls // 20, 1)),
            "look-up among 1 bucket": partial(call_microseconds, partial(few.fit, 1), calls),
            "look-up among 512 buckets": partial(call_microseconds, partial(many.fit, 437), calls),
        },
        rounds,
    )
    interpreter = times.pop("interpreter")
    times[names[0]] = [each - base for each, base in zip(times[names[0]], interpreter, strict=True)]
    table = Table("what comes before the first step, us")
    for name, each in times.items():
        table.rows.append(
            {"what": name, "us": statistics.median(each), "spread": Spread.of(each), "budget": BUDGETS.get(name)}
        )
    result = Result("start", str(adapter.device), [table])
    growth = Spread.ratio(times["look-up among 512 buckets"], times["look-up among 1 bucket"])
    result.notes.append(f"a look-up among 512 buckets takes {growth} of one among 1")
    return result
