"""Several GPUs, a process each: tensor-parallel and data-parallel ranks over NCCL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "tp_ranks.py"
GPUS = torch.cuda.device_count()


@pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, and there are {GPUS}")
@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_two_gpus_share_a_decoder_with_its_all_reduces_in_the_graph_and_end_without_a_hang(mode: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command = [*launcher, "--nproc-per-node", "2", str(SCRIPT), "--capture-error-mode", mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
