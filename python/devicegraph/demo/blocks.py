"""The paged key-value cache: tensors cut into blocks of a few tokens, and who holds which block."""

from __future__ import annotations

from typing import Final

import torch

#: What padded tokens write to and padded requests read: no request ever holds it.
RESERVED_BLOCK: Final = 0


class Cache:
    """Keys and values: for each layer a tensor `[blocks, block_size, heads, width]`.

    Tensors of their own for each layer make the layers alike for torch.compile, which compiles them once then.

    Args:
        layers: how many.
        blocks: of each layer, the reserved one included.
        block_size: tokens of a block.
        heads: of keys and values.
        width: columns of a head.
        dtype: of the model.
        device: of the model.
    """

    def __init__(
        self,
        *,
        layers: int,
        blocks: int,
        block_size: int,
        heads: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.blocks = blocks
        self.block_size = block_size
        shape = (blocks, block_size, heads, width)
        # ADDRESS: captured graphs hold all of them; the engine outlives its runners.
        self.keys, self.values = (
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)] for _ in range(2)
        )

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.keys[0].device

    def locations(self, tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where positions are: `block * block_size + offset`; behind a request's blocks that is the reserved one.

        Args:
            tables: `[requests, blocks]` int32, 0 behind the blocks that a request holds.
            positions: `[requests, tokens]` int64.
        """
        return tables.gather(1, positions // self.block_size) * self.block_size + positions % self.block_size

    def write(self, layer: int, where: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes `[heads, tokens, width]` to `where`, `block * block_size + offset` of each token, int64."""
        for held, new in ((self.keys[layer], key), (self.values[layer], value)):
            held.flatten(0, 1).index_copy_(0, where, new.transpose(0, 1))


class BlockManager:
    """The free blocks of a cache; the lowest are given first.

    Args:
        blocks: of the cache, the reserved one included.
    """

    def __init__(self, blocks: int) -> None:
        self.total = blocks - 1
        self._free = list(range(blocks - 1, RESERVED_BLOCK, -1))

    @property
    def free(self) -> int:
        """How many are free."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """That many blocks, which have to be free."""
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        """Frees blocks and empties their list."""
        self._free += reversed(blocks)
        blocks.clear()
