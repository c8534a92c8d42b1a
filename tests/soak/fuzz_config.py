"""Configurations and lists of buckets from anything: by every route, against a validator of a few lines."""

from __future__ import annotations

import argparse
import json
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import devicegraph as dg
from devicegraph import _core
from hostile import FoundError, Lists, main, odd_objects, outcome

if TYPE_CHECKING:
    import random

LARGEST = 1 << 20
WORDS: dict[str, tuple[str, ...]] = {
    "decode": ("full", "breakable", "tc_piecewise", "disabled"),
    "prefill": ("breakable", "tc_piecewise", "disabled"),
}
ODD = odd_objects()


# The oracle


def is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= LARGEST


def is_right_phase(phase: str, value: Any) -> bool:
    if value is None:
        return True
    if type(value) is not dict or not set(value) <= {"backend", "max_bs", "bs", "tc_compiler"}:
        return False
    backend, max_bs, bs, compiler = (value.get(key) for key in ("backend", "max_bs", "bs", "tc_compiler"))
    is_list = bs is None or (type(bs) in (list, tuple, range) and len(bs) > 0 and all(map(is_size, bs)))
    return (
        (backend is None or (type(backend) is str and backend in WORDS[phase]))
        and (max_bs is None or is_size(max_bs))
        and is_list
        and (bs is None or max_bs is None or max(bs) == max_bs)
        and (compiler is None or (type(compiler) is str and compiler in ("eager", "inductor")))
    )


def is_right(document: Any) -> bool:
    if type(document) is not dict or not set(document) <= {"decode", "prefill", "padding"}:
        return False
    padding = document.get("padding")
    return (padding is None or type(padding) is bool) and all(
        is_right_phase(phase, document.get(phase)) for phase in WORDS
    )


def wants(document: dict[str, Any]) -> dict[str, Any]:
    """What a right document comes to, whole."""
    whole: dict[str, Any] = {}
    for phase, default in (("decode", "full"), ("prefill", "tc_piecewise")):
        given = document.get(phase) or {}
        bs = given.get("bs")
        whole[phase] = {
            "backend": given.get("backend") or default,
            "max_bs": given.get("max_bs"),
            "bs": None if bs is None else sorted(set(bs)),
            "tc_compiler": given.get("tc_compiler") or "eager",
        }
    padding = document.get("padding")
    whole["padding"] = True if padding is None else padding
    return whole


# What goes in


def a_size(draw: random.Random) -> Any:
    return draw.choice([1, 2, 4, 8, 64, 64, 256, 1000, LARGEST, LARGEST + 1, 0, -1, None])


def some_sizes(draw: random.Random) -> Any:
    sizes = [draw.choice([1, 2, 4, 8, 64, 256]) for _ in range(draw.randrange(5))]
    if draw.random() < 0.1:
        sizes.insert(draw.randrange(len(sizes) + 1), draw.choice(ODD))
    return draw.choice([list, tuple])(sizes)


def a_phase(draw: random.Random, phase: str) -> Any:
    if draw.random() < 0.05:
        return draw.choice(ODD)
    value: dict[Any, Any] = {}
    if draw.random() < 0.5:
        value["backend"] = draw.choice([*WORDS[phase], *WORDS[phase], None, "full", "Full", "cuda"])
    if draw.random() < 0.4:
        value["max_bs"] = a_size(draw)
    if draw.random() < 0.4:
        value["bs"] = some_sizes(draw)
        if value["bs"] and draw.random() < 0.7 and all(map(is_size, value["bs"])):
            value["max_bs"] = max(value["bs"])
    if draw.random() < 0.2:
        value["tc_compiler"] = draw.choice(["eager", "inductor", "gcc", None])
    if draw.random() < 0.15:
        value[draw.choice(["backend", "max_bs", "bs", "tc_compiler", "maxbs", 4, None, "\ud800"])] = draw.choice(ODD)
    return value


def a_document(draw: random.Random) -> Any:
    if draw.random() < 0.03:
        return draw.choice(ODD)
    document: dict[Any, Any] = {phase: a_phase(draw, phase) for phase in WORDS if draw.random() < 0.7}
    if draw.random() < 0.3:
        document["padding"] = draw.choice([True, False, None, 0, "no"])
    if draw.random() < 0.05:
        document[draw.choice(["decod", "max_bs", "", 3, (), "padding"])] = draw.choice(ODD)
    return document


# The routes


