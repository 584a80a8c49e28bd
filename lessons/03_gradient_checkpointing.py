# ---
# jupyter:
#   labkit:
#     title: Compute it twice, store it once
#     question: How much memory does recomputing save, and what does it cost?
#     after: choose what a training step keeps and what it computes again, and say the price before you pay it
#     minutes: {gpu: 2, cpu: 0.7}
#     memory: 8 GiB budget
#     needs: [01_baseline_oom]
#     fetch: []
# ---

# %% name="begin"
import contextlib
import functools
import io
import logging
import statistics

import torch

from IPython.display import display
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import labkit as lab
from labkit import checkpointing, quiet
from labkit.memory.workspaces import workspaces

quiet.transformers()  # imported now, without its complaints
lesson = lab.begin("03_gradient_checkpointing")
BUDGET = lesson.budget  # bytes that PyTorch may take from the card
on_card = lab.device().type == "cuda"
capability = lesson.machine.capability or lab.machine.preset().capability
MiB, GiB = 2**20, 2**30
show = lab.show_bytes
# sequences in a batch: what fits without checkpointing
FEW, TEXTS = (1, 2) if lesson.budget < 7 * GiB else (3, 5)

# %% [markdown]
# ## Claims
#
# *Gradient checkpointing* (also called activation checkpointing) throws results of the forward pass away and computes
# them again when backward needs them. These sentences are said about it, most of them in a training log that went
# around. This run fills in the empty columns, at the end of the lesson.
#
# Words that this lesson uses all the time:
#
# | word | meaning |
# | --- | --- |
# | activation | a result of the forward pass that backward needs again and that is therefore kept |
# | block | one of the 12 layers of GPT-2: attention and MLP, each after a LayerNorm |
# | segment | consecutive blocks behind one checkpoint: only the first one's input is kept |
# | recompute | the forward pass of a segment, run a second time in the middle of backward |
# | interval N | "a checkpoint every N layers" - which can mean two things, and both are measured |
# | selective | within a segment some results are kept all the same |
# | reentrant | the older way to recompute: it starts a second backward inside the first |
# | peak | the most bytes that are alive at one moment of a step |
# | logits | the scores of every word of the vocabulary for every token |

# %% name="claims"
lab.claim("third", "Memory falls to a third of what it was.", said_by="courses, blog posts")
lab.claim("time", "The step takes 30 % more time.", said_by="courses, blog posts")
lab.claim("every third", "Checkpointing every third layer is best.", said_by="a training log")
lab.claim(
    "a third of the layers",
    "The interval should not exceed a third of the layers.",
    said_by="a training log",
)
lab.claim(
    "formula",
    "Best interval = min(layers, deficit / (2 x activation bytes of a layer)).",
    said_by="a training log",
)
lab.claim("28 %", "Tuning the interval makes the step 28 % faster.", said_by="a training log")
lab.claim(
    "4.3 GB", "12 layers, 120M parameters: from 7.8 GB to 4.3 GB.", said_by="a training log"
)
lab.claims()

# %% [markdown]
# ## Experiment
#
# GPT-2 with 124 million parameters as in lesson 01, now with SDPA, PyTorch's fused attention. All that checkpointing
# needs is one function, `torch.utils.checkpoint.checkpoint`: it runs a function without keeping its inner results, and
# runs it again in backward. `Segment` puts some blocks behind it, and `segments` puts all blocks of a model into such
# segments.
#
# Eight sequences of 1024 tokens do not fit into 8 GiB. What if every block is a segment of its own?


# %% name="segment"
class Segment(torch.nn.Module):
    """Consecutive blocks behind one checkpoint."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def run(self, hidden, *args, **kwargs):
        for block in self.blocks:
            out = block(hidden, *args, **kwargs)
            hidden = out[0] if isinstance(out, tuple) else out  # a tuple in older transformers
        return hidden

    def forward(self, hidden, *args, **kwargs):
        return checkpoint(self.run, hidden, *args, use_reentrant=False, **kwargs)


def segments(model, every):
    blocks = list(model.transformer.h)
    parts = [blocks[start : start + every] for start in range(0, len(blocks), every)]
    model.transformer.h = torch.nn.ModuleList(Segment(part) for part in parts)


def language_model(device, batch=8, seq=1024, every=0):
    with device:
        model = lab.models.gpt2("gpt2", attention="sdpa").train()
        tokens = torch.randint(0, 50257, (batch, seq))
    if every:
        segments(model, every)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step():
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step.tokens = batch * seq
    return step


# %% name="guess-fits"
lab.guess("fits", None, "8 x 1024 with every block checkpointed: does it fit? (True or False)")

# %% name="fits"
quick = {  # a step does the same every time, which makes a prediction cheaper
    "budget": BUDGET,
    "trace": False,
    "nearest": False,
    "stateless": True,
}
wish = lab.measure(language_model, name="8 x 1024, all stored", repeats=0, **quick)
granted = lab.measure(
    language_model, name="8 x 1024, every block checkpointed", every=1, repeats=0, **quick
)
display(wish, granted)
lab.answer("fits", measured=granted.ok)

# %% [markdown]
# From here on the step varies in more ways, so the experiment takes them as settings. `labkit.checkpointing.segments`
# is the function above, with options. Two *heads* are compared: a language model, whose logits are large, and a
# classifier of texts, which has 20 scores for a whole sequence and therefore no logits to speak of.


# %% name="experiment"
def one_liner(model, every):
    """What transformers has built in; newer versions (5.24 is one) call it `activation_...`."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()


def selective(model, every):
    keep = checkpointing.keeping("products", "attention")  # the latter only without dropout
    checkpointing.segments(model, 1, context_fn=keep)


def compiled(model, every):
    for block in model.transformer.h:
        block.compile()


CHANGES = {
    "all stored": lambda model, every: None,
    "segments": checkpointing.segments,  # N consecutive blocks behind one checkpoint
    "one in": checkpointing.one_in,  # one block in N behind a checkpoint, the others stored
    "selective": selective,
    "one-liner": one_liner,
    "compiled": compiled,
}
# the 16-bit type that this card's arithmetic has; before Ampere (sm_80) that is fp16
sixteen = torch.bfloat16 if tuple(capability) >= (8, 0) else torch.float16


def training(
    device, batch=FEW, seq=1024, how="all stored", every=0, head="language model", amp=False
):
    with device:
        model = lab.models.gpt2("gpt2", attention="sdpa").train()
        classes = torch.nn.Linear(768, 20)
        tokens, label = torch.randint(0, 50257, (batch, seq)), torch.randint(0, 20, (batch,))
    CHANGES[how](model, every)
    trained = [*model.parameters(), *(classes.parameters() if head == "classifier" else ())]
    optimizer = torch.optim.AdamW(trained, foreach=True)

    def loss_now():
        if head == "language model":
            return model(input_ids=tokens, labels=tokens).loss
        hidden = model.transformer(input_ids=tokens).last_hidden_state  # (batch, seq, width)
        return torch.nn.functional.cross_entropy(classes(hidden[:, -1]), label)

    def step():
        with torch.autocast(device.type, dtype=sixteen, enabled=amp):
            loss = loss_now()
        loss.backward()  # outside autocast: the recomputation must find its own way back in
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step.tokens = batch * seq
    return step


