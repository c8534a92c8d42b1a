"""The commands that print what an operator needs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import devicegraph
from devicegraph import cli
from devicegraph._core import config_schema

if TYPE_CHECKING:
    from pathlib import Path


def _run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def _refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as exit:
        cli.main(argv)
    assert exit.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "engine.toml"
    path.write_text('padding = true\n[decode]\nbs = [1, 2, 8]\n[prefill]\nbackend = "disabled"\n')
    return path


def test_explain_reads_a_file_or_text_below_nothing_and_above_the_options(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    expected = f"""\
key                  value             from
decode.backend       breakable         --cuda-graph-backend-decode
                     not full          default
decode.max_bs        -                 {config} names `bs`
                     not 64            --cuda-graph-max-bs (deprecated)
decode.bs            1, 2, 8           {config}
decode.tc_compiler   eager             default
prefill.backend      disabled          {config}
                     not tc_piecewise  default
prefill.max_bs       -                 default
prefill.bs           -                 default
prefill.tc_compiler  eager             default
padding              true              {config}
warning: `--cuda-graph-max-bs` is deprecated; use `--cuda-graph-max-bs-decode`
"""
    options = ("--cuda-graph-max-bs", "64", "--cuda-graph-backend-decode", "breakable")
    assert _run(capsys, "explain", str(config), *options) == expected
    assert _run(capsys, "explain", *options, str(config)) == expected
    text = '{"decode": {"bs": [1, 2, 8]}, "prefill": {"backend": "disabled"}, "padding": true}'
    assert _run(capsys, "explain", text, *options).splitlines()[-1] == expected.splitlines()[-1]


def test_explain_prints_json_for_machines(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    data = json.loads(_run(capsys, "explain", "--json", str(config), "--disable-piecewise-cuda-graph"))
    explanation = devicegraph.CudaGraphConfig.from_file(config).explain().to_dict()
    assert data["keys"]["decode.bs"] == explanation["keys"]["decode.bs"]
    assert data["warnings"] == []
    assert data["deprecations"] == [
        "`--disable-piecewise-cuda-graph` is deprecated; use `--cuda-graph-backend-prefill disabled`"
    ]


def test_explain_applies_the_ready_rules_under_facts(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _run(capsys, "explain", "--fact", "pipeline_parallel_size=2", "--fact", "device=npu").splitlines()
    assert lines[5:9] == [
        "prefill.backend      disabled          rule `npu`: an NPU captures decode only",
        "                     also disabled     rule `other-device`: compiled pieces are known to work on CUDA only",
        "                     also disabled     rule `pipeline-parallel`: what stages hand over has sizes of its own",
        "                     not tc_piecewise  default",
    ]
    assert _refused(capsys, "explain", "--fact", "device=npu", "--cuda-graph-backend-prefill", "breakable") == (
        'devicegraph explain: error: prefill.backend (--cuda-graph-backend-prefill): `"breakable"` cannot be used: '
        "an NPU captures decode only (rule `npu`) [rule-forbids]\n"
        "  hint: leave `backend` out, or set it to `disabled`\n"
    )


def test_explain_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(_run(capsys, "explain", "--schema")) == config_schema()


def test_buckets_prints_what_was_asked_kept_and_dropped(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    assert _run(capsys, "buckets", "decode", "100", "--limit", "64", "--max-graphs", "5") == (
        "asked    1, 2, 4..16 by 4, 24..96 by 8, 100\n"
        "kept     1, 4, 8, 24, 64\n"
        "dropped  72..96 by 8, 100: above the limit 64\n"
        "dropped  2, 12, 16, 32..56 by 8: beyond the budget of 5 graphs\n"
        "padding  on: a size in between takes the next larger bucket\n"
    )
    assert _run(capsys, "buckets", "decode", "--config", str(config)).splitlines()[1] == "kept     1, 2, 8"
    assert _run(capsys, "buckets", "decode", "--config", str(config), "--bs", "3").splitlines()[1] == "kept     3"
    assert _run(capsys, "buckets", "decode", "5", "--no-padding").splitlines()[1] == "kept     1..5"
    assert _run(capsys, "buckets", "prefill", "--preset", "dense", "70").splitlines()[1] == "kept     4..64 by 4, 70"
    speculative = _run(capsys, "buckets", "decode", "--num-tokens-per-bs", "2", "11", "--token-alignment", "4")
    assert speculative.splitlines()[1] == "kept     2..12 by 2"


def test_buckets_prints_json_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("buckets", "prefill", "--bs", "4", "6", "32", "--alignment", "4", "--json", "--bytes-per-size", "10")
    assert json.loads(_run(capsys, *argv)) == {
        "phase": "prefill",
        "asked": [4, 6, 32],
        "sizes": [4, 32],
        "dropped": [
            {
                "size": 6,
                "code": "bucket-not-aligned",
                "message": "6 is not a multiple of the alignment 4",
                "hint": "use 4 or 8",
            }
        ],
        "maximum": 32,
        "padding": True,
        "total_bytes": 20,
    }


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    path = tmp_path / "steps.csv"
    path.write_text("size,count\n1,300\n2,150\n3,100\n5,120\n8,90\n13,80\n21,60\n30,40\n33,30\n48,20\n64,10\n")
    return path


def test_buckets_finds_the_list_that_pads_the_least(capsys: pytest.CaptureFixture[str], traffic: Path) -> None:
    argv = ("buckets", "--optimize", str(traffic), "--limit", "50", "--alignment", "2")
    assert _run(capsys, *argv, "--max-graphs", "5") == (
        "sizes    2, 8, 22, 34, 50\n"
        "steps    990, and 10 above the largest size: eager\n"
        "padding  2170 of 9840 rows (22.1%) with 5 graphs\n"
        "default  1470 rows (16.1%) with 10 graphs: 2, 4..16 by 4, 24..48 by 8, 50\n"
        "saving   -700 padded rows against the default list (-47.6%)\n"
        "\n"
        "graphs  padded rows\n"
        "     1  41830   84.5%\n"
        "     2   9910   56.4%\n"
        "     3   5910   43.5%\n"
        "     4   3290   30.0%\n"
        "     5   2170   22.1%\n"
        "     6   1530   16.6%\n"
        "     7   1090   12.4%\n"
        "     8    890   10.4%\n"
        "     9    730    8.7%\n"
        "    10    690    8.3%\n"
    )


def test_buckets_optimizes_for_as_many_graphs_as_the_default_list_has(
    capsys: pytest.CaptureFixture[str], traffic: Path
) -> None:
    for argv in (("buckets",), ("buckets", "prefill", "--preset", "dense"), ("buckets", "decode", "30")):
        data = json.loads(_run(capsys, *argv, "--optimize", str(traffic), "--json"))
        best = devicegraph.optimize_buckets(
            devicegraph.read_histogram(traffic), len(data["default"]["sizes"]), maximum=data["sizes"][-1]
        )
        assert tuple(data["sizes"]) == best.sizes
        assert tuple(data["curve"]) == best.curve
        assert data["saved_rows"] == best.padded_rows_with(data["default"]["sizes"]) - best.padded_rows >= 0
        assert (data["steps"], data["eager_steps"]) == (best.steps, best.eager_steps)
    options = ("--max-bytes", "2000", "--bytes-per-size", "100", "--bytes-per-row", "10", "--json")
    data = json.loads(_run(capsys, "buckets", "--optimize", str(traffic), *options))
    assert data["total_bytes"] == sum(100 + 10 * size for size in data["sizes"]) <= 2000


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "devicegraph: error: the following arguments are required: COMMAND"),
        (["explain", "no.json"], "devicegraph explain: error: no.json: No such file or directory"),
        (
            ["explain", '{"decode": 3}'],
            "devicegraph explain: error: decode: `3` is an integer, not an object with the keys `backend`, `max_bs`, "
            "`bs` and `tc_compiler` [wrong-type]",
        ),
        (
            ["explain", "{}", "--cuda-graph-config", "{}"],
            "devicegraph explain: error: give CONFIG or `--cuda-graph-config`, not both [options-disagree]",
        ),
        (
            ["explain", "--fact", "device"],
            "devicegraph explain: error: `device` gives the fact no value; write `device=VALUE` [unknown-fact]",
        ),
        (
            ["explain", "--cuda-graph-max-bs", "4", "--cuda-graph-bs", "0"],
            "devicegraph explain: error: decode.bs[0] (--cuda-graph-bs): `0` is not an integer from 1 to 1048576 "
            "[out-of-range]",
        ),
        (
            ["buckets", "decode", "many"],
            'devicegraph buckets: error: max_bs: `"many"` is a string, not an integer from 1 to 1048576 [wrong-type]',
        ),
        (
            ["buckets", "prefill", "8", "--token-alignment", "2"],
            "devicegraph buckets: error: `--token-alignment` is for decode only [unknown-option]",
        ),
        (
            ["buckets", "prefill", "--config", '{"prefill": {"backend": "disabled"}}'],
            "devicegraph buckets: error: prefill is disabled by the configuration: it has no sizes [phase-disabled]",
        ),
        (
            ["buckets", "8", "--optimize", "no.csv"],
            "devicegraph buckets: error: argument phase: invalid choice: '8' (choose from 'decode', 'prefill')",
        ),
        (["buckets", "--optimize", "no.csv"], "devicegraph buckets: error: no.csv: No such file or directory"),
        (
            ["buckets", "--optimize", "no.csv", "--no-padding"],
            "devicegraph buckets: error: `--no-padding` does not go with `--optimize` [unknown-option]",
        ),
        (
            ["buckets", "decode", "8", "--bytes-per-row", "1"],
            "devicegraph buckets: error: `--bytes-per-row` goes with `--optimize` [unknown-option]",
        ),
        (
            ["buckets", "decode", "8", "--frobnicate"],
            "devicegraph buckets: error: unrecognized arguments: --frobnicate",
        ),
    ],
    ids=lambda argv: " ".join(argv) if isinstance(argv, list) else "",
)
def test_bad_input_is_one_clear_line_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _refused(capsys, *argv).partition("\n")[::2] == (message, "")


def test_an_unknown_command_or_fact_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    command = _refused(capsys, "explian")
    assert all(name in command for name in cli.COMMANDS)
    fact = _refused(capsys, "explain", "--fact", "pp_size=2")
    assert all(f"`{name}`" in fact for name in devicegraph.FACTS)


def test_help_and_version_name_every_command_and_load_no_torch() -> None:
    code = (
        "import sys; from devicegraph import cli\ntry: cli.main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    )
    for argv in (["--help"], ["--version"], ["explain", "--help"], ["buckets", "--help"], ["buckets", "decode", "8"]):
        done = subprocess.run([sys.executable, "-c", code, *argv], check=True, capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == "False"
        if argv == ["--help"]:
            assert all(about in done.stdout for _, about in cli.COMMANDS.values())
        if argv == ["--version"]:
            assert done.stdout.startswith(f"devicegraph {devicegraph.__version__}\n")


def test_the_module_runs_and_a_reader_that_stops_reading_is_no_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "devicegraph", "buckets", "decode", "8"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.splitlines()[1]) == (0, "kept     1, 2, 4, 8")
    with subprocess.Popen(
        [sys.executable, "-m", "devicegraph", "explain"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def test_a_command_whose_output_was_closed_before_it_began_does_its_work_in_silence() -> None:
    command = [sys.executable, "-c", "import os, sys; os.close(1); os.execv(sys.executable, sys.argv[1:])"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "devicegraph", "explain"], capture_output=True, check=False, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
