# ---
# jupyter:
#   labkit:
#     title: Attention without the square
#     question: What does attention cost, and which of PyTorch's kernels really runs?
#     after: say which attention kernel runs on a card and why, and what it saves
#     minutes: {gpu: 2, cpu: 0.7}
#     memory: 8 GiB budget
#     needs: [01_baseline_oom]
#     fetch: []
# ---

# %% name="begin"
import math

import numpy
import torch

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import labkit as lab
from labkit import attention, extras, quiet

quiet.transformers()  # imported now, silently
lesson = lab.begin("06_attention")
BUDGET = lesson.budget  # bytes that PyTorch may take from the card
device = lab.device()
on_card = device.type == "cuda"
capability = lesson.machine.capability or lab.machine.preset().capability
HALF = "bfloat16" if capability >= (8, 0) else "float16"  # a Turing card only emulates bf16
MiB, GiB = 2**20, 2**30
show = lab.show_bytes  # 1536 MiB -> "1.50 GiB"
common = {"budget": BUDGET, "trace": False, "nearest": False}
common["stateless"] = True  # every step does the same, so a prediction may stop at the second


def peak(report):
    """Requested bytes at the peak of a steady step; None after running out of memory."""
    return report.steady.requested_bytes if report.ok else None


def by_length(experiment, name, lengths, **sizes):
    """One report for each length, with the length in its name."""
    return [
        lab.measure(experiment, name=f"{name}, {seq} tokens", seq=seq, **sizes, **common)
        for seq in lengths
    ]


def shown_time(report):
    """The median time in words, if there is one to tell."""
    return (
        lab.show_seconds(report.timing.median_seconds) if report.timing else "no reference row"
    )


def gain(before, after):
    """The part of the time of `before` that `after` saves, and by how much noise may move it: half of both
    interquartile ranges. None where a time is missing."""
    if not (before.timing and after.timing):
        return None
    whole = before.timing.median_seconds
    noise = (before.timing.spread_seconds + after.timing.spread_seconds) / 2
    return 1 - after.timing.median_seconds / whole, noise / whole


def have_times(series):
    """Whether every run that fits has a time: measured, or from a reference row."""
    return all(r.timing for reports in series.values() for r in reports if r.ok)


def fitting(series):
    """Only the runs that fit, with times from reference rows where this machine has none."""
    return {name: lab.with_times([r for r in rows if r.ok]) for name, rows in series.items()}


# %% [markdown]
# ## Claims
#
# Six sentences from documentation, blog posts and logs. This run fills in the table, at the end of the lesson.
#
# Words that this lesson uses all the time (*peak*, *requested*, *allocator* and *activation* are those of lesson 01):
#
# | word | meaning |
# | --- | --- |
# | q, k, v | queries, keys and values: three tensors (batch, heads, seq, head_size); GPT-2's heads are 64 wide |
# | scores | q kᵀ / √head_size: one number for each pair of tokens, (batch, heads, seq, seq) |
# | probabilities | softmax of the scores, row by row; attention is probabilities times v |
# | causal | a token sees itself and what came before; all other scores become minus infinity |
# | mask | a tensor that says which pairs of tokens count |
# | kernel | a program that runs on the card, started by one call |
# | fused | one kernel that does the work of several and does not write what lies between to memory |
# | SDPA | `scaled_dot_product_attention`, PyTorch's one call for all of attention |
# | backend | one of the programs behind SDPA: math, memory-efficient, flash, cuDNN |
# | eager | attention written operation by operation, as in Hugging Face's `attn_implementation="eager"` |
# | tile | a piece of a matrix that is small enough for the fast memory on the chip itself |
# | logsumexp | log of the sum of exp(score) of a row: one number for each query |

# %% name="claims"
lab.claim(
    "square",
    "Attention takes memory that grows with the square of the sequence length.",
    said_by="papers, blog posts",
)
lab.claim("removed", "SDPA removes the square: memory becomes linear.", said_by="documentation")
lab.claim(
    "half",
    "Memory-efficient attention saves half of the memory and costs 15 % of the time.",
    said_by="training logs",
)
lab.claim("mask", "A mask silently turns flash attention off.", said_by="issues")
lab.claim("short", "Below 128 tokens flash attention gains nothing.", said_by="training logs")
lab.claim(
    "ampere", "FlashAttention-2 needs an Ampere card or a newer one.", said_by="documentation"
)
lab.claims()

# %% [markdown]
# ## Experiment
#
# Attention is five lines: `by_hand` below, for q, k and v of shape (batch, heads, seq, head_size).
# `scaled_dot_product_attention` (SDPA) computes the same in one call. Behind it are four *backends*, and `sdpa_kernel`
# allows only some of them. `attend` has a name for each way; *default* is what PyTorch takes when it may choose.


# %% name="attend"
def by_hand(q, k, v, dropout=0.0):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (batch, heads, seq, seq)
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(ahead, float("-inf"))  # nobody looks ahead
    probabilities = torch.dropout(scores.softmax(-1), dropout, train=True)
    return probabilities @ v


BACKENDS = {
    "math": SDPBackend.MATH,  # ordinary operators, one after the other
    "efficient": SDPBackend.EFFICIENT_ATTENTION,  # memory-efficient, from xFormers
    "flash": SDPBackend.FLASH_ATTENTION,  # FlashAttention-2
    "cudnn": SDPBackend.CUDNN_ATTENTION,  # from NVIDIA's cuDNN
}
WAYS = ["by hand", *BACKENDS]


def attend(how, q, k, v, dropout=0.0, mask=None):
    if how == "by hand":
        return by_hand(q, k, v, dropout)
    rest = {"attn_mask": mask, "dropout_p": dropout, "is_causal": mask is None}
    if how == "default":
        return scaled_dot_product_attention(q, k, v, **rest)
    with sdpa_kernel(BACKENDS[how]):
        return scaled_dot_product_attention(q, k, v, **rest)


def one_layer(device, how="by hand", dtype="float32", batch=1, seq=1024, masked=False):
    shape, dtype = (batch, seq, 12, 64), getattr(torch, dtype)  # as a projection leaves them
    with device:
        q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
        from_above = torch.randn(shape, dtype=dtype)  # the gradient that backward starts with
        mask = torch.ones(seq, seq, dtype=torch.bool).tril() if masked else None

    def step():
        heads = (t.transpose(1, 2) for t in (q, k, v))  # a view: (batch, heads, seq, 64)
        attend(how, *heads, mask=mask).backward(from_above.transpose(1, 2))
        q.grad = k.grad = v.grad = None

    step.tokens = batch * seq
    return step


# %% [markdown]
# The experiment is one attention layer of GPT-2 124M, forward and backward, without the projections around it. One
# sequence, fp32. Two guesses first; for comparison, q alone has 12 x 4096 x 64 numbers, 12 MiB.

# %% name="guess-layer"
lab.guess("layer_hand", None, "By hand, one sequence of 4096 tokens: the peak?", unit="GiB")
lab.guess("layer_sdpa", None, "SDPA, the same sequence: the peak?", unit="GiB")

