"""The case that this course started from, replayed: which package of the standard library does a passage come from?

A passage is one function or class of a module, so lengths are as uneven as those of real text. Files, not passages, are
split into training and test.
"""

from __future__ import annotations

import ast
import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import data
from .checkpointing import segments
from .units import UserError

if TYPE_CHECKING:
    import torch

PADDINGS = ("longest", "batch", "buckets")
_LEFT_OUT = {"encodings", "pydoc_data"}  # tables
_BEGIN = re.compile(r"^\s*(?:async def|def|class) ", re.MULTILINE)
_TEST = 4  # every so many files are for testing, by a hash of the name


@dataclass(frozen=True)
class Passage:
    """The source of one function or class, the number of its package and the file it comes from."""

    text: str
    label: int
    file: str


def passages(*, classes: int = 8, each: int = 200, seed: int = 0) -> tuple[list[str], list[Passage], list[Passage]]:
    """The names of the `classes` packages with the most functions and classes, and of each about `each` passages for
    training and a third as many for testing, from other files.

    Files are read in an order drawn with `seed`, until they hold twice what is taken. Raises `UserError` where the
    library has too few packages.
    """
    files: dict[str, list[tuple[str, str]]] = {}
    for split in data.SPLITS:
        for file, text in data.stdlib(split).files:
            package, _, rest = file.partition("/")
            if rest and package not in _LEFT_OUT:
                files.setdefault(package, []).append((file, text))
    size = {name: sum(len(_BEGIN.findall(text)) for _, text in some) for name, some in files.items()}
    names = sorted(sorted(size, key=lambda name: -size[name])[:classes])
    if len(names) < classes:
        raise UserError(f"this Python's library has {len(names)} packages, not {classes}")
    draw = random.Random(seed)
    train: list[Passage] = []
    test: list[Passage] = []
    for label, name in enumerate(names):
        draw.shuffle(files[name])
        for taken, wanted, testing in ((train, each, False), (test, each // 3, True)):
            parts: list[Passage] = []
            for file, text in files[name]:
                if len(parts) < 2 * wanted and (zlib.crc32(file.encode()) % _TEST == 0) == testing:
                    parts += [Passage(part, label, file) for part in _parts(text)]
            taken += draw.sample(parts, min(wanted, len(parts)))
    draw.shuffle(train)
    return names, train, test


def _parts(text: str) -> Iterator[str]:
    """Functions, methods and short classes of a module, as they stand there."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and node.end_lineno and node.end_lineno - node.lineno >= 4:
            if isinstance(node, ast.ClassDef) and node.end_lineno - node.lineno > 60:
                continue  # its methods come by themselves
            yield "\n".join(lines[node.lineno - 1 : node.end_lineno])


def encode(tokenizer: Any, some: Sequence[Passage], *, most: int) -> list[tuple[list[int], int]]:
    """Token ids, at most `most` of each passage, with the label."""
    ids = tokenizer([p.text for p in some], add_special_tokens=False, truncation=True, max_length=most)["input_ids"]
    return [(row, p.label) for row, p in zip(ids, some, strict=True)]


def batches(
    rows: Sequence[tuple[list[int], int]], batch: int, *, padding: str, longest: int, seed: int = 0, multiple: int = 16
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Shuffled batches: tokens ``(batch, seq)``, mask of the same shape (1: a token, 0: padding), labels ``(batch,)``.

    `padding`: ``"longest"`` pads every row to `longest`, ``"batch"`` to the longest row of its batch (rounded up to
    `multiple`), ``"buckets"`` does so with rows of similar length together. Raises `UserError` for another.
    """
    import torch

    if padding not in PADDINGS:
        raise UserError(f"padding {padding!r} is not one of {', '.join(PADDINGS)}")
    draw = random.Random(seed)
    order = list(range(len(rows)))
    draw.shuffle(order)
    if padding == "buckets":  # sorted within pools of fifty batches, so that neighbours differ from epoch to epoch
        pool = 50 * batch
        order = [
            i for at in range(0, len(order), pool) for i in sorted(order[at : at + pool], key=lambda i: len(rows[i][0]))
        ]
    chosen = [order[at : at + batch] for at in range(0, len(order), batch)]
    draw.shuffle(chosen)
    found = []
    for places in chosen:
        width = (
            longest
            if padding == "longest"
            else min(longest, -(-max(len(rows[i][0]) for i in places) // multiple) * multiple)
        )
        tokens = torch.zeros(len(places), width, dtype=torch.int64)
        mask = torch.zeros(len(places), width, dtype=torch.int64)
        for row, i in enumerate(places):
            ids = rows[i][0][:width]
            tokens[row, : len(ids)] = torch.tensor(ids)
            mask[row, : len(ids)] = 1
        found.append((tokens, mask, torch.tensor([rows[i][1] for i in places])))
    return found


def classifier(body: Any, classes: int) -> Any:
    """`body` (a causal language model without its head) with a linear layer on the last token of each row: called with
    tokens and mask ``(batch, seq)``, it returns scores ``(batch, classes)`` in float32."""
    import torch

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body.base_model
            self.head = torch.nn.Linear(body.config.hidden_size, classes, device=body.device, dtype=body.dtype)

        def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            hidden = self.body(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
            rows = torch.arange(len(tokens), device=tokens.device)
            scores: torch.Tensor = self.head(hidden[rows, mask.sum(1) - 1])
            return scores.float()

    return Classifier()


def smollm2(attention: str = "eager", layers: int = 30) -> Any:
    """SmolLM2-135M with random weights on the current default device: its published configuration."""
    import torch
    from transformers import LlamaConfig

    from . import models, quiet

    quiet.transformers()
    configuration = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, use_cache=False,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return models.causal_lm(configuration, device=torch.get_default_device(), attention=attention)


def classifying(
    device: Any,
    *,
    batch: int = 4,
    seq: int = 448,
    attention: str = "eager",
    precision: str = "fp32",
    checkpoint: int = 0,
) -> Callable[[], torch.Tensor]:
    """An experiment: one training step of the classifier with AdamW on rows that are all `seq` long, the worst batch
    of an epoch. `precision` is ``"fp32"``, ``"amp-fp16"`` or ``"amp-bf16"``."""
    import torch

    with torch.device(device):
        model = classifier(smollm2(attention), 8).train()
        tokens = torch.randint(0, 49152, (batch, seq))
        mask, labels = torch.ones_like(tokens), torch.randint(0, 8, (batch,))
    if checkpoint:
        segments(model.body, checkpoint)
    return step_on(model, precision)(tokens, mask, labels)


def step_on(model: Any, precision: str = "fp32", lr: float = 3e-5) -> Any:
    """``step_on(model)(tokens, mask, labels)`` is a step function for one batch; called again, for another one."""
    import torch

    cast = {"fp32": None, "amp-fp16": torch.float16, "amp-bf16": torch.bfloat16}[precision]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    device = next(model.parameters()).device
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "amp-fp16")

    def on(tokens: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Any:
        def step() -> torch.Tensor:
            with torch.autocast(device.type, dtype=cast, enabled=cast is not None):
                loss = torch.nn.functional.cross_entropy(model(tokens, mask), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        step.tokens = tokens.numel()  # type: ignore[attr-defined]
        return step

    on.optimizer = optimizer  # type: ignore[attr-defined]
    return on


def predict(model: Any, some: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Labels and the classifier's guesses for batches as `batches` makes them."""
    import torch

    device, labels, guesses = next(model.parameters()).device, [], []
    model.eval()
    with torch.no_grad():
        for tokens, mask, truth in some:
            guesses += model(tokens.to(device), mask.to(device)).argmax(1).tolist()
            labels += truth.tolist()
    model.train()
    return labels, guesses


def macro_f1(labels: Sequence[int], guesses: Sequence[int]) -> float:
    """The mean over classes of 2 hits / (2 hits + false alarms + misses); a class that never comes up counts 0."""
    classes = sorted({*labels, *guesses})
    pairs = list(zip(labels, guesses, strict=True))
    scores = []
    for c in classes:
        hits = sum(a == b == c for a, b in pairs)
        wrong = sum((a == c) != (b == c) for a, b in pairs)
        scores.append(2 * hits / (2 * hits + wrong))
    return sum(scores) / len(scores)
