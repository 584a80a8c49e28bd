"""Texts longer than a model or a card takes: chunks with overlap and their merging, and masks that keep a part.

A mask here is a ``mask_mod`` as FlexAttention wants it: ``mask(batch, head, query, key)`` on index tensors, True where
the query may look at the key. The same function makes a dense mask (`dense`) and says which blocks a kernel must
compute (`block_counts`), so that what is drawn, what is checked and what runs cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from .units import UserError

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[..., Any]
MERGES = ("context", "mean")
FLEX_BLOCK = 128  # FlexAttention's default block of queries and of keys (torch/nn/attention/flex_attention.py)


# ------------------------------------------------------------------------------------------- chunks


class Chunk(NamedTuple):
    """Positions ``start`` to ``stop`` of a text are read together; the results from ``keep`` on count."""

    start: int
    stop: int
    keep: int


def chunks(length: int, window: int, overlap: int = 0) -> list[Chunk]:
    """How a text of `length` tokens is read `window` at a time, each chunk repeating `overlap` of the one before.

    Every position is kept exactly once. All chunks have the same length: the last one moves to the left, and so repeats
    more. Raises `UserError` unless ``0 <= overlap < window``.
    """
    for name, value in (("length", length), ("window", window), ("overlap", overlap)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise UserError(f"{name} must be a whole number, not {value!r}")
    if length < 1 or window < 1:
        raise UserError(f"length and window must be at least 1, not {length} and {window}")
    if not 0 <= overlap < window:
        raise UserError(f"overlap {overlap} must be at least 0 and smaller than the window, {window}")
    if length <= window:
        return [Chunk(0, length, 0)]
    found = [Chunk(0, window, 0)]
    while found[-1].stop < length:
        start = min(found[-1].stop - overlap, length - window)
        found.append(Chunk(start, start + window, found[-1].stop))
    return found


def split(tokens: torch.Tensor, plan: Sequence[Chunk]) -> torch.Tensor:
    """The chunks of one text: tokens ``(length,)`` -> ``(chunks, window)``."""
    import torch

    return torch.stack([tokens[c.start : c.stop] for c in plan])


def merge(pieces: torch.Tensor, plan: Sequence[Chunk], how: str = "context") -> torch.Tensor:
    """Results for each position of each chunk, ``(chunks, window, ...)``, as results for the text, ``(length, ...)``.

    ``"context"`` takes each position from the chunk that keeps it: in a causal model the one in which most text comes
    before it. ``"mean"`` averages all chunks that read the position; a nan (nothing was predicted) does not count.
    """
    import torch

    if how not in MERGES:
        raise UserError(f"merge by {' or '.join(MERGES)}, not {how!r}")
    if len(pieces) != len(plan):
        raise UserError(f"{len(pieces)} pieces for {len(plan)} chunks")
    if how == "context":
        return torch.cat([p[c.keep - c.start : c.stop - c.start] for p, c in zip(pieces, plan, strict=True)])
    total = pieces.new_zeros((plan[-1].stop, *pieces.shape[2:]))
    count = torch.zeros_like(total)
    for piece, c in zip(pieces, plan, strict=True):
        there = ~piece.isnan()
        total[c.start : c.stop] += piece.nan_to_num(0.0)
        count[c.start : c.stop] += there
    return total / count  # 0 / 0 is nan: nobody knows


def token_losses(model: Any, tokens: torch.Tensor, *, rows: int = 2048) -> torch.Tensor:
    """The loss of each token given those before it: tokens ``(batch, seq)`` -> ``(batch, seq)`` float32, in nats.

    The first column is nan: nothing comes before it. Logits are formed for `rows` tokens at a time, so that a long text
    does not need ``seq x vocabulary`` numbers. No gradient is kept.
    """
    import torch

    with torch.no_grad():
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
        head, targets = model.get_output_embeddings(), tokens[:, 1:]
        parts = [
            torch.nn.functional.cross_entropy(head(h).float(), y, reduction="none")
            for h, y in zip(hidden.flatten(0, 1).split(rows), targets.flatten().split(rows), strict=True)
        ]
        losses = torch.cat(parts).view(targets.shape)
        return torch.nn.functional.pad(losses, (1, 0), value=float("nan"))


# ------------------------------------------------------------------------------------------- masks


def causal() -> MaskMod:
    """Every token looks at itself and all earlier ones."""

    def mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key <= query

    return mask


def sliding_window(window: int) -> MaskMod:
    """Every token looks at itself and the ``window - 1`` before it (Mistral's window; Jiang et al., 2023)."""
    _positive("window", window)

    def mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (query - key < window)

    return mask


def global_and_window(window: int, first: int, *, causal: bool = True) -> MaskMod:
    """A window, and the `first` tokens of the text, which everybody sees (Longformer's global tokens, Beltagy et al.,
    2020; the "attention sinks" of Xiao et al., 2023).

    With ``causal=False`` the window reaches `window` - 1 tokens to both sides and the first tokens see everybody, as in
    Longformer's encoder.
    """
    _positive("window", window)
    _positive("first", first)

    def mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
        if causal:
            return (key <= query) & ((query - key < window) | (key < first))
        return ((query - key).abs() < window) | (key < first) | (query < first)

    return mask


def big_bird(
    window: int, first: int, *, length: int, links: int, block: int = FLEX_BLOCK, seed: int = 0, device: Any = None
) -> MaskMod:
    """`global_and_window`, and for each block of queries `links` earlier blocks of keys drawn with `seed` (BigBird,
    Zaheer et al., 2020; here causal). `length` is the longest text that the mask is for."""
    import torch

    for name, value in (("length", length), ("links", links), ("block", block)):
        _positive(name, value)
    near = global_and_window(window, first)
    count = -(-length // block)
    generator = torch.Generator().manual_seed(seed)
    table = torch.zeros(count, count, dtype=torch.bool)
    for row in range(1, count):
        table[row, torch.randperm(row, generator=generator)[:links]] = True
    table = table.to(device)

    def mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return near(batch, head, query, key) | ((key <= query) & table[query // block, key // block])

    return mask


def dense(mask: MaskMod, length: int, device: Any = None) -> torch.Tensor:
    """The mask as a table ``(length, length)`` of bools, queries down and keys across: what SDPA's ``attn_mask`` takes.
    It has ``length ** 2`` bytes."""
    import torch

    at = torch.arange(length, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return mask(zero, zero, at[:, None], at[None, :])


class BlockCounts(NamedTuple):
    """Blocks of a mask: all of them, those with anything to compute, and those where no entry is masked."""

    total: int
    touched: int
    full: int

    @property
    def density(self) -> float:
        """The share of blocks that must be computed."""
        return self.touched / self.total


def block_counts(mask: MaskMod, length: int, block: int = FLEX_BLOCK) -> BlockCounts:
    """How many blocks of ``block x block`` a kernel must compute for `length` tokens (a multiple of `block`)."""
    touched, full = _blocks(mask, length, block, None)
    return BlockCounts(touched.numel(), int(touched.sum()), int(full.sum()))


def block_mask(mask: MaskMod, length: int, device: Any = None, block: int = FLEX_BLOCK) -> BlockMask:
    """What FlexAttention's ``create_block_mask`` makes of `mask` for a text of `length` tokens (a multiple of `block`),
    one row of blocks at a time: uncompiled, ``create_block_mask`` forms ``length ** 2`` numbers on the way."""
    from torch.nn.attention.flex_attention import BlockMask

    touched, full = _blocks(mask, length, block, device)

    def listed(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = table.int().argsort(dim=1, descending=True, stable=True)  # the columns that are True come first
        return table.sum(dim=1).int()[None, None], order.int()[None, None].contiguous()

    return BlockMask.from_kv_blocks(
        *listed(touched & ~full), *listed(full), BLOCK_SIZE=block, mask_mod=mask, seq_lengths=(length, length)
    )


def _blocks(mask: MaskMod, length: int, block: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables ``(rows, columns)`` of blocks: those with anything to compute, and those where no entry is masked."""
    import torch

    _positive("block", block)
    if length % block:
        raise UserError(f"length {length} is no multiple of the block, {block}")
    zero, keys = torch.zeros((), dtype=torch.int64, device=device), torch.arange(length, device=device)
    side = length // block
    touched, full = (torch.zeros(side, side, dtype=torch.bool, device=device) for _ in range(2))
    for row in range(side):
        queries = keys[row * block : (row + 1) * block]
        entries = mask(zero, zero, queries[:, None], keys[None, :]).view(block, side, block)
        touched[row], full[row] = entries.any(dim=2).any(dim=0), entries.all(dim=2).all(dim=0)
    return touched, full


def picture(masks: Mapping[str, MaskMod], length: int = 64) -> tuple[Axes, ...]:
    """The masks side by side, ``{label: mask}``, for a text of `length` tokens: what `labkit.plots.show` takes."""
    from .plots import canvas

    with canvas.styled():
        figure = canvas.new_figure(canvas.WIDTH_INCHES, 1.75)
        axes = tuple(figure.subplots(1, len(masks), sharey=True, squeeze=False)[0])
        for ax, (label, mask) in zip(axes, masks.items(), strict=True):
            table = dense(mask, length)
            ax.imshow(table.numpy(), cmap="Blues", vmin=0, vmax=1.3, interpolation="nearest")
            ax.set_title(label, pad=3)
            ax.set_xticks([])
            ax.set_yticks([])
            ax.set_xlabel("key")
            for spine in ax.spines.values():
                spine.set_visible(True)
            share = float(table.float().mean())
            canvas.describe(ax, f"Mask '{label}', {length} x {length}: {share:.0%} of the pairs are computed.")
        axes[0].set_ylabel("query")
    return axes


def flex(device: torch.device | str) -> Callable[..., torch.Tensor]:
    """FlexAttention for that device: ``attend(query, key, value, block_mask=...)``, each ``(batch, heads, seq, size)``.

    On a card it is compiled, and so computes only the blocks that the mask touches; it is compiled once for all lengths
    (``dynamic=True``). On a processor it is the uncompiled form: the same numbers from a full table of scores, forward
    only, and without the warning that says so.
    """
    import torch
    from torch.nn.attention import flex_attention as module

    if torch.device(device).type == "cuda":
        return torch.compile(_by_blocks, dynamic=True)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        import warnings

        flag = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"  # else it is traced first, for seconds; torch >= 2.9
        before = getattr(module, flag, None)
        if before is not None:
            setattr(module, flag, True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return module.flex_attention(query, key, value, **options)
        finally:
            if before is not None:
                setattr(module, flag, before)

    return attend


def _by_blocks(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    """A function of our own around ``flex_attention``: Dynamo remembers shapes by function, and what it learns from
    these calls must not make the kernels of a model that compiles ``flex_attention`` itself general, too."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(query, key, value, **options)


@contextmanager
def attending(model: Any, rule: Callable[..., torch.Tensor]) -> Iterator[Any]:
    """While it is open, every block of `model` attends by ``rule(query, key, value)``, each of shape
    ``(batch, heads, seq, size)`` with as many heads of keys as of queries; the rule masks and scales by itself. Through
    transformers' ``AttentionInterface``, the door it has for a function of one's own."""
    from transformers import AttentionInterface

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any) -> tuple[Any, None]:
        times = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(times, dim=1) for t in (key, value))
        return rule(query, key, value).transpose(1, 2), None

    before = model.config._attn_implementation
    AttentionInterface.register("labkit_rule", attend)
    model.set_attn_implementation("labkit_rule")
    try:
        yield model
    finally:
        model.set_attn_implementation(before)


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name} must be a whole number of at least 1, not {value!r}")
