"""On a GPU an audit finds what it finds on the CPU: the same catalogue, and the same table of constructs."""

from __future__ import annotations

import pytest

import devicegraph as dg
from audit_models import BAD, GOOD, Block, check_bad, check_good
from engines import ToyEngine, config
from verdicts import ALLOWED, CONSTRUCTS, RANDOM, Construct, Setting

AUDITED = [c for c in CONSTRUCTS if c.verdict in (ALLOWED, RANDOM, *dg.AUDIT_CODES)]


@pytest.mark.parametrize("block", BAD, ids=lambda block: block.__name__)
def test_all_that_a_bad_model_is_marked_with_is_found_and_nothing_else(
    adapter: dg.DeviceAdapter, block: type[Block]
) -> None:
    check_bad(block, adapter)


@pytest.mark.parametrize("block", GOOD, ids=lambda block: block.__name__)
def test_nothing_is_found_in_a_good_model(adapter: dg.DeviceAdapter, block: type[Block]) -> None:
    check_good(block, adapter)


@pytest.mark.parametrize("construct", AUDITED, ids=lambda construct: construct.name)
def test_an_audit_says_of_each_construct_what_a_capture_says(adapter: dg.DeviceAdapter, construct: Construct) -> None:
    setting = Setting(adapter)
    report = dg.audit(lambda _: construct.run(setting), None, constants=vars(setting), device=adapter.device)
    found = {finding.code for finding in report.findings}
    assert found == {ALLOWED: set(), RANDOM: {"random"}}.get(construct.verdict, {construct.verdict}), str(report)


def test_a_runner_is_audited_where_it_captures(adapter: dg.DeviceAdapter) -> None:
    engine = ToyEngine(adapter.device, max_bs=4)
    with dg.DecodeCudaGraphRunner(engine, config=config(bs=[2, 4])) as runner:
        assert {finding.code for finding in runner.audit().findings} == {"unknown-tensor"}
        report = runner.audit(constants=vars(engine))
        assert report.ok, str(report)
        runner.capture()
