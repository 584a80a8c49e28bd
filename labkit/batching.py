"""Texts of different lengths in rectangular batches: in which order, padded how far, packed how, and what is wasted.

`LengthBatches` orders, `Padded` and `Packed` collate, `waste` counts. All of it works with a plain
``torch.utils.data.DataLoader`` (``batch_sampler=`` and ``collate_fn=``) and can be sent to its workers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .units import UserError

if TYPE_CHECKING:
    import torch

IGNORED = -100  # the label that cross-entropy leaves out (torch.nn.functional.cross_entropy, ignore_index)


def percentile(lengths: Sequence[int], percent: float) -> int:
    """The smallest length that at least `percent` % of `lengths` do not exceed. Raises `UserError` without lengths."""
    if not lengths or not 0 < percent <= 100:
        raise UserError(f"a percentile needs lengths and a percentage above 0 up to 100, not {percent!r}")
    ordered = sorted(lengths)
    return ordered[max(0, -int(-len(ordered) * percent // 100) - 1)]


class LengthBatches:
    """A batch sampler: indices of texts whose lengths are alike, `batch` at a time, in an order drawn anew each epoch.

    Texts are shuffled, taken in pools of ``pool * batch``, sorted by length within a pool, cut into batches, and the
    batches of all pools shuffled. ``pool=1`` is a plain shuffled order; ``pool=None`` sorts everything: the least
    padding, and always the same neighbours. With `tokens` instead of `batch` a batch has as many texts as fit into so
    many padded tokens, so that short texts come in large batches.

    The order follows from `seed` and the epoch alone: ``order(epoch)``. ``start_at(epoch, batches)`` continues there:
    count the batches that were *trained on*, since a loader with workers asks for more than that ahead. Each
    iteration of the sampler is one epoch.
    """

    def __init__(
        self, lengths: Sequence[int], *, batch: int | None = None, tokens: int | None = None, pool: int | None = 50,
        seed: int = 0, multiple: int = 1,
    ):  # fmt: skip
        if (batch is None) == (tokens is None):
            raise UserError("give either batch (texts) or tokens (padded tokens) for a batch, not both")
        for name, value in (("batch", batch), ("tokens", tokens), ("pool", pool), ("multiple", multiple)):
            _whole(name, value, missing=name != "multiple")
        if not lengths:
            raise UserError("there are no lengths to make batches of")
        longest = _up(max(lengths), multiple)
        if tokens is not None and longest > tokens:
            raise UserError(f"a text of {longest} tokens does not fit into a batch of {tokens}: cut it or allow more")
        self.lengths, self.batch, self.tokens, self.multiple = list(lengths), batch, tokens, multiple
        self.pool, self.seed = pool, seed
        self.epoch, self.skip = 0, 0

    def order(self, epoch: int) -> list[list[int]]:
        """The batches of this epoch, each a list of indices."""
        chance = random.Random(f"{self.seed} {epoch}")
        indices = list(range(len(self.lengths)))
        chance.shuffle(indices)
        typical = self.batch or max(1, self.tokens * len(indices) // max(1, sum(self.lengths)))  # type: ignore[operator]
        size = typical * self.pool if self.pool else len(indices)
        batches: list[list[int]] = []
        for start in range(0, len(indices), size):
            pool = indices[start : start + size]
            if self.pool != 1:
                pool.sort(key=lambda i: self.lengths[i])
            batches += self._cut(pool)
        chance.shuffle(batches)
        return batches

    def _cut(self, pool: list[int]) -> list[list[int]]:
        if self.batch is not None:
            return [pool[i : i + self.batch] for i in range(0, len(pool), self.batch)]
        assert self.tokens is not None
        found: list[list[int]] = [[]]
        longest = 0
        for index in pool:
            longest = max(longest, _up(self.lengths[index], self.multiple))
            if found[-1] and longest * (len(found[-1]) + 1) > self.tokens:
                found.append([])
                longest = _up(self.lengths[index], self.multiple)
            found[-1].append(index)
        return found

    def start_at(self, epoch: int, batches: int) -> None:
        """Let the next iteration be this epoch without its first `batches` batches."""
        self.epoch, self.skip = epoch, batches

    def __iter__(self) -> Iterator[list[int]]:
        batches = self.order(self.epoch)[self.skip :]
        self.epoch, self.skip = self.epoch + 1, 0
        return iter(batches)

    def __len__(self) -> int:
        return len(self.order(self.epoch)) - self.skip


@dataclass(frozen=True)
class Padded:
    """Collates texts (sequences of token ids) to one rectangle, padded on the right with `pad`.

    The width is the longest text's, rounded up to a `multiple`; with `to` it is always that. Texts longer than `cap`
    (or `to`) are cut. Gives ``input_ids`` and ``labels`` ``(batch, width)``, int64, with `IGNORED` as the label of
    padding. There is no attention mask: a causal model's tokens look to the left, where no padding is; a mask would
    only keep SDPA from its fastest kernel. Add one with ``mask=True`` for models that look to both sides.
    """

    pad: int = 0
    multiple: int = 1
    cap: int | None = None
    to: int | None = None
    mask: bool = False

    def width(self, lengths: Sequence[int]) -> int:
        """Columns of a batch of texts with these lengths."""
        return self.to or _up(max(self.kept(n) for n in lengths), self.multiple)

    def kept(self, length: int) -> int:
        """Tokens of a text of this length that are not cut off."""
        return min(length, self.cap or length, self.to or length)

    def __call__(self, texts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        import torch

        width = self.width([len(text) for text in texts])
        ids = torch.full((len(texts), width), self.pad, dtype=torch.int64)
        labels = torch.full_like(ids, IGNORED)
        for row, text in enumerate(texts):
            kept = torch.as_tensor(text[: self.kept(len(text))])
            ids[row, : len(kept)] = kept
            labels[row, : len(kept)] = kept
        batch = {"input_ids": ids, "labels": labels}
        return {**batch, "attention_mask": (labels != IGNORED).long()} if self.mask else batch


def pack(lengths: Sequence[int], seq: int) -> list[list[int]]:
    """Which texts share a row of `seq` tokens: best fit, longest first. Each list of indices fits into one row.

    Raises `UserError` for a text that is longer than a row.
    """
    _whole("seq", seq)
    if lengths and max(lengths) > seq:
        raise UserError(f"a text of {max(lengths)} tokens does not fit into a row of {seq}: cut it first")
    room: list[list[list[int]]] = [[] for _ in range(seq + 1)]  # rows by what is free in them
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        need = lengths[index]
        free = next((f for f in range(need, seq + 1) if room[f]), None)
        row = [] if free is None else room[free].pop()
        row.append(index)
        room[(seq if free is None else free) - need].append(row)
    return [row for rows in room for row in rows]


@dataclass(frozen=True)
class Packed:
    """Collates rows, each of several texts one behind the other, to ``(rows, seq)``; every text is one document.

    ``position_ids`` start at 0 in each document: transformers (5 and later) sees that, and lets a token attend to its
    own document only, where neither an attention mask nor a cache is given. The first token of a document has no label,
    because the model would have to guess it from another document. What is left of a row is padding, a document
    of its own.
    """

    seq: int
    pad: int = 0

    def __call__(self, rows: Sequence[Sequence[Sequence[int]]]) -> dict[str, torch.Tensor]:
        import torch

        ids = torch.full((len(rows), self.seq), self.pad, dtype=torch.int64)
        labels, positions = torch.full_like(ids, IGNORED), torch.zeros_like(ids)
        for number, texts in enumerate(rows):
            if sum(map(len, texts)) > self.seq:
                raise UserError(f"{sum(map(len, texts))} tokens do not fit into a row of {self.seq}")
            start = 0
            for text in texts:
                end = start + len(text)
                ids[number, start:end] = torch.as_tensor(text)
                labels[number, start + 1 : end] = ids[number, start + 1 : end]
                positions[number, start:end] = torch.arange(len(text))
                start = end
            positions[number, start:] = torch.arange(self.seq - start)
        return {"input_ids": ids, "labels": labels, "position_ids": positions}


def same_document(position_ids: torch.Tensor) -> torch.Tensor:
    """The mask that packed rows need, ``(rows, 1, seq, seq)`` bool: True where a token may look, which is at earlier
    tokens of its own document. `position_ids` ``(rows, seq)`` start at 0 in each document. For models that do not make
    it themselves; ``scaled_dot_product_attention(..., attn_mask=)`` takes it."""
    import torch

    document = (position_ids == 0).cumsum(-1)
    seq = position_ids.shape[-1]
    earlier = torch.ones(seq, seq, dtype=torch.bool, device=position_ids.device).tril()
    return ((document[:, :, None] == document[:, None, :]) & earlier)[:, None]


@dataclass(frozen=True)
class Waste:
    """Tokens of an epoch: ``computed`` go through the model, ``real`` of them are text, ``cut`` of the texts' tokens
    are never seen, in ``texts_cut`` of ``texts`` texts. ``largest`` is the largest batch, ``(rows, columns)``."""

    computed: int
    real: int
    cut: int
    texts: int
    texts_cut: int
    batches: int
    largest: tuple[int, int]

    @property
    def share(self) -> float:
        """The part of what is computed that is padding."""
        return 1 - self.real / self.computed

    @property
    def cut_share(self) -> float:
        """The part of the texts' tokens that is cut off."""
        return self.cut / (self.real + self.cut)


