"""Why a plan looks as it does: each switch undone alone, the questions that lead to it, and what kind of case it is.

All of it comes from the predictor and the time model that made the plan; nothing here knows better than they do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..recipes import Recipe, conflict
from ..units import UserError, show_bytes
from .roofline import Times, estimate
from .room import Need, Room, least_bytes, need
from .shape import Shape

if TYPE_CHECKING:
    from ..machine import Card


@dataclass(frozen=True)
class Switch:
    """One thing that a plan turns on: what it ``saves`` and what it costs here (``slower_seconds`` a step; negative:
    it gains), and the lesson that teaches it. `alone` is False where the plan cannot be had without it, so that its
    effect is not known apart from others."""

    name: str
    what: str
    lesson: str
    saves_bytes: int | None = None
    slower_seconds: float | None = None

    def __str__(self) -> str:
        if self.saves_bytes is None or self.slower_seconds is None:
            return f"{self.name}: {self.what} (lesson {self.lesson})"
        memory = "saves" if self.saves_bytes >= 0 else "takes"
        time = "costs" if self.slower_seconds >= 0 else "gains"
        size = f"{memory} {show_bytes(abs(self.saves_bytes))}, {time} {abs(self.slower_seconds) * 1e3:.1f} ms a step"
        return f"{self.name}: {self.what}; {size} (lesson {self.lesson})"


def switches(recipe: Recipe, card: Card) -> tuple[Switch, ...]:
    """What `recipe` turns on, each with the effect of turning it off again, all others left as they are."""
    before = need(recipe, card), estimate(recipe, card)
    return tuple(_switch(recipe, card, before, *entry) for entry in _turned_on(recipe))


def names(recipe: Recipe) -> tuple[Switch, ...]:
    """What `recipe` turns on, without effects: nothing is predicted."""
    return tuple(Switch(name, what, lesson) for name, what, lesson, _ in _turned_on(recipe))


def _switch(
    recipe: Recipe, card: Card, before: tuple[Need, Times], name: str, what: str, lesson: str, undo: dict[str, Any]
) -> Switch:
    fields = {**recipe.to_dict(), **undo}
    if not undo or conflict(fields) is not None:  # eager attention is no choice that anybody would go back to
        return Switch(name, what, lesson)
    try:
        without = Recipe.of(**fields)
        after = need(without, card), estimate(without, card)
    except UserError:  # the step without it cannot be predicted: then its effect is not known
        return Switch(name, what, lesson)
    scale = recipe.tokens / without.tokens
    saved = after[0].reserved_bytes - before[0].reserved_bytes
    return Switch(name, what, lesson, saved, before[1].seconds - scale * after[1].seconds)


def _turned_on(recipe: Recipe) -> list[tuple[str, str, str, dict[str, Any]]]:
    """Name, what it does, lesson, and the fields without it."""
    on: list[tuple[str, str, str, dict[str, Any]]] = []
    autocast = {"precision": "amp-bf16", "stochastic_rounding": False, "optimizer": "adamw-fused", "loss":
                "chunked" if recipe.loss == "in-place" else recipe.loss}  # fmt: skip
    if recipe.precision.startswith("amp"):
        kind = recipe.precision.removeprefix("amp-")
        on.append(
            (f"precision={recipe.precision}", f"products in {kind}, weights stay fp32", "02", {"precision": "fp32"})
        )
    if recipe.precision == "bf16":
        what = "16-bit weights, rounded stochastically, with 8-bit states: 6 bytes for each parameter instead of 16"
        on.append((f"precision=bf16 with {recipe.optimizer}", what, "04 and 12", autocast))
    if recipe.precision == "fp16":
        what = "16-bit weights on the card, their fp32 master copy and the states elsewhere"
        on.append(("precision=fp16", what, "02 and 05", {**autocast, "precision": "amp-fp16", "offload": "none"}))
    if recipe.optimizer == "adam8bit":
        what = "optimizer states of one byte: 10 bytes for each parameter instead of 16"
        on.append(("optimizer=adam8bit", what, "04", {"optimizer": "adamw-fused"}))
    if recipe.offload.startswith("optimizer"):
        what = "states wait and step on the host, over the bus"
        if recipe.offload.endswith("gradients"):
            what = "gradients leave at once, states wait and step on the host, over the bus"
        on.append((f"offload={recipe.offload}", what, "05", {"offload": "none", "optimizer": "adamw-fused"}))
    if recipe.offload.startswith("states"):
        moved = show_bytes(int(Shape.of(recipe).state_bytes(recipe)))
        what = f"states wait on the host and step on the card: {moved} over the bus each way, once a step"
        on.append((f"offload={recipe.offload}", what, "12", {"offload": "none"}))
    if recipe.offload == "states+activations":
        what = "the inputs of checkpointed blocks wait on the host, too"
        on.append(("its activations", what, "05", {"offload": "states"}))
    if recipe.offload == "activations":
        on.append(("offload=activations", "what backward needs waits on the host", "05", {"offload": "none"}))
    if recipe.gradients == "host":
        on.append(("gradients=host", "gradients wait on the host until all are known", "12", {"gradients": "card"}))
    if recipe.gradients.startswith("in-backward"):
        what = "each gradient is used and dropped at once: no accumulation, no clipping by the global norm"
        on.append((f"gradients={recipe.gradients}", what, "12", {"gradients": "card"}))
    if recipe.flat:
        what = "the optimizer steps a block's weights as one tensor: fewer launches"
        on.append(("flat", what, "12", {"flat": False}))
    if recipe.checkpoint:
        every = "every block" if recipe.checkpoint == 1 else f"every {recipe.checkpoint} blocks"
        what = f"only the input of {every} is kept, the rest is computed twice"
        on.append((f"checkpoint={recipe.checkpoint}", what, "03", {"checkpoint": 0}))
    if recipe.loss != "full":
        where = "the head's gradient summed in place" if recipe.loss == "in-place" else "each computed twice"
        what = f"logits in {recipe.loss_chunks} pieces, {where}"
        on.append((f"loss={recipe.loss}", what, "08", {"loss": "full"}))
    if recipe.activation != "gelu_new":
        what = "one kernel instead of eight, the same function"
        on.append((f"activation={recipe.activation}", what, "07", {"activation": "gelu_new"}))
    if recipe.compile != "none":
        on.append((f"compile={recipe.compile}", "small kernels fused, fewer launches", "07", {"compile": "none"}))
    if recipe.expandable_segments:
        what = "PYTORCH_ALLOC_CONF=expandable_segments:True, fewer gaps between blocks"
        on.append(("expandable_segments", what, "01", {"expandable_segments": False}))
    if recipe.accumulation > 1:
        what = f"{recipe.accumulation} micro-batches of {recipe.batch} in a step"
        whole = {"accumulation": 1, "batch": recipe.batch * recipe.accumulation}
        on.append((f"accumulation={recipe.accumulation}", what, "01", whole))
    if recipe.attention == "sdpa":
        on.append(("attention=sdpa", "attention in one kernel, no seq x seq matrix", "06", {}))
    return on


# ------------------------------------------------------------------------------------------------ the decision tree


@dataclass(frozen=True)
class Node:
    """A question of the decision tree with its figures, the answer, and what follows from it."""

    question: str
    figures: str
    yes: bool
    advice: str


def tree(plain: Recipe, best: Recipe | None, card: Card, room: Room) -> tuple[Node, ...]:
    """The questions from the plain step to the plan, up to the first that needs no further one."""
    shape, limit = Shape.of(plain), room.limit_bytes
    wanted = need(plain, card)
    nodes = [
        Node("Does the plain step fit?", f"{plain}: {show_bytes(wanted.reserved_bytes)} of {show_bytes(limit)}",
             (fits := room.fits(wanted)), "nothing is needed, the rest is for speed" if fits else "something must go")
    ]  # fmt: skip
    if nodes[0].yes:
        return (*nodes, *_speed(best, card))
    static = least_bytes(plain, shape)
    enough = static <= limit
    each = show_bytes(static)
    nodes.append(
        Node("Do weights, gradients and states fit?", f"16 bytes x {shape.parameters / 1e6:,.0f}M = {each}", enough,
             "then the activations are too large" if enough else "fewer bytes for each parameter")
    )  # fmt: skip
    if not enough:
        nodes += _fewer_bytes(shape, limit, best)
    stored = best is not None and not best.checkpoint and not best.offload.endswith("activations")
    shown = plain if best is None else best.changed(checkpoint=0, offload="none")
    kept = shape.activation_bytes(shown)
    nodes.append(
        Node("Do the activations fit beside them?", f"about {show_bytes(kept)} for {shown.batch} x {shown.seq}", stored,
             "store them" if stored else "checkpoint the blocks")
    )  # fmt: skip
    logits = 4 * shown.batch * shown.seq * shape.vocabulary
    whole = best is not None and best.loss == "full"
    nodes.append(
        Node("And the logits?", f"{show_bytes(logits)} for one fp32 copy, of which three live at once", whole,
             "the model's own loss" if whole else "a loss in pieces")
    )  # fmt: skip
    return (*nodes, *_speed(best, card))


def _fewer_bytes(shape: Shape, limit: int, best: Recipe | None) -> list[Node]:
    ways = ((10, "8-bit states"), (6, "16-bit weights, 8-bit states"), (4, "these, and gradients that leave at once"),
            (2, "gradients, states and master copy on the host"))  # fmt: skip
    nodes = []
    for each, what in ways:
        size = each * shape.parameters
        follows = what if size < limit else "still fewer"
        nodes.append(Node(f"Do {each} bytes for each fit?", f"{what}: {show_bytes(size)}", size < limit, follows))
        if size < limit:
            break
    return nodes


def _speed(best: Recipe | None, card: Card) -> tuple[Node, ...]:
    if best is None:
        return ()
    times = estimate(best, card)
    on_card = sum(c for c, _ in times.phases.values())
    on_host = sum(h for _, h in times.phases.values())
    busy = on_card >= on_host
    figures = f"card busy {on_card * 1e3:.0f} ms, host {on_host * 1e3:.0f} ms a step"
    advice = "larger matrices and fewer bytes make it faster" if busy else "a larger batch or compiled blocks pay"
    return (Node("Is the card the slower side?", figures, busy, advice),)


# ------------------------------------------------------------------------------------------------ the nine-grid


@dataclass(frozen=True)
class Row:
    """One row of the nine-grid: a quantity of the plain step, its value in words, and which of three cells it is in
    (0 low, 1 middle, 2 high); ``cells`` say what each would mean."""

    quantity: str
    value: str
    place: int
    cells: tuple[str, str, str]


def grid(plain: Recipe, card: Card, room: Room) -> tuple[Row, ...]:
    """What kind of case this is: compute intensity, parameter bytes, data lengths, each low, middle or high."""
    shape, times = Shape.of(plain), estimate(plain, card)
    on_card = sum(c for c, _ in times.phases.values())
    on_host = sum(h for _, h in times.phases.values())
    computing = times.product_seconds / max(on_card, on_host)
    static, kept = least_bytes(plain, shape), need(plain, card).allocated_bytes - least_bytes(plain, shape)
    limit = room.limit_bytes
    return (
        Row("compute intensity", f"{computing:.0%} of a step in matrix products", _third(computing, 1 / 3, 2 / 3),
            ("fuse, compile, larger batch", "16-bit products", "recomputing is dear, offload hides")),
        Row("parameter bytes", f"{show_bytes(static)}, {static / limit:.0%} of room", _third(static / limit, 0.3, 0.9),
            ("leave them alone", "8-bit states", "16-bit weights, gradients or states elsewhere")),
        Row("data lengths", f"{show_bytes(kept)}, {kept / limit:.0%} of room", _third(kept / limit, 0.3, 0.9),
            ("leave them alone", "fused kernels, loss in pieces", "checkpointing, smaller micro-batch")),
    )  # fmt: skip


def _third(value: float, low: float, high: float) -> int:
    return int(value >= low) + int(value >= high)
