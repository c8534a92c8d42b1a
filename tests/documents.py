"""Documents that a configuration is read from: good ones by chance, and a table of good and bad ones with verdicts."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

import devicegraph as dg


def _sizes() -> st.SearchStrategy[dict[str, Any]]:
    lists = st.lists(st.integers(1, 4096), min_size=1, max_size=8)
    return st.one_of(
        st.just({}),
        st.integers(1, 4096).map(lambda size: {"max_bs": size}),
        lists.map(lambda bs: {"bs": bs}),
        lists.map(lambda bs: {"bs": bs, "max_bs": max(bs)}),
    )


def _phase(phase: str) -> st.SearchStrategy[dict[str, Any]]:
    words = {
        "backend": st.sampled_from([None, *dg.ALLOWED_BACKENDS_PER_PHASE[phase]]),
        "tc_compiler": st.sampled_from([None, "eager", "inductor"]),
    }
    return st.tuples(st.fixed_dictionaries({}, optional=words), _sizes()).map(lambda both: both[0] | both[1])


documents = st.fixed_dictionaries(
    {}, optional={"decode": _phase("decode"), "prefill": _phase("prefill"), "padding": st.booleans()}
)


NAN = math.nan
SIZE = "an integer from 1 to 1048576"
DECODE = "one of `full`, `breakable`, `tc_piecewise` or `disabled`"
PREFILL = "one of `breakable`, `tc_piecewise` or `disabled`"
COMPILER = "one of `eager` or `inductor`"
FLAG = "`true` or `false`"

#: What one source says, and the verdict: the code and the message of its one problem, or None.
CASES: list[tuple[dict[str, Any], tuple[str, str] | None]] = [
    ({"decode.max_bs": 64}, None),
    ({"prefill.max_bs": 8192}, None),
    ({"decode.bs": [4, 1, 4, 2]}, None),
    ({"prefill.bs": [4]}, None),
    ({"decode.max_bs": 4, "decode.bs": [1, 4]}, None),
    ({"decode.backend": "full"}, None),
    ({"decode.backend": "disabled"}, None),
    ({"prefill.backend": "breakable"}, None),
    ({"prefill.backend": "disabled"}, None),
    ({"prefill.tc_compiler": "inductor"}, None),
    # Another backend beside the compiler: kept, and a warning that the verdict has too.
    ({"prefill.backend": "breakable", "prefill.tc_compiler": "inductor"}, None),
    ({"padding": False}, None),
    ({"decode.max_bs": None, "decode.backend": "full"}, None),
    ({"decode.max_bs": "four"}, ("wrong-type", f'`"four"` is a string, not {SIZE}')),
    ({"decode.max_bs": "4"}, ("wrong-type", f'`"4"` is a string, not {SIZE}')),
    ({"decode.max_bs": -1}, ("out-of-range", f"`-1` is not {SIZE}")),
    ({"decode.max_bs": 0}, ("out-of-range", f"`0` is not {SIZE}")),
    ({"prefill.max_bs": 2**20 + 1}, ("out-of-range", f"`1048577` is not {SIZE}")),
    ({"decode.max_bs": True}, ("wrong-type", f"`true` is a boolean, not {SIZE}")),
    ({"decode.max_bs": 1.5}, ("wrong-type", f"`1.5` is a float, not {SIZE}")),
    ({"decode.max_bs": 4.0}, ("wrong-type", f"`4.0` is a float, not {SIZE}")),
    ({"decode.max_bs": NAN}, ("wrong-type", f"`NaN` is a float, not {SIZE}")),
    ({"decode.max_bs": []}, ("wrong-type", f"`[]` is a list, not {SIZE}")),
    ({"decode.max_bs": {}}, ("wrong-type", f"`{{}}` is an object, not {SIZE}")),
    ({"decode.bs": []}, ("empty-list", "`[]` names no size")),
    ({"prefill.bs": []}, ("empty-list", "`[]` names no size")),
    ({"decode.bs": [True]}, ("wrong-type", f"`true` is a boolean, not {SIZE}")),
    ({"prefill.bs": [4, "8"]}, ("wrong-type", f'`"8"` is a string, not {SIZE}')),
    ({"decode.bs": [4, NAN]}, ("wrong-type", f"`NaN` is a float, not {SIZE}")),
    ({"decode.bs": [4, None]}, ("wrong-type", f"`null` is null, not {SIZE}")),
    ({"decode.bs": [4, -1]}, ("out-of-range", f"`-1` is not {SIZE}")),
    ({"decode.bs": 4}, ("wrong-type", "`4` is an integer, not a list of integers from 1 to 1048576")),
    ({"decode.bs": "1,2"}, ("wrong-type", '`"1,2"` is a string, not a list of integers from 1 to 1048576')),
    ({"decode.bs": {}}, ("wrong-type", "`{}` is an object, not a list of integers from 1 to 1048576")),
    ({"decode.max_bs": 8, "decode.bs": [1, 4]}, ("sizes-disagree", "`8` is not the largest entry of `bs`, 4")),
    ({"prefill.max_bs": 2, "prefill.bs": [1, 4]}, ("sizes-disagree", "`2` is not the largest entry of `bs`, 4")),
    ({"decode.backend": "ful"}, ("unknown-backend", f'`"ful"` is not {DECODE}')),
    ({"decode.backend": "Full"}, ("unknown-backend", f'`"Full"` is not {DECODE}')),
    ({"decode.backend": ""}, ("unknown-backend", f'`""` is not {DECODE}')),
    ({"decode.backend": True}, ("wrong-type", f"`true` is a boolean, not {DECODE}")),
    ({"decode.backend": ["full"]}, ("wrong-type", f'`["full"]` is a list, not {DECODE}')),
    ({"prefill.backend": "cuda"}, ("unknown-backend", f'`"cuda"` is not {PREFILL}')),
    (
        {"prefill.backend": "full"},
        ("backend-not-allowed", '`"full"` needs the same shapes on every replay, and those of this phase vary'),
    ),
    ({"prefill.tc_compiler": "gcc"}, ("unknown-compiler", f'`"gcc"` is not {COMPILER}')),
    ({"prefill.tc_compiler": 1}, ("wrong-type", f"`1` is an integer, not {COMPILER}")),
    ({"decode.tc_compiler": "gcc"}, ("unknown-compiler", f'`"gcc"` is not {COMPILER}')),
    ({"padding": "no"}, ("wrong-type", f'`"no"` is a string, not {FLAG}')),
    ({"padding": 0}, ("wrong-type", f"`0` is an integer, not {FLAG}")),
    (
        {"decode.maxbs": 8},
        ("unknown-key", "no such key; the keys here are `backend`, `max_bs`, `bs` and `tc_compiler`"),
    ),
    ({"paddin": True}, ("unknown-key", "no such key; the keys here are `decode`, `prefill` and `padding`")),
    ({"max_bs": 8}, ("unknown-key", "a key of a phase, outside a phase")),
    ({"prefil.max_bs": 8}, ("unknown-phase", "no such phase; the phases are `decode` and `prefill`")),
    (
        {"decode": [4]},
        ("wrong-type", "`[4]` is a list, not an object with the keys `backend`, `max_bs`, `bs` and `tc_compiler`"),
    ),
    (
        {"decode": "full"},
        ("wrong-type", '`"full"` is a string, not an object with the keys `backend`, `max_bs`, `bs` and `tc_compiler`'),
    ),
]


def tree(said: dict[str, Any]) -> dict[str, Any]:
    """What is said by path, as the document that it is."""
    document: dict[str, Any] = {}
    for path, value in said.items():
        *phase, key = path.split(".")
        (document.setdefault(phase[0], {}) if phase else document)[key] = value
    return document