# %% name="guess-peak"
lab.guess(
    "share",
    None,
    f"{FEW} x 1024, language model: the peak falls to how many % of it?",
    unit="%",
)
lab.guess("slower", None, "And how much longer does the step take?", unit="%")

# %% name="pair"
traced = {**quick, "trace": True, "repeats": 6}
stored = lab.measure(training, name="language model, all stored", **traced)
every_block = lab.measure(
    training, name="language model, segments of 1", how="segments", every=1, **traced
)
stored, every_block = lab.with_times([stored, every_block])
share = every_block.peak_bytes / stored.peak_bytes
lab.answer("share", measured=100 * share, note="The account below says why it is no less.")
lab.plots.heatmap_pair(stored, every_block)

# %% [markdown]
# *What to see:* on the left the blocks fill a staircase that backward empties. On the right the staircase is gone: each
# block holds only its input, and lights up once more for a moment, when it is recomputed just before its own backward.
# The head's flash is the same in both, and it is now the peak.
#
# ### Two readings of "every N layers"
#
# *Segments of N:* N consecutive blocks behind one checkpoint. Everything is recomputed, whatever N is; a larger N keeps
# fewer inputs and recomputes more at once. *One in N:* one block in N is checkpointed, the others store everything. A
# larger N recomputes less and keeps more. (transformers' `every_n_layers` is this one. `checkpoint_sequential(blocks,
# segments, x)` of PyTorch takes a third number: how *many* segments.) For N = 1 the two are the same.

# %% name="guess-best"
lab.guess(
    "best", None, "Language model, 12 blocks: which N of the segments has the smallest peak?"
)


# %% name="sweep"
def swept(how, intervals, head="language model", repeats=5, **settings):
    """One report for each N, timed on a card (and without one from the reference rows)."""
    settings = {"how": how, "head": head, "repeats": repeats, **settings, **quick}
    called = f"{head}, {how} of" if how == "segments" else f"{head}, {how}"
    return lab.with_times(
        lab.measure(training, name=f"{called} {every}", every=every, **settings)
        for every in intervals
    )


in_segments = [every_block, *swept("segments", [2, 3, 4, 6, 12])]
one_in = [every_block, *swept("one in", [2, 3, 12])]
readings = {"segments of N": in_segments, "one in N": one_in}
lab.plots.sweep(readings, x="every", y="requested", fit=False)

# %% [markdown]
# *What to see:* the segments are flat up to about N = 4 and then rise; *one in N* rises at once.


# %% name="times"
def seconds(report):
    return report.timing.median_seconds if report.timing else None


def longer(report, than):
    """How much longer one step takes, as a part of the other; None where one of the times is not known."""
    both = seconds(report) and seconds(than)
    return seconds(report) / seconds(than) - 1 if both else None


def steady_clock(*reports):
    """Whether the times of all these steps vary by less than 5 %: others are shown, and settle nothing."""
    return all(r.timing.spread_seconds < 0.05 * r.timing.median_seconds for r in reports)


def where(report):
    """The source and scope of a verdict that needs this report's time."""
    if on_card:
        return {}
    return {"source": "reference", "scope": report.timing.clock.removeprefix("reference · ")}


everyone = [stored, *in_segments, *one_in[1:]]
have_times = all(report.timing for report in everyone)
if have_times:
    lab.plots.show(lab.plots.sweep(readings, x="every", y="time", fit=False))
    lab.plots.show(lab.plots.pareto(everyone))
    twice = statistics.median(seconds(report) for report in in_segments)
    print(
        f"all stored {lab.units.show_seconds(seconds(stored))}, every block computed twice "
        f"{lab.units.show_seconds(twice)} (median over N): {twice / seconds(stored) - 1:+.1%}"
    )
else:
    print("Time needs a card, and there is no reference row yet.")

# %% [markdown]
# *What to see, above:* the time of the segments does not depend on N, because all blocks are computed twice whatever N
# is; *one in N* falls towards the step that stores everything. All segments do the same work, so a point that sticks
# out was disturbed by something else on the machine, and their median is taken. *Below:* down and to the left is
# better. The stairs lead from recomputing everything over *one in N* down to "all stored": time is bought with memory.
# The longest segments pay in memory and buy nothing.

# %% [markdown]
# ## Account
#
# First what one block keeps, with and without a checkpoint. PyTorch calls a pair of functions for each tensor that it
# saves for backward (`saved_tensors_hooks`); we only count.


# %% name="kept"
kept_bytes = {}


