"""Buckets: which sizes are captured, and which of them a live size is padded to. The arithmetic is in the core."""

from __future__ import annotations

from devicegraph._core import Buckets, DroppedBucket, decode_buckets, prefill_buckets

__all__ = ["Buckets", "DroppedBucket", "decode_buckets", "prefill_buckets"]
