"""Writing text with a causal language model: the meter, the memory of its cache, and a decoding step as an ONNX graph.

A loop that yields the next token of every sequence is timed from outside, so that it stays plain PyTorch::

    written = generating.timed(greedy(model, prompt, 32), device)
    written.first_seconds, written.tokens_per_second
"""

from __future__ import annotations

import inspect
import logging
import time
import warnings
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .units import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch


@dataclass(frozen=True)
class Written:
    """What a loop wrote: ``tokens`` ``(batch, new)``; seconds until the first token was there, and for all later ones.

    The clock stops only when the card has finished: after the first token and after the last.
    """

    tokens: torch.Tensor
    first_seconds: float
    later_seconds: float

    @property
    def new(self) -> int:
        """Tokens written for each sequence."""
        return int(self.tokens.shape[1])

    @property
    def token_seconds(self) -> float | None:
        """Seconds between two tokens of one sequence after the first; None where there is only one."""
        return self.later_seconds / (self.new - 1) if self.new > 1 else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all sequences together in a second, without the first step."""
        return self.tokens.shape[0] / self.token_seconds if self.token_seconds else None


def timed(tokens: Iterable[torch.Tensor], device: torch.device | str) -> Written:
    """Run a loop to its end; it yields one tensor ``(batch, 1)`` a step. Raises `UserError` when it yields nothing."""
    import torch

    def wait() -> None:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    start = first = time.perf_counter()
    found: list[torch.Tensor] = []
    for token in tokens:
        found.append(token)
        if len(found) == 1:
            wait()
            first = time.perf_counter()
    wait()
    end = time.perf_counter()
    if not found:
        raise UserError("the loop yields no token: is there a `yield` in it, and at least one step?")
    return Written(torch.cat(found, 1), first - start, end - first)


def token_bytes(configuration: Any, dtype: torch.dtype) -> int:
    """Bytes that one token of one sequence takes in the key-value cache: a key and a value in every layer.

    ``2 x layers x key-value heads x head width x bytes of a value``; with grouped-query attention there are fewer
    key-value heads than heads.
    """
    heads = configuration.num_attention_heads
    width = getattr(configuration, "head_dim", None) or configuration.hidden_size // heads
    kept = getattr(configuration, "num_key_value_heads", None) or heads
    return int(2 * configuration.num_hidden_layers * kept * width * dtype.itemsize)


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values that a transformers cache holds now (a static one: from its first use on)."""
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(t.nbytes for t in tensors if t is not None)


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """The arguments that hand `cache` to ``model(...)``: ``cache`` in transformers 5.24, ``past_key_values`` in 5.17.

    None means no cache.
    """
    if cache is None:
        return {"use_cache": False}
    known = inspect.signature(type(model).forward).parameters
    return {"cache" if "cache" in known else "past_key_values": cache, "use_cache": True}


def export_step(model: Any, file: Path | str) -> list[str]:
    """Write one decoding step of `model` as an ONNX graph; returns the names of the cache's tensors, in order.

    Inputs: ``input_ids`` ``(batch, seq)`` and, for each layer, ``key_i.past`` and ``value_i.past`` ``(batch, heads,
    past, head width)``; past may be 0. Outputs: ``logits`` ``(batch, seq, vocab)`` and ``key_i``, ``value_i`` with
    ``past + seq`` tokens, to be fed again. Batch, seq and past are free. Raises `UserError` when onnx or onnxscript is
    missing.
    """
    import torch

    needs_onnx()
    from transformers import DynamicCache

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, *past: torch.Tensor) -> tuple[torch.Tensor, ...]:
            cache: Any = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
            logits = self.model(input_ids=input_ids, **with_cache(self.model, cache)).logits
            return logits, *(x for layer in cache.layers for x in (layer.keys, layer.values))

    configuration = model.config
    layers, heads = configuration.num_hidden_layers, configuration.num_attention_heads
    width = getattr(configuration, "head_dim", None) or configuration.hidden_size // heads
    kept = getattr(configuration, "num_key_value_heads", None) or heads
    names = [f"{kind}_{layer}" for layer in range(layers) for kind in ("key", "value")]
    parameter = next(model.parameters())
    past = [torch.zeros(2, kept, 5, width, dtype=parameter.dtype, device=parameter.device) for _ in names]
    tokens = torch.zeros(2, 3, dtype=torch.int64, device=parameter.device)
    batch, seq, before = (torch.export.Dim(name) for name in ("batch", "seq", "past"))
    with _quietly():
        torch.onnx.export(
            Step().eval(),
            (tokens, *past),
            str(file),
            dynamo=True,
            input_names=["input_ids", *(f"{name}.past" for name in names)],
            output_names=["logits", *names],
            dynamic_shapes=({0: batch, 1: seq}, tuple({0: batch, 2: before} for _ in past)),
            verbose=False,
        )
    return names


def needs_onnx() -> None:
    """Raise `UserError` when onnx or onnxscript is missing."""
    for name in ("onnx", "onnxscript"):
        try:
            __import__(name)
        except ImportError as error:
            raise UserError(f"exporting needs {name}: pip install onnx onnxscript onnxruntime") from error


@contextmanager
def _quietly() -> Iterator[None]:
    """The exporter reports its progress, and what else is not installed, as warnings."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