def one_block(device, batch=2, seq=1024, wrap=False):
    with device:
        block = lab.models.gpt2("gpt2", attention="sdpa", n_layer=1).transformer.h[0].train()
        x = torch.randn(batch, seq, 768, requires_grad=True)
    part = Segment([block]) if wrap else block
    weights = {p.untyped_storage()._cdata for p in block.parameters()}

    def step():
        saved = {}

        def count(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:  # those are there anyway
                saved[storage._cdata] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            y = part(x)
        y = y[0] if isinstance(y, tuple) else y
        kept_bytes[wrap] = sum(saved.values())
        y.sum().backward()
        block.zero_grad(set_to_none=True)
        x.grad = None

    return step


for wrap in (False, True):
    lab.measure(one_block, name="one block", wrap=wrap, repeats=0, trace=False, record=False)
    per_element = kept_bytes[wrap] / (2 * 1024 * 768)
    how = "checkpointed" if wrap else "all stored"
    print(
        f"one block, {how:13s} {show(kept_bytes[wrap]):>10s} = {per_element:6.2f} bytes for each of b s d"
    )

# %% [markdown]
# With b sequences of s tokens, width d and h heads, a block keeps **114 b s d + 16 b s + 4 b h s** bytes (lesson 01 has
# the 114 line by line; SDPA replaces the s² part by one number for each token and head). A checkpointed one keeps its
# input: **4 b s d**.
#
# ### The √L argument
#
# Where does "every third of 12 layers" come from? From this count (Chen et al. 2016, *Training Deep Nets with Sublinear
# Memory Cost*): with segments of N of L layers, L/N inputs are kept and N layers are recomputed at once. L/N + N is
# smallest for N = √L, and √12 = 3.5. The count takes the input of a layer and its inside as one unit each. For a
# transformer block they are 4 and 114. With bytes, L/N · 4 + N · 114 is smallest for N = √(12 · 4 / 114) = 0.6: no
# segment should be longer than one block.
#
# Even that is not the whole step. Three moments compete for the peak:
#
# | moment | bytes alive, on top of 12 N_p for weights and AdamW state, and the workspace |
# | --- | --- |
# | start of backward | everything kept + 3 logits of 4 b s V + around the blocks 9 b s d + 8 b s |
# | backward of a segment | inputs of earlier ones + its inside + gradients of later ones + passing 37 b s d + 16 d² |
# | optimizer | gradients 4 N_p and one more copy 4 N_p |
#
# (N_p is the number of parameters, V the size of the vocabulary; *passing* are temporaries of the MLP's backward.) The
# largest of the three is the peak.


# %% name="moments"
L, d, h, V = 12, 768, 12, 50257
with torch.device("meta"):
    N_p = sum(p.numel() for p in lab.models.gpt2("gpt2").parameters())
of_block = 12 * d * d + 13 * d  # parameters of one block
of_classes = 20 * d + 20


def inside(batch, seq=1024):
    """What one block keeps, in bytes."""
    return 114 * batch * seq * d + 16 * batch * seq + 4 * batch * h * seq


def moments(how, every, head="language model", batch=FEW, seq=1024):
    """Bytes alive at each moment that could be the peak of a step in fp32."""
    n = batch * seq * d
    if how == "segments":
        lengths = [min(every, L - start) for start in range(0, L, every)]
        keeps = [4 * n for _ in lengths]
    else:  # "one in", or all stored when every is 0
        lengths = [1] * L
        keeps = [4 * n if every and i % every == 0 else inside(batch, seq) for i in range(L)]
    parameters = N_p + (of_classes if head == "classifier" else 0)
    base = 12 * parameters + sum(workspaces(capability))
    logits = 4 * batch * seq * V if head == "language model" else 0
    found = {"start of backward": base + sum(keeps) + 3 * logits + 9 * n + 8 * batch * seq}
    gradients = 4 * V * d if head == "language model" else 4 * of_classes
    for j in reversed(range(len(lengths))):
        here = lengths[j] * inside(batch, seq) + 32 * n + 16 * d * d
        first = 1 + sum(lengths[:j])
        found[f"backward of block {first}"] = base + sum(keeps[:j]) + here + gradients + 5 * n
        gradients += 4 * of_block * lengths[j]
    found["optimizer"] = base + 8 * parameters
    return found


def peak_by_formula(*args, **kwargs):
    return max(moments(*args, **kwargs).values())


by_classes = [
    lab.measure(
        training,
        name="classifier, all stored",
        head="classifier",
        batch=TEXTS,
        repeats=5,
        **quick,
    ),
    *swept("segments", [1], head="classifier", batch=TEXTS),
    *swept("segments", [2, 3, 6], head="classifier", batch=TEXTS, repeats=0),
]
by_classes = lab.with_times(by_classes)


def accounted(reports):
    """One row for each interval: the arguments, the formula, the measurement, and what is not explained."""
    rows = []
    for report in reports:
        N, head, batch = (report.settings[key] for key in ("every", "head", "batch"))
        n = batch * 1024 * d
        found = moments("segments", N, head, batch)
        moment = max(found, key=found.get)
        peak = report.steady.requested_bytes
        in_bytes = L / N * 4 * n + N * inside(batch)
        rows.append(
            (
                N,
                f"{L / N + N:g}",
                show(in_bytes),
                show(found[moment]),
                moment,
                show(peak),
                show(peak - found[moment]),
            )
        )
    head = (
        "N",
        "L/N + N",
        "4 L/N + 114 N",
        "whole step",
        "its peak is at",
        reports[0].source,
        "unexplained",
    )
    lab.table(head, rows)


print(f"language model, {FEW} x 1024:")
accounted(in_segments)
print(f"classifier, {TEXTS} x 1024:")
accounted(by_classes[1:])


def best_of(reports):
    return min(reports, key=lambda report: report.steady.requested_bytes)


best_words, best_classes = best_of(in_segments), best_of(by_classes[1:])
least = {
    name: min(range(1, L + 1), key=cost)
    for name, cost in {
        "L/N + N": lambda N: L / N + N,
        "4 L/N + 114 N": lambda N: 4 * L / N + 114 * N,
        "whole step, language model": lambda N: peak_by_formula("segments", N),
        "whole step, classifier": lambda N: peak_by_formula("segments", N, "classifier", TEXTS),
    }.items()
}
print("smallest by the formulas, N =", least)
lab.answer(
    "best",
    measured=best_words.settings["every"],
    formula=least["whole step, language model"],
    note=f"N = 1 needs {every_block.steady.requested_bytes / best_words.steady.requested_bytes - 1:.1%} more. For the "
    f"classifier it is N = {best_classes.settings['every']}.",
)

# %% [markdown]
# The logits decide. In the language model the peak is at the start of backward, where nothing is recomputed yet and the
# logits are there three times; a segment may grow until its inside is as large as they are, and a larger N then keeps
# fewer inputs. In the classifier nothing hides the recomputed segment, so every block more in it costs its 114 b s d,
# and N = 1 is best: there only the optimizer is left to make the peak. The √L argument names neither.
#
# Time has a simpler account. Backward does twice the work of forward, so a second forward pass adds a third. But only
# the blocks are recomputed, not the head and not the optimizer.


# %% name="time-account"
def forward_operations(seq=1024, head="language model"):
    """Operations of products in one forward pass for each token: (blocks, head)."""
    return 2 * L * 12 * d * d + 4 * L * seq * d, 2 * V * d if head == "language model" else 0


more_time = {
    "language model": twice / seconds(stored) - 1 if have_times else None,
    "classifier": longer(*by_classes[1::-1]),
}
by_operations = {}
for head, found in more_time.items():
    in_blocks, in_head = forward_operations(head=head)
    by_operations[head] = in_blocks / (3 * (in_blocks + in_head))
    measured = "no time known" if found is None else f"measured {found:+.1%}"
    print(f"{head:14s} by operations {by_operations[head]:+.1%}, {measured}")
slower = more_time["language model"]
lab.answer(
    "slower",
    measured=None if slower is None else 100 * slower,
    formula=100 * by_operations["language model"],
    source="measured" if on_card else "reference",
)

# %% [markdown]
# What the count of operations leaves out: the optimizer on one side; on the other memory-bound operations (dropout,
# LayerNorm, the eight parts of `gelu_new`), which are recomputed as well and take time without many operations.
#
# ### What this says about the claims
#
# The claims about memory can be settled now. A claim that holds for one of two heads holds *when*. What counts: *a
# third* is 28 to 38 % of the peak; 7.8 to 4.3 GB is 55 %, give or take 5; an interval is *best* when its peak is at
# most 2 % above the smallest one.


# %% name="settle-memory"
def some(cases, condition):
    """The verdict on a claim that was tried in several cases: {case: whether it is true there}."""
    if all(cases.values()):
        return "holds"
    return f"holds when {condition}" if any(cases.values()) else "does not hold"


def times_worse(reports, every):
    """The peak with this interval, compared with the smallest of the sweep."""
    chosen = next(r for r in reports if r.settings["every"] == every)
    return chosen.steady.requested_bytes / best_of(reports).steady.requested_bytes


fell = {"language model": (stored, every_block), "classifier": tuple(by_classes[:2])}
ratios = {head: after.peak_bytes / before.peak_bytes for head, (before, after) in fell.items()}
blocks_share = L * inside(TEXTS) / by_classes[0].peak_bytes
lab.settle(
    "third",
    measured=", ".join(f"{head}: to {ratio:.0%}" for head, ratio in ratios.items()),
    verdict=some(
        {head: 0.28 < ratio < 0.38 for head, ratio in ratios.items()},
        f"most of the peak is in the blocks ({blocks_share:.0%}) and no logits are there",
    ),
)
said = [
    f"{head}: {show(a.peak_bytes)} to {show(b.peak_bytes)}" for head, (a, b) in fell.items()
]
alike = {head: abs(ratio - 4.3 / 7.8) < 0.05 for head, ratio in ratios.items()}
lab.settle(
    "4.3 GB",
    measured=f"{', '.join(said)}; 4.3 is {4.3 / 7.8:.0%} of 7.8",
    verdict=some(alike, f"it is the {next((head for head in alike if alike[head]), '')}"),
)
worse = {
    "language model in segments": times_worse(in_segments, 3),
    "classifier in segments": times_worse(by_classes[1:], 3),
    "language model with one in N": times_worse(one_in, 3),
}
said = [f"{case} {factor - 1:+.1%}" for case, factor in worse.items()]
good = {case: factor < 1.02 for case, factor in worse.items()}
lab.settle(
    "every third",
    measured=f"peak with N = 3 against the best N: {', '.join(said)}",
    verdict=some(good, f"it is the {' or the '.join(case for case in good if good[case])}"),
)

# %% [markdown]
# ### The formula for the interval
#
# *Deficit* is what is missing to the budget. The formula makes the interval longer when more is missing. Two wishes
# that are too large for the budget, and what becomes of them with its interval, in both readings, and with N = 1:

# %% name="formula"
rows, fits = [], {}
for head, batch in (("language model", 8), ("classifier", 20)):
    deficit = peak_by_formula("all stored", 0, head, batch) - BUDGET
    N = min(L, max(1, round(deficit / (2 * inside(batch)))))
    tried = {"segments": N, "one in": N, "every block": 1}
    for how, every in tried.items():
        reading = "segments" if how == "every block" else how
        settings = {"how": reading, "every": every, "head": head, "batch": batch}
        found = lab.measure(
            training, name=f"{head} {batch}, {how} {every}", repeats=0, **settings, **quick
        )
        fits[head, how] = found.ok
        got = show(found.steady.requested_bytes) if found.ok else "out of memory"
        pieces = "" if found.ok else show(found.failure.scattered_bytes)
        by_shapes = show(peak_by_formula(reading, every, head, batch))
        rows.append(
            (f"{head}, {batch} x 1024", show(deficit), f"{how} {every}", by_shapes, got, pieces)
        )
lab.table(("wish", "deficit", "interval", "by the account", "peak", "free in pieces"), rows)
failed = [
    f"{head} {how}" for (head, how), ok in fits.items() if not ok and how != "every block"
]
saved = all(fits[head, "every block"] for head in ("language model", "classifier"))
lab.settle(
    "formula",
    measured=f"its interval runs out of memory in {len(failed)} of 4 cases ({', '.join(failed)}); N = 1 "
    f"{'fits in all' if saved else 'does not fit in all'}",
    verdict="does not hold"
    if failed and saved
    else "not measured here"
    if not saved
    else "holds",
)

# %% [markdown]
# Where the account stays below the budget and memory ran out all the same, what was free lay in pieces too small for
# the long segment (lesson 01): one more price of a long one.
#
# The formula is upside down. The more is missing, the *less* one may keep: a longer interval keeps more of the blocks
# (one in N) or recomputes more at once (segments).
#
# ### Keeping something: selective checkpointing
#
# Between a block's input and everything there is much to choose. What is cheap to compute again and large to keep? In
# GPT-2 the eight elementwise operations of `gelu_new`. What is expensive to compute and smaller? Results of matrix
# products. `create_selective_checkpoint_contexts` takes the list of operators whose results are kept:
#
# ```python
# from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
#
# keep = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default, ...]  # below autograd, by overload
# contexts = functools.partial(create_selective_checkpoint_contexts, keep)
# checkpoint(block, hidden, use_reentrant=False, context_fn=contexts)
# ```
#
# A function in the place of the list decides case by case (`CheckpointPolicy.MUST_SAVE`, `PREFER_RECOMPUTE`).
# `checkpointing.keeping("products", "attention")` makes such a function.
#
# By shapes: q, k, v (12), the product after attention (4), the MLP's two (16 + 4), and the input (4): 40 b s d instead
# of 114, and no product is computed twice. Attention has dropout here and is computed again all the same;
# *Equivalence* below says why.

# %% name="guess-selective"
lab.guess("selective", None, f"{FEW} x 1024, language model, selective: the peak?", unit="GiB")

# %% name="selective"
kept = lab.measure(
    training, name="language model, selective", how="selective", repeats=5, **quick
)
built_in = lab.measure(
    training, name="language model, the one-liner", how="one-liner", repeats=5, **quick
)
kept, built_in = lab.with_times([kept, built_in])
n = FEW * 1024 * d
lab.answer(
    "selective",
    measured=kept.steady.requested_bytes / GiB,
    formula=(peak_by_formula("all stored", 0) - L * (inside(FEW) - 40 * n)) / GiB,
    note=f"All stored {show(stored.steady.requested_bytes)}, every block recomputed "
    f"{show(every_block.steady.requested_bytes)}.",
)


def compared(reports, base):
    """Name, peak, peak and time against `base`."""
    rows = []
    for report in reports:
        more = longer(report, base)
        ratio = report.steady.requested_bytes / base.steady.requested_bytes
        rows.append(
            (
                report.name,
                show(report.steady.requested_bytes),
                f"{ratio - 1:+.0%}",
                str(report.timing or "–"),
                "not known" if more is None else f"{more:+.1%}",
            )
        )
    lab.table(("step", f"peak ({base.source})", "peak", "time", "time"), rows)


compared([stored, kept, every_block, built_in], stored)

# %% [markdown]
# The time of *selective* deserves a second look. The policy is Python that is asked about every operator, in forward
# and again in backward. Where the card's work for an operator is shorter than that, the card waits, and the step can
# take longer than recomputing everything. (Compiled, the policy is asked once, while the graph is made.)
#
# The last line is what most people use: `model.gradient_checkpointing_enable()` (in newer versions
# `activation_checkpointing_enable()`; there the old name warns). It is our N = 1: each block a segment,
# `use_reentrant=False`.
#
# ### Let the compiler choose
#
# `torch.compile` sees the graph of forward and backward together, and decides itself what to keep: it recomputes what
# it can fuse into backward's own kernels, which is often faster than reading it from memory.
# `torch._functorch.config.activation_memory_budget` sets the share of activation memory that it may keep, from 1 (its
# own choice) to 0 (inputs only); in between it solves a knapsack: which results are worth their bytes. Here each block
# is compiled by itself. [Lesson 07](07_compile.ipynb) is about the compiler.

# %% name="compiler"
import torch._functorch.config as compiler_settings

rows = []
for share_kept in (1.0, 0.5):
    peak = took = None
    if on_card:
        torch._dynamo.reset()
        with (
            compiler_settings.patch(activation_memory_budget=share_kept),
            contextlib.redirect_stderr(io.StringIO()),  # hints about settings
        ):
            report = lab.measure(
                training,
                name=f"language model, compiled, budget {share_kept}",
                how="compiled",
                repeats=5,
                **quick,
            )
        peak, took = report.steady.requested_bytes / GiB, 1e3 * seconds(report)
    peak = lab.known("compiled peak", peak, "GiB", what=f"budget {share_kept}")
    took = lab.known("compiled step", took, "ms", what=f"budget {share_kept}")
    cells = [
        f"{row['value']:.2f} {row['unit']}" if row["value"] is not None else "–"
        for row in (peak, took)
    ]
    rows.append((f"{share_kept}", *cells, peak["label"]))
lab.table(("activation memory budget", "peak", "step", "where from"), rows)

# %% [markdown]
# ### Checkpointing and mixed precision
#
# With autocast ([lesson 02](02_mixed_precision.ipynb)) both save on the same bytes, the activations of the blocks. What
# autocast adds, 16-bit copies of the weights and casts of the logits, checkpointing does not take away. (Autocast is to
# bf16 here. On cards before Ampere, such as an RTX 20 or a T4, the cell takes fp16; no such card was at hand.)
#
# With these times the claims about time can be settled, too: 30 % is 25 to 35; 28 % faster is at least 25. Steps whose
# times vary by more than 5 % settle nothing.

# %% name="amp"
amp_stored = lab.measure(
    training, name="language model, AMP, all stored", amp=True, repeats=5, **quick
)
amp_block = lab.measure(
    training,
    name="language model, AMP, segments of 1",
    how="segments",
    every=1,
    amp=True,
    repeats=5,
    **quick,
)
amp_kept = lab.measure(
    training,
    name="language model, AMP, selective",
    how="selective",
    amp=True,
    repeats=5,
    **quick,
)
amp_stored, amp_block, amp_kept = lab.with_times([amp_stored, amp_block, amp_kept])
compared([stored, amp_stored, every_block, amp_block, amp_kept], stored)

pairs = {**more_time, "language model with AMP": longer(amp_block, amp_stored)}
if None in pairs.values():
    for claim in ("time", "28 %", "a third of the layers"):
        lab.settle(claim, measured="no time is known", verdict="not measured here")
else:
    if not steady_clock(amp_block, amp_stored):
        noisy = pairs.pop("language model with AMP")
        print(f"AMP: {noisy:+.0%}, but its times vary by more than 5 %: not counted")
    said = ", ".join(f"{name} {more:+.0%}" for name, more in pairs.items())
    near = {name: 0.25 <= more <= 0.35 for name, more in pairs.items()}
    lab.settle(
        "time",
        measured=said,
        verdict=some(near, f"it is the {' or the '.join(name for name in near if near[name])}"),
        **where(every_block),
    )

    gains = {
        name: max((twice / seconds(r) - 1 for r in reports[1:] if steady_clock(r)), default=0.0)
        for name, reports in readings.items()
    }
    said = ", ".join(f"{name}: at most {gain:.0%} faster" for name, gain in gains.items())
    said += f" than every block; without any checkpoint {twice / seconds(stored) - 1:.0%}"
    lab.settle(
        "28 %",
        measured=said,
        verdict=some(
            {name: gain >= 0.25 for name, gain in gains.items()},
            "one in N leaves hardly any block checkpointed",
        ),
        **where(every_block),
    )

    def of(reports, N):
        return next(r for r in reports if r.settings["every"] == N)

    rises = all(
        of(reports, 6).steady.requested_bytes > 1.02 * best_of(reports).steady.requested_bytes
        for reports in (in_segments, by_classes[1:])
    )
    no_gain = seconds(of(in_segments, 4)) / seconds(of(in_segments, 6)) - 1
    gain = seconds(of(one_in, 3)) / seconds(of(one_in, 12)) - 1
    said = f"from N = 4 to 6, segments: {no_gain:+.1%} speed, the peak {'rises' if rises else 'does not rise'}; "
    said += f"from 3 to 12, one in N: {gain:+.1%} speed"
    if rises and no_gain < 0.02:
        verdict = "holds when it means segments" if gain > 0.02 else "holds"
    else:
        verdict = "does not hold"
    lab.settle("a third of the layers", measured=said, verdict=verdict, **where(every_block))

# %% [markdown]
# ## Equivalence
#
# Recomputing is the same arithmetic on the same numbers, so the gradients must be equal *to the last bit*, with dropout
# too: the random state of the forward pass is stored and set again before the recomputation. A small GPT-2 computes
# them in each variant. The first line is the control: the plain step, run twice. Where not even that is equal (some
# kernels of a card add in changing order), nothing else can be.


# %% name="equivalence"
torch.set_num_threads(1)  # a small model is faster on one


def tiny(dropout=0.1, layers=3):
    off = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    sizes = {"n_layer": layers, "n_embd": 64, "n_head": 4, "vocab_size": 500}
    torch.manual_seed(0)
    return lab.models.gpt2(
        "gpt2", attention="sdpa", bos_token_id=0, eos_token_id=0, **sizes, **off
    )


def gradients(change, dtype=torch.float32, amp=None, dropout=0.1):
    """All gradients of one step, end to end in one tensor."""
    device = lab.device()
    model = tiny(dropout).to(device, dtype).train()
    change(model)
    tokens = torch.randint(0, 500, (2, 32), generator=torch.Generator().manual_seed(1)).to(
        device
    )
    torch.manual_seed(2)  # the same dropout masks for everyone
    with torch.autocast(device.type, dtype=amp, enabled=amp is not None):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


variants = {
    "the plain step again": lambda model: None,
    "segments of 1": lambda model: checkpointing.segments(model, 1),
    "segments of 2": lambda model: checkpointing.segments(model, 2),
    "one in 2": lambda model: checkpointing.one_in(model, 2),
    "selective": lambda model: selective(model, 1),
    "the one-liner": lambda model: one_liner(model, 1),
    "reentrant": lambda model: checkpointing.segments(model, 1, use_reentrant=True),
}
aten = torch.ops.aten
products = [aten.addmm.default, aten.mm.default, aten.bmm.default]
attention = [
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
]
list_of_operators = functools.partial(
    create_selective_checkpoint_contexts, products + attention
)
traps = {
    "random state not kept": lambda model: checkpointing.segments(
        model, 1, preserve_rng_state=False
    ),
    "selective, attention in the list": lambda model: checkpointing.segments(
        model, 1, context_fn=list_of_operators
    ),
}
columns = {
    "fp32, no dropout": {"dropout": 0.0},
    "fp32": {},
    "bf16 weights": {"dtype": torch.bfloat16},
    "autocast": {"amp": sixteen if on_card else torch.bfloat16},
}
plain = {
    column: gradients(lambda model: None, **options) for column, options in columns.items()
}
off = {}
for variant, change in {**variants, **traps}.items():
    off[variant] = {}
    for column, options in columns.items():
        found, wanted = gradients(change, **options), plain[column]
        same = torch.equal(found, wanted)
        off[variant][column] = 0.0 if same else float((found - wanted).norm() / wanted.norm())
lab.table(
    ("gradients against the plain step", *columns),
    [
        (v, *("equal" if x == 0 else f"differ by {x:.1%}" for x in row.values()))
        for v, row in off.items()
    ],
)
counted = [off[variant][column] for variant in list(variants)[1:] for column in columns]
lab.fact("equal to the last bit", counted.count(0), f"of {len(counted)}")
print(
    f"{counted.count(0)} of {len(counted)} equal to the last bit, control and traps not counted"
)
trap = lab.known(
    "selective with attention kept: gradients differ by",
    100 * off["selective, attention in the list"]["fp32"] if on_card else None,
    "%",
)
if trap["value"] is not None:
    print(
        f"the last line, in fp32 with dropout, on a card: {trap['value']:.1f} % ({trap['label']})"
    )

inside_autocast = []
model = tiny(layers=2).to(lab.device()).train()
for block in model.transformer.h:
    block.register_forward_pre_hook(
        lambda *_: inside_autocast.append(torch.is_autocast_enabled(lab.device().type))
    )
checkpointing.segments(model, 1)
tokens = torch.zeros(1, 8, dtype=torch.long, device=lab.device())
with torch.autocast(lab.device().type, dtype=torch.bfloat16):
    loss = model(input_ids=tokens, labels=tokens).loss
in_forward = len(inside_autocast)
loss.backward()
print(
    f"blocks inside autocast: forward {inside_autocast[:in_forward]}, recomputed {inside_autocast[in_forward:]}"
)

# %% [markdown]
# The last two lines are traps. Nothing fails there and no shape is wrong, but the gradient belongs to another function.
#
# `preserve_rng_state=False` (a little faster): backward draws *other* dropout masks than forward did. Without dropout
# it does not matter.
#
# *Selective, with attention in the list*: on a card attention with dropout is one operator that draws random numbers.
# When its result is kept, it does not run again and does not draw, and so every later dropout in the block draws what
# attention should have drawn. (On a processor attention with dropout is several operators, and this does not show.)
# Keep no operator that draws: `checkpointing.keeping("attention")` keeps attention only where its dropout is 0.
#
# Autocast is stored and set again like the random state: `loss.backward()` ran outside the autocast context, and yet
# the blocks found themselves inside one, in forward and again in the recomputation.
#
# ### Reentrant or not
#
# The older way to recompute starts a second backward pass inside the first one: it *re-enters* autograd
# (`use_reentrant=True`). The newer one only fills in the missing tensors when they are asked for. What the older one
# cannot do:


# %% name="reentrant"
from torch.utils._python_dispatch import TorchDispatchMode


class Products(TorchDispatchMode):
    """Counts matrix products while it is active."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def mlp():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))


def frozen_input(reentrant):
    block, head = mlp(), torch.nn.Linear(8, 1)
    x = torch.ones(2, 8)  # comes from frozen layers
    head(checkpoint(block, x, use_reentrant=reentrant)).sum().backward()
    return f"gradient of a weight: {'None' if block[0].weight.grad is None else 'there'}"


def keywords(reentrant):
    def scaled(x, factor):
        return factor * block(x)

    block, x = mlp(), torch.ones(2, 8, requires_grad=True)
    checkpoint(scaled, x, factor=2.0, use_reentrant=reentrant)
    return "taken"


def some_gradients(reentrant):
    block, x = mlp(), torch.ones(2, 8, requires_grad=True)
    torch.autograd.grad(checkpoint(block, x, use_reentrant=reentrant).sum(), [block[0].weight])
    return "works"


def recomputed(reentrant):
    block, x = mlp(), torch.ones(2, 8, requires_grad=True)
    with Products() as products:
        loss = checkpoint(block, x, use_reentrant=reentrant).sum()
        forward = products.count
        loss.backward()
    again = products.count - forward - 4  # backward itself has two for each layer
    return f"{again} of {forward} products computed again"


def outcome(case, reentrant):
    """What a case returns, or the beginning of what it raises, and what it warns of."""
    with contextlib.redirect_stderr(io.StringIO()) as warned:
        try:
            result = case(reentrant)
        except (ValueError, RuntimeError) as error:
            result = f"{type(error).__name__}: {str(error).split('.')[0][:90]}"
    said = [line for line in warned.getvalue().splitlines() if "Warning" in line]
    return result + (f" · warns: {said[0].split('Warning: ')[1][:80]}" if said else "")


cases = {
    "input without gradient": frozen_input,
    "keyword arguments": keywords,
    "torch.autograd.grad": some_gradients,
    "what is recomputed": recomputed,
}
lab.table(
    ("", "use_reentrant=True", "use_reentrant=False"),
    [(name, outcome(case, True), outcome(case, False)) for name, case in cases.items()],
)

# %% [markdown]
# The last line is a small gain: the newer way stops as soon as the last missing tensor is there, and nobody needs the
# result of the last product. PyTorch asks for the argument to be given; give `use_reentrant=False`.

# %% [markdown]
# ## Negative control
#
# One sequence of 128 tokens. The blocks keep so little that the peak is in the optimizer: weights, gradients, AdamW's
# state and its copy, 20 bytes for each parameter. Checkpointing can take nothing from that, and still recomputes.

# %% name="guess-control"
lab.guess(
    "control",
    None,
    "1 x 128, language model: every block checkpointed saves how many MiB?",
    unit="MiB",
)

# %% name="negative-control"
short = {"batch": 1, "seq": 128, "repeats": 5, **quick}
short_stored = lab.measure(training, name="language model 1 x 128, all stored", **short)
short_block = lab.measure(
    training, name="language model 1 x 128, segments of 1", how="segments", every=1, **short
)
short_stored, short_block = lab.with_times([short_stored, short_block])
saved = short_stored.steady.requested_bytes - short_block.steady.requested_bytes
by_shapes = peak_by_formula("all stored", 0, batch=1, seq=128) - peak_by_formula(
    "segments", 1, batch=1, seq=128
)
lab.answer("control", measured=saved / MiB, formula=by_shapes / MiB)
compared([short_stored, short_block], short_stored)

# %% [markdown]
# ## Pitfalls
#
# **Generation is slow or wrong after training.** A model that was loaded with `use_cache=False` for checkpointing
# computes the whole prefix again for every new token. One that is still in train mode with checkpointing on has its
# cache taken away in the middle and is fed one token at a time all the same: it does not see what it wrote. Call
# `model.eval()` and generate with the cache. Here for 8 new tokens after a prompt of 16, without dropout: how many
# tokens pass through a block, and are the scores of the last one the same?


# %% name="generation"
def generated(model, **options):
    """Tokens that go through the first block while 8 new ones are generated, and the scores for the last one."""
    count = []
    block = model.transformer.h[0]
    handle = block.register_forward_pre_hook(lambda _, args: count.append(args[0].shape[1]))
    prompt = torch.arange(16)[None]
    asked = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    scores = {"return_dict_in_generate": True, "output_logits": True}
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), **asked, **scores, **options
    )
    handle.remove()
    return sum(count), out.logits[-1]


logging.getLogger("transformers").setLevel(logging.ERROR)  # the table shows what it would say
model, plain_model = tiny(dropout=0.0, layers=2), tiny(dropout=0.0, layers=2)
one_liner(model, 1)
outcomes = {
    "eval(), with cache": generated(model.eval(), use_cache=True),
    "eval(), use_cache=False left from training": generated(model.eval(), use_cache=False),
    "train(), not checkpointed, with cache": generated(plain_model.train(), use_cache=True),
    "train(), checkpointed, with cache": generated(model.train(), use_cache=True),
}
right = outcomes["eval(), with cache"][1]
lab.table(
    ("model", "tokens computed", "last scores"),
    [
        (name, str(tokens), "same" if torch.allclose(scores, right, atol=1e-5) else "others")
        for name, (tokens, scores) in outcomes.items()
    ],
)


class Moody(torch.nn.Module):
    """Skips its activation every other time."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return (x * x).tanh() if self.calls % 2 else x * x


try:
    checkpoint(Moody(), torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward()
except torch.utils.checkpoint.CheckpointError as error:
    print(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")

# %% [markdown]
# **"A different number of tensors was saved"**, or *recomputed values ... have different metadata*. The function did
# something else the second time: it depends on a counter, on global state, on a random choice of Python's (`Moody`
# above). The check sees shapes and counts only, never values.
#
# **LoRA with checkpointing: gradients are None.** All inputs of the first block are frozen, and the reentrant way asks
# its *inputs* whether a gradient is wanted (see the table above). `use_reentrant=False`, or
# `model.enable_input_require_grads()`.
#
# **Checkpointing is on, and nothing changed.** It works only in train mode and where gradients are wanted; or the peak
# is not in the blocks. Look at who is alive (lesson 01).
#
# **torch.compile around a checkpointed model peaks higher than without.** One graph over several blocks may recompute
# them side by side. Compile each block by itself, or let the compiler choose (above); [lesson 07](07_compile.ipynb).
#
# **Out of memory in backward, with checkpointing.** A segment is too long: its whole inside comes back at once. N = 1.

# %% [markdown]
# ## Exercise 1
#
# *5 min, easy.* A model has 48 blocks of width 1600. In 16 bits and with fused kernels one of its blocks keeps 34 bytes
# for each of b s d, and its input takes 2. The batch is one sequence of 1024 tokens. Take segments of N blocks, and
# count as the column `4 L/N + 114 N` does: inputs of all segments + the inside of one. How many **MiB** are alive with
# the *best* whole N? (A last, shorter segment keeps its input like the others.)
#
# <details><summary>Hint</summary>
#
# Write the sum for N = 1, 2, 3 with the two numbers above. It is no use to take the root first: N is a whole number.
#
# </details>

# %% answer="best_mib"
best_mib = ...
### BEGIN SOLUTION
alive = {N: -(-48 // N) * 2 + 34 * N for N in range(1, 49)}  # bytes for each of b s d
best_mib = min(alive.values()) * 1600 * 1024 / 2**20  # N = 2: 48 + 68
### END SOLUTION

# %% check="best_mib" points=1
lab.check.number(
    "best_mib",
    best_mib,
    116 * 1600 * 1024 / 2**20,
    unit="MiB",
    tolerance=0.003,
    mistakes={
        130
        * 1600
        * 1024
        / 2**20: "This is N = 1. Does a longer segment cost more than it saves here?",
        134 * 1600 * 1024 / 2**20: "This is N = 3. Try its neighbours.",
        252
        * 1600
        * 1024
        / 2
        ** 20: "This is the N of the √L argument: it takes the inside and the input as equal.",
        251.7
        * 1600
        * 1024
        / 2
        ** 20: "This is the N of the √L argument: it takes the inside and the input as equal.",
        550
        * 1600
        * 1024
        / 2**20: "This is every third of the layers. Smaller segments recompute less at once.",
        114.26 * 1600 * 1024 / 2**20: ("N must be a whole number.", 0.5),
        68 * 1600 * 1024 / 2**20: (
            "The inside is there; where are the inputs of all segments?",
            0.5,
        ),
        48 * 1600 * 1024 / 2**20: (
            "The inputs are there; where is the inside of one segment?",
            0.5,
        ),
        1632 * 1600 * 1024 / 2**20: "This is everything stored.",
        116 * 768 * 1024 / 2**20: "This is the width of the small gpt2.",
        2: "This is an N; how many MiB are alive with it?",
    },
    hint="Which N did you take, and what are the two parts?",
)

# %% [markdown]
# ## Exercise 2
#
# *8 min, medium.* Write `in_segments_of(blocks, hidden, every)`: run `hidden` through the list `blocks`, every `every`
# consecutive blocks behind one checkpoint, the last segment shorter where it does not come out even. Return the last
# result. `checkpoint` is imported.
#
# <details><summary>Hint</summary>
#
# An inner function that runs one part of the list is what `checkpoint` takes. It runs again in backward, when your loop
# has long ended: what do its names mean then? Give the part to it as an argument, or as a default value.
#
# </details>


# %% answer="in_segments_of"
def in_segments_of(blocks, hidden, every):
    ### BEGIN SOLUTION
    def run(hidden, part):
        for block in part:
            hidden = block(hidden)
        return hidden

    for start in range(0, len(blocks), every):
        part = blocks[start : start + every]
        hidden = checkpoint(run, hidden, part, use_reentrant=False)
    return hidden
    ### END SOLUTION


# %% check="in_segments_of" points=2
class Listed(torch.nn.Module):
    """A small block that writes down when it runs."""

    def __init__(self, number, diary):
        super().__init__()
        self.number, self.diary = number, diary
        self.weight = torch.nn.Parameter(torch.full((4,), 0.5 + 0.1 * number))

    def forward(self, x):
        self.diary.append(self.number)
        return torch.tanh(self.weight * x) + 0.1 * x


def small_case(count, every, worth=1.0):
    """One call with `count` blocks: which ran when, forward and again in backward, and are the gradients right?"""
    diary = []
    blocks = [Listed(number, diary) for number in range(count)]
    start = torch.linspace(-1, 1, 4).requires_grad_()
    parts = [list(range(at, min(at + every, count))) for at in range(0, count, every)]
    again = [number for part in reversed(parts) for number in part]

    def judge(out):
        if not isinstance(out, torch.Tensor):
            return "returns no tensor: is there a `return`?"
        first, diary[:] = list(diary), []
        if sorted(set(first)) != list(range(count)):
            return (
                f"{len(set(first))} of {count} blocks ran: is a last, shorter segment missing?"
            )
        if first != list(range(count)):
            return "the blocks did not run once each and in their order."
        try:
            out.sum().backward()
        except RuntimeError:
            return "backward fails: did other blocks run again? What do your function's names mean by then?"
        second, diary[:] = list(diary), []
        found = [block.weight.grad for block in blocks]
        x = start.detach().requires_grad_()
        for block in blocks:
            block.weight.grad = None
            x = block(x)
        x.sum().backward()
        right = all(
            g is not None and torch.allclose(g, b.weight.grad)
            for g, b in zip(found, blocks, strict=True)
        )
        if not second:
            return "nothing is computed again in backward: where is `checkpoint`?"
        if not right:
            return "the gradients are wrong: did other blocks run again? What do your function's names mean by then?"
        if second != again:
            return f"{count} blocks, every={every}: which blocks share a checkpoint? These segments are not of {every}."
        return True

    return lab.check.case(blocks, start, every, expect=judge, raw=True, worth=worth)


lab.check.code(
    "in_segments_of",
    in_segments_of,
    [small_case(6, 3), small_case(5, 2), small_case(3, 1), small_case(2, 4)],
    points=2,
)

# %% [markdown]
# ## Exercise 3
#
# *5 min, medium.* Three steps that do not fit into 8 GiB (fp32, AdamW, SDPA), with the three largest parts of their
# peak when everything is stored:
#
# | step | weights and AdamW state | blocks | logits, three times |
# | --- | --- | --- | --- |
# | A: gpt2, language model, 16 x 1024 | 1.39 GiB | 16.04 GiB | 9.20 GiB |
# | B: gpt2, classifier, 16 x 1024 | 1.39 GiB | 16.04 GiB | 0 |
# | C: gpt2-large, language model, 1 x 512 | 8.65 GiB | 2.51 GiB | 0.29 GiB |
#
# Which one does checkpointing of every block bring under 8 GiB? Say for each of the others what it would take instead.
#
# <details><summary>Hint</summary>
#
# Strike out the column that checkpointing makes small. What is left?
#
# </details>

# %% answer="cured"
cured_step = ...
### BEGIN SOLUTION
cured_step = "B"
### END SOLUTION

# %% check="cured" points=1
lab.check.choice(
    "cured",
    cured_step,
    "B",
    of=("A", "B", "C"),
    mistakes={
        "A": "A keeps something else that is larger than the budget, whatever its blocks do.",
        "C": "C does not fit before its first block has run.",
    },
)

# %% answer="why" points=2
why = ...
### BEGIN SOLUTION
why = """A: the logits alone take 9.2 GiB three times over, and checkpointing blocks leaves them: cut the loss into
chunks, or take a smaller batch with accumulation. C: weights and AdamW state are 8.65 GiB before any activation: 8-bit
states, 16-bit weights or the optimizer on the host."""
### END SOLUTION

# %% check="why"
lab.check.words(
    "why",
    why,
    {
        r"logit|vocabular|\bhead\b|\bloss\b|cross.?entropy|scores|output layer": (
            "What is left of A when its blocks keep next to nothing?"
        ),
        r"chunk|accumulat|micro.?batch|(small|low|reduc|few|halv|less).{0,30}(batch|sequence|vocab)"
        r"|batch (size )?(of )?[1-9]\b": ("What makes that part of A smaller?"),
        r"weight|parameter|optimi[sz]er|adam|\bstates?\b|moment": "What fills C before any activation is there?",
        r"8.?bit|16.?bit|quanti|half|bf16|fp16|offload|host|\bcpu\b|sgd|smaller model|lora|freez|frozen|adafactor": (
            "What makes that part of C smaller?"
        ),
    },
    against={
        r"(?<!not )(?<!n't )(?<!never )(?<!cannot )\bcures? (a\b|c\b|all|both|every)": "Does it fit A, or C?",
        r"\ba\b[^.;:]{0,40}(weights|parameters) (are|is) too": "How large are the weights of A, in the table?",
        r"\bc\b[^.;]{0,40}(logits (are |is )?too|chunk)|(others|both|all) have logits": (
            "How large are the logits of C, in the table?"
        ),
        r"\bc\b[^.;]{0,40}(small|low|reduc)\w* batch": "C is one sequence: how small can its batch become?",
        r"longer segment|larger interval": "What would a longer segment do with the part that is left?",
        r"\ba and c (both )?(run out|fail|do not fit)[^.]{0,20}(blocks|logits)": "Is it the same part in A and in C?",
        r"(states?|optimi[sz]er) (is|are) not the problem": "What is in the first column of C?",
        r"(do not|don't) know|no idea": "Say what you do know: what is left of A, and of C?",
    },
    points=2,
    least=15,
)

# %% [markdown]
# ## Take-away
#
# 1. A checkpointed block keeps 4 instead of 114 bytes for each of b s d. What is left is what the blocks never held:
#    weights, state, logits. They decide how far the peak falls.
# 2. Take N = 1 and `use_reentrant=False`. A longer segment saves no time; it helps memory only under the cover of large
#    logits, by a few percent. To buy time back, store some blocks (one in N), or keep the results of products
#    (selective) where Python's part in it does not eat the gain.
# 3. Gradients are equal to the last bit, dropout included, as long as the random state is kept.
#
# Next: [lesson 04](04_eight_bit.ipynb), 8 bits. What became of the claims:

# %% name="finish"
lab.finish(
    "Are the blocks most of the peak? Then checkpoint every block; if there is room left, selective, then one in N. "
    "If not, look at logits or state first."
)
