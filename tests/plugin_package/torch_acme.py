"""What a vendor's package does when it is imported: it makes the device type and its module known to torch."""

from __future__ import annotations

import torch

import stand_in

torch.utils.rename_privateuse1_backend("acme")
torch._register_device_module("acme", stand_in.make_module(stand_in.ACMEGraph))
globals().update(_acme_endAllocateToPool=stand_in.end, _acme_releasePool=stand_in.release)