# %% name="layer"
LENGTHS = [128, 256, 512, 1024, 2048, 4096]
layers = {
    how: by_length(one_layer, f"one layer, {how}", LENGTHS, how=how)
    for how in ("by hand", "math", "default")
}
square = 16 * 12 * LENGTHS[-1] ** 2 / GiB  # four tensors of fp32 scores, 12 heads: see Account
said = "Four tensors of scores at the peak of backward; the Account has the rest."
for name, how, *more in [("layer_hand", "by hand", square, said), ("layer_sdpa", "default")]:
    nbytes = peak(layers[how][-1])
    formula, note = more or (None, "No tensor of scores at all.")
    measured = nbytes / GiB if nbytes else None
    lab.answer(name, measured=measured, formula=formula, note=note)
lab.plots.show(lab.plots.sweep(layers, x="seq", y="requested", log=True))
timed = fitting(layers)
if have_times(timed):
    lab.plots.show(lab.plots.sweep(timed, x="seq", y="time", log=True, fit=False))
    for how, found in timed.items():
        before, last = found[-2:]
        times = last.timing.median_seconds / before.timing.median_seconds
        said = f"{before.settings['seq']} to {last.settings['seq']} tokens"
        print(f"{how:8s} {said}: {times:.1f} times as long")
else:
    print("time of a layer: no reference row")

# %% [markdown]
# *What to see, memory:* at the right end by hand and math rise about four times for each doubling, the default less
# than two times. On the left all are flat: that is the workspace of cuBLAS, the library of matrix products (lesson
# 01). The legend gives the exponent of what grows above it.
#
# *Time:* on the left a step takes the same time whatever its length, because starting a kernel takes longer than
# running it; then the curves rise. SDPA removes the square from memory, **not from the arithmetic**: twice the tokens
# are still four times the products.
#
# The exponents, with the constant taken off. By hand it comes out a little under 2, because q, k, v and their gradients
# grow only with the length:

# %% name="settle-square"
law = {}
for how, reports in layers.items():
    points = [(r.settings["seq"], peak(r)) for r in reports if r.ok]
    found = law[how] = lab.plots.fit_exponent(*zip(*points, strict=True), offset=True)
    said = f"exponent {found.exponent:.2f}   constant {show(found.offset)}"
    print(f"{how:8s} {said}   worst point {found.error:.1%} off")
squares = {how: 1.9 < found.exponent < 2.1 for how, found in law.items()}
lines = {how: 0.9 < found.exponent < 1.1 for how, found in law.items()}
said = ", ".join(f"{how} {found.exponent:.2f}" for how, found in law.items())
if squares["by hand"] and not squares["default"]:
    verdict = "holds when the scores are written to memory: by hand, eager, math"
else:
    verdict = "holds" if all(squares.values()) else "does not hold"
lab.settle("square", measured=f"exponents: {said}", verdict=verdict)
if lines["default"] and squares["math"]:
    verdict = "holds when a fused backend runs; the math backend keeps the square"
else:
    verdict = "holds" if lines["default"] else "does not hold"
lab.settle("removed", measured=f"exponents: {said}", verdict=verdict)

# %% [markdown]
# ### Which kernel ran?
#
# Nothing in SDPA's result tells which backend made it. Three questions, three ways to ask:
#
# - *What ran?* Look at the operator that PyTorch dispatched. `attention.watch()` does this for every call of SDPA
#   inside its block, also deep in somebody else's model.
# - *What would run for these tensors, and why do the others refuse?* `attention.explain(q, k, v, mask)`. On a card it
#   asks `torch.backends.cuda.can_use_flash_attention(params)` and its sisters; then it allows only the one that
#   refuses, because then PyTorch warns of the reason. For a card that is not here it follows the rules in PyTorch's
#   source.
# - *May only this one run?* `with sdpa_kernel(...)`: SDPA raises an error if that one cannot.

# %% name="explain"
PRESETS = {"Turing": "rtx2070", "Ampere": "rtx3090", "Hopper": "h200"}


def inputs(dtype, seq=1024, where="meta"):  # meta: shapes without memory
    shape = (2, 12, seq, 64)
    kind = {"dtype": getattr(torch, dtype), "device": where, "requires_grad": True}
    return [torch.randn(shape, **kind) for _ in range(3)]


seen = []


def watched_layer(device):
    step = one_layer(device, how="default", seq=128)

    def watched():
        with attention.watch() as calls:
            step()
        seen[:] = calls

    return watched


lab.measure(watched_layer, repeats=0, trace=False, record=False)
print(
    f"the default in the sweep above: {seen[0].backend} ({seen[0].operator}), {lesson.source}"
)
q = torch.randn(1, 12, 128, 64)
with attention.watch() as calls:
    attend("default", q, q, q)
print(f"on the processor: {calls[0].backend} ({calls[0].operator})\n")

rows = []
for dtype in ("float32", "float16", "bfloat16"):
    if on_card:
        found = attention.explain(*inputs(dtype, where=device), causal=True)
        rows.append([dtype, lesson.sm, found.source, *map(found.word, attention.BACKENDS)])
    for family, preset in PRESETS.items():
        found = attention.explain(*inputs(dtype), causal=True, card=preset)
        sm = lab.machine.preset(preset).sm
        rows.append([dtype, f"{family} {sm}", "rules", *map(found.word, attention.BACKENDS)])
lab.table(["dtype", "card", "source", *attention.BACKENDS], rows)

presets = lab.machine.PRESETS.values()
works = {
    card.sm: "flash"
    not in attention.explain(*inputs("float16"), causal=True, card=card.name).refused
    for card in presets
}
if on_card:  # what this card itself says goes before the rule
    here = attention.explain(*inputs("float16", where=device), causal=True)
    works[lesson.sm] = "flash" not in here.refused
right = all(able == (int(sm[3:]) >= 80) for sm, able in works.items())
lab.settle(
    "ampere",
    measured="; ".join(
        f"{sm} {'runs' if able else 'refuses'}" for sm, able in sorted(works.items())
    ),
    verdict="holds" if right else "does not hold",
    source="predicted",
    scope=f"PyTorch's rules{f', {lesson.sm} asked' if on_card else ''}",
)

# %% [markdown]
# Four things to read there. fp32 never runs flash, on no card. Hopper cards take cuDNN first (a recent cuDNN), older
# ones flash. On a Turing card (RTX 20, T4) fp16 takes the memory-efficient backend, which keeps no square either; bf16
# there falls to math, silently, and the square is back: use fp16. (No Turing card was at hand; these rows are PyTorch's
# rules.) The processor has a flash of its own, written for CPUs.
#
# The package `flash-attn` (FlashAttention-2 by its authors; Hugging Face's `"flash_attention_2"`) says in its README
# that it supports Ampere, Ada and Hopper. PyTorch's flash backend is the same algorithm, and needs no package.
#
# ### One layer, all backends
#
# Four sequences of 1024 tokens, forward and backward, in three dtypes. The last column is the relative difference of
# the output to a computation in float64, on smaller tensors; *Equivalence* says what may be expected. Without a card
# the processor computes it, and has only some of the backends.


# %% name="numerics"
lab.guess(
    "hand_over_flash",
    None,
    "Peak by hand over peak of flash, 4 x 1024 tokens, 16 bits: how many times?",
    unit="x",
)
small = (1, 12, 1024, 64) if on_card else (1, 4, 256, 64)
generator = torch.Generator().manual_seed(0)
originals = [torch.randn(small, generator=generator, dtype=torch.float64) for _ in range(4)]


