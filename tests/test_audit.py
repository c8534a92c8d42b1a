"""The audit: everything that a catalogue of bad forwards is marked with, nothing in good ones, at the right places."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import audit_models
import devicegraph as dg
from audit_models import BAD, GOOD, Block, check_bad, check_good, marks
from devicegraph.devices.tape_rules import REFUSALS
from engines import CompiledPrefill, ToyEngine, ToyPrefill, config
from verdicts import ALLOWED, CONSTRUCTS, RANDOM, Construct, Setting

ADAPTER = dg.get_device_adapter("cpu")
named = pytest.mark.parametrize


def here(mark: str) -> int:
    """The line of this file that ends with a mark."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (line,) = (number for number, text in enumerate(lines, 1) if text.endswith(f"  #! {mark}"))
    return line


def codes(report: dg.AuditReport) -> list[str]:
    return [finding.code for finding in report.findings]


@named("block", BAD, ids=lambda block: block.__name__)
def test_all_that_a_bad_model_is_marked_with_is_found_and_nothing_else(block: type[Block]) -> None:
    check_bad(block, ADAPTER)


@named("block", GOOD, ids=lambda block: block.__name__)
def test_nothing_is_found_in_a_good_model(block: type[Block]) -> None:
    check_good(block, ADAPTER)


@named("block", [audit_models.ExpertByExpert, audit_models.InvertsWithACheck, audit_models.RecurrentStateOnPython])
def test_the_same_is_found_where_composite_operators_arrive_whole(block: type[Block]) -> None:
    with torch.inference_mode():
        check_bad(block, ADAPTER)


def test_the_catalogue_shows_every_code_but_those_of_the_tape() -> None:
    shown = {code for block in BAD for code, _ in marks(block)}
    assert shown == set(dg.AUDIT_CODES) - {"no-fake-kernel", "tape-limit"}


AUDITED = [c for c in CONSTRUCTS if c.verdict in (ALLOWED, RANDOM, *dg.AUDIT_CODES)]


@named("construct", AUDITED, ids=lambda construct: construct.name)
def test_an_audit_says_of_each_construct_what_a_capture_says(construct: Construct) -> None:
    setting = Setting(ADAPTER)
    report = dg.audit(lambda _: construct.run(setting), None, constants=vars(setting))
    assert {*codes(report)} == {ALLOWED: set(), RANDOM: {"random"}}.get(construct.verdict, {construct.verdict})


def test_what_an_audit_does_not_look_at_is_streams_events_and_captures() -> None:
    left_out = {c.verdict for c in CONSTRUCTS} - {c.verdict for c in AUDITED}
    assert left_out == {"foreign-stream", "unjoined-stream", "uncaptured-event", "nested-capture"}


def test_findings_say_what_refusals_say() -> None:
    for code in dg.AUDIT_CODES.keys() & REFUSALS.keys():
        assert dg.AUDIT_CODES[code] == REFUSALS[code]


def test_what_the_tape_cannot_record_is_found_on_the_tape() -> None:
    library = torch.library.Library("devicegraph_test_audit", "DEF")
    library.define("opaque(Tensor x) -> Tensor")
    library.m.impl("opaque", "CPU", lambda x: x + 1, False)  # as a compiled kernel: the library knows no Python of it
    try:
        report = dg.audit(lambda x: torch.ops.devicegraph_test_audit.opaque(x).to_sparse(), torch.ones(4, 4))
    finally:
        library._destroy()
    assert codes(report) == ["no-fake-kernel", "tape-limit"]
    assert "torch does not know the shape" in report.findings[0].what
    assert "`torch.Tensor.to_sparse` cannot be put on the CPU tape: sparse tensors" in report.findings[1].what


# What is known.


@dataclass
class OneField:
    x: torch.Tensor


class Engine(ToyEngine):
    """Keeps what attention needs on the batch, made anew for every batch or once."""

    def __init__(self, *, makes_anew: bool) -> None:
        super().__init__(max_bs=4)
        self.makes_anew = makes_anew
        self.lengths = torch.zeros(4, dtype=torch.int64)

    def prepare_metadata(self, batch: Any, key: Any) -> None:
        lengths = self.lengths[: batch.batch_size]
        lengths.copy_(batch.seq_lens)
        batch.extras = {"lengths": lengths + 1 if self.makes_anew else lengths}

    def forward(self, batch: Any) -> Any:
        batch.seq_lens.copy_(batch.extras["lengths"])
        return super().forward(batch)


