"""The NPU's tests on the real `torch_npu` over a simulated device library, in processes of their own.

They show what torch_npu and this package do with a device library that behaves as modelled, and nothing of a device.
"""

from __future__ import annotations

import os
import re

import pytest

from npu_sim import simulation

#: Files of tests/npu, and the simulated device that they need.
RUNS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "conformance": (("test_npu_conformance.py",), {}),
    "one device": (
        (
            "test_npu_accelerator.py",
            "test_npu_audit.py",
            "test_npu_capture.py",
            "test_npu_docs.py",
            "test_npu_runner.py",
            "test_npu_signatures.py",
            "test_npu_update.py",
        ),
        {},
    ),
    # Whether a device makes an update at once or in the order of the stream is not public: both have to do.
    "updates in order": (
        ("test_npu_runner.py", "test_npu_update.py"),
        {"SIMULATED_CANN_ORDERED_UPDATES": "1"},
    ),
    "two devices": (("test_npu_two_devices.py",), {"SIMULATED_CANN_DEVICES": "2"}),
    "few streams": (("test_npu_few_streams.py",), {"SIMULATED_CANN_GRAPHS": "3"}),
    "task queue": (("test_npu_task_queue.py",), {"TASK_QUEUE_ENABLE": "2"}),
}


@pytest.fixture(scope="session")
def _simulated() -> None:
    try:
        simulation.libraries()
    except simulation.Unavailable as reason:
        if os.environ.get("DEVICEGRAPH_REQUIRE_NPU_SIM") == "1":
            pytest.fail(f"DEVICEGRAPH_REQUIRE_NPU_SIM is set, and there is no simulated NPU: {reason}", pytrace=False)
        pytest.skip(f"no simulated NPU: {reason}")


@pytest.mark.usefixtures("_simulated")
@pytest.mark.parametrize("name", RUNS)
def test_the_tests_for_an_npu_pass_on_the_simulated_device_library(name: str) -> None:
    files, variables = RUNS[name]
    paths = [f"tests/npu/{file}" for file in files]
    ended = simulation.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *paths, **variables)
    assert ended.returncode == 0, ended.stdout
    assert re.search(r"^\d+ passed in ", ended.stdout, re.MULTILINE), ended.stdout


def test_every_file_for_an_npu_is_run_in_the_simulation() -> None:
    run = {file for files, _ in RUNS.values() for file in files}
    assert run == {path.name for path in (simulation.ROOT / "tests" / "npu").glob("test_*.py")}