def computed(how, dtype):
    """Output and gradients of q, k, v in `dtype`, and the same from float64; both as float64 in host memory."""
    q, k, v, from_above = (t.to(device, getattr(torch, dtype)) for t in originals)

    def run(how, q, k, v, from_above):
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        out = attend(how, *inputs)
        gradients = torch.autograd.grad(out, inputs, from_above)
        return [t.double().cpu() for t in (out.detach(), *gradients)]

    exact = [t.double() for t in (q, k, v, from_above)]  # the same rounded inputs
    return run(how, q, k, v, from_above), run("by hand", *exact)


def runs_here(how, dtype):
    """Whether the machine that computes (a card, or the processor) has this backend for this dtype."""
    if how == "by hand":
        return True
    if not on_card:
        return how in ("math", "flash")
    with sdpa_kernel(BACKENDS[how]):
        return attention.explain(*inputs(dtype, where=device), causal=True).ran == how


differences = {}
for dtype in ("float32", "float16", "bfloat16"):
    for how in WAYS:
        if runs_here(how, dtype):
            found, wanted = computed(how, dtype)
            differences[how, dtype] = [
                float((f - w).norm() / w.norm()) for f, w in zip(found, wanted, strict=True)
            ]


# %% name="table"
def fits_card(how, dtype):
    """Whether this card, or the preset that stands for it, has this backend for this dtype; else why not."""
    if how == "by hand":
        return True, ""
    with sdpa_kernel(BACKENDS[how]):
        found = attention.explain(
            *inputs(dtype, where=device if on_card else "meta"), causal=True
        )
    return found.ran == how, found.refused.get(how, "")


reports, rows = {}, []
for dtype in ("float32", "float16", "bfloat16"):
    for how in WAYS:
        able, why = fits_card(how, dtype)
        if not able:
            rows.append([dtype, how, why, "–", "–", "–"])
            continue
        name = f"4 x 1024, {how}, {dtype}"
        report = lab.measure(one_layer, name=name, how=how, dtype=dtype, batch=4, **common)
        (reports[how, dtype],) = (report,) = lab.with_times([report])
        off = differences.get((how, dtype))
        far = f"{off[0]:.1e}" if off else "–"
        took = str(report.timing) if report.timing else "no reference row"  # median ± spread
        rows.append([dtype, how, "runs", show(peak(report)), took, far])
clock = next((r.timing.clock for r in reports.values() if r.timing), "no reference row")
print(
    f"memory: {lesson.source} · time: {clock} · difference: {'measured' if on_card else 'cpu'}"
)
lab.table(["dtype", "backend", "ran", "peak", "time", "difference"], rows)
DTYPES = ["float32", "float16", "bfloat16"]
times = {
    how: [
        1e6 * report.timing.median_seconds if report and report.timing else None
        for report in (reports.get((how, dtype)) for dtype in DTYPES)
    ]
    for how in WAYS
}
if any(value for row in times.values() for value in row):
    lab.plots.show(
        lab.plots.grouped(
            times,
            labels=DTYPES,
            unit="forward and backward (µs)",
            title="One attention layer, 4 x 1024 tokens",
            source=clock if clock.startswith("reference") else f"measured · {lesson.card}",
        )
    )
shortest = fitting(layers)["default"][0]
if shortest.timing:
    print(
        f"a layer of {shortest.settings['seq']} tokens (fp32, default) takes {shown_time(shortest)}"
    )
rows = []
for how in ("efficient", "flash", "cudnn"):
    if not fits_card(how, HALF)[0]:
        continue
    name = f"4 x 8192, {how}, {HALF}"
    report = lab.measure(one_layer, name=name, how=how, dtype=HALF, batch=4, seq=8192, **common)
    (report,) = lab.with_times([report])
    rows.append([how, show(peak(report)), str(report.timing or "no reference row")])
lab.table([f"4 x 8192 tokens, {HALF}", "peak", "time"], rows)
flash_like = reports.get(("flash", HALF)) or reports["efficient", HALF]  # no flash on Turing
lab.answer(
    "hand_over_flash",
    measured=peak(reports["by hand", HALF]) / peak(flash_like),
    note="The workspace is in both. What is above it grows with the square by hand, and with the length in flash.",
)

# %% [markdown]
# *What to see:* a missing bar is a backend that refuses; shorter is faster. The line under the figure is what starting
# the kernels takes on this machine even if they have next to nothing to do; it changes with what else the processor
# does. Times near it say more about Python than about the card: do not rank the fused backends in 16 bits by them. The
# long bars are the card's, and so are the times of the second table, with eight times the tokens in a sequence.
#
# *Math* in 16 bits takes as much memory as in fp32: for accuracy it computes in fp32 inside, and so needs more than the
# five lines by hand. The fused backends hardly differ in memory, because all of them keep the same things (see
# *Account*).
#
# ### The whole model
#
# A layer is not a model. The training step of lesson 01, with autocast to 16 bits (lesson 02), one sequence, eager
# against SDPA; the position table is longer than GPT-2's where the sequence is.


# %% name="whole"
def gpt2(device, way="eager", precision="16 bits", batch=1, seq=1024):
    kind = "eager" if way == "eager" else "sdpa"
    with device:
        model = lab.models.gpt2("gpt2", attention=kind, n_positions=max(seq, 1024)).train()
        tokens = torch.randint(0, 50257, (batch, seq))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    half = {"dtype": getattr(torch, HALF), "enabled": precision == "16 bits"}
    scaler = torch.amp.GradScaler(device.type, enabled=half["enabled"] and HALF == "float16")
    allowed = [BACKENDS[way]] if way in BACKENDS else list(BACKENDS.values())

    def step():
        with torch.autocast("cuda", **half), sdpa_kernel(allowed):
            loss = model(input_ids=tokens, labels=tokens).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step.tokens = batch * seq
    return step


lab.guess(
    "longest",
    None,
    "Of 128, 512, 1024, 1536 and 4096 tokens: what is the longest that fits with SDPA?",
    unit="tokens",
)

# %% name="whole-sweep"
whole = {
    "eager": by_length(gpt2, "GPT-2, eager", [128, 512, 1024, 1536, 2048], way="eager"),
    "sdpa": by_length(gpt2, "GPT-2, sdpa", [128, 512, 1024, 1536, 4096], way="sdpa"),
}
longest = max((r.settings["seq"] for r in whole["sdpa"] if r.ok), default=None)
out = min((r.settings["seq"] for r in whole["eager"] if not r.ok), default=None)
lab.answer(
    "longest",
    measured=longest,
    note=f"Eager attention runs out at {out:,}." if out else "Eager attention fits, too.",
)
lab.plots.show(lab.plots.sweep(whole, x="seq", y="requested", fit=False))
timed = fitting(whole)
if have_times(timed):
    lab.plots.show(lab.plots.sweep(timed, x="seq", y="time", fit=False))
else:
    print("time of a step: no reference row")
curves = {}
for way, found in whole.items():
    pairs = [(r.settings["seq"], peak(r)) for r in found if r.ok]
    pairs = [(seq, nbytes) for seq, nbytes in pairs if nbytes > 1.02 * pairs[0][1]]
    if len(pairs) >= 3:  # less the lengths where the optimizer makes the peak
        square, slope, constant = numpy.polyfit(*zip(*pairs, strict=True), 2)
        curves[way] = square
        said = f"{constant / GiB:.2f} GiB + {slope / MiB:.2f} MiB s"
        each = square / (12 * 12)
        print(
            f"{way:5s} peak = {said} + {square:,.0f} B s²: {each:.1f} bytes a score, 12 heads, 12 blocks"
        )
