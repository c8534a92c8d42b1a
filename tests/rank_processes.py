"""Ranks in processes of their own, forked from this one so that torch is imported once: for scripts, not for pytest."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable


def run_ranks(main: Callable[[], Any], size: int, *, limit_s: float = 70) -> list[dict[str, Any]]:
    """Runs `main` in `size` processes with the environment that `torchrun` gives, and ends those that take too long.

    As under `torchrun`, the store of `torch.distributed` is held by the launcher, here this process.

    Returns:
        For each rank its `exit` code, None for one that had to be killed, and its `result`, or its `error` as text.
    """
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(size)]
    ranks = [
        context.Process(target=_rank, args=(main, rank, size, there), daemon=True)
        for rank, (_, there) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # has threads: not before a fork
    for here, there in pipes:
        there.close()
        here.send(store.port)
    outcomes: list[dict[str, Any]] = [{} for _ in ranks]
    deadline = time.monotonic() + limit_s
    open_pipes = {here: rank for rank, (here, _) in enumerate(pipes)}
    while open_pipes and (ready := wait(list(open_pipes), timeout=max(deadline - time.monotonic(), 0))):
        for here in ready:
            assert isinstance(here, Connection)
            rank = open_pipes.pop(here)
            try:
                outcomes[rank] = here.recv()
            except EOFError:
                outcomes[rank] = {}  # it died
    for process, outcome in zip(ranks, outcomes, strict=True):
        process.join(max(deadline - time.monotonic(), 0.1))
        outcome["exit"] = process.exitcode
        if process.is_alive():
            process.kill()
            process.join()
    return outcomes


def _rank(main: Callable[[], Any], rank: int, size: int, launcher: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(launcher.recv()),
        TORCHELASTIC_USE_AGENT_STORE="True",
        GLOO_SOCKET_IFNAME="lo",
    )
    try:
        launcher.send({"result": main()})
    except BaseException:
        launcher.send({"error": traceback.format_exc()})
        raise
    finally:
        launcher.close()


def held_by(rank: int) -> dist.Store:
    """A store that one of the ranks holds, as without a launcher; for `init_process_group`."""
    launchers = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=30), wait_for_workers=False
    )
    if int(os.environ["RANK"]) == rank:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        launchers.set("held", str(store.port))
        return store
    return dist.TCPStore("127.0.0.1", int(launchers.get("held")), is_master=False, wait_for_workers=False)
