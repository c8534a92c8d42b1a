"""The engine side: a Llama-family model over a static key-value cache, as a `ModelRunner`.

The cache has a row for each request that can run at once, and row 0 for padding: padded requests read and write there
and nowhere else. All of it is preallocated, so that a captured graph finds it at the same addresses in every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812

from devicegraph.demo.checkpoint import import_transformers
from devicegraph.engine import Limits
from devicegraph.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable

    from devicegraph.runners.shape_key import ShapeKey

#: Under this name transformers finds the attention of this engine.
ATTENTION = "devicegraph_demo"


def register_attention() -> None:
    """Teaches transformers the attention of this engine."""
    transformers = import_transformers()
    transformers.AttentionInterface.register(ATTENTION, _attention)
    transformers.AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    update: Callable[..., tuple[torch.Tensor, torch.Tensor]] = kwargs["update"]
    keys, values = update(module.layer_idx, key, value)
    scale = kwargs["scaling"]
    output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
    return output.transpose(1, 2), None


@dataclass
class DecodeBatch:
    """One decode step of `batch_size` requests, a token each; all tensors `[batch_size]` int64 on the device.

    Attributes:
        input_ids: the tokens chosen last.
        positions: their positions in their requests.
        seq_lens: tokens of each request, this one included.
        req_pool_indices: the requests' rows of the cache.
        out_cache_loc: where keys and values of these tokens go: `row * max_length + position`.
        batch_size: requests.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    out_cache_loc: torch.Tensor
    batch_size: int


class LlamaEngine:
    """Runs a transformers model of the Llama family.

    Args:
        model: the model, loaded with the attention `ATTENTION`.
        device: where it lies.
        max_requests: how many requests run at once.
        max_length: tokens a request may have, prompt included.

    Raises:
        BackendError: `checkpoint-unusable` for a model that is built in another way.
    """

    def __init__(self, model: Any, device: torch.device, *, max_requests: int, max_length: int) -> None:
        config = model.config
        self.device = device
        self.limits = Limits(max_bs=max_requests, max_num_tokens=max_requests)
        self.max_length = max_length
        self._model = model
        query_heads = getattr(config, "num_attention_heads", None)
        if not query_heads:
            raise self._unusable("it has no attention heads")
        heads = getattr(config, "num_key_value_heads", None) or query_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // query_heads
        rows, layers = max_requests + 1, config.num_hidden_layers
        # ADDRESS: captured graphs hold the cache and the steps; the engine outlives its runner.
        self._keys = torch.zeros(layers, rows, max_length, heads, width, device=device, dtype=model.dtype)
        self._values = torch.zeros_like(self._keys)
        self._steps = torch.arange(max_length, device=device)
        self._check()

    def make_batch(self, views: dict[str, torch.Tensor], key: ShapeKey) -> DecodeBatch:
        """The static batch: the fields that this engine's batches have."""
        fields = {name: views[name] for name in DecodeBatch.__dataclass_fields__ if name != "batch_size"}
        return DecodeBatch(**fields, batch_size=key.size)

    def forward(self, batch: DecodeBatch) -> torch.Tensor:
        """Logits `[batch_size, vocabulary]` of the next token of each request."""
        visible = self._steps < batch.seq_lens[:, None]
        update = partial(self._update_decode, batch)
        return self._run(batch.input_ids[:, None], batch.positions[:, None], visible[:, None, None], update)[:, -1]

    def prefill(self, token_ids: torch.Tensor, row: int) -> torch.Tensor:
        """Writes a prompt `[tokens]` into a row of the cache; logits `[vocabulary]` of its next token."""
        positions = self._steps[: len(token_ids)]
        visible = positions <= positions[:, None]
        return self._run(token_ids[None], positions[None], visible[None, None], partial(self._update_prefill, row))[
            0, -1
        ]

    def _run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        visible: torch.Tensor,
        update: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        # A mask of four dimensions is taken as it is; from anything else transformers makes one, reading values on the
        # host.
        output = self._model(
            input_ids=input_ids, position_ids=positions, attention_mask=visible, use_cache=False, update=update
        )
        logits: torch.Tensor = output.logits
        return logits

    def _update_decode(
        self, batch: DecodeBatch, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the new token of each request, and returns all that its row holds."""
        for cache, new in ((self._keys[layer], key), (self._values[layer], value)):
            cache.flatten(0, 1).index_copy_(0, batch.out_cache_loc, new[:, :, 0])
        keys, values = (cache[layer][batch.req_pool_indices].transpose(1, 2) for cache in (self._keys, self._values))
        return keys, values

    def _update_prefill(
        self, row: int, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the tokens of a prompt, which see nothing but each other."""
        self._keys[layer, row, : key.shape[2]] = key[0].transpose(0, 1)
        self._values[layer, row, : key.shape[2]] = value[0].transpose(0, 1)
        return key, value

    def _check(self) -> None:
        """Runs one token through every layer, into the reserved row."""
        reached = set()

        def update(layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            reached.add(layer)
            return self._update_prefill(0, layer, key, value)

        first = self._steps[:1]
        problem = None
        try:
            with torch.no_grad():
                self._run(first[None], first[None], first[None, None, None] == 0, update)
        except Exception as error:
            problem = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
        if problem is None and len(reached) < len(self._keys):
            problem = "not every layer asks for the attention it was given"
        if problem is not None:
            raise self._unusable(problem)

    def _unusable(self, problem: str) -> BackendError:
        return BackendError(
            f"the demo cannot serve a `{type(self._model).__name__}`: {problem}",
            code="checkpoint-unusable",
            hint="give `--model` a checkpoint of the Llama family",
        )