def waste(lengths: Sequence[int], batches: Sequence[Sequence[int]], collate: Padded) -> Waste:
    """What padding costs when texts of these `lengths` go through `collate` in these `batches` of indices."""
    shapes = [(len(batch), collate.width([lengths[i] for i in batch])) for batch in batches]
    used = [lengths[i] for batch in batches for i in batch]
    kept = [collate.kept(n) for n in used]
    return Waste(
        computed=sum(rows * columns for rows, columns in shapes),
        real=sum(kept),
        cut=sum(used) - sum(kept),
        texts=len(used),
        texts_cut=sum(k < n for k, n in zip(kept, used, strict=True)),
        batches=len(shapes),
        largest=max(shapes, key=lambda shape: shape[0] * shape[1]),
    )


def packed_waste(lengths: Sequence[int], rows: Sequence[Sequence[int]], seq: int, batch: int) -> Waste:
    """The same for texts packed into `rows` of `seq` tokens, `batch` rows at a time."""
    used = [lengths[i] for row in rows for i in row]
    batches = -(-len(rows) // batch)
    return Waste(len(rows) * seq, sum(used), 0, len(used), 0, batches, (min(batch, len(rows)), seq))


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _whole(name: str, value: int | None, missing: bool = False) -> None:
    if value is None and missing:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name} must be a whole number of at least 1, not {value!r}")
