"""The model: one of transformers' Llama family, with its attention over the paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from devicegraph.demo.blocks import Cache
from devicegraph.demo.checkpoint import import_transformers
from devicegraph.demo.graphs import attend_in_step
from devicegraph.errors import BackendError

if TYPE_CHECKING:
    import torch

    from devicegraph.demo.batches import DecodeBatch, PrefillBatch

#: Under this name transformers finds the attention of this engine.
ATTENTION = "devicegraph_demo"


def register_attention() -> None:
    """Teaches transformers the attention of this engine."""
    import_transformers().AttentionInterface.register(ATTENTION, _attention)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    cache: Cache,
    out_cache_loc: torch.Tensor,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer, with `[1, heads, tokens, width]` of the step's tokens."""
    cache.write(module.layer_idx, out_cache_loc, key[0], value[0])
    return attend_in_step(query[0].transpose(0, 1), module.layer_idx, scaling)[None], None


def fuse_norms(transformer: Any) -> None:
    """Makes each norm one kernel, of the six small ones that it is in transformers: half of all that a layer launches.

    Gemma's norms, which are named alike and weigh in another way, call their epsilon otherwise and stay.
    """
    for name, module in list(transformer.named_modules()):
        epsilon = getattr(module, "variance_epsilon", None)
        if epsilon is not None and type(module).__name__.endswith("RMSNorm"):
            norm = nn.RMSNorm(module.weight.shape, eps=epsilon, device="meta")
            norm.weight = module.weight
            holder, _, own = name.rpartition(".")
            setattr(transformer.get_submodule(holder), own, norm)


class Model:
    """A transformers model of the Llama family, as the engine calls it.

    Args:
        transformer: loaded with the attention `ATTENTION`, on its device. Its norms are replaced, see `fuse_norms`.

    Attributes:
        device: where it lies.
        max_length: tokens that a request may have by the model's positions; None where it does not say.
        vocabulary: tokens that it has embeddings of.

    Raises:
        BackendError: `checkpoint-unusable` for a model without attention heads.
    """

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer
        self.vocabulary: int = transformer.get_input_embeddings().num_embeddings
        self.device: torch.device = transformer.device
        config = transformer.config
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        query_heads = getattr(config, "num_attention_heads", None)
        if not query_heads:
            raise self.unusable("it has no attention heads")
        self._heads = getattr(config, "num_key_value_heads", None) or query_heads
        self._width = getattr(config, "head_dim", None) or config.hidden_size // query_heads
        fuse_norms(transformer)

    def make_cache(self, blocks: int, block_size: int) -> Cache:
        """A paged cache for its keys and values."""
        return Cache(
            layers=self.transformer.config.num_hidden_layers,
            blocks=blocks,
            block_size=block_size,
            heads=self._heads,
            width=self._width,
            dtype=self.transformer.dtype,
            device=self.device,
        )

    def hidden(self, batch: PrefillBatch) -> torch.Tensor:
        """What the last layer makes of the step's tokens: `[tokens, hidden_size]`."""
        hidden: torch.Tensor = _run(self.transformer.base_model, batch).last_hidden_state[0]
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[tokens, vocabulary]` of what the last layer made of tokens."""
        logits: torch.Tensor = self.transformer.get_output_embeddings()(hidden)
        return logits

    def logits(self, batch: DecodeBatch) -> torch.Tensor:
        """Logits `[tokens, vocabulary]` of what follows each of the step's tokens."""
        logits: torch.Tensor = _run(self.transformer, batch).logits[0]
        return logits

    def unusable(self, problem: str) -> BackendError:
        """The error of a model that this engine cannot serve."""
        return BackendError(
            f"the demo cannot serve a `{type(self.transformer).__name__}`: {problem}",
            code="checkpoint-unusable",
            hint="give `--model` a checkpoint of the Llama family",
        )


def _run(transformer: Any, batch: DecodeBatch | PrefillBatch) -> Any:
    return transformer(
        input_ids=batch.input_ids[None],
        position_ids=batch.positions[None],
        use_cache=False,
        cache=batch.cache,
        out_cache_loc=batch.out_cache_loc,
    )
