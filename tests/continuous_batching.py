"""A small model under transformers' continuous batching, and a session of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Of several lengths; the two of one beginning share blocks of the cache, and the longest is read in two chunks.
PROMPTS = [[1, 2, 3], [9] * 40, [5], [9] * 17, [4, 5, 6, 7, 8]]
WORDS = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def model_of(kind: str = "Qwen3", attention: str = "paged|sdpa", device: str = "cpu", **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**WORDS, "head_dim": 8, **options})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(device).eval()
    model.set_attn_implementation(attention)
    return model


def batching(**options: Any) -> Any:
    sizes = {"block_size": 8, "num_blocks": 48, "max_batch_tokens": 32, "max_requests_per_batch": 8}
    return transformers.ContinuousBatchingConfig(**{**sizes, **options})


def greedy(**options: Any) -> Any:
    return transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, **options)


def manager_of(model: Any, generation: Any = None, **options: Any) -> Any:
    return model.init_continuous_batching(greedy() if generation is None else generation, batching(**options))


def serve(manager: Any, prompts: Sequence[Sequence[int]] = PROMPTS, *, keep: bool = False) -> list[Any]:
    """What a session of the manager gives, in the order of the prompts; then of their forks, where there are any."""
    # As starting does: all prompts are to be there when the first step is made.
    manager.background_thread_status.clear()
    names = manager.add_requests([list(prompt) for prompt in prompts])
    manager.start()
    done: dict[str, Any] = {}
    while len(done) < len(names) * manager.num_return_sequences:
        output = manager.get_result(timeout=30)
        assert output is not None
        assert output.error is None
        done[output.request_id] = output
    manager.stop(keep_for_next_session=keep)
    return [done[name] for name in [*names, *sorted(done.keys() - set(names))]]


def tokens(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.generated_tokens) for output in outputs]


def own(model: Any, **options: Any) -> list[list[int]]:
    """What transformers gives by itself."""
    return tokens(serve(manager_of(model, **options)))
