"""What a third party's package has: a device, and a backend for it. Its entry points name both."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

import devicegraph as dg


class AcmeDevice(dg.AcceleratorDevice):
    """An accelerator that `torch_acme` brings to torch. Nobody has one: its memory is the host's."""

    type = "acme"
    package = "torch_acme"
    bindings = "torch_acme"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.device = torch.device("cpu")


class CountingBackend(dg.FullCudaGraphBackend):
    """The full backend, counting what is replayed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.replays: Counter[Any] = Counter()

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        output = super().replay(shape_key, static_forward_batch, **kwargs)
        self.replays[shape_key] += 1
        return output