for seq in (128, 1024, 1536):
    pair = [
        peak(r) for found in whole.values() for r in found if r.ok and r.settings["seq"] == seq
    ]
    if len(pair) == 2:
        print(f"1 x {seq:4d}: SDPA saves {1 - pair[1] / pair[0]:.0%} of {show(pair[0])}")
lab.guess(
    "saved",
    None,
    "GPT-2, 2 x 1024, fp32: which part of eager's peak does memory-efficient attention save?",
    unit="%",
)

# %% [markdown]
# *What to see:* both curves start at the same place, where the optimizer makes the peak and tokens do not count. Then
# eager bends upwards and SDPA goes straight on. A cross is a run that ran out of memory. The fits under the curves
# leave out the lengths where the optimizer makes the peak. Eager keeps 7 bytes for each score: the softmax, which
# autocast runs in fp32 (4), the mask of dropout (1), and what dropout leaves of it, in 16 bits (2).
#
# *Time:* one short sequence cannot keep a fast card busy. There the step takes as long as Python needs to start its
# kernels, and wobbles with it, up and down whatever the length; SDPA starts fewer. On a slower card the curves rise
# earlier.
#
# Now the claim about half the memory and 15 % of the time: two sequences of 1024 tokens, the memory-efficient backend
# forced, in both precisions.

# %% name="half"
for batch, seq in [(2, 1024), (1, 1024), (1, 512)]:  # what the budget allows
    sizes = {"batch": batch, "seq": seq}
    name = f"GPT-2, eager, fp32, {batch} x {seq}"
    first = lab.measure(gpt2, name=name, way="eager", precision="fp32", **sizes, **common)
    if first.ok:
        break
pairs, rows, saved, slower = {("eager", "fp32"): first}, [], {}, {}
for precision in ("fp32", "16 bits"):
    for way in ("eager", "efficient"):
        if (way, precision) not in pairs:
            name = f"GPT-2, {way}, {precision}, {batch} x {seq}"
            pairs[way, precision] = lab.measure(
                gpt2, name=name, way=way, precision=precision, **sizes, **common
            )
    eager, efficient = lab.with_times(
        [pairs["eager", precision], pairs["efficient", precision]]
    )
    saved[precision] = 1 - peak(efficient) / peak(eager)
    found = gain(eager, efficient)
    if found:
        slower[precision] = -found[0], found[1]
    cells = [show(peak(eager)), show(peak(efficient)), f"{saved[precision]:.0%}"]
    cells += [shown_time(eager), shown_time(efficient)]
    more = "{:+.0%} ± {:.0%}".format(*slower[precision]) if precision in slower else "–"
    rows.append([precision, *cells, more])
print(f"GPT-2, {batch} x {seq}; memory: {lesson.source}")
lab.table(["precision", "eager", "efficient", "saved", "eager", "efficient", "time"], rows)
lab.answer(
    "saved",
    measured=100 * saved["fp32"],
    note="Of the step's peak. The bytes of the model and of the logits do not shrink.",
)
said = "saves " + ", ".join(f"{s:.0%} ({p})" for p, s in saved.items())
if slower:
    said += "; time " + ", ".join(
        f"{more:+.0%} ± {noise:.0%} ({p})" for p, (more, noise) in slower.items()
    )
    about_half = all(0.4 <= s <= 0.6 for s in saved.values())
    costs = all(0.05 <= more <= 0.25 for more, _ in slower.values())
    lab.settle(
        "half",
        measured=said,
        verdict="holds" if about_half and costs else "does not hold",
        source=None if on_card else "reference",
        scope=f"{lesson.sm}, GPT-2 124M, {batch} x {seq}",
    )
else:
    lab.settle("half", measured=f"{said}; time unknown", verdict="not measured here")

# %% [markdown]
# What it saves depends on how large the square is in the peak: see the three lines under the curves. About the time,
# think of what is moved: eager attention writes the square to memory and reads it again at every operation. The
# *Account* counts this.
#
# ### A mask that turns flash off
#
# Flash knows one mask: causal, given by `is_causal=True`. Every *tensor* as `attn_mask` makes it refuse, also one that
# is True everywhere. SDPA then takes another backend. It says nothing.

# %% name="masks"
everywhere = torch.ones(1024, 1024, dtype=torch.bool)
causal = everywhere.tril()
padded = causal.expand(2, 1, -1, -1).clone()
padded[0, :, :, :300] = False  # 300 tokens of padding, left of the first sequence
cases = {
    "is_causal=True": (None, {"causal": True}),
    "is_causal=True, dropout 0.1": (None, {"causal": True, "dropout": 0.1}),
    "mask: True everywhere": (everywhere, {}),
    "mask: the causal triangle": (causal, {}),
    "mask: causal and padding": (padded, {}),
}
cards = {family: preset for family, preset in PRESETS.items() if family != "Turing"}
rows, refusals = [], {}
for name, (mask, options) in cases.items():
    row, refusals[name] = [name], []
    if on_card:
        found = attention.explain(
            *inputs(HALF, where=device), None if mask is None else mask.to(device), **options
        )
        row += [found.ran, found.refused.get("flash", "could run")]
        if capability >= (8, 0):  # an older card has no flash that a mask could turn off
            refusals[name].append("flash" in found.refused)
    for preset in cards.values():
        mask = None if mask is None else mask.to("meta")
        found = attention.explain(*inputs("bfloat16"), mask, card=preset, **options)
        row += [found.ran, found.refused.get("flash", "could run")]
        refusals[name].append("flash" in found.refused)
    rows.append(row)
head = [lesson.sm, "flash"] if on_card else []
lab.table(
    ["call", *head, *(part for family in cards for part in (f"{family} (rules)", "flash"))],
    rows,
)

detours = {}
for how in ("default", "flash", "efficient"):
    for masked in (False, True):
        able = how == "default" or (fits_card(how, HALF)[0] and not (how == "flash" and masked))
        if able:
            name = f"4 x 1024, {how}, {HALF}, {'mask' if masked else 'is_causal'}"
            report = lab.measure(
                one_layer, name=name, how=how, dtype=HALF, batch=4, masked=masked, **common
            )
            (detours[how, masked],) = lab.with_times([report])
for (how, masked), report in detours.items():
    kind = "mask tensor" if masked else "is_causal"
    print(f"{how:9s} {kind:11s} {show(peak(report)):>10s}   {shown_time(report)}")

with_mask = [all(refusals[name]) for name in cases if name.startswith("mask")]
without = [any(refusals[name]) for name in cases if not name.startswith("mask")]
holds = all(with_mask) and not any(without)


def complaints():
    """How many warnings PyTorch gives when a mask keeps flash from running."""
    q, k, v = inputs(HALF, where=device)
    return len(attention.warned(lambda: attend("default", q, k, v, mask=causal.to(device))))


said = f"flash refuses {sum(with_mask)} of {len(with_mask)} mask tensors, "
said += "no call without one" if not any(without) else "and calls without one"
heard = lab.known("warnings about a mask", complaints() if on_card else None)
if heard["value"] is not None:
    said += f"; {heard['value']} warnings"
where = device if on_card else "meta"
alone = attention.explain(*inputs(HALF, where=where), causal=True).ran
other = attention.explain(*inputs(HALF, where=where), causal.to(where)).ran
words = {"default": f"default ({alone}, with a mask {other})", "efficient": "efficient"}
for how in [how for how in words if (how, True) in detours]:
    longer = gain(detours[how, False], detours[how, True])
    if longer:
        said += f"; time of {words[how]} {-longer[0]:+.0%} ± {longer[1]:.0%}"
