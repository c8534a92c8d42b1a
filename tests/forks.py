"""A process with graphs alive that forks, serves on, and ends without closing anything: run as a program.

It prints what the children were told and whether the parent's steps are right. The first argument is the device.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

import torch

import devicegraph as dg
from engines import ToyEngine, eager


def runner_on(device: str, backend: str, *, shares: bool = False) -> dg.DecodeCudaGraphRunner:
    adapter = dg.get_device_adapter(device)
    pool = dg.GraphMemoryPool(adapter)
    given = (
        dg.FullCudaGraphBackend(adapter, phase="decode", graph_pool=pool, share_executables=True) if shares else None
    )
    config = dg.CudaGraphConfig(decode={"backend": backend, "bs": [2, 4]})
    runner = dg.DecodeCudaGraphRunner(ToyEngine(device, max_bs=4), config=config, graph_pool=pool, backend=given)
    runner.capture()
    return runner


def is_right(runner: Any) -> bool:
    batch = runner.model_runner.batch([3, 5, 2])
    return torch.equal(runner.run(batch), eager(runner.model_runner, batch))


def told(call: Any) -> str:
    """The code of what a call raises."""
    try:
        call()
    except dg.DeviceGraphError as error:
        return f"{type(error).__name__} {error.code}"
    return "nothing"


def ask(runner: Any, device: str, *, may_capture: bool) -> dict[str, str]:
    """What a child is told by each thing that it may ask of its parent's runner."""
    backend, key = runner.backend, dg.ShapeKey(4)
    batch = runner.model_runner.batch([3, 5, 2]) if device == "cpu" else None
    answers = {
        "run": told(lambda: runner.run(batch)),
        "replay": told(lambda: runner.replay(batch)),
        "can_run": told(lambda: runner.can_run(batch)),
        "replay_prepare": told(lambda: runner.replay_prepare(batch)),
        "capture": told(runner.capture),
        "capture_one_shape": told(lambda: runner.capture_one_shape(4)),
        "pause": told(runner.pause),
        "resume": told(runner.resume),
        "with": told(runner.__enter__),
        "backend.replay": told(lambda: backend.replay(key, None)),
        "close": told(lambda: (runner.close(), runner.close())),
    }
    if may_capture:
        answers["a runner of its own"] = str(is_right(runner_on(device, "full")))
    return answers


def in_child(runner: Any, device: str, *, ends_at_once: bool) -> dict[str, str]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, json.dumps(ask(runner, device, may_capture=ends_at_once and device == "cpu")).encode())
        if ends_at_once:
            os._exit(0)
        sys.exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        found: dict[str, str] = json.loads(answers.read())
    found["status"] = str(os.waitpid(child, 0)[1])
    return found


def main() -> None:
    device = sys.argv[1]
    gc.freeze()  # captures need not look through what imports have left
    runners = [runner_on(device, "full"), runner_on(device, "breakable")]
    if device == "cpu":
        runners.append(runner_on(device, "full", shares=True))
    found = [in_child(runner, device, ends_at_once=i == 0) for i, runner in enumerate(runners)]
    right = [is_right(runner) for runner in runners]
    runners[0].pause()
    runners[1].itself = runners  # a cycle, which only the interpreter's end takes apart
    sys.stdout.write(json.dumps({"children": found, "parent": right}))
    sys.kept = [*runners, runners[0].backend.captured]  # alive for longer than any module


if __name__ == "__main__":
    main()
