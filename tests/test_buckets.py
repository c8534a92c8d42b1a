"""Buckets as Python meets them; the arithmetic has its properties in rust/tests/buckets.rs."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import devicegraph as dg
from devicegraph import Buckets, ConfigError, CudaGraphConfig, decode_buckets, prefill_buckets

if TYPE_CHECKING:
    from pathlib import Path

sizes = st.lists(st.integers(1, 600), min_size=1, max_size=12)
rules = st.fixed_dictionaries(
    {},
    optional={
        "padding": st.booleans(),
        "alignment": st.integers(1, 32),
        "limit": st.one_of(st.none(), st.integers(1, 600)),
        "max_graphs": st.one_of(st.none(), st.integers(1, 6)),
        "bytes_per_size": st.one_of(st.none(), st.integers(0, 9), st.just(lambda size: 3 * size)),
    },
)


@given(sizes, rules)
def test_a_list_is_a_value_that_copies_and_pickles_with_its_history(asked: list[int], options: dict[str, Any]) -> None:
    buckets = Buckets(asked, **options)
    for same in (pickle.loads(pickle.dumps(buckets)), copy.deepcopy(buckets), Buckets(asked[::-1], **options)):
        assert (same, hash(same), str(same)) == (buckets, hash(buckets), str(buckets))
        assert same.dropped == buckets.dropped
    assert tuple(buckets) == buckets.sizes
    assert len(buckets) == len(buckets.sizes)
    assert all(size in buckets for size in buckets)
    assert not any(drop.size in buckets for drop in buckets.dropped)
    assert buckets.asked == tuple(sorted(set(asked)))
    assert buckets.maximum == max(buckets.sizes, default=0)


@given(sizes, rules)
def test_every_function_that_takes_a_list_gives_the_same_buckets(asked: list[int], options: dict[str, Any]) -> None:
    buckets = Buckets(asked, **options)
    assert str(decode_buckets(bs=asked, **options)) == str(buckets)
    assert str(prefill_buckets(max(asked), bs=asked, preset="dense", **options)) == str(buckets)


@given(sizes, st.integers(-2, 700), st.booleans())
def test_fit_is_the_smallest_size_that_holds_it(asked: list[int], raw: int, padding: bool) -> None:
    buckets = Buckets(asked, padding=padding)
    holds = [size for size in asked if (size >= raw > 0 if padding else size == raw)]
    assert buckets.fit(raw) == min(holds, default=None)


def test_the_default_lists_end_exactly_at_the_maximum() -> None:
    assert decode_buckets(20).sizes == (1, 2, 4, 8, 12, 16, 20)
    assert decode_buckets(20, padding=False).sizes == tuple(range(1, 21))
    assert decode_buckets(11, num_tokens_per_bs=2).sizes == (*range(1, 9), 10, 11)
    assert decode_buckets(20, alignment=8).sizes == (8, 16, 24)
    assert decode_buckets(5, num_tokens_per_bs=3, token_alignment=4).sizes == (4, 8)
    assert prefill_buckets(33).sizes == (*range(4, 33, 4), 33)
    assert decode_buckets(limit=3) == decode_buckets(3) == Buckets([1, 2, 3]) != Buckets([1, 2, 3], padding=False)


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_three_requests_take_a_bucket_of_whole_requests_whatever_the_tokens_each(tokens: int) -> None:
    bucket = decode_buckets(4, num_tokens_per_bs=tokens).fit(3)
    assert bucket == (4 if tokens == 1 else 3)


def test_a_phase_goes_in_as_it_is_with_the_engines_limit() -> None:
    phases = {
        '{"decode": {"max_bs": 64}}': (1, 2, 4, 8, 12, 16, 20),
        '{"decode": {"bs": [1, 8, 64]}}': (1, 8, 20),
        "{}": (1, 2, 4, 8, 12, 16, 20),
    }
    for text, expected in phases.items():
        phase = CudaGraphConfig.from_json(text).decode
        assert decode_buckets(phase.max_bs, bs=phase.bs, limit=20).sizes == expected


def test_the_dense_preset_pads_less_with_more_graphs() -> None:
    assert decode_buckets(70, preset="dense").sizes == (*range(1, 33), *range(34, 65, 2), 68, 70)
    assert decode_buckets(40, preset="dense", num_tokens_per_bs=2) == decode_buckets(40, preset="dense")
    assert prefill_buckets(80, preset="dense").sizes == (*range(4, 65, 4), 72, 80)
    assert decode_buckets(bs=[1, 8], preset="dense") == Buckets([1, 8])
    assert decode_buckets(9, preset="default") == decode_buckets(9)
    with pytest.raises(ConfigError, match="did you mean `dense`"):
        prefill_buckets(80, preset="dens")


def test_bytes_come_as_a_number_a_table_or_a_function_of_the_size() -> None:
    asked: list[int] = []

    def linear(size: int) -> int:
        asked.append(size)
        return 10 * size

    by_function = Buckets([1, 2, 4, 8, 16, 32], max_bytes=500, max_graphs=5, bytes_per_size=linear)
    # What the other limits took away costs nothing, and nobody is asked about it.
    assert asked == [1, 2, 4, 16, 32]
    assert by_function.sizes == (1, 4, 32)
    assert by_function.total_bytes == 370
    table = {size: 10 * size for size in asked}
    by_table = Buckets([1, 2, 4, 8, 16, 32], max_bytes=500, max_graphs=5, bytes_per_size=table)
    assert str(by_table) == str(by_function) == str(pickle.loads(pickle.dumps(by_function)))
    assert prefill_buckets(16, max_bytes=3, bytes_per_size=1).sizes == (4, 8, 16)
    assert decode_buckets(16, bytes_per_size=0).total_bytes == 0
    assert decode_buckets(16).total_bytes is None


def test_what_is_wrong_with_bytes_is_refused_and_what_a_function_raises_is_the_callers() -> None:
    def broken(size: int) -> int:
        raise OSError("no such device")

    with pytest.raises(OSError, match="no such device"):
        decode_buckets(4, bytes_per_size=broken)
    with pytest.raises(ConfigError, match=r"bytes_per_size\[2\]: `1\.5` is a float"):
        decode_buckets(bs=[2], bytes_per_size=lambda size: 1.5)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError) as raised:
        decode_buckets(bs=[0], max_bytes=True, bytes_per_size=broken)
    assert [issue.path for issue in raised.value.issues] == ["bs[0]", "max_bytes"]


def test_what_was_asked_kept_and_dropped_can_be_printed() -> None:
    buckets = Buckets([1, 2, 24, 500, 700, 900], alignment=8, limit=600)
    assert str(buckets) == (
        "asked    1, 2, 24, 500, 700, 900\n"
        "kept     24, 600\n"
        "added    600, the largest size within the limit\n"
        "dropped  1, 2, 500: not a multiple of the alignment 8\n"
        "dropped  700, 900: above the limit 600\n"
        "padding  on: a size in between takes the next larger bucket"
    )
    assert repr(buckets) == "<Buckets 24, 600>"
    assert repr(decode_buckets(40, padding=False)) == "<Buckets 1..40, without padding>"
    assert repr(Buckets([8], limit=4, padding=False)) == "<Buckets none, without padding>"
    assert str(buckets.dropped[2]) == (
        "500 is not a multiple of the alignment 8 [bucket-not-aligned]\n  hint: use 496 or 504"
    )
    assert [(drop.size, drop.code) for drop in buckets.dropped[3:]] == [
        (700, "bucket-over-limit"),
        (900, "bucket-over-limit"),
    ]


@pytest.mark.parametrize("entry", [0, -1, True, 1.5, "2", None])
def test_an_entry_that_is_no_size_is_refused_by_its_place(entry: Any) -> None:
    for make in (Buckets, lambda bs: decode_buckets(bs=bs), lambda bs: prefill_buckets(bs=bs)):
        with pytest.raises(ConfigError) as raised:
            make([1, entry])
        assert [issue.path for issue in raised.value.issues] == ["bs[1]"]


def test_nothing_that_says_how_large_is_refused() -> None:
    for make, argument in ((decode_buckets, "max_bs"), (prefill_buckets, "max_tokens")):
        with pytest.raises(ConfigError) as raised:
            make()
        (issue,) = raised.value.issues
        assert (issue.path, issue.code, issue.hint) == (argument, "no-maximum", f"give `{argument}`, `bs` or `limit`")


class Three:
    def __index__(self) -> int:
        return 3


@pytest.mark.parametrize("three", [3, np.int64(3), np.uint8(3), np.array(3), Three()])
def test_whatever_stands_for_an_integer_is_a_size(three: Any) -> None:
    assert Buckets([1, three]) == decode_buckets(bs=[three, 1]) == decode_buckets(bs=[1, 3, 4], limit=three)
    assert decode_buckets(three) == decode_buckets(3)
    assert prefill_buckets(three, alignment=three, max_graphs=three, max_bytes=three, bytes_per_size=three).sizes == (
        3,
    )
    assert Buckets([2, 3], bytes_per_size={2: 3, 3: three}).total_bytes == 6
    assert Buckets([2, 3], bytes_per_size=lambda size: three).total_bytes == 6
    assert Buckets([1, 4]).fit(three) == 4
    assert three in Buckets([1, 3])
    assert three not in Buckets([1, 4])


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (True, "raw: `true` is a boolean, not an integer [wrong-type]"),
        (1.0, "raw: `1.0` is a float, not an integer [wrong-type]"),
        ("1", 'raw: `"1"` is a string, not an integer [wrong-type]'),
        (None, "raw: `null` is null, not an integer [wrong-type]"),
    ],
)
def test_a_live_size_that_is_no_integer_is_refused(raw: Any, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Buckets([1, 2]).fit(raw)
    assert str(raised.value) == told
    assert raw not in Buckets([1, 2])


def test_no_bucket_holds_an_integer_however_large_or_small() -> None:
    for raw in (2**63, 2**70, -(2**70)):
        assert Buckets([1, 2]).fit(raw) is None


def test_other_objects_are_neither_contained_nor_equal() -> None:
    buckets = Buckets([1, 2])
    assert "1" not in buckets
    assert -1 not in buckets
    assert 2**70 not in buckets
    assert buckets != (1, 2)
    assert dg.buckets.Buckets is Buckets


histograms = st.dictionaries(st.integers(1, 400), st.integers(1, 1000), min_size=1, max_size=30)


@given(histograms, st.integers(1, 12))
def test_an_optimized_list_is_one_to_capture_and_pads_as_a_step_by_step_count_says(
    histogram: dict[int, int], max_graphs: int
) -> None:
    best = dg.optimize_buckets(histogram, max_graphs)
    buckets = Buckets(best.sizes)
    assert buckets.maximum == max(histogram)
    assert len(buckets) == min(max_graphs, len(histogram))
    padding = {size: buckets.fit(size) - size for size in histogram}  # type: ignore[operator]
    assert best.padded_rows == sum(padding[size] * count for size, count in histogram.items())
    assert best.raw_rows == sum(size * count for size, count in histogram.items())
    assert (best.steps, best.eager_steps) == (sum(histogram.values()), 0)
    assert best.waste == pytest.approx(best.padded_rows / (best.padded_rows + best.raw_rows))
    assert best.curve[len(best.sizes) - 1] == best.padded_rows == best.padded_rows_with(best.sizes)
    default = decode_buckets(max(histogram), max_graphs=max_graphs)
    if len(default) <= max_graphs:
        assert best.padded_rows <= best.padded_rows_with(default.sizes)


def test_the_bytes_of_graphs_may_be_a_number_a_table_or_a_function() -> None:
    histogram = dict.fromkeys(range(1, 9), 5)
    each = dg.optimize_buckets(histogram, bytes=30, bytes_per_size=10)
    assert (each.sizes, each.total_bytes) == (dg.optimize_buckets(histogram, 3).sizes, 30)
    by_row = dg.optimize_buckets(histogram, bytes=15, bytes_per_size=lambda size: 1 + size)
    by_table = dg.optimize_buckets(histogram, bytes=15, bytes_per_size={size: 1 + size for size in histogram})
    assert by_row == by_table
    assert by_row.total_bytes == sum(1 + size for size in by_row.sizes) <= 15
    assert by_row.sizes[-1] == 8


def test_what_cannot_be_optimized_is_refused_with_every_problem() -> None:
    with pytest.raises(ConfigError) as info:
        dg.optimize_buckets({0: 1, 4: -1}, 0, bytes=1, maximum=True)  # type: ignore[arg-type]
    assert [(issue.path, issue.code) for issue in info.value.issues] == [
        ("histogram[0]", "out-of-range"),
        ("histogram[4]", "out-of-range"),
        ("max_graphs", "out-of-range"),
        ("bytes", "no-bytes"),
        ("maximum", "wrong-type"),
    ]
    with pytest.raises(ConfigError, match="budget-too-small"):
        dg.optimize_buckets({4: 1}, bytes=9, bytes_per_size=10)
    with pytest.raises(ZeroDivisionError):
        dg.optimize_buckets({4: 1}, bytes_per_size=lambda size: size // 0)


@given(histograms)
def test_a_histogram_comes_back_from_its_file(
    tmp_path_factory: pytest.TempPathFactory, histogram: dict[int, int]
) -> None:
    path = tmp_path_factory.mktemp("csv") / "steps.csv"
    dg.write_histogram(path, histogram)
    assert dg.read_histogram(path) == histogram
    # Files may be joined, and edited where a byte order mark and other line ends are put in.
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n") + path.read_bytes())
    assert dg.read_histogram(path) == {size: 2 * count for size, count in histogram.items()}


def test_every_bad_line_of_a_histogram_is_named(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("size;count\n1,x\n0,3\n\n5\n7,1_000\n٣,1\n9,1\n")
    with pytest.raises(ConfigError) as info:
        dg.read_histogram(path)
    assert info.value.code == "csv-syntax"
    assert info.value.message == (
        f"{path}: line 1: `size;count` is not the header `size,count`\n"
        "line 2: count: `x` is not an integer of at least 0\n"
        "line 3: size: `0` is not an integer of at least 1\n"
        "line 5: 1 cells, not a size and a count\n"
        "line 6: count: `1_000` is not an integer of at least 0\n"
        "line 7: size: `٣` is not an integer of at least 1"
    )
    path.write_bytes(b"size,count\n\xff\n")
    with pytest.raises(ConfigError, match="it is no CSV text"):
        dg.read_histogram(path)
