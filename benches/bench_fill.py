"""`devicegraph bench fill` with a peer: the registry of SGLang, where its package or its files are at hand.

    python benches/bench_fill.py [--sglang FOLDER] [options of `devicegraph bench fill`]

FOLDER is one that holds the package `sglang`: a checkout's `python` folder, or an unpacked wheel (`pip download
sglang==0.5.23 --no-deps`). Only its registry's own files are loaded; of what they import from the rest of the engine
there are stand-ins, none of which is called while it fills.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from devicegraph.bench import command, fill

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

#: What the registry's files ask of the engine: whether the platform is an NPU, a switch that is off by default, and the
#: ranks, which only its own factories read.
STAND_INS: dict[str, dict[str, Any]] = {
    "sglang.srt.utils": {"is_npu": lambda: False},
    "sglang.srt.environ": {
        "envs": SimpleNamespace(SGLANG_OPT_CUDA_GRAPH_FILL_FAST_PATH=SimpleNamespace(get=lambda: False))
    },
    "sglang.srt.runtime_context": {"get_parallel": None},
}


def load(folder: Path) -> Any:
    """The module of SGLang's registry.

    Raises:
        SystemExit: the folder does not hold it.
    """
    root = folder / "sglang"
    if not (root / "srt/model_executor/cuda_graph_buffer_registry.py").is_file():
        raise SystemExit(f"{folder}: no `sglang` with a `cuda_graph_buffer_registry.py` in it")
    for package in ("", "srt", "srt.model_executor", "kernels", "kernels.ops", "kernels.ops.memory"):
        module = ModuleType(".".join(filter(None, ("sglang", package))))
        module.__path__ = [str(root / package.replace(".", "/"))]
        sys.modules[module.__name__] = module
    for name, values in STAND_INS.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(values)
    return importlib.import_module("sglang.srt.model_executor.cuda_graph_buffer_registry")


def peer(module: Any) -> fill.Peer:
    """The way of SGLang's registry."""

    def way(
        fields: Sequence[fill.Field], batch: dict[str, torch.Tensor], case: fill.Case, device: torch.device
    ) -> Callable[[], None]:
        import torch

        registry = module.CudaGraphBufferRegistry(device=device, max_bs=512, max_num_tokens=max(512, case.num_tokens))
        for field in fields:
            slot = module.GraphSlot(
                field.name,
                field.shape,
                torch.int64,
                axis=field.axis,
                device=torch.device("cpu") if field.is_host else None,
                padding_policy=module.PaddingPolicy[field.policy.name],
                pad_value=field.pad_value,
                slice_fn=(lambda buffer, size: buffer[:, :size]) if field.is_planes else None,
            )
            registry.register_slot(slot)
        forward_batch, sizes = SimpleNamespace(**batch), case.sizes()
        registry.fill_from(forward_batch, **sizes)
        for field in fields:
            filled, source = registry.get_slot(field.name).buffer, batch[field.name]
            if not torch.equal(filled[..., : source.shape[-1]], source):
                raise SystemExit(f"nothing is timed, since the peer's `{field.name}` is wrong")
        return lambda: registry.fill_from(forward_batch, **sizes)

    return way


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang", metavar="FOLDER", type=Path, help="what holds the package `sglang`")
    parser.set_defaults(benchmark="fill")
    command.add_options(parser)
    options = parser.parse_args()
    peers = {} if options.sglang is None else {"SGLang's fill_from": peer(load(options.sglang))}
    command.show(command.measure(options, peers=peers), options)


if __name__ == "__main__":
    main()