def from_document(draw: random.Random) -> str:
    document = a_document(draw)
    right = is_right(document)
    config, error = outcome(lambda: dg.CudaGraphConfig.from_dict(document))
    if right != (error is None):
        # Sizes of other libraries, and mappings and sequences of others, are as good.
        if error is None and not is_plain(document):
            check_exports(config)
            return "accepted"
        raise FoundError(f"{document!r}: the oracle says {right}, and it was {error!r}")
    if error is None:
        if config.to_dict(full=True) != wants(document):
            raise FoundError(f"{document!r} came to {config.to_dict(full=True)}")
        check_exports(config)
        text = outcome(lambda: dg.CudaGraphConfig.from_json(json.dumps(document)))
        if text.value != config:
            raise FoundError(f"{document!r} as text: {text}")
        return "accepted"
    if isinstance(error, dg.ConfigError) and not error.issues:
        raise FoundError(f"{document!r}: an error without issues: {error}")
    return "refused"


def is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(type(name) is str for name in value) and all(map(is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(is_plain, value)) if len(value) < 9 and value not in ODD[-30:-29] else False
    return value is None or type(value) in (int, float, str, bool)


def check_exports(config: Any) -> None:
    for options in ({}, {"explicit": True}, {"full": True}):
        assert dg.CudaGraphConfig.from_dict(config.to_dict(**options)) == config
    assert pickle.loads(pickle.dumps(config)).explicit_keys == config.explicit_keys
    assert str(config.explain())


def from_keywords(draw: random.Random) -> str:
    phase = draw.choice(list(WORDS))
    value = a_phase(draw, phase)
    if type(value) is not dict or not all(type(name) is str and name.isascii() for name in value):
        return "skipped"
    made, error = outcome(lambda: dg.PhaseConfig(**value), TypeError)
    if isinstance(error, TypeError) and set(value) <= {"backend", "max_bs", "bs", "tc_compiler"}:
        raise FoundError(f"{value!r}: {error!r}")
    if error is None:
        assert hash(made) == hash(pickle.loads(pickle.dumps(made)))
        whole, refusal = outcome(lambda: dg.CudaGraphConfig(**{phase: made}))
        if refusal is None:
            check_exports(whole)
            outcome(lambda: whole.with_phase(draw.choice(["decode", "prefill", "x"]), **value), KeyError, TypeError)
        if is_right_phase(phase, value) != (refusal is None) and is_plain(value):
            raise FoundError(f"{value!r} for {phase}: {refusal!r}")
    return "refused" if error else "accepted"


OPTIONS = [option.keyword for option in _core.CONFIG_OPTIONS]


def from_options(draw: random.Random) -> str:
    options = {
        draw.choice([*OPTIONS, *OPTIONS, "cuda_graf", "cuda_graph"]): draw.choice(
            [*ODD, 4, 8, [1, 8], [8], "disabled", "breakable", True, None, '{"decode": {}}', "{", a_document(draw)]
        )
        for _ in range(draw.randrange(4))
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        config, error = outcome(lambda: dg.config_from_options(**options))
        namespace = outcome(lambda: dg.config_from_args(argparse.Namespace(**options)))
    if not set(options) - set(OPTIONS) and (error is None) != (namespace.error is None):
        raise FoundError(f"{options!r}: by keywords {error!r}, by a namespace {namespace.error!r}")
    if error is None:
        check_exports(config)
    return "refused" if error else "accepted"


BUCKET_KEYS = (
    "max_bs", "bs", "padding", "num_tokens_per_bs", "alignment", "token_alignment", "limit", "max_graphs", "max_bytes",
    "bytes_per_size", "preset",
)  # fmt: skip


def an_argument(draw: random.Random, name: str) -> Any:
    if draw.random() < 0.08:
        return draw.choice(ODD)
    if name == "bs":
        return some_sizes(draw)
    if name == "padding":
        return draw.choice([True, False, None])
    if name == "preset":
        return draw.choice(["default", "dense", "x", None])
    if name == "bytes_per_size":
        return draw.choice([4, {1: 4, 64: 9}, lambda size: 4 + size, lambda size: draw.choice(ODD), 0])
    if draw.random() < 0.01:
        return LARGEST
    return draw.choice([1, 2, 3, 4, 8, 16, 64, 100, 512, None])


def from_sizes(draw: random.Random) -> str:
    """Lists of buckets: what is made ascends within every limit, and finds for each size the smallest."""
    is_decode = draw.random() < 0.6
    names = [name for name in BUCKET_KEYS if draw.random() < 0.35]
    arguments = {name: an_argument(draw, name) for name in names}
    if not is_decode:
        arguments = {name: arguments[name] for name in names if name not in ("num_tokens_per_bs", "token_alignment")}
        if "max_bs" in arguments:
            arguments["max_tokens"] = arguments.pop("max_bs")
    make = dg.decode_buckets if is_decode else dg.prefill_buckets
    buckets, error = outcome(lambda: make(**arguments), *raised_by(arguments))
    if error is not None:
        return "refused"
    sizes = list(buckets)
    if sizes != sorted(set(sizes)) or any(not is_size(size) for size in sizes):
        raise FoundError(f"{arguments!r}: {sizes}")
    limit = arguments.get("limit")
    if is_size(limit) and sizes and sizes[-1] > limit:
        raise FoundError(f"{arguments!r}: {sizes[-1]} is above the limit")
    for live in (1, 3, sizes[len(sizes) // 2] if sizes else 1, sizes[-1] + 1 if sizes else 2):
        fit = min((size for size in sizes if size >= live), default=None)
        if buckets.padding is False and live not in sizes:
            fit = None
        if buckets.fit(live) != fit:
            raise FoundError(f"{arguments!r}: {live} fits {buckets.fit(live)}, not {fit}")
    assert str(buckets)
    return "accepted"


def raised_by(arguments: dict[str, Any]) -> tuple[type[BaseException], ...]:
    """What functions of the caller may raise on their own: `len` and `type` take no size."""
    function = arguments.get("bytes_per_size")
    return (TypeError,) if callable(function) else ()


def from_histogram(draw: random.Random) -> str:
    steps = [1, 2, 3, 5, 8, 13, 64, 100]
    histogram: Any = {draw.choice(steps): draw.choice([0, 1, 5, 1000, 2**62, 2**63]) for _ in range(draw.randrange(6))}
    if draw.random() < 0.15 and histogram:
        histogram[draw.choice([*steps, "4", 0, -1, 2**40])] = draw.choice(ODD)
    if draw.random() < 0.03:
        histogram = draw.choice(ODD)
    names = ("max_graphs", "bytes", "bytes_per_size", "maximum", "alignment", "limit")
    arguments = {name: an_argument(draw, name) for name in names if draw.random() < 0.3}
    found, error = outcome(lambda: dg.optimize_buckets(histogram, **arguments), *raised_by(arguments))
    if error is not None:
        return "refused"
    assert list(found.sizes) == sorted(set(found.sizes))
    assert found.padded_rows >= 0
    assert 0 <= found.waste <= 1
    assert str(found)
    if type(arguments.get("max_graphs")) is int:
        assert len(found.sizes) <= arguments["max_graphs"]
    return "accepted"


def from_a_rule(draw: random.Random) -> str:
    good = {"name": "a", "phase": "decode", "backends": ("full",), "when": bool, "hard": True, "reason": "why"}
    for name in draw.sample(list(good), draw.randrange(3)):
        good[name] = draw.choice([*ODD, "prefill", ("breakable",), ("full", "x"), lambda facts: facts["x"]])
    rule, error = outcome(lambda: dg.Rule(**good), *((TypeError,) if isinstance(good["backends"], Lists) else ()))
    if error is not None:
        return "refused"
    facts = draw.choice([{}, {"x": 1}, {"x": None}])
    outcome(lambda: dg.resolve_config(dg.CudaGraphConfig(), facts, [rule]))
    return "accepted"


def from_a_word(draw: random.Random) -> str:
    value = draw.choice(ODD)
    calls = [
        lambda: _core.as_size("n", value),
        lambda: dg.check_cuda_graph_backend("decode", value),
        lambda: dg.Limits(max_bs=value, max_num_tokens=4),
        lambda: dg.decode_buckets(8).fit(value),
        lambda: value in dg.decode_buckets(8),
        lambda: dg.decode_buckets(8) == value,
        lambda: dg.CudaGraphConfig() == value,
        lambda: dg.CudaGraphConfig.from_json(value),
        lambda: dg.parse_cuda_graph_config_arg(value),
        lambda: _core.Arena(alignment=value, segment_bytes=draw.choice([*ODD, 64])),
        lambda: an_arena(draw, value),
        lambda: _core.is_slot_dtype(value),
        lambda: _core.read_argument(value),
    ]
    words = (TypeError, OverflowError, ValueError, UnicodeEncodeError, MemoryError, argparse.ArgumentTypeError)
    return "refused" if outcome(draw.choice(calls), *words).error else "accepted"


def an_arena(draw: random.Random, value: Any) -> None:
    arena = _core.Arena(
        alignment=2 ** draw.randrange(64), segment_bytes=draw.choice([1, 4096, 2**40, 2**63, 2**64 - 1])
    )
    for request in (draw.choice([1, 100, 2**62]), value, draw.choice([0, 2**63, 2**64 - 1])):
        outcome(lambda request=request: arena.allocate(request), MemoryError, TypeError, OverflowError)
        assert arena.live_bytes <= arena.reserved_bytes < 2**63


ROUTES = [
    *[from_document] * 6, *[from_keywords] * 3, *[from_options] * 2, *[from_sizes] * 4, *[from_histogram] * 2,
    from_a_rule, from_a_word,
]  # fmt: skip


def case(draw: random.Random) -> str:
    return draw.choice(ROUTES)(draw)


if __name__ == "__main__":
    main("fuzz_config", case, 100_000)