def audit_engine(engine: Any, **options: Any) -> dg.AuditReport:
    runner = dg.DecodeCudaGraphRunner(engine, config=config(bs=[2, 4]))
    return runner.audit(**options)


def test_a_runner_finds_metadata_that_is_made_anew_for_each_batch() -> None:
    engine = Engine(makes_anew=False)
    assert audit_engine(engine, constants=vars(engine)).ok
    engine = Engine(makes_anew=True)
    (finding,) = audit_engine(engine, constants=vars(engine)).findings
    assert finding.code == "unknown-tensor"
    assert "`extras['lengths']`, [2] of int64 at another address in another batch" in finding.what


def test_tensors_of_an_engine_are_named_unless_they_are_said_to_stay() -> None:
    engine = ToyEngine(max_bs=4)
    report = audit_engine(engine)
    assert {*codes(report)} == {"unknown-tensor"}
    found = " ".join(finding.what for finding in report.findings)
    for name in ("embedding", "position", "cache", "steps", "head"):
        assert f"`ToyEngine.{name}`" in found
    constants = [engine.embedding, engine.position, {"cache": [engine.cache]}, SimpleNamespace(steps=engine.steps)]
    (finding,) = audit_engine(engine, constants=constants).findings
    assert "`ToyEngine.head`, [8, 32] of float32" in finding.what


def test_an_audit_captures_nothing_and_refuses_a_bucket_that_there_is_not() -> None:
    engine = ToyEngine(max_bs=4)
    with dg.DecodeCudaGraphRunner(engine, config=config(bs=[2, 4])) as runner:
        assert runner.audit(4, constants=vars(engine)).ok
        assert engine.forwards == [4, 4]
        assert runner.can_run(engine.batch([3])).code == "not-captured"
        with pytest.raises(dg.CaptureError, match="3 is not one of the buckets") as caught:
            runner.audit(3)
        assert caught.value.code == "bucket-unknown"
    with pytest.raises(dg.ReplayError, match="closed"):
        runner.audit()


def test_a_disabled_phase_can_be_audited() -> None:
    engine = ToyEngine(max_bs=4)
    runner = dg.DecodeCudaGraphRunner(engine, config=config(backend="disabled"))
    assert runner.audit(constants=vars(engine)).ok


def test_what_is_recorded_at_the_head_of_a_capture_is_audited_too() -> None:
    class Head(ToyEngine):
        def prepare_in_graph(self, batch: Any, key: Any) -> None:
            assert key.size == 2
            assert dg.get_is_capture_mode()
            assert dg.current_batch() is batch
            int(batch.seq_lens.max())

    engine = Head(max_bs=4)
    assert codes(audit_engine(engine, constants=vars(engine))) == ["host-read"]


def test_an_engine_in_the_place_of_its_forward_is_refused() -> None:
    with pytest.raises(dg.ConfigError, match="forward: a `ToyEngine` cannot be called") as caught:
        dg.audit(ToyEngine(), torch.ones(1))  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.hint) == ("not-callable", "pass the engine's `forward`")


def test_slots_of_a_registry_are_known_and_its_host_slots_are_host_memory() -> None:
    registry = dg.build_decode_registry(
        device="cpu", max_bs=4, max_num_token=4, seq_len_fill_value=1, cache_loc_dtype=torch.int64
    )
    views = registry.views(padded_bs=2, padded_num_tokens=2)

    def forward(_: Any) -> Any:
        longest = int(views["seq_lens_cpu"].max())
        return views["input_ids"][:longest] + 1

    (finding,) = dg.audit(forward, None, registry=registry).findings
    assert finding.code == "frozen-value"
    assert "the batch's host tensor `seq_lens_cpu`" in finding.what
    assert codes(dg.audit(forward, None)) == ["unknown-tensor", "unknown-tensor"]


