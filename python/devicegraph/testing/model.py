"""The model that the clauses are checked on: small, whole numbers, the operators that any device has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from devicegraph.backends.breaks import current_batch, eager_on_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

WIDTH = 4
#: The operator at which a compiled forward is split.
ATTENTION = "devicegraph_testing::attend"


@torch.library.custom_op(ATTENTION, mutates_args=())
def _attend(hidden: torch.Tensor) -> torch.Tensor:
    batch = current_batch()
    batch.model.on_attention()
    return torch.mm(batch.mask, hidden)


@_attend.register_fake
def _(hidden: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(hidden)


@eager_on_graph
def attend(hidden: torch.Tensor) -> torch.Tensor:
    """A break for backends that have breaks, and a split operator for those that compile."""
    return torch.ops.devicegraph_testing.attend(hidden)  # type: ignore[no-any-return]


class Batch:
    """The static input and state of one size.

    Attributes:
        model: whose batch it is; attention finds it here.
        x: `[size, WIDTH]`, the input.
        mask: `[size, size]`, what attention sums over.
        bias: `[size, WIDTH]`, prepared in the graph.
        total: `[size, WIDTH]`, the sum over all runs of what each of them adds, as a cache would keep it.
    """

    def __init__(self, model: Model, size: int) -> None:
        self.model = model
        self.x, self.bias, self.total = (torch.zeros(size, WIDTH, device=model.device) for _ in range(3))
        self.mask = torch.ones(size, size, device=model.device).tril()

    def draw(self, seed: int) -> None:
        """Puts other values into the input."""
        self.x.copy_(_small_numbers(seed, *self.x.shape))


class Model:
    """Two attentions and what is between them, on small whole numbers: every order of summation gives the same bits.

    Attributes:
        count: `[1]`, counts the runs on the device.
        on_prepare, on_attention: called by the Python of these parts, whenever it runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.weight, self.head = (_small_numbers(seed, WIDTH, WIDTH).to(device) for seed in (1000, 2000))
        self.count = torch.zeros(1, device=device)
        self.on_prepare: Callable[[], None] = lambda: None
        self.on_attention: Callable[[], None] = lambda: None

    def prepare(self, batch: Batch, key: Hashable) -> None:
        """What the engine's `prepare_in_graph` is to a runner."""
        self.on_prepare()
        batch.bias.copy_(batch.x)
        batch.bias.mul_(2)

    def forward(self, batch: Batch) -> Any:
        """The forward that is captured."""
        self.count.add_(1)
        hidden = torch.relu(torch.mm(batch.x, self.weight)) + batch.bias
        batch.total.add_(hidden)
        # What crosses a break goes through it or around it; the first result has to outlast the second break.
        first = attend(hidden)
        second = attend(first + hidden)
        return self.finish(batch, torch.mm(second + first + hidden, self.head))

    def finish(self, batch: Batch, logits: torch.Tensor) -> Any:
        """The output."""
        return logits

    def added(self, batch: Batch) -> torch.Tensor:
        """What a run adds to `total`, computed on the host."""
        x = batch.x.cpu()
        return torch.relu(x @ self.weight.cpu()) + 2 * x


class Pair(NamedTuple):
    """A named tuple in an output."""

    first: torch.Tensor
    second: Any


@dataclass
class Nested:
    """A dataclass in an output."""

    logits: torch.Tensor
    rest: dict[str, Any]
    label: str = "none"


class NestedModel(Model):
    """Gives tensors of several shapes and types in containers, with parts that are no tensors, and an input."""

    def finish(self, batch: Batch, logits: torch.Tensor) -> Any:
        """See `Model.finish`."""
        pair = Pair(logits.sum(1), (logits.to(torch.int32), None))
        return Nested(logits, {"pair": pair, "list": [logits * 2, 3], "x": batch.x}, label="nested")


class SilentModel(Model):
    """Gives nothing: what it does, it does to `total`."""

    def finish(self, batch: Batch, logits: torch.Tensor) -> Any:
        """See `Model.finish`."""
        return


class WideModel(Model):
    """Needs far more memory inside a segment than crosses its ends."""

    #: Of one intermediate tensor with 8 rows.
    BYTES = 6 * 2**20
    COPIES = BYTES // (8 * WIDTH * 4)

    def finish(self, batch: Batch, logits: torch.Tensor) -> Any:
        """See `Model.finish`."""
        wide = logits.repeat(1, self.COPIES)
        wide = torch.relu(wide) + wide
        return wide.view(-1, self.COPIES, WIDTH).amax(1)


def _small_numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed), device="cpu").float()
