"""The GPT-2 family and any other causal language model, built from a configuration: no weights are ever downloaded."""

from __future__ import annotations

import codecs
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import quiet
from .units import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

# layers, width, heads: the released configurations of Radford et al. (2019); vocabulary 50257, 1024 positions
GPT2_SIZES = {
    "gpt2": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
}


def config(name: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of `name`: a GPT-2 size, a folder with a Hugging Face ``config.json``, or a hub name.

    `changes` overwrite its fields (``n_layer=2``). Raises `UserError` when there is no such model, or it is not a
    causal language model.
    """
    quiet.transformers()
    if name in GPT2_SIZES:
        from transformers import GPT2Config

        layers, width, heads = GPT2_SIZES[name]
        return GPT2Config(**{"n_layer": layers, "n_embd": width, "n_head": heads, **changes})
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    folder = Path(name)
    if folder.is_dir():
        file = folder / "config.json"
        if not file.is_file():
            raise UserError(f"{name}: the folder has no config.json")
        try:
            fields = json.loads(file.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: not readable as JSON ({error})") from error
        except RecursionError:
            raise UserError(f"{file}: not a configuration: nested too deeply") from None
        if not isinstance(fields, dict):
            raise UserError(f"{file}: not a configuration: an object of fields is needed")
    elif name.count("/") != 1 or name.startswith((".", "/")):
        raise UserError(
            f"unknown model {name!r}: give {', '.join(GPT2_SIZES)}, a folder with config.json or a hub name"
        )
    try:
        with _without_mark(folder) as place:
            found = AutoConfig.from_pretrained(place or name, **changes)
        found.name_or_path = name
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and its own kinds here
        raise UserError(f"{name}: no usable configuration ({_reason(error)})") from error
    if type(found) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{name}: {type(found).__name__} is not the configuration of a causal language model")
    return found


@contextmanager
def _without_mark(folder: Path) -> Iterator[Path | None]:
    """A folder with the same config.json less its byte order mark, which transformers cannot read; None: none there."""
    file = folder / "config.json"
    if not file.is_file() or not file.read_bytes().startswith(codecs.BOM_UTF8):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="labkit-config-") as copy:
        Path(copy, "config.json").write_bytes(file.read_bytes().removeprefix(codecs.BOM_UTF8))
        yield Path(copy)


def _reason(error: Exception) -> str:
    """The first line of an error, with its kind where the message alone says nothing."""
    line = next(iter(str(error).strip().splitlines()), "")[:160]
    return line if isinstance(error, (ValueError, OSError)) and line else f"{type(error).__name__}: {line}".rstrip(": ")


def adapt(
    configuration: Any, *, layers: int | None = None, activation: str | None = None, dropout: float | None = None
) -> Any:
    """Change a configuration in place, whatever its family calls the fields; returns it. None leaves a field alone.

    `layers` cuts or sets the number of blocks; `activation` takes the place of ``gelu_new``, where that is used;
    `dropout` is every dropout's probability.
    """
    if layers is not None:
        configuration.num_hidden_layers = layers
        if getattr(configuration, "layer_types", None):
            configuration.layer_types = configuration.layer_types[:layers]
    if activation is not None:
        for name in ("activation_function", "hidden_act"):
            if getattr(configuration, name, None) == "gelu_new":
                setattr(configuration, name, activation)
    if dropout is not None:
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "hidden_dropout"):
            if hasattr(configuration, name):
                setattr(configuration, name, dropout)
    return configuration


def positions(configuration: PreTrainedConfig) -> int | None:
    """How many tokens the model's position table holds; None where there is no such limit in the configuration."""
    return getattr(configuration, "max_position_embeddings", None)


def causal_lm(
    configuration: PreTrainedConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    attention: str = "sdpa",
) -> PreTrainedModel:
    """A causal language model with random weights, created on `device` in `dtype` (float32 unless given).

    `attention` is ``"sdpa"`` or ``"eager"``. For GPT-2 this is ``GPT2LMHeadModel(config)``. Raises `UserError` when the
    model has no such attention, or its configuration makes no model.
    """
    import torch

    quiet.transformers()
    from transformers import AutoModelForCausalLM

    kwargs: dict[str, Any] = {"dtype": dtype or torch.float32, "attn_implementation": attention}
    name = configuration.name_or_path or configuration.model_type
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(configuration, **kwargs)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a bad field shows as any kind: ZeroDivisionError, KeyError, RuntimeError ...
        if attention == "sdpa" and "scaled_dot_product_attention" in str(error):
            raise UserError(f"{name} has no sdpa attention in transformers: use --attention eager") from error
        raise UserError(f"{name}: its configuration makes no model ({_reason(error)})") from error
    if model.loss_type is None:  # transformers cannot tell it from the name GPT2LMHeadModel, and warns on every use
        model.loss_type = "ForCausalLM"
    return model


def gpt2(name: str = "gpt2", *, attention: str = "eager", **changes: Any) -> PreTrainedModel:
    """``GPT2LMHeadModel`` with random weights on the current default device, its cache switched off.

    `name` is one of `GPT2_SIZES`; `changes` overwrite fields of the configuration (``n_layer=2``,
    ``activation_function="gelu_pytorch_tanh"``).
    """
    import torch

    if name not in GPT2_SIZES:
        raise UserError(f"unknown GPT-2 size {name!r}: {', '.join(GPT2_SIZES)}")
    configuration = config(name, use_cache=False, **changes)
    return causal_lm(configuration, device=torch.get_default_device(), attention=attention)


def blocks(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The list of transformer blocks of a model: its longest ``ModuleList`` that lies in no other.

    Raises `UserError` when there is none.
    """
    import torch

    lists: dict[str, torch.nn.ModuleList] = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) and not any(path.startswith(f"{p}.") for p in lists):
            lists[path] = module
    if not lists:
        raise UserError(f"{type(model).__name__} has no list of blocks to checkpoint")
    return max(lists.values(), key=len)


def has(name: str) -> bool:
    """Whether the pretrained model `name` (``"smollm2-135m"``) is in data/, so that `pretrained` works offline."""
    from . import fetch

    return fetch.is_here(name)


def pretrained(
    name: str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    attention: str = "sdpa",
    **options: Any,
) -> PreTrainedModel:
    """The fetched model `name` with its real weights, in `dtype` (float32 unless given), in evaluation mode.

    `options` go to ``from_pretrained`` (``quantization_config``, ``device_map``: `device` is then left to them). Raises
    `UserError` saying how to fetch it when it is not in data/.
    """
    import torch

    from . import fetch

    folder = fetch.path(name)
    quiet.transformers()
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if "device_map" not in options and "quantization_config" not in options:
        options["device_map"] = torch.device(device)
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype or torch.float32, attn_implementation=attention, **options
        )
    finally:
        if bars:
            logging.enable_progress_bar()
    return model.eval()


def tokenizer(name: str) -> Any:
    """The tokenizer of the fetched model `name`. Raises `UserError` saying how to fetch it when it is not in data/."""
    from . import fetch

    folder = fetch.path(name)
    quiet.transformers()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