def test_modules_are_found_behind_functions_methods_and_partial_calls() -> None:
    class Holder:
        def __init__(self) -> None:
            self.parts = {"model": torch.nn.BatchNorm1d(4).eval()}

        def by_hand(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.parts["model"].running_var + self.parts["model"].weight

    holder, x = Holder(), torch.ones(2, 4)
    inner = lambda x: holder.by_hand(x)  # noqa: E731
    for forward in (holder.by_hand, inner, lambda x: inner(x), holder.parts["model"]):
        assert dg.audit(forward, x).ok


def test_memory_that_came_another_way_is_the_same_memory() -> None:
    x = torch.arange(8.0)
    assert dg.audit(lambda batch: torch.from_dlpack(batch["x"].detach())[2:] + 1, {"x": x}).ok


# What is left out, and what is not.


def test_breaks_are_left_out_for_the_backends_that_have_them() -> None:
    @dg.eager_on_graph
    def sample(x: torch.Tensor) -> torch.Tensor:
        return x[: int(x.sum())] * torch.rand([])

    def forward(x: torch.Tensor) -> torch.Tensor:
        dg.break_graph()
        return sample(x + 1) * 2

    x = torch.ones(4)
    assert codes(dg.audit(forward, x)) == ["host-read", "random"]
    assert dg.audit(forward, x, backend="breakable").ok


@pytest.mark.parametrize("backend", ["breakable", "tc_piecewise"])
def test_a_prefill_runner_leaves_out_what_its_backend_does(backend: str) -> None:
    engine = CompiledPrefill() if backend == "tc_piecewise" else ToyPrefill()
    runner = dg.PrefillCudaGraphRunner(engine, config=dg.CudaGraphConfig(prefill={"backend": backend, "bs": [4, 8]}))
    assert runner.audit(constants=vars(engine)).ok


def test_what_only_the_first_run_does_is_no_finding() -> None:
    tables: dict[int, torch.Tensor] = {}

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not tables:
            tables[len(x)] = x * x.sum().item()
        return x + 1

    assert dg.audit(forward, torch.ones(4)).ok


def test_other_threads_are_not_watched() -> None:
    x = torch.ones(4)

    def forward(x: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=lambda: torch.nn.Dropout()(x).sum().item())
        other.start()
        other.join()
        return x + 1

    assert dg.audit(forward, x).ok


def test_compiled_functions_run_as_they_are_written() -> None:
    model = torch.nn.Linear(4, 4)
    compiled = torch.compile(lambda x: model(x) * 2, fullgraph=True, backend="eager")
    assert dg.audit(compiled, torch.ones(2, 4)).ok
    assert dg.audit(torch.compile(model, backend="eager"), torch.ones(2, 4)).ok


def test_an_error_that_the_model_catches_explains_no_other_one() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with suppress(IndexError):
            x[torch.tensor([77])]  #! host-copy
        raise KeyError("lost")  #! forward-failed

    report = dg.audit(forward, torch.ones(4))
    assert [(f.code, f.line) for f in report.findings] == [
        (code, here(code)) for code in ("host-copy", "forward-failed")
    ]
    assert "KeyError: 'lost'" in report.findings[1].what


def test_an_audit_leaves_modes_hooks_and_modules_as_they_were() -> None:
    from torch.nn.modules import module

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
    before = torch.get_default_dtype(), len(module._global_forward_hooks), len(module._global_forward_pre_hooks)
    report = dg.audit(model, torch.ones(2, 4))
    assert codes(report) == ["random"]
    assert report.findings[0].module == "1"
    after = torch.get_default_dtype(), len(module._global_forward_hooks), len(module._global_forward_pre_hooks)
    assert after == before
    assert torch.is_grad_enabled()
    assert model(torch.ones(2, 4)).requires_grad


# The report.


def test_a_report_prints_and_exports_what_was_found_with_what_to_do() -> None:
    class Gate(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                if x.sum() > 0:  #! gate
                    x = x * 2
            return x

    report = dg.audit(torch.nn.Sequential(Gate()), torch.ones(2))
    file = Path(__file__)
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    message, hint = dg.AUDIT_CODES["host-read"]
    assert str(report).splitlines() == [
        "audit on cpu: 1 host-read",
        f"{shown}:{here('gate')} in `0`: host-read, 3 times",
        f"  {message.format(operator='torch.Tensor.__bool__')}",
        f"  hint: {hint}",
    ]
    exported = json.loads(report.to_json())
    assert exported == report.to_dict()
    assert exported["ok"] is report.ok is False
    assert exported["findings"][0]["count"] == 3
    assert str(dg.audit(torch.nn.Linear(2, 2), torch.ones(2))) == "audit on cpu: nothing found"


PAGE = (Path(__file__).parent.parent / "docs" / "audit.md").read_text(encoding="utf-8")


def test_the_page_has_a_row_for_every_code() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    assert [(code.strip("`"), hint) for code, _, hint in rows] == [
        (code, hint) for code, (_, hint) in dg.AUDIT_CODES.items()
    ]


def test_what_the_page_says_is_printed_is_printed() -> None:
    source, shown = PAGE.split("```python\n")[1].split("```")[0], PAGE.split("```text\n")[1].split("...\n```")[0]
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(source, "model.py", "exec"), names)
    assert str(names["report"]).startswith(shown)