verdict = "holds" if holds and not heard["value"] else "does not hold"
lab.settle("mask", measured=said, verdict=verdict)

# %% [markdown]
# Dropout does not disturb flash on a card. (On the processor it does: there any dropout means math.) cuDNN and the
# memory-efficient backend take a mask tensor, but have to read it, and cannot leave out the tiles above the diagonal:
# the lines under the table say what that costs, for the same triangle as `is_causal` and as a tensor. (On a fast card
# the shortest of these times are near what starting kernels takes, see above.)
#
# Hugging Face's tokenizers give an `attention_mask` with every batch. What becomes of it? A small GPT-2, watched:

# %% name="hugging-face"
tiny_sizes = {
    "n_layer": 1,
    "n_embd": 64,
    "n_head": 4,
    "vocab_size": 500,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
tiny = lab.models.gpt2("gpt2", attention="sdpa", **tiny_sizes).to(device).eval()
ids = torch.randint(1, 500, (2, 64), generator=generator).to(device)
ones = torch.ones_like(ids)
padding = ones.clone()
padding[0, :20] = 0
rows = []
for name, given in {"none": None, "all ones": ones, "with padding": padding}.items():
    with attention.watch() as calls, torch.no_grad():
        tiny(input_ids=ids, attention_mask=given)
    (call,) = calls
    rows.append([name, call.mask, str(call.causal), call.on("rtx3090", "bfloat16").ran])
lab.table(
    ["attention_mask", "mask that SDPA gets", "is_causal", "16 bits on Ampere (rules)"], rows
)

# %% [markdown]
# A mask of ones is dropped on the way, and flash stays. One padded token in the batch, and a tensor reaches SDPA.
#
# The ways out, in this order:
#
# 1. Nothing is padded: give no mask. In causal training with padding on the *right* no real token ever sees a padded
#    one; labels of -100 for the padding are enough.
# 2. Pad less: batches of equal lengths, or packing (lesson 09, planned).
# 3. Sequences without padding at all: nested tensors (`torch.nested`, layout `torch.jagged`), the *varlen* functions of
#    `flash-attn` and of `torch.nn.attention.varlen` (in newer versions of PyTorch), which take one long row of tokens
#    and the places where sequences begin.
# 4. A pattern of your own (windows, documents): FlexAttention compiles a fused kernel for it (lesson 08).

# %% [markdown]
# ## Account
#
# ### Softmax, one tile at a time
#
# How can a kernel compute softmax of a row without having the whole row? Softmax needs the row's maximum (so that exp
# does not overflow) and the sum of exp(score - maximum). Both can be kept *running*: when a tile brings a larger
# maximum, everything summed so far shrinks by exp(old - new). This is the *online softmax* (Milakov and Gimelshein
# 2018), and with the product with v in the same loop it is FlashAttention (Dao et al. 2022). In plain PyTorch:


# %% name="tiles"
def in_tiles(q, k, v, tile=64):
    """Causal attention with one tile of keys at a time: the output, and logsumexp of each row of scores."""
    rows = torch.arange(q.shape[-2], device=q.device)[:, None]
    out = torch.zeros_like(q)
    best = torch.full_like(q[..., :1], -math.inf)  # running maximum of each row
    total = torch.zeros_like(best)  # running sum of exp(score - best)
    for start in range(0, k.shape[-2], tile):
        keys, values = k[..., start : start + tile, :], v[..., start : start + tile, :]
        scores = q @ keys.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (.., seq, tile)
        ahead = torch.arange(start, start + keys.shape[-2], device=q.device) > rows
        scores = scores.masked_fill(ahead, -math.inf)
        larger = torch.maximum(best, scores.amax(-1, keepdim=True))
        shrink, weights = (best - larger).exp(), (scores - larger).exp()
        total = shrink * total + weights.sum(-1, keepdim=True)
        out = shrink * out + weights @ values
        best = larger
    return out / total, (best + total.log())[..., 0]


q, k, v, _ = originals  # float64
tiled, logsumexp = in_tiles(q, k, v)
scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
again = (scores - logsumexp[..., None]).exp()  # probabilities, from logsumexp alone
largest = {
    "output": (tiled - by_hand(q, k, v)).abs().max(),
    "logsumexp": (logsumexp - scores.logsumexp(-1)).abs().max(),
    "probabilities": (again - scores.softmax(-1)).abs().max(),
}
for name, off in largest.items():
    print(f"{name:13s} differs by at most {float(off):.1e}")
assert max(largest.values()) < 1e-12

# %% [markdown]
# The last line is why backward needs no probabilities: with one number for each row, the logsumexp, each tile of them
# can be computed again. A fused kernel keeps q, k, v, its output and the logsumexp. We ask autograd what it keeps, in
# bytes for each of the b h s elements (b sequences of s tokens, h heads, head size D = 64):

# %% name="saved"
kept = {}


def keeps(device, how="by hand", dtype="float32", batch=4, seq=1024):
    step = one_layer(device, how=how, dtype=dtype, batch=batch, seq=seq)

    def note(tensor):  # autograd calls this for every tensor that it saves
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    def watched():
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            step()

    return watched


rows, D = [], 64
wanted = {
    "by hand": lambda e, s: 3 * e * D + e * s + s / (4 * 12),
    "math": lambda e, s: 4 * (3 * D + s),
    "fused": lambda e, s: 4 * e * D + 4,
}
unseen = {"repeats": 0, "trace": False, "record": False}
for how, dtype in [
    ("by hand", "float32"),
    ("efficient", "float32"),
    ("by hand", HALF),
    ("math", HALF),
] + [
    (how, HALF)
    for how in ("efficient", "flash", "cudnn")
    if ("flash", HALF) in reports or how == "efficient"
]:
    if how != "by hand" and not fits_card(how, dtype)[0]:
        continue
    lab.measure(keeps, how=how, dtype=dtype, **unseen)
    e = torch.finfo(getattr(torch, dtype)).bits // 8
    found = sum(kept.values()) / (4 * 12 * 1024)
    formula = wanted.get(how, wanted["fused"])(e, 1024)
    rows.append([dtype, how, f"{found:,.1f}", f"{formula:,.1f}", f"{found * 12:,.0f}"])
lab.table(["dtype", "way", "kept, bytes / (b h s)", "formula", "bytes a token, 12 heads"], rows)

# %% [markdown]
# With e bytes for an element (4 or 2):
#
# | way | kept for backward, bytes for each of the b h s | why |
# | --- | --- | --- |
# | by hand | 3 e D + e s | q, k, v and the probabilities; and the mask of looking ahead, s² bytes once for all heads |
# | math | 4 (3 D + s) | the same in fp32, whatever the dtype |
# | fused | 4 e D + 4 | q, k, v, the output, and the logsumexp in fp32 |
#
# At the peak, in backward, eager attention has four tensors of the scores' size: the probabilities, their gradient, the
# product of both (softmax's backward makes it) and the gradient of the scores. The tensors without the square are q, k,
# v, the output, the gradient from above and the gradient of v: six. And s² bytes for the mask of looking ahead.

# %% name="peak-account"
from labkit.memory.workspaces import workspaces

workspace = sum(workspaces(capability))
rows = []
for report in layers["by hand"]:
    seq = report.settings["seq"]
    terms = (4 * 4 * 12 * seq**2, 6 * 4 * 12 * seq * D, seq**2, workspace)
    off = f"{peak(report) / sum(terms) - 1:+.2%}" if report.ok else "out of memory"
    rows.append([str(seq), *map(show, (*terms, sum(terms), peak(report))), off])
lab.table(
    ["tokens", "16 h s²", "24 h s D", "s²", "workspace", "formula", lesson.source, "off"], rows
)

# %% [markdown]
# ### Why it is faster too
#
# Both ways do about the same arithmetic: the fused kernel computes the scores again in backward, but may leave out the
# tiles above the diagonal, where nobody looks. By hand, however, the s² numbers travel to the card's memory and back at
# every operation. The forward pass of one layer, 4 x 1024 tokens, by the data sheet's ceilings follows; the last column
# is what forward *and* backward took above (fused: the memory-efficient backend). In 16 bits the arithmetic units are
# many times faster and the memory is not: the gap widens.

# %% name="traffic"
same = [card for card in lab.machine.PRESETS.values() if card.title == lesson.machine.card]
sheet = same[0] if same else lab.machine.preset()
pairs_of_tokens, elements = 4 * 12 * 1024**2, 4 * 12 * 1024 * D
traffic = {
    # written and read once by each of: product, division, mask, softmax, product with v
    "by hand": 4 * (8 * pairs_of_tokens + 4 * elements),
    "fused": 4 * 4 * elements,
}
flops = 2 * 2 * D * pairs_of_tokens
ceilings = {"fp32": sheet.fp32_flops, "16 bits": sheet.half_flops}
print(f"{flops / 1e9:.1f} GFLOP either way; ceilings: {sheet.title}, {sheet.source}")
rows = []
for (kind, rate), shrink in zip(ceilings.items(), (1, 2), strict=True):
    for how, nbytes in traffic.items():
        moving, computing = nbytes / shrink / sheet.bandwidth_bytes, flops / rate
        limit = "memory" if moving > computing else "arithmetic"
        cells = [show(nbytes / shrink), f"{1e6 * moving:.0f} µs", f"{1e6 * computing:.0f} µs"]
        ran = (
            {"by hand": "by hand", "fused": "efficient"}[how],
            "float32" if shrink == 1 else HALF,
        )
        rows.append([kind, how, *cells, limit, shown_time(reports[ran])])
lab.table(["dtype", "way", "moved", "moving", "computing", "limit", "all, measured"], rows)

# %% [markdown]
# ## Equivalence
#
# Every backend against float64, with the same (rounded) inputs: relative difference of the output and of the three
# gradients, each in the Euclidean norm. In 16 bits the inputs are exact and the rounding starts inside: the
# probabilities are rounded before their product with v, the output at the end; each rounds by at most ε / 2 (ε: the
# distance from 1 to the next number). Independent roundings partly cancel, so ε for the output and 4 ε for gradients,
# which are products of more rounded factors, are fair tolerances. In fp32 the sums over s numbers count as well:
# 10 ε and 40 ε.

# %% name="equivalence"
rows, worst = [], []
for (how, dtype), off in differences.items():
    eps = torch.finfo(getattr(torch, dtype)).eps
    limits = (10 * eps, 40 * eps) if dtype == "float32" else (eps, 4 * eps)
    good = off[0] < limits[0] and max(off[1:]) < limits[1]
    worst.append(good)
    rows.append([dtype, how, *(f"{x / eps:.2f} ε" for x in off), "yes" if good else "NO"])
print(f"{'measured' if on_card else 'cpu'}, tensors of {small}")
lab.table(["dtype", "way", "output", "grad q", "grad k", "grad v", "within"], rows)
assert all(worst)

# %% [markdown]
# And the whole model: loss and gradients of a small GPT-2, eager against SDPA, in fp32, without dropout (which would
# draw other numbers), with weights large enough that scores matter. The second row switches on a rarely used option of
# the configuration that divides the scores of layer i by i + 1. Versions of transformers from before March 2026 did not
# hand it on to SDPA: the two ways then computed different models, and said nothing (transformers#44380). The last row
# shows how far apart such models are.

# %% name="equivalence-model"
no_dropout = {
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "initializer_range": 0.3,
}
OPTION = {"scale_attn_by_inverse_layer_idx": True}


def loss_and_gradients(kind, **options):
    torch.manual_seed(0)
    sizes = {**tiny_sizes, "n_layer": 3, **no_dropout, **options}
    model = lab.models.gpt2("gpt2", attention=kind, **sizes).to(device).train()
    loss = model(input_ids=ids, labels=ids).loss
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def apart(some, others):
    """Relative difference of the loss, and the largest one of a gradient."""
    loss, *gradients = (
        float((a - b).norm() / a.norm()) for a, b in zip(some, others, strict=True)
    )
    return loss, max(gradients)


eager, sdpa = loss_and_gradients("eager"), loss_and_gradients("sdpa")
with_option = loss_and_gradients("eager", **OPTION)
rows = {
    "eager and sdpa": apart(eager, sdpa),
    "eager and sdpa, option on": apart(with_option, loss_and_gradients("sdpa", **OPTION)),
    "eager, option on and off": apart(with_option, eager),
}
lab.table(
    ["compared", "loss differs by", "gradients differ by", "same model"],
    [
        [name, *(f"{x:.1e}" for x in off), "yes" if max(off) < 1e-4 else "no"]
        for name, off in rows.items()
    ],
)

# %% [markdown]
# ## Negative control
#
# A square of a small number is small. Here are always 4096 tokens, cut into short or long sequences, so that all but
# attention is the same; then the whole model, 2048 tokens in sequences of 128 and of 32. For the verdict, less than
# a tenth counts as nothing, and a time counts only as far as it is beyond the noise (half of both interquartile
# ranges).

# %% name="guess-short"
lab.guess(
    "short",
    None,
    "GPT-2, 16 x 128 tokens, 16 bits: which part of eager's peak does SDPA save?",
    unit="%",
)

# %% name="negative-control"
short = {
    how: [
        lab.measure(
            one_layer,
            name=f"4096 tokens, {how}, {seq}",
            how=how,
            dtype=HALF,
            batch=4096 // seq,
            seq=seq,
            **common,
        )
        for seq in (32, 64, 128, 256, 512, 1024)
    ]
    for how in ("by hand", "default")
}
lab.plots.show(lab.plots.sweep(short, x="seq", y="requested", log=True, fit=False))
timed = fitting(short)
if have_times(timed):
    lab.plots.show(lab.plots.sweep(timed, x="seq", y="time", log=True, fit=False))
else:
    print("time of a layer: no reference row")
saves, gains = {}, {}
for seq in (128, 32):
    for batch in (2048 // seq, 512 // seq):  # fewer where the budget is much smaller than 8 GiB
        name = f"{batch} x {seq}"
        pair = [
            lab.measure(
                gpt2, name=f"GPT-2, {way}, {name}", way=way, batch=batch, seq=seq, **common
            )
            for way in ("eager", "sdpa")
        ]
        if all(r.ok for r in pair):
            break
    saves[name] = 1 - peak(pair[1]) / peak(pair[0])
    gains[f"GPT-2, {name}"] = gain(*lab.with_times(pair))
for before, after in zip(timed["by hand"], timed["default"], strict=True):
    if before.settings["seq"] in (32, 128):
        gains[f"one layer, {before.settings['seq']} tokens"] = gain(before, after)
lab.answer(
    "short",
    measured=100 * next(iter(saves.values())),
    note=f"With longer sequences, above, it was {saved['16 bits']:.0%}.",
)
said = "GPT-2, less memory: " + ", ".join(f"{s:.1%} ({name})" for name, s in saves.items())
known = {name: found for name, found in gains.items() if found}
if known:
    said += "; less time: "
    said += ", ".join(f"{g:.0%} ± {noise:.0%} ({name})" for name, (g, noise) in known.items())
    some_memory = max(saves.values()) >= 0.1
    some_time = [name for name, (g, noise) in known.items() if g - noise > 0.1]
    some_noise = [name for name, (_, noise) in known.items() if noise > 0.1]
    if some_memory and some_time:
        verdict = "does not hold"
    elif some_memory:
        verdict = "holds when only time counts"
    elif some_time:
        verdict = f"holds when only memory counts ({some_time[0]}: less time beyond all noise)"
    else:
        verdict = "holds when noise above a tenth is left out" if some_noise else "holds"
    lab.settle("short", measured=said, verdict=verdict, source=None if on_card else "reference")
else:
    lab.settle("short", measured=f"{said}; time unknown", verdict="not measured here")
by_hand_peak, sdpa_peak = (peak(short[how][0]) for how in ("by hand", "default"))
print(f"one layer, 128 x 32: SDPA takes {sdpa_peak / by_hand_peak - 1:+.1%} memory")
print(f"SDPA against eager or by hand: {said}")

# %% [markdown]
# *What to see:* by hand the memory falls with the length and comes down to the flat curve of SDPA. For the shortest
# sequences the probabilities are no larger than what a fused kernel keeps in their place, the output and the logsumexp:
# e s bytes against e D + 4. What may remain is time: one kernel is started instead of several, and on a fast card a
# step of short sequences waits for nothing but starts.

# %% [markdown]
# ## Pitfalls
#
# **It is installed, and still slow.** Something falls back: fp32 inputs, a mask tensor, bf16 on Turing. Put
# `attention.watch()` around one step, or force the backend with `sdpa_kernel`: the error says why it refuses.
#
# **`output_attentions=True` and SDPA.** A fused kernel never has the probabilities, so it cannot return them. Hugging
# Face warns and returns none, or asks for `"eager"`.
#
# **Eager and SDPA give different losses.** With dropout they draw different numbers: compare in `eval()`. Without: see
# the option above (transformers#44380), and upgrade.
#
# **A row of NaN, or worse.** A query that may see no key at all (a padded token on the left) has a softmax of nothing,
# and every backend has its own answer: the cell below asks. Let such a row see itself, and leave it out of the loss.
#
# **"No execution plans support the graph".** An error from cuDNN's backend, on Hopper or Blackwell cards.
# `torch.backends.cuda.enable_cudnn_sdp(False)` takes it out of the choice; flash is next.

# %% name="no-keys"
blind = torch.ones(64, 64, dtype=torch.bool, device=device).tril()
blind[0] = False  # the first query sees no key
q, k, v = (t[..., :64, :].to(device, getattr(torch, HALF)) for t in originals[:3])


def first_row(how):
    """What becomes of a query without keys: nan, zeros or numbers."""
    if how == "by hand":
        row = ((q @ k.transpose(-2, -1)).masked_fill(~blind, -math.inf).softmax(-1) @ v)[
            ..., 0, :
        ]
    else:
        row = attend(how, q, k, v, mask=blind)[..., 0, :]
    return "nan" if row.isnan().any() else "numbers" if row.any() else "zeros"


rows = []
for how in WAYS:
    if how == "flash" and on_card:
        continue  # it takes no mask
    asked = first_row(how) if runs_here(how, HALF) else None
    if on_card or how in ("efficient", "cudnn"):
        found = lab.known("a query without keys", asked, what=how)
    else:
        found = lab.fact("a query without keys", asked, what=how)
    rows.append([how, found["value"] or "–", found["label"]])
lab.table(["way", "the row is", "source"], rows)

# %% [markdown]
# ### Names that you will meet
#
# Hugging Face's `attn_implementation` and this machine, asked by building a small GPT-2 with each (the older
# `model.to_bettertransformer()` is gone); and xFormers, the library that the memory-efficient backend came from.

# %% name="names"
meanings = {
    "eager": "operation by operation",
    "sdpa": "PyTorch's call; the default",
    "flash_attention_2": "the package flash-attn; 16 bits, Ampere or newer",
    "flex_attention": "patterns of your own, compiled (lesson 08)",
}
rows = []
for name, meaning in meanings.items():
    try:
        lab.models.gpt2("gpt2", attention=name, **tiny_sizes)
        rows.append([name, meaning, "can be built here"])
    except lab.UserError as error:
        reason = (
            str(error).partition("(")[2].rstrip(").")
        )  # "gpt2: ... makes no model (reason)"
        rows.append([name, meaning, reason[:70] or str(error)[:70]])
lab.table(["attn_implementation", "what it is", "here"], rows)


def xformers_attention(q, k, v):
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # xFormers: (batch, seq, heads, head_size)
    return memory_efficient_attention(q, k, v, attn_bias=LowerTriangularMask()).transpose(1, 2)


def xformers_layer(device, batch=4, seq=1024):
    shape, dtype = (batch, 12, seq, 64), getattr(torch, HALF)
    with device:
        q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
        from_above = torch.randn(shape, dtype=dtype)

    def step():
        xformers_attention(q, k, v).backward(from_above)
        q.grad = k.grad = v.grad = None

    return step


if extras.has("xformers") and on_card:
    q, k, v = (t.to(device, getattr(torch, HALF)) for t in originals[:3])
    exact = by_hand(*(t.double() for t in (q, k, v)))
    off = float((xformers_attention(q, k, v).double() - exact).norm() / exact.norm())
    lab.fact("xformers differs", off, "of the output, relative")
    report = lab.measure(xformers_layer, name="4 x 1024, xformers", **common)
    print(
        f"xFormers, 4 x 1024: {show(peak(report))}, {shown_time(report)}, differs by {off:.1e}"
    )
else:
    extras.missing(
        "xformers", "only PyTorch's own copy of its kernel, *efficient*, is measured"
    )
    for row in lab.reference("4 x 1024, xformers", kind="report"):
        print(row["label"], lab.Report.from_dict(row))

# %% [markdown]
# ## Exercise 1
#
# *4 min, easy.* One attention layer of **gpt2-large** (20 heads, head size 64), 2 sequences of 2048 tokens, bf16,
# flash: how many **MiB** does it keep for backward?
#
# <details><summary>Hint</summary>
#
# The last line of the table under *Account*: what does a fused kernel keep, and in which dtype? Multiply by b h s.
#
# </details>

# %% answer="flash_mib"
flash_mib = ...
### BEGIN SOLUTION
flash_mib = 2 * 20 * 2048 * (4 * 2 * 64 + 4) / 2**20
### END SOLUTION

# %% check="flash_mib" points=1
lab.check.number(
    "flash_mib",
    flash_mib,
    2 * 20 * 2048 * (4 * 2 * 64 + 4) / 2**20,
    unit="MiB",
    tolerance=0.002,
    mistakes={
        2 * 20 * 2048 * 4 * 2 * 64 / 2**20: (
            "Something small is missing: one number for each row.",
            0.5,
        ),
        2 * 20 * 2048 * (4 * 2 * 64 + 2) / 2**20: ("In which dtype is the logsumexp?", 0.5),
        2 * 20 * 2048 * (3 * 2 * 64 + 4) / 2**20: (
            "q, k and v are there. What else does backward need?",
            0.5,
        ),
        2 * 20 * 2048 * 3 * 2 * 64 / 2**20: "q, k and v are there. Two more things are kept.",
        2 * 20 * 2048 * (4 * 4 * 64 + 4) / 2**20: "bf16 has 2 bytes.",
        2
        * 20
        * 2048
        * (3 * 2 * 64 + 2 * 2048)
        / 2**20: "These are the probabilities by hand: what does flash keep instead?",
        20 * 2048 * (4 * 2 * 64 + 4) / 2**20: "This is one sequence: how many are there?",
        2 * 2048 * (4 * 2 * 64 + 4) / 2**20: "This is one head: how many are there?",
        2 * 12 * 2048 * (4 * 2 * 64 + 4) / 2**20: "gpt2-large has more heads than gpt2.",
        36
        * 2
        * 20
        * 2048
        * (4 * 2 * 64 + 4)
        / 2**20: "This is the whole model; one layer is asked for.",
    },
    hint="What does a fused kernel keep?",
)

# %% [markdown]
# ## Exercise 2
#
# *10 min, medium.* Keys can be cut in two: attention over the first half gives `out_a` (…, seq, head_size) and its
# logsumexp `lse_a` (…, seq), over the second half `out_b` and `lse_b`. Write `merge(out_a, lse_a, out_b, lse_b)`:
# output and logsumexp of attention over all keys. It must also work when scores are as large as 1000. (This is how
# attention over several cards, or over a cache in pieces, is put together.)
#
# <details><summary>Hint</summary>
#
# A half's weight is its share of the sum: exp(lse_a) / (exp(lse_a) + exp(lse_b)). exp(1000) is infinite: take the
# larger of the two off first, as `in_tiles` does, or look for a function of PyTorch that adds in logarithms.
#
# </details>


# %% answer="merge"
def merge(out_a, lse_a, out_b, lse_b):
    ### BEGIN SOLUTION
    lse = torch.logaddexp(lse_a, lse_b)
    share_a, share_b = (lse_a - lse).exp()[..., None], (lse_b - lse).exp()[..., None]
    return share_a * out_a + share_b * out_b, lse
    ### END SOLUTION


# %% check="merge" points=2
def half_of(scores, values):
    """Attention of `scores` (..., seq, keys) over `values` (..., keys, head_size), and logsumexp of each row."""
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def judge(scores, values):
    """What `lab.check.code` asks about the pair that was returned: True, or what is wrong with it."""
    out, lse = half_of(scores, values)

    def verdict(found):
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            return "two results are asked for: the output and the logsumexp."
        if not all(isinstance(t, torch.Tensor) for t in found):
            return "both results should be tensors."
        if found[0].shape != out.shape or found[1].shape != lse.shape:
            shapes = " and ".join(str(tuple(t.shape)) for t in found)
            return f"the shapes are {shapes}; how were out_a and lse_a shaped?"
        if not all(torch.isfinite(t).all() for t in found):
            return "gives inf or nan: what is exp of a large logsumexp?"
        if not torch.allclose(found[0], out, atol=1e-9):
            half = scores.shape[-1] // 2
            a, b = (
                half_of(scores[..., :half], values[..., :half, :])[0],
                half_of(scores[..., half:], values[..., half:, :])[0],
            )
            if torch.allclose(found[0], (a + b) / 2):
                return "the output is the plain mean: do both halves weigh the same?"
            if torch.allclose(found[0], a + b):
                return "the output is the plain sum: by what must each half be weighed?"
            return "the output is not that of attention over all keys."
        return (
            torch.allclose(found[1], lse, atol=1e-9)
            or "the output is right, the logsumexp is not."
        )

    return verdict


def halves(factor, *lead, keys=12, cut=6):
    numbers = torch.Generator().manual_seed(factor)
    scores = factor * torch.randn(*lead, 5, keys, generator=numbers, dtype=torch.float64)
    values = torch.randn(*lead, keys, 4, generator=numbers, dtype=torch.float64)
    a = half_of(scores[..., :cut], values[..., :cut, :])
    b = half_of(scores[..., cut:], values[..., cut:, :])
    return lab.check.case(*a, *b, expect=judge(scores, values), raw=True)


lab.check.code("merge", merge, [halves(1), halves(3, 2, 6), halves(1000)], points=2)

# %% [markdown]
# ## Exercise 3
#
# *6 min, medium.* Three calls on an RTX 3090 (Ampere):
#
# ```
# A  q, k, v in float32, is_causal=True
# B  q, k, v in bfloat16, attn_mask=torch.ones(seq, seq, dtype=torch.bool).tril()
# C  q, k, v in bfloat16, is_causal=True, dropout_p=0.1
# ```
#
# Which of them runs flash? For each of the others, say why not, what runs instead, and what you would change.
#
# <details><summary>Hint</summary>
#
# `attention.explain(..., card="rtx3090")` answers for tensors on the device "meta"; so do the tables under *Which
# kernel ran?* and *A mask that turns flash off*.
#
# </details>

# %% answer="runs_flash"
runs_flash = ...
### BEGIN SOLUTION
runs_flash = "C"
### END SOLUTION

# %% check="runs_flash" points=1
lab.check.choice(
    "runs_flash",
    runs_flash,
    "C",
    of=("A", "B", "C"),
    mistakes={
        "A": "Look at the dtype: which dtypes does flash take?",
        "B": "This mask says what is_causal says. Does flash look into it?",
    },
)

# %% answer="refusals_why" points=2
refusals_why = ...
### BEGIN SOLUTION
refusals_why = """A: flash takes only 16-bit inputs, so fp32 runs the memory-efficient backend; use
autocast or cast q, k and v to bfloat16. B: flash refuses any mask tensor, whatever is in it, so the
memory-efficient backend runs; drop the mask and say is_causal=True. C is left: dropout does not disturb
flash on a card."""
### END SOLUTION

# %% check="refusals_why"
lab.check.words(
    "refusals_why",
    refusals_why,
    {
        r"fp32|float32|32.bit|16.bit|half|autocast|precision|dtype": "Why does A not run flash?",
        r"is_causal": "What would you write in B instead of the mask?",
        r"efficient": "Which backend runs instead?",
    },
    against={
        r"(do not|don't) know|no idea": "Say what you do know: what does flash refuse?",
        r"(?<!not )(?<!n't )\b(falls?|goes|runs?|takes?) (back )?(to |on |by )?(the )?math\b": (
            "Does an RTX 3090 need math for A or B?"
        ),
        r"\b[ab] (runs|takes|uses) flash\b": "Look at the tables again: what keeps flash from running there?",
    },
    points=2,
    least=15,
)

# %% [markdown]
# ## Take-away
#
# 1. The square is in memory only if somebody writes the scores down. Fused kernels keep q, k, v, the output and one
#    number for each row, and compute the probabilities again, tile by tile.
# 2. SDPA chooses silently: by dtype, mask, head size and card. Ask which one ran (`attention.watch()`), do not believe.
# 3. The gain grows with the sequence. At 128 tokens look elsewhere.
#
# Next: lesson 07, compilation.

# %% name="finish"
lab.finish(
    "SDPA, 16 bits, is_causal instead of a mask tensor; check once which backend ran. Turing: fp16, memory-efficient."
)
