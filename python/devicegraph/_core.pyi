"""The Rust core: configuration rules, buckets, planning and memory layout. Torch-free."""

from typing import Final

__version__: Final[str]
