# ---
# jupyter:
#   labkit:
#     title: What do 16 bits save, and what do they cost?
#     question: How much memory and time does mixed precision really save, and when does it break training?
#     after: choose between fp32, fp16 and bf16 for a training step, say what it saves, and find what breaks it
#     minutes: {gpu: 2, cpu: 0.6}
#     memory: 8 GiB budget
#     needs: [01_baseline_oom]
#     fetch: [smollm2-135m]
# ---

# %% name="begin"
import contextlib
import copy
import dataclasses
import math
import re

import numpy
import pandas
import torch

from IPython.display import display

import labkit as lab
from labkit import halves, monitors, quiet, recipes

quiet.transformers()  # imported now, silently
lesson = lab.begin("02_mixed_precision")
BUDGET = lesson.budget  # bytes that PyTorch may take from the card
device = lab.device()
on_card = device.type == "cuda"
here = "measured" if on_card else "cpu"  # where numbers come from that are really computed
place = lesson.card if on_card else "the processor"
MiB, GiB = 2**20, 2**30
show = lab.show_bytes
fp16, bf16 = torch.float16, torch.bfloat16
# what AMP means on this card: bf16 where it is native, else (Turing, Volta) fp16 with a GradScaler
capability = lesson.machine.capability or lab.machine.preset().capability
native = lab.machine.native_dtypes(capability)["bf16"].native
AMP = "bf16" if native else "fp16"
print(f"AMP below: {AMP}")

# %% [markdown]
# ## Claims
#
# *Mixed precision* computes a part of the step with 16-bit numbers and keeps the rest in 32 bits. PyTorch's way to do
# it is *autocast*, also called AMP (automatic mixed precision). The table below this cell has six sentences that one
# hears about it; this run fills in its empty columns at the end.
#
# Words that this lesson uses all the time:
#
# | word | meaning |
# | --- | --- |
# | fp32 | the usual 32-bit number: 8 bits say its size (the exponent), 23 its digits |
# | fp16 | 16 bits: 5 for the size, 10 for the digits |
# | bf16 | 16 bits: 8 for the size, as in fp32, 7 for the digits |
# | ε | the distance from 1 to the next number: 2⁻²³ in fp32, 2⁻¹⁰ in fp16, 2⁻⁷ in bf16; rounding errs by half |
# | underflow | a number too small for a type becomes 0 |
# | overflow | a number too large for a type becomes infinite |
# | subnormal | a number near the lower end of a type's range, which has fewer digits |
# | autocast | a context in which PyTorch picks the type for each operator: 16 bits for matrix products |
# | loss scaling | multiplying the loss, and so every gradient, to keep small ones above fp16's lower end |
# | GradScaler | PyTorch's loss scaling: picks the factor, takes it off again, skips steps that overflowed |
# | NaN | "not a number": what 0 · ∞ or ∞ − ∞ gives; everything that it touches becomes NaN |
# | held-out | text that the model was not trained on |
# | nat | the unit of a loss made with the natural logarithm; e to the loss is the perplexity |

# %% name="claims"
lab.claim("memory", "AMP saves 1.5 to 2 times the memory.", said_by="blog posts, model cards")
lab.claim("time", "AMP is 1.5 to 2 times as fast.", said_by="documentation, blog posts")
lab.claim("batch", "With AMP the batch can double.", said_by="blog posts, forum answers")
lab.claim("free", "AMP is free: the loss is as good as in fp32.", said_by="documentation")
lab.claim("softmax", "Softmax overflows in fp16.", said_by="forum answers, papers")
lab.claim(
    "log",
    "Against underflow: raise the scale to 2**12, lengthen the interval to 500.",
    said_by="a training log",
)
lab.claims()

# %% [markdown]
# ## Experiment
#
# The step of lesson 01 with SDPA attention, and the three lines that AMP adds to it. Forward and loss run inside
# `torch.autocast`; backward runs outside, each operator in the type that its forward had. The `GradScaler` is needed
# for fp16 only, and does nothing when it is switched off. (Older code says `torch.cuda.amp`; `torch.amp` is the same
# for every device.)


# %% name="training"
def training(device, batch=4, seq=512, precision="fp32", checkpoint=0, **changes):
    with device:
        model = lab.models.gpt2("gpt2", attention="sdpa", **changes).train()
        tokens = torch.randint(0, 50257, (batch, seq))
    if checkpoint:  # lesson 03: keep only what goes from block to block, compute the rest again
        recipes.checkpoint_segments(model, checkpoint)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    cast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    def step():
        with torch.autocast(device.type, dtype=cast, enabled=cast is not None):
            loss = model(input_ids=tokens, labels=tokens).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step.tokens = batch * seq
    return step


# %% [markdown]
# ### What autocast casts
#
# Autocast has two long lists of operators: those that run in 16 bits and those that run in fp32. All others follow
# PyTorch's usual rules: the type of their input, and the wider one where two types meet. The cell asks some of each
# kind, once with an fp32 input and once with a 16-bit one, and notes the type of the result. A processor has lists of
# its own: the last columns run the same there.


# %% name="operators"
def result_types(device):
    """The type of each operator's result under bf16 autocast, of fp32 and of 16-bit input."""
    F, found = torch.nn.functional, {}
    with device:
        x, w = torch.randn(8, 8), torch.randn(8, 8)
        q, target = torch.randn(1, 2, 8, 8), torch.zeros(8, dtype=torch.long)
    operators = {
        "x @ w": lambda x: x @ w.to(x.dtype),
        "linear": lambda x: F.linear(x, w.to(x.dtype)),
        "attention (SDPA)": lambda x: F.scaled_dot_product_attention(*[q.to(x.dtype)] * 3),
        "softmax": lambda x: x.softmax(-1),
        "layer_norm": lambda x: F.layer_norm(x, (8,)),
        "cross_entropy": lambda x: F.cross_entropy(x, target),
        "x ** 3": lambda x: x**3,
        "exp": lambda x: x.exp(),
        "sum": lambda x: x.sum(),
        "tanh": lambda x: x.tanh(),
        "gelu": lambda x: F.gelu(x),
        "dropout": lambda x: F.dropout(x, 0.1),
        "x + an fp32 tensor": lambda x: x + w,
    }

    def step():
        with torch.autocast(device.type, dtype=torch.bfloat16):
            for name, operator in operators.items():
                found[name] = [
                    str(operator(x.to(dtype)).dtype).removeprefix("torch.")
                    for dtype in (torch.float32, torch.bfloat16)
                ]

    step()
    return step, found


types = {}


def asking(device):
    step, types[f"on a GPU ({lesson.source})"] = result_types(device)
    return step


lab.measure(asking, name="autocast's lists", repeats=0, trace=False, record=False)
_, types["on a processor (cpu)"] = result_types(torch.device("cpu"))
table = {
    (where, f"of {of}"): {name: pair[i] for name, pair in found.items()}
    for where, found in types.items()
    for i, of in enumerate(("fp32", "16 bits"))
}
pandas.DataFrame(table)

# %% [markdown]
# Two kinds of lines explain most of what follows. Products give 16 bits even when their input is fp32: autocast makes
# a 16-bit *copy of the weights* for each of them. And whatever adds a 16-bit result to an fp32 tensor is back in fp32:
# what goes from block to block in GPT-2 stays in fp32, because the embedding is not a product.
#
# ### The copies, and the cache for them
#
# The copy of a weight is needed in forward and again in backward, so it lives as long as an activation. A cache keeps
# it until the context ends, in case the weight is used twice. One layer of 4096 x 4096 weights (64 MiB in fp32), used
# once and eight times in one context, with the cache and without:


# %% name="cache"
def reusing(device, uses=1, cached=True):
    layer = torch.nn.Linear(4096, 4096, bias=False, device=device)
    x = torch.randn(16, 4096, device=device, requires_grad=True)  # as if a layer came before

    def step():
        with torch.autocast(device.type, dtype=bf16, cache_enabled=cached):
            y = x
            for _ in range(uses):
                y = layer(y)
            loss = y.sum()
        loss.backward()
        layer.zero_grad(set_to_none=True)
        x.grad = None

    return step


quick = {"repeats": 0, "nearest": False, "stateless": True}  # every step does the same
rows = {}
for cached in (True, False):
    peaks = [
        lab.measure(
            reusing, name="cache", uses=uses, cached=cached, record=False, **quick
        ).phase_peaks["forward"]
        for uses in (1, 8)
    ]
    rows["cache on (the default)" if cached else "cache_enabled=False"] = [*map(show, peaks)]
pandas.DataFrame(rows, index=["used once: peak in forward", "used eight times"]).T

# %% [markdown]
# *What to see:* eight uses without the cache hold eight copies of 32 MiB, with it one. The rest is the same
# everywhere: the weights, and the workspace of the products (lesson 01).
#
# ### Memory
#
# Guess before you see it: 3 sequences of 1024 tokens, AdamW, GPT-2 124M. How many times the peak of the AMP step is
# that of the fp32 step?

# %% name="guess-memory"
lab.guess("saving", None, "3 x 1024: peak in fp32 divided by peak with AMP?", unit="x")
lab.guess(
    "largest", None, "The largest batch of 1024 tokens in the budget, fp32?", unit="sequences"
)
lab.guess("largest_amp", None, "The same with AMP?", unit="sequences")
lab.guess("speed", None, "3 x 1024 on an H200: time of fp32's step divided by AMP's?", unit="x")

# %% name="memory"
SIZES = [(1, 256), (4, 512), (3, 1024)]
BIG = SIZES[-1]
timed = {"repeats": 5, "nearest": False, "stateless": True, "budget": BUDGET}
runs = {}
for batch, seq in SIZES:
    for precision in ("fp32", AMP):
        runs[batch, seq, precision] = lab.measure(
            training,
            name=f"{batch} x {seq}, {precision}",
            batch=batch,
            seq=seq,
            precision=precision,
            trace=(batch, seq) == BIG,
            **timed,
        )
for precision in {"bf16": ("fp16", "tf32"), "fp16": ("tf32",)}[AMP]:
    runs[(*BIG, precision)] = lab.measure(
        training,
        name=f"{BIG[0]} x {BIG[1]}, {precision}",
        batch=BIG[0],
        seq=BIG[1],
        precision=precision,
        trace=False,
        **timed,
    )
torch.set_float32_matmul_precision("highest")


def gib(report):
    return report.peak_bytes / GiB if report.ok else None


def ratio(batch, seq, precision=AMP):
    """The peak in fp32 divided by that with AMP; None where one of them ran out of memory."""
    pair = runs[batch, seq, "fp32"].peak_bytes, runs[batch, seq, precision].peak_bytes
    return pair[0] / pair[1] if all(pair) else None


lab.answer("saving", measured=ratio(*BIG))
lab.plots.grouped(
    {f"{b} x {s}": [gib(runs[b, s, p]) for p in ("fp32", AMP)] for b, s in SIZES},
    labels=("fp32", f"AMP, {AMP}"),
    unit="peak (GiB)",
    title="Peak of a GPT-2 step, fp32 and AMP",
    source=f"{lesson.source} · {lesson.card}",
)

# %% [markdown]
# *What to see:* the bars of a pair are nearly equally long. At the smallest size AMP does not take less at all.
#
# ### Time
#
# Speed is what 16 bits are made for: a card's matrix units (*tensor cores*) multiply them many times faster than
# fp32. *TF32* is a third way: fp32 tensors whose products are computed with 10 bits of digits,
# `torch.set_float32_matmul_precision("high")`. It takes no memory and changes no types. Compare AMP with it, too:
# part of the speed that is put down to AMP is that of the matrix units, and TF32 uses the same ones.

# %% name="time"
timed_runs = dict(zip(runs, lab.with_times(runs.values()), strict=True))


def seconds(*key):
    timing = timed_runs[key].timing if key in timed_runs else None
    return timing.median_seconds if timing else None


def faster(batch, seq, precision):
    pair = seconds(batch, seq, "fp32"), seconds(batch, seq, precision)
    return pair[0] / pair[1] if all(pair) else None


clock = next((r.timing.clock for r in timed_runs.values() if r.timing), None)
if clock is None:
    print("No card here, and no reference row of one: nothing to say about time.")
    lab.answer("speed", measured=None)
    lab.settle("time", measured="no card, no reference row", verdict="not measured here")
else:
    reference = clock.startswith("reference")
    where = clock if reference else f"measured · {lesson.card}"
    rates = {
        f"{b} x {s}, {p}": [1e3 * seconds(b, s, p), faster(b, s, p), gib(runs[b, s, p])]
        for b, s, p in timed_runs
        if seconds(b, s, p) and seconds(b, s, "fp32")
    }
    head = ["ms a step", "times as fast as fp32", f"peak in GiB ({lesson.source})"]
    display(pandas.DataFrame(rates, index=head).T.round(2))
    gains = {size: faster(*size, AMP) for size in SIZES if faster(*size, AMP)}
    source = "reference" if reference else "measured"
    borrowed = lab.reference(runs[(*BIG, AMP)].name, kind="report") if reference else []
    scope = borrowed[0]["provenance"]["capability"] if borrowed else None
    if BIG in gains:
        lab.answer(
            "speed",
            measured=gains[BIG],
            source=source,
            note="Against TF32 instead of fp32: "
            f"{seconds(*BIG, 'tf32') / seconds(*BIG, AMP):.2f} times."
            if seconds(*BIG, "tf32")
            else None,
        )
    said = ", ".join(f"{b} x {s}: {gain:.2f}" for (b, s), gain in gains.items())
    inside = [size for size, gain in gains.items() if gain >= 1.5]
    if len(inside) == len(gains):
        verdict = "holds"
    elif inside:
        verdict = (
            f"holds when a step has {math.prod(min(inside, key=math.prod)):,} tokens or more"
        )
    else:
        verdict = "does not hold"
    lab.settle(
        "time",
        measured=f"times as fast as fp32, {said}",
        verdict=verdict,
        source=source,
        scope=scope,
    )
    print(f"({where}; inside the {show(BUDGET)} budget)")

# %% [markdown]
# *What to see:* the more tokens a step has, the more AMP speeds it up; a small step waits for Python, not for
# products. TF32 has a good part of the speed, at the peak of fp32.
#
# ### fp16 and bf16: range or digits
#
# Both have 16 bits and spend them differently. fp16 has eight times finer steps; bf16 has the range of fp32.
#
# Which of the two does training need? That depends on how large gradients are. The rest of the lesson uses a small
# GPT-2 (2 blocks, width 64, bytes as tokens) that learns the source code of Python's standard library. It is small
# enough to run for real on a processor. A processor without 16-bit units is slow at 16-bit products;
# `halves.fast_products(device)` computes them there as a GPU's matrix unit does: products exact, sum in fp32, rounded
# once.


# %% name="small-model"
rows = {}
for dtype in (torch.float32, fp16, bf16):
    info = torch.finfo(dtype)
    rows[str(dtype).removeprefix("torch.")] = {
        "largest": f"{info.max:.3g} (2^{math.log2(info.max):.0f})",
        "smallest with all digits": f"2^{math.log2(info.tiny):.0f}",
        "smallest of all": f"2^{math.log2(info.smallest_normal * info.eps):.0f}",
        "ε": f"2^{math.log2(info.eps):.0f}",
        "1.003 becomes": f"{torch.tensor(1.003).to(dtype).item():.4f}",
        "1e-8 becomes": f"{torch.tensor(1e-8).to(dtype).item():.2g}",
        "70000 becomes": f"{torch.tensor(70000.0).to(dtype).item():g}",
    }
display(pandas.DataFrame(rows).T)

if not on_card:
    torch.set_num_threads(1)  # the model is so small that a second core would only wait
SMALL = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": 64}
PLAIN = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FUSED = {"activation_function": "gelu_pytorch_tanh"}  # one kernel, so no x ** 3 in 16 bits
ENDS = {"bos_token_id": 0, "eos_token_id": 0}


def small(seed=0):
    torch.manual_seed(seed)
    model = lab.models.gpt2("gpt2", attention="sdpa", **SMALL, **PLAIN, **FUSED, **ENDS)
    return model.to(device).train()


def loss_of(model, tokens, cast=None):
    with torch.autocast(device.type, dtype=cast, enabled=cast is not None):
        return model(input_ids=tokens, labels=tokens).loss


def gradients(model, tokens, cast=None, scale=1.0):
    """One forward and backward pass; all gradients in one piece, times `scale`. They stay in the model, too."""
    model.zero_grad(set_to_none=True)
    (loss_of(model, tokens, cast) * scale).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


text = lab.data.byte_blocks(seq=64, count=16 * 20)
learner = small()
optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-3)
history = lab.training.train(learner, optimizer, text.split(16))
tokens = lab.data.byte_blocks(seq=64, count=16, split="held-out").to(device)
wanted = gradients(learner, tokens)
print(f"loss {history.losses[0]:.2f} -> {history.losses[-1]:.2f} nats a byte; ", end="")
print(f"{wanted.numel():,} gradients, the largest {wanted.abs().max():.2g}")
rows = {}
for power in (0, 16):
    lost = monitors.lost(wanted, fp16, scale=2.0**power)
    rows[f"times 2^{power}"] = [f"{s:.2%}" for s in (lost.zero, lost.subnormal, lost.overflow)]
display(pandas.DataFrame(rows, index=["0 in fp16", "few digits in fp16", "∞ in fp16"]).T)
exponents = monitors.exponents(wanted).numpy()
axes = lab.plots.histograms(
    {"as they are": exponents, "times 2^16": exponents + 16},
    x="log2 of the gradient's magnitude",
    bins=numpy.arange(-48, 20),
    marks={"0 below": -25, "all digits above": -14, "∞ above": 16},
    title="How large gradients are, and what fp16 can hold",
    source=f"{here} · {place}, small GPT-2 in fp32",
)
axes.set_ylim(top=1.3 * axes.get_ylim()[1])  # room for the names of the lines
axes

# %% [markdown]
# *What to see:* the solid curve has a tail to the left of fp16's lower end, and a larger part where fp16 has few
# digits. (The smallest number is 2⁻²⁴; what is above half of it still rounds up to it.) The dashed curve, the same
# gradients times 2¹⁶, has moved into the range and still has room on the right. bf16's range is that of fp32: nothing
# falls out.
#
# The tail gets longer with the model. The gradient of the mean loss with respect to one logit is about p / n, with n
# tokens and p the probability that the model gives to that word. For 8 x 1024 tokens and p = 1/50257 this is 2⁻²⁹:
# below the smallest number of fp16.
#
# Autocast keeps weights in fp32, and so `p.grad` is fp32, too. How can it underflow? Backward's products run in 16 bits
# like those of forward: the gradient of a 16-bit copy is made in fp16 and turned into fp32 only then. What was 0 stays
# 0. So the loss is multiplied by a *scale* before backward, which makes every gradient larger on its way.
#
# The cell makes the pass under fp16 autocast with several scales and counts the gradients that come back as 0 although
# they are not 0 in fp32. (The counts differ a little from the table above, which rounds finished gradients: here all
# that lies on the way is rounded, and what LayerNorms compute in fp32 is not.) It does so for the healthy model and for
# one that is *starved* on purpose: a gate lets so little pass through the MLP of its second block that the gradient's
# norm there is about 1e-9, as in a layer that a training log reports.


# %% name="scales"
class Gate(torch.nn.Module):
    """Multiplies by a constant; a gate that starts small is a known way to start a deep model."""

    def forward(self, x):
        return x * 1e-8


def starved(model):
    """Almost nothing passes through the MLP of block 1."""
    model.transformer.h[1].mlp.dropout = Gate()


thin = copy.deepcopy(learner)
starved(thin)
exact = {"healthy": gradients(learner, tokens), "starved": gradients(thin, tokens)}
layer = thin.transformer.h[1].mlp.c_fc.weight
exact_layer = layer.grad.clone()
print(
    f"gradient norm of transformer.h.1.mlp.c_fc in the starved model: {exact_layer.norm():.1e}"
)

rows, lost_at, room = {}, {}, 0
with halves.fast_products(device):
    for power in (0, 8, 12, 16, 17, 18, 19, 20):
        got = gradients(learner, tokens, fp16, scale=2.0**power)
        gradients(thin, tokens, fp16, scale=2.0**power)
        zeros = int(((got == 0) & (exact["healthy"] != 0)).sum())
        lost_at[power] = float(((layer.grad == 0) & (exact_layer != 0)).double().mean())
        steps = bool(got.isfinite().all())
        room = power if steps else room  # the largest scale that works
        rows[f"2^{power}"] = {
            "healthy: come back as 0": f"{zeros:,}",
            "starved layer: come back as 0": f"{lost_at[power]:.1%}",
            "healthy: not finite": f"{int((~got.isfinite()).sum()):,}",
            "GradScaler": "steps" if steps else "skips, and halves the scale",
        }
    got = gradients(learner, tokens, bf16)
    gradients(thin, tokens, bf16)
    zeros = int(((got == 0) & (exact["healthy"] != 0)).sum())
    rows["bf16, no scale"] = {
        "healthy: come back as 0": f"{zeros:,}",
        "starved layer: come back as 0": f"{float((layer.grad == 0).double().mean()):.1%}",
        "healthy: not finite": f"{int((~got.isfinite()).sum()):,}",
        "GradScaler": "not needed",
    }
pandas.DataFrame(rows).T

# %% [markdown]
# A larger scale loses fewer gradients, until the largest one overflows. Overflow is no disaster: the step is skipped.
# How large a scale may be differs from batch to batch, since their gradients do: a scaler has to find out again and
# again.
#
# ### GradScaler by hand
#
# What PyTorch's `GradScaler` does fits into twenty lines: multiply the loss, divide the gradients, look whether all
# are finite, step or skip; halve the scale after a skip, double it after `interval` steps in a row without one.


# %% name="scaler"
class HandScaler:
    def __init__(self, scale=2.0**16, interval=2000, growth=2.0, backoff=0.5):
        self.scale, self.interval = scale, interval  # the defaults of torch.amp.GradScaler
        self.growth, self.backoff = growth, backoff
        self.good = 0  # steps in a row that were not skipped

    def step(self, optimizer):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        for gradient in gradients:
            gradient.div_(self.scale)
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        if finite:
            optimizer.step()
        self.update(finite)
        return finite

    def update(self, finite):
        if not finite:
            self.scale, self.good = self.scale * self.backoff, 0
            return
        self.good += 1
        if self.good == self.interval:
            self.scale, self.good = self.scale * self.growth, 0


def both_scalers(steps=10):
    """Ours and PyTorch's, started too high and with a short interval: scales, and the largest difference."""
    models = [copy.deepcopy(learner) for _ in range(2)]
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.01) for m in models)
    hand = HandScaler(2.0**21, interval=3)
    torchs = torch.amp.GradScaler(device.type, init_scale=2.0**21, growth_interval=3)
    scales = []
    for part in text[: 8 * steps].to(device).split(8):
        (loss_of(models[0], part, fp16) * hand.scale).backward()
        hand.step(ours)
        torchs.scale(loss_of(models[1], part, fp16)).backward()
        torchs.step(theirs)
        torchs.update()
        ours.zero_grad()
        theirs.zero_grad()
        scales.append((math.log2(hand.scale), math.log2(torchs.get_scale())))
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return scales, max(float((a - b).detach().abs().max()) for a, b in pairs)


with halves.fast_products(device):
    scales, difference = both_scalers()
print("log2 of the scale after each step")
print("ours     ", *(f"{a:3.0f}" for a, _ in scales))
print("PyTorch's", *(f"{b:3.0f}" for _, b in scales))
print(f"largest difference between the two trained models: {difference}")
lab.guess(
    "catch_up",
    None,
    "From 2**12 on, doubled every 500 steps: after how many steps is the scale 2**16?",
    unit="steps",
)

# %% [markdown]
# ### A setting from the field
#
# A training log, against gradients that underflow: "raised `init_scale` to 2\*\*12 and lengthened `growth_interval`
# to 500". The defaults are 2\*\*16 and 2000: both numbers were lowered. Which direction helps? The scale alone
# follows from a rule, so it can be followed without a model: the cell lets it run for 6000 steps, with an overflow
# above the largest scale that worked in the table before.


# %% name="log"
SETTINGS = {
    "the log: 2^12, 500": (2.0**12, 500),
    "defaults: 2^16, 2000": (2.0**16, 2000),
    "only the interval: 2^16, 500": (2.0**16, 500),
}
curves, rows = {}, {}
for name, (scale, interval) in SETTINGS.items():
    hand, path, skips = HandScaler(scale, interval), [], 0
    for _ in range(6000):
        path.append(math.log2(hand.scale))
        finite = hand.scale <= 2.0**room
        skips += not finite
        hand.update(finite)
    curves[name] = (list(range(6000)), path)
    top = next((i for i, power in enumerate(path) if power >= room), None)
    rows[name] = {
        "starved layer: lost at the start": f"{lost_at[int(math.log2(scale))]:.2%}",
        f"steps until 2^{room}": top,
        "steps skipped of 6000": skips,
    }
display(pandas.DataFrame(rows).T)
worse = lost_at[12] > lost_at[16]
theirs, usual = (curves[name][1] for name in list(SETTINGS)[:2])
reached = [power >= 16 for power in theirs]
ahead = [step for step, (a, b) in enumerate(zip(theirs, usual, strict=True)) if a > b]
lab.answer(
    "catch_up",
    measured=float(reached.index(True)) if any(reached) else None,
    formula=4 * 500,
    source=here,
)
sooner, slower = (
    rows[name][f"steps until 2^{room}"]
    for name in ("only the interval: 2^16, 500", "defaults: 2^16, 2000")
)


def reaching(steps):
    return "not within 6000 steps" if steps is None else f"after {steps} steps"


helps = sooner is not None and (slower is None or sooner < slower)
lab.settle(
    "log",
    measured=f"both numbers are below the defaults; gradients of the starved layer that are lost at 2^12: "
    f"{lost_at[12]:.2%}, at 2^16: {lost_at[16]:.2%}; interval 500 reaches 2^{room} {reaching(sooner)}, 2000 "
    f"{reaching(slower)}; the log's scale is above that of the defaults "
    + (f"from step {ahead[0]:,} on, for a while" if ahead else "at no time"),
    verdict="holds"
    if not worse
    else "does not hold: the lower start loses more, and only the shorter interval helps"
    if helps
    else "does not hold",
    source=here,
)
lab.plots.lines(
    curves,
    x="step",
    y="log2 of the scale",
    title="The scale under three settings",
    source=f"by the rule; overflow above 2^{room} ({here})",
)

# %% [markdown]
# *What to see:* a low start loses gradients until the scale has grown. A short interval makes it grow sooner, which
# does help, and costs a skipped step each time it tries too high: where the log's curve crosses that of the defaults,
# the interval has made up for the start. So a higher start and a *shorter* interval act against underflow. Skipped
# steps cost little as long as they are few. Many of them say that the interval is too short, or that forward itself
# overflows (fault 3 below).
#
# ### Does softmax overflow?
#
# Softmax needs exp(x), and exp(x) leaves fp16's range above x = 11.1. But every library subtracts the largest score
# first, so the largest term is exp(0) = 1. The cell tries scores of growing size, with softmax by hand, PyTorch's in
# fp16, and what comes before it: the product q kᵀ of a query and a key with 64 components.


# %% name="softmax"
def by_hand(x):
    e = x.exp()
    return e / e.sum(-1, keepdim=True)


generator = torch.Generator().manual_seed(0)
noise = torch.randn(4, 256, generator=generator).to(device)
rows = {}
for size in (1, 8, 12, 100, 10_000, 60_000):
    scores = (noise / noise.abs().max() * size).to(fp16)
    exact = scores.double().softmax(-1)
    rows[f"scores up to {size:,}"] = {
        name: f"off by {float((p.double() - exact).abs().max()):.1g}"
        if p.isfinite().all()
        else "not finite"
        for name, p in (
            ("exp / sum by hand", by_hand(scores)),
            ("torch.softmax in fp16", scores.softmax(-1)),
        )
    }
display(pandas.DataFrame(rows).T)
hand_fails = any("not" in row["exp / sum by hand"] for row in rows.values())
finite = [name for name, row in rows.items() if "not" not in row["torch.softmax in fp16"]]
softmax_fails = len(finite) < len(rows)

rows, first_bad = {}, None
F = torch.nn.functional
for size in (1, 8, 30, 33, 100):
    q = torch.full((1, 1, 4, 64), float(size), device=device, dtype=fp16)
    with halves.fast_products(device):
        plain = q @ q.transpose(-1, -2)
        early = (q / 8) @ q.transpose(-1, -2)  # divided by the square root of 64 first
        fused = F.scaled_dot_product_attention(q, q, q)
    if first_bad is None and not plain.isfinite().all():
        first_bad = size
    rows[f"all components {size}"] = {
        "exact score": f"{64 * size**2:,}",
        "q @ kᵀ in fp16": f"{float(plain.max()):g}",
        "(q / 8) @ kᵀ": f"{float(early.max()):g}",
        "softmax of q @ kᵀ": "finite" if (plain / 8).softmax(-1).isfinite().all() else "NaN",
        "fused attention": "finite" if fused.isfinite().all() else "NaN",
    }
verdict = "holds" if softmax_fails else "does not hold"
if hand_fails and not softmax_fails:
    verdict = "holds when softmax is written as exp / sum, without taking off the maximum"
lab.settle(
    "softmax",
    measured=f"torch.softmax in fp16 is finite for {finite[-1]}; q kᵀ before it overflows from components of "
    f"{first_bad} on (64 x {first_bad}² > 65504)",
    verdict=verdict,
    source=here,
)
pandas.DataFrame(rows).T

# %% [markdown]
# So what overflows is not softmax but the score before it, and softmax turns an infinite score into NaN. Fused
# attention keeps scores in fp32 and never writes them. Under autocast on a GPU softmax runs in fp32 anyway (see the
# table of operators), but it gets scores that were already made in 16 bits.
#
# ### Three faults, and the monitors that find them
#
# Now the small model is broken on purpose, in three ways that a training log reports: a layer whose gradient norm
# falls to 1e-9; activations near zero after a LayerNorm; a loss that is NaN now and then. `labkit.monitors` looks from
# outside, with hooks: `gradient_norms(model)` gives one number a layer; inside `watch(model)` every module's output
# is looked at, and the first value that is not finite is noted with the module that made it.


# %% name="faults"
def flat(model):
    """Embeddings so small that their variance disappears beside the ε = 1e-5 inside LayerNorm."""
    model.transformer.wte.weight.data.mul_(1e-4)
    model.transformer.wpe.weight.data.mul_(1e-4)


def spiking(model):
    """One rare byte, 0, makes the MLP of block 1 shoot beyond 65504, fp16's largest number."""
    rare = model.transformer.wte.weight.data[0]
    rare.mul_(100)
    direction = torch.nn.functional.layer_norm(rare, rare.shape)
    model.transformer.h[1].mlp.c_fc.weight.data[:, 0] = 1200 * direction


def broken(fault):
    model = copy.deepcopy(learner)
    with torch.no_grad():
        fault(model)
    return model


batches = text[:48].reshape(6, 8, 64).clone()
batches[2::3, 0, 10] = 0  # the rare byte, once in every third batch

with halves.fast_products(device):
    model = broken(starved)
    gradients(model, batches[0].to(device), fp16)
    norms = {"fp16, no scale": monitors.gradient_norms(model)}
    gradients(model, batches[0].to(device))
    norms["fp32"] = monitors.gradient_norms(model)

    model = broken(flat)
    with monitors.watch(model) as seen:
        loss_of(model, batches[0].to(device), fp16)
    healthy = learner
    with monitors.watch(healthy) as normal:
        loss_of(healthy, batches[0].to(device), fp16)

    model, losses, troubles = broken(spiking), [], {}
    scaler = torch.amp.GradScaler(device.type)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number, part in enumerate(batches):
        with monitors.watch(model) as spike:
            loss = loss_of(model, part.to(device), fp16)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if spike.trouble:
            troubles[number] = str(spike.trouble)

table = pandas.DataFrame(norms)
print("1. Gradient norm by layer, the smallest five")
display(table[table["fp32"] > 0].sort_values("fp32").head().map("{:.1e}".format))
print("2. Size of activations after each LayerNorm (root mean square)")
layer_norms = [name for name in seen.activations if ".ln_" in name]
display(
    pandas.DataFrame(
        {
            "healthy": {n: normal.activations[n].rms for n in layer_norms},
            "broken": {n: seen.activations[n].rms for n in layer_norms},
        }
    ).map("{:.1e}".format)
)
print("3. Losses:", *(f"{x:.2f}" for x in losses))
print(*(f"   step {n}: {what}" for n, what in troubles.items()), sep="\n")
lab.guess("cured", None, "Of the three faults, how many does a loss scale of 2**16 cure?")
lab.plots.histograms(
    {
        "healthy": normal.activations["transformer.h.0.ln_1"].exponents,
        "broken": seen.activations["transformer.h.0.ln_1"].exponents,
    },
    x="log2 of the activation's magnitude",
    title="Activations after the first LayerNorm",
    source=f"{here} · {place}, fault 2",
)

# %% [markdown]
# *What to see:* a healthy LayerNorm gives values around 2⁰, as it divides by the standard deviation. The broken one
# divides by √ε instead, because the variance is far below ε.
#
# Note how the monitors differ. Fault 1: fp16 without a scale says 0 where fp32 says a small number, so something is
# lost. Fault 3: an infinite value in forward is blamed on one module; the scaler halves its scale each time, which
# cannot help, as the loss itself is not finite.
#
# ### The cures, one by one
#
# Against each fault: the default scale of 2¹⁶, the largest scale that the table of scales allows, fp32 in the module
# that is to blame, a smaller ε in every LayerNorm, bf16, and fp32 everywhere. A module keeps fp32 when autocast is
# switched off around it. Its input must be made fp32 too, since what comes in may have 16 bits already. A cure gets its
# ✓ when the gradient norm is within 10 % of the true one, when the root mean square after LayerNorm is above 0.1, or
# when the losses of three batches are all finite.


# %% name="cures"
class InFloat32(torch.nn.Module):
    """Runs a module in fp32 inside an autocast context."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return self.module(x.float())


def with_cure(fault, cure):
    """What the monitor says about a fault under a cure."""
    model = broken(fault)
    cast = {"bf16": bf16, "fp32 everywhere": None}.get(cure, fp16)
    scale = 2.0 ** {"scale 2^16": 16, f"scale 2^{room}": room}.get(cure, 0)
    if cure == "fp32 in that module":
        place = {starved: "mlp", flat: "ln_1", spiking: "mlp"}[fault]
        block = model.transformer.h[0 if fault is flat else 1]
        setattr(block, place, InFloat32(getattr(block, place)))
    if cure == "LayerNorm's ε 1e-12":
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = 1e-12
    if fault is spiking:
        losses = [loss_of(model, part.to(device), cast).detach() for part in batches[:3]]
        return sum(bool(loss.isfinite()) for loss in losses) / len(losses)
    if fault is flat:
        with monitors.watch(model) as seen:
            loss_of(model, batches[0].to(device), cast)
        return next(a.rms for n, a in seen.activations.items() if n.endswith("h.0.ln_1"))
    gradients(model, batches[0].to(device), cast, scale)
    norms = monitors.gradient_norms(model, scale=scale)
    return next(norm for name, norm in norms.items() if "h.1.mlp" in name and "c_fc" in name)


CURES = (
    "none",
    "scale 2^16",
    f"scale 2^{room}",
    "fp32 in that module",
    "LayerNorm's ε 1e-12",
    "bf16",
    "fp32 everywhere",
)
with halves.fast_products(device):
    outcome = {
        fault.__name__: {cure: with_cure(fault, cure) for cure in CURES}
        for fault in (starved, flat, spiking)
    }
truth = outcome["starved"]["fp32 everywhere"]
well = {
    "starved": lambda value: abs(value / truth - 1) < 0.1,
    "flat": lambda value: value > 0.1,
    "spiking": lambda value: value == 1,
}
cured = {fault: {c: well[fault](v) for c, v in row.items()} for fault, row in outcome.items()}
lab.answer(
    "cured",
    measured=float(sum(row["scale 2^16"] for row in cured.values())),
    source=here,
    note="A scale moves gradients, as far as the largest one allows. It cannot change what happens in forward.",
)
titles = {
    "starved": "1. gradient norm of h.1.mlp.c_fc",
    "flat": "2. root mean square after h.0.ln_1",
    "spiking": "3. share of finite losses",
}
pandas.DataFrame(
    {
        title: {
            c: f"{v:.2g}  {'✓' if cured[fault][c] else '✗'}" for c, v in outcome[fault].items()
        }
        for fault, title in titles.items()
    }
)

# %% [markdown]
# Three faults, three answers. Fault 1 is underflow: bf16 and fp32 bring the true value back, and a scale does so as
# far as the other layers allow, which is not far enough for a layer so small: what lies below fp16's smallest number
# becomes 0 or is rounded *up* to it, so the norm can come out too large as well. But the true norm is about 1e-9, 1e-11
# for each weight, and AdamW's own ε of 1e-8 is larger than that: the layer hardly learns in fp32 either, and the gate
# is what to change.
#
# Fault 2 is no question of precision at all: fp32 shows the same, so the cure is a sensible size of the embeddings, or
# a smaller ε. Fault 3 is overflow in forward: fp32 in one module, or bf16, helps; a loss scale cannot. **Look at
# the same batch in fp32 first**: what stays is not AMP's fault.
#
# ### 16-bit weights, and updates that get lost
#
# AMP keeps weights in fp32. One may go further and make the weights themselves bf16: 2 bytes instead of 4 for each
# weight, gradient and average of AdamW, and no copies. The price: just below 1, neighbouring bf16 numbers lie 2⁻⁸ =
# 0.0039 apart, and an update of less than half of that rounds away.
#
# *Stochastic rounding* rounds up or down at random, with the odds such that the mean is right. Below it is written
# out: bf16 is the upper half of an fp32 number, so a random number is added to the lower half before it is cut off.


# %% name="guess-lost"
lab.guess(
    "lost", None, "A bf16 weight starts at 1; 0.001 is taken off 1000 times. Where does it end?"
)


# %% name="lost-updates"
def round_at_random(x):
    """fp32 to bf16; up or down at random, right on average."""
    bits = x.view(torch.int32)
    bits = bits + torch.randint_like(bits, 0, 1 << 16)
    return (bits & -65536).view(torch.float32).to(torch.bfloat16)


torch.manual_seed(0)
STEP, COUNT = 1e-3, 1000
ways = {
    "fp32": lambda w: w - STEP,
    "bf16": lambda w: w - STEP,
    "fp16": lambda w: w - STEP,
    "bf16, stochastic": lambda w: round_at_random(w.float() - STEP),
}
start = {"bf16": bf16, "fp16": fp16, "bf16, stochastic": bf16}
curves = {}
for name, update in ways.items():
    weight = torch.ones(1, dtype=start.get(name, torch.float32))
    path = [1.0]
    for _ in range(COUNT):
        weight = update(weight)
        path.append(float(weight))
    curves[name] = (list(range(0, COUNT + 1, 20)), path[::20])
lab.answer("lost", measured=curves["bf16"][1][-1], source="cpu")
lab.plots.lines(
    curves,
    x="step",
    y="the weight",
    title="One weight, 1000 updates of −0.001",
    source="cpu · the processor",
)

# %% [markdown]
# *What to see:* the bf16 weight has not moved at all: the update rounds away in every step, so it is lost for good.
# fp16, whose numbers lie eight times closer, moves at nearly the right speed. Stochastic rounding follows fp32 with
# some noise.
#
# In a model the loss shows it. The tables below compare five ways to train on real text, each from the same start on
# the same batches, with three seeds; `torchao` has an AdamW with stochastic rounding. What counts is the difference
# from fp32 *of the same seed*, since seeds differ more than the ways do. *Gains* are the weights of the normalisation
# layers: most are near 1, where bf16's numbers are far apart. A step that the GradScaler skips trains nothing. Pure
# bf16 is the control: it is known to lose updates. AMP counts as free when its difference, the mean of the seeds, is at
# most a tenth of the control's.
#
# First the small model, then a real one: SmolLM2-135M, pretrained, learns the same text with a learning rate as one
# uses for fine-tuning, 2·10⁻⁵. The smaller the updates, the more of them get lost. The second part runs on a card;
# elsewhere the table shows what a card measured.

# %% name="quality"
from torchao.optim import _AdamW as StochasticAdamW

WAYS = ("fp32", "amp-bf16", "amp-fp16", "bf16", "bf16, stochastic")
SEEDS = (0, 1, 2)


def trained(start, way, batches, held_out, lr):
    """Train a copy of `start` in one of the WAYS: held-out loss, share of weights that moved, steps skipped."""
    model = copy.deepcopy(start)
    if way.startswith("bf16"):
        model.to(bf16)
    before = [p.detach().clone() for p in model.parameters()]
    if way == "bf16, stochastic":
        optimizer = StochasticAdamW(
            model.parameters(), lr=lr, weight_decay=0.0, bf16_stochastic_round=True
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, foreach=True)
    cast = {"amp-bf16": bf16, "amp-fp16": fp16}.get(way)
    scaler = torch.amp.GradScaler(device.type) if way == "amp-fp16" else None
    history = lab.training.train(model, optimizer, batches, autocast=cast, scaler=scaler)
    moved = [(a != b).flatten() for a, b in zip(before, model.parameters(), strict=True)]
    names = [name for name, _ in model.named_parameters()]
    gains = [
        m
        for m, name in zip(moved, names, strict=True)
        if re.search(r"(ln|norm)\w*\.weight", name)
    ]
    shares = [float(torch.cat(some).double().mean()) for some in (moved, gains)]
    return lab.training.evaluate(model, held_out, batch=32), *shares, history.skipped


def compare(name, starts, batches, held_out, lr):
    """Train in all ways with all seeds; one fact for each way."""
    runs = []
    for seed in SEEDS:
        start, parts = starts(seed), batches(seed)
        for way in WAYS:
            products = (
                contextlib.nullcontext() if way == "fp32" else halves.fast_products(device)
            )
            # torchao would compile its step, which takes longer than these few steps
            with products, torch.compiler.set_stance("force_eager"):
                runs.append((way, seed, *trained(start, way, parts, held_out, lr)))
    found = pandas.DataFrame(runs, columns=["way", "seed", "loss", "moved", "gains", "skipped"])
    fp32 = found[found["way"] == "fp32"].set_index("seed")["loss"]
    found["minus fp32"] = found["loss"] - found["seed"].map(fp32)
    for way, rows in found.groupby("way", sort=False):
        lab.fact(
            name,
            float(rows["minus fp32"].mean()),
            "nats",
            what=way,
            minus=[*map(float, rows["minus fp32"])],
            losses=[*map(float, rows["loss"])],
            moved=float(rows["moved"].mean()),
            gains_moved=float(rows["gains"].mean()),
            skipped=[*map(int, rows["skipped"])],
            lr=lr,
            steps=len(batches(0)),
            **lab.data.stdlib().provenance(),
        )


def summary(rows):
    """The table of one model from its facts."""
    spread, lines = lab.training.Spread.of, {}
    for row in rows:
        minus, losses = spread(row["minus"]), spread(row["losses"])
        lines[row["what"]] = {
            "held-out loss": str(losses),
            "minus fp32 of the same seed": f"{minus.mean:+.4f} ({minus.low:+.4f} to {minus.high:+.4f})",
            "weights that moved": f"{row['moved']:.1%}",
            "gains that moved": f"{row['gains_moved']:.1%}",
            "steps skipped, by seed": ", ".join(map(str, row["skipped"])),
        }
    return pandas.DataFrame(lines).T


def facts_of(name):
    """The latest facts of that name in this run, one for each way."""
    rows = [r for r in lesson.ledger.rows() if (r["kind"], r.get("name")) == ("fact", name)]
    return list({r["what"]: r for r in rows if r["session"] == lesson.session}.values())


STEPS = 12 if on_card else 6
held_out = lab.data.byte_blocks(seq=64, count=32, split="held-out")
compare(
    "small GPT-2",
    small,
    lambda seed: lab.data.byte_blocks(seq=64, count=4 * STEPS, seed=seed).split(4),
    held_out,
    lr=2e-3,
)
print(f"small GPT-2 from random weights, {STEPS} steps of 4 x 64 bytes ({here} · {place})")
summary(facts_of("small GPT-2"))

# %% name="pretrained"
NAME = "SmolLM2-135M"
if on_card and lab.models.has("smollm2-135m"):
    tokenizer = lab.models.tokenizer("smollm2-135m")
    pretrained = lab.models.pretrained("smollm2-135m", device=device)
    compare(
        NAME,
        lambda seed: pretrained,
        lambda seed: lab.data.token_blocks(tokenizer, seq=128, count=96, seed=seed).split(8),
        lab.data.token_blocks(tokenizer, seq=128, count=32, split="held-out"),
        lr=2e-5,
    )
    del pretrained
    big, label = facts_of(NAME), f"measured · {place}"
else:
    big = lab.reference(NAME)
    label = big[0]["label"] if big else "no reference row yet"
    if not lab.models.has("smollm2-135m"):
        print("The model is not here: `labkit fetch` brings it.")
if big:
    print(f"{NAME}, {big[0]['steps']} steps of 8 x 128 tokens, seeds draw the text ({label})")
    display(summary(big))
else:
    print(f"{NAME} is trained on a card only, and there is {label}.")

tables = {"small GPT-2": facts_of("small GPT-2"), **({NAME: big} if on_card and big else {})}
off, said = [], []  # AMP ways that are farther from fp32 than a tenth of what pure bf16 costs
for name, rows in tables.items():
    by_way = {row["what"]: row for row in rows}
    mean = {way: lab.training.Spread.of(row["minus"]).mean for way, row in by_way.items()}
    amp = WAYS[1:3]
    off += [any(by_way[w]["skipped"]) for w in amp if abs(mean[w]) > abs(mean["bf16"]) / 10]
    steps, skips = by_way["fp32"]["steps"], [n for w in amp for n in by_way[w]["skipped"]]
    said.append(
        f"{name}, {steps} steps: {', '.join(f'{w} {mean[w]:+.4f}' for w in amp)} nats from fp32"
    )
    said[-1] += f", pure bf16 {mean['bf16']:+.4f}"
    said[-1] += f", {sum(n > 0 for n in skips)} of {len(skips)} AMP runs skipped a step"
if not off:
    verdict = "holds"
elif all(off):
    verdict = "holds when no step is skipped: a skipped step is one that was not trained"
else:
    verdict = "does not hold"
lab.settle("free", measured="; ".join(said), verdict=verdict, source=here)

# %% [markdown]
# *What to see:* both AMP ways stay with fp32, and pure bf16 does not. In the small model it has moved hardly a gain. In
# SmolLM2, whose updates are smaller, hardly a weight of any kind, and the loss is far behind. Stochastic rounding moves
# a part of the weights in a step, but the right ones on average, and its loss is that of fp32.
#
# ## Account
#
# Why did 16 bits not halve the memory? PyTorch tells what forward keeps for backward: `saved_tensors_hooks` calls a
# function for each tensor that is saved. The cell sorts them by type, and calls a 16-bit tensor with the shape of a
# weight a copy of it.


# %% name="saved"
with torch.device("meta"):  # shapes without memory
    shapes = lab.models.gpt2("gpt2")
N = sum(p.numel() for p in shapes.parameters())
config = shapes.config
L, d, V = config.n_layer, config.n_embd, config.vocab_size
kept = {}


def forward_only(device, batch=2, seq=1024, precision="fp32"):
    with device:
        model = lab.models.gpt2("gpt2", attention="sdpa").train()
        tokens = torch.randint(0, V, (batch, seq))
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    weight_shapes = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}
    weight_shapes |= {shape[::-1] for shape in weight_shapes}
    found, seen = dict.fromkeys(("fp32", "16 bits", "copies of weights", "other"), 0), {}
    half_type = {"bf16": bf16, "fp16": fp16}[AMP]

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights and storage._cdata not in seen:
            seen[storage._cdata] = storage  # kept, so that no other can get its place
            half = tensor.dtype in (fp16, bf16)
            kind = "16 bits" if half else "fp32" if tensor.is_floating_point() else "other"
            if half and tuple(tensor.shape) in weight_shapes:
                kind = "copies of weights"
            found[kind] += storage.nbytes()
        return tensor

    def step():
        listen = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        listen = contextlib.nullcontext() if precision in kept else listen  # once is enough
        with listen, torch.autocast(device.type, dtype=half_type, enabled=precision == AMP):
            loss = model(input_ids=tokens, labels=tokens).loss
        kept.setdefault(precision, found)
        seen.clear()
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


for precision in ("fp32", AMP):
    lab.measure(
        forward_only,
        name=f"kept, {precision}",
        budget=BUDGET,
        precision=precision,
        record=False,
        trace=False,
        **quick,
    )
table = pandas.DataFrame(kept).rename(columns={AMP: f"AMP, {AMP}"})
table.loc["all"] = table.sum()
print(f"kept for backward, 2 x 1024 tokens ({lesson.source}; other: masks, indices)")
table.map(show)

# %% [markdown]
# Only a part became 16-bit. The rest is in fp32 for good reasons: what goes from block to block, the inputs of
# LayerNorm, the loss; and for a bad one: the `gelu_new` of GPT-2 is made of eight operators, and `x ** 3` is on
# autocast's fp32 list, so most of the MLP's activation is computed in fp32. And there is something new.
#
# Let d be the width, V the vocabulary, L the blocks, b s the tokens. Bytes for each of the b s d elements of a block:
#
# | part of a block | fp32 | AMP |
# | --- | --- | --- |
# | from block to block: inputs of two LayerNorms | 8 | 8 |
# | masks of two dropouts | 2 | 2 |
# | attention: input of the products, q k v, result | 20 | 10 |
# | MLP: input of the first product | 4 | 2 |
# | MLP: `gelu_new` and the input of the second product | 80 | 64 |
# | sum | **114** | **86** |
#
# Where the 64 come from (the width inside the MLP is 4 d): `x ** 3` keeps an fp32 copy of its input (16) and tanh its
# fp32 result (16); the last product of `gelu_new` keeps x / 2, in 16 bits (8), and 1 + tanh, in fp32 (16); then comes
# the 16-bit input of the second matrix product (8). In fp32 all five take 16.
#
# The copies of the weights take 2 bytes for each weight of a product: 12 d² L in the blocks and d V in the head. The
# loss keeps its three tensors of 4 b s V bytes. So AMP saves about 28 d L for each token, and pays 2 (12 d² L + d V)
# once. (Small terms that the code adds: 5 b s d around the blocks, two statistics for each LayerNorm and token, and the
# input of the head.)


# %% name="account"
products = 12 * d * d * L + d * V  # weights that are multiplied


def terms(batch, seq, amp):
    """What is alive at the start of backward, term by term, in bytes, without the workspace."""
    t = batch * seq
    return {
        "weights": 4 * N,
        "optimizer state": 8 * N,
        "16-bit copies": 2 * products if amp else 0,
        "from block to block": t * d * (10 * L + 5) + 8 * t * (2 * L + 1),
        "attention": t * d * (10 if amp else 20) * L,
        "MLP": t * d * (66 if amp else 84) * L,
        "logits and loss": t * (12 * V + (2 if amp else 4) * d),
    }


def term_of(holding):
    known = {"parameter": "weights", "optimizer state": "optimizer state"}
    path = holding.module
    if holding.category in ("workspace", "gradient", *known):
        return known.get(holding.category, holding.category)
    if path.endswith((".ln_1", ".attn", ".c_attn")) or path.endswith("attn.c_proj"):
        return "attention"
    if path.endswith((".ln_2", ".act", ".c_fc")) or path.endswith("mlp.c_proj"):
        return "MLP"
    if path in ("", "lm_head", "transformer.ln_f") and holding.category != "input":
        return "logits and loss"
    return "from block to block"


def by_term(report, copies):
    """The same report, with our terms in place of categories; copies of weights taken out of their modules."""
    found = {}
    for holding in report.alive:
        term = term_of(holding)
        found[term] = found.get(term, 0) + holding.nbytes
    if copies:
        inside = {"attention": 4 * d * d * L * 2, "MLP": 8 * d * d * L * 2}
        inside["logits and loss"] = 2 * d * V
        for term, nbytes in inside.items():
            found[term] -= nbytes
        found["16-bit copies"] = copies
    held = [
        dataclasses.replace(report.alive[0], module="", category=term, nbytes=nbytes)
        for term, nbytes in found.items()
        if nbytes
    ]
    return dataclasses.replace(report, alive=tuple(held))


before, after = runs[(*BIG, "fp32")], runs[(*BIG, AMP)]
if before.ok and after.ok:
    copies = kept[AMP]["copies of weights"]
    before, after = by_term(before, 0), by_term(after, copies)
    formula = {
        name: (terms(*BIG, False)[name], terms(*BIG, True)[name]) for name in terms(*BIG, True)
    }
    found = [report.held_by() for report in (before, after)]
    rows = {
        name: [show(f32), show(found[0].get(name, 0)), show(f16), show(found[1].get(name, 0))]
        for name, (f32, f16) in formula.items()
    }
    workspace = [held.get("workspace", 0) for held in found]
    together = [sum(pair[amp] for pair in formula.values()) for amp in (False, True)]
    peaks = [report.steady.requested_bytes for report in (before, after)]
    left = [peaks[i] - together[i] - workspace[i] for i in (0, 1)]
    rows["workspace"] = ["", show(workspace[0]), "", show(workspace[1])]
    rows["all"] = [show(together[0]), show(peaks[0]), show(together[1]), show(peaks[1])]
    rows["unexplained"] = ["", show(left[0]), "", show(left[1])]
    columns = [
        "fp32, formula",
        f"fp32, {lesson.source}",
        "AMP, formula",
        f"AMP, {lesson.source}",
    ]
    display(pandas.DataFrame(rows, index=columns).T)
    lab.plots.show(lab.plots.waterfall(before, after))
else:
    print("3 x 1024 does not fit into this budget: no account of it.")

# %% [markdown]
# *What to see:* attention shrinks to a half, the MLP by a fifth, logits and loss do not shrink at all, and the copies
# are new. (*Unattributed* is what the allocator had to round up.)
#
# Two numbers follow from the formula. Below some number of tokens the copies cost more than the activations save. And
# however many tokens there are, the ratio stays below that of the bytes a token takes. A GELU in one kernel (lesson 07)
# keeps 48 bytes less for each of b s d, with AMP or without, which leaves AMP a larger share to halve.

# %% name="limits"
per_token = {
    amp: sum(terms(1, 1024, amp).values()) - sum(terms(1, 512, amp).values())
    for amp in (False, True)
}
per_token = {amp: nbytes / 512 for amp, nbytes in per_token.items()}
even = 2 * products / (per_token[False] - per_token[True])
limit = per_token[False] / per_token[True]
print(f"bytes a token: fp32 {per_token[False]:,.0f}, AMP {per_token[True]:,.0f}")
print(f"copies: {show(2 * products)}, earned back from {even:,.0f} tokens on")
less = 48 * d * L  # what a GELU in one kernel keeps less, in fp32 and with AMP: its input only
fused = (per_token[False] - less) / (per_token[True] - less)
print(
    f"fp32's bytes over AMP's, with any number of tokens: at most {limit:.2f}; "
    f"with a GELU in one kernel {fused:.2f}"
)
ratios = {size: ratio(*size) for size in SIZES if ratio(*size)}
most = max(ratios.values(), default=None)
said = "fp32's peak over AMP's: " + ", ".join(
    f"{b} x {s} {r:.2f}" for (b, s), r in ratios.items()
)
lab.settle(
    "memory",
    measured=f"{said}; by the account never above {limit:.2f} (GPT-2 124M; {fused:.2f} with a GELU in one kernel)",
    verdict="not measured here"
    if most is None
    else "holds"
    if most >= 1.5
    else "does not hold",
)


def fits(batch, precision):
    if (batch, 1024, precision) in runs:
        return runs[batch, 1024, precision].ok
    options = {"budget": BUDGET, "trace": False, "record": False, **quick}
    return lab.measure(training, batch=batch, seq=1024, precision=precision, **options).ok


largest = {}
for amp, precision in ((False, "fp32"), (True, AMP)):
    fixed = 12 * N + (2 * products if amp else 0)  # and a workspace, which is small
    batch = start = max(1, int((BUDGET - fixed) // (1024 * per_token[amp])))
    while batch and not fits(
        batch, precision
    ):  # the formula knows no allocator: it may promise too much
        batch -= 1
    if batch == start:
        while fits(batch + 1, precision):
            batch += 1
    largest[precision] = batch
    lab.answer(
        "largest_amp" if amp else "largest",
        measured=float(batch),
        formula=float(start),
        note="The formula counts requested bytes; the allocator reserves more than it hands out."
        if batch < start
        else None,
    )
lab.settle(
    "batch",
    measured=f"largest batch of 1024 tokens in {show(BUDGET)}: fp32 {largest['fp32']}, AMP {largest[AMP]}",
    verdict="holds" if largest[AMP] >= 2 * largest["fp32"] > 0 else "does not hold",
)

# %% [markdown]
# ## Equivalence
#
# AMP does not compute the same numbers, and it need not: it computes them with a coarser ε. If rounding is all that
# differs, then the loss and the gradients differ from fp32's by a few ε, and *the difference grows with ε*: bf16's ε
# is eight times fp16's, so its difference should be about eight times as large. A mistake would stay the same size.
#
# How many roundings does a gradient see? The longest way leads through 13 products in forward (six in each of the two
# blocks, and the head) and as many in backward. Each is wrong by at most ε / 2; at random, 26 of them add up to
# √26 · ε / 2 ≈ 2.5 ε. That is a bound: most roundings are smaller, and what goes around a block is not rounded. The
# tolerance is 4 ε. The loss is a mean over 1008 tokens, whose errors average out: 4 ε / √1008 ≈ ε / 8. fp16 is scaled
# by 2¹⁶, so that underflow does not disturb the comparison.

# %% name="equivalence"
rows, offs = {}, {}
with halves.fast_products(device):
    for cast, name in ((fp16, "fp16, scale 2^16"), (bf16, "bf16")):
        eps = torch.finfo(cast).eps
        scale = 2.0**16 if cast is fp16 else 1.0
        model = small(1)
        exact = gradients(model, tokens)
        exact_loss = float(loss_of(model, tokens).detach())
        off = float(
            (gradients(model, tokens, cast, scale) / scale - exact).norm() / exact.norm()
        )
        loss_off = abs(float(loss_of(model, tokens, cast).detach()) - exact_loss) / exact_loss
        offs[name] = off
        rows[name] = {
            "ε": f"{eps:.1e}",
            "loss differs by": f"{loss_off:.1e}",
            "gradients differ by": f"{off:.1e}",
            "in ε": f"{off / eps:.2f}",
            "within tolerance": off < 4 * eps and loss_off < eps / 8,
        }
print(
    f"bf16's difference is {offs['bf16'] / offs['fp16, scale 2^16']:.1f} times fp16's ({here})"
)
pandas.DataFrame(rows).T

# %% [markdown]
# ## Negative control
#
# Three cases where AMP should not save memory. *Fewer tokens than the account asks for:* the copies cost more than the
# activations save. *Still fewer:* the peak is in the optimizer, which has no 16-bit numbers at all, so AMP changes
# next to nothing. *Checkpointing* (lesson 03): most activations are not kept anyway, so there is little left to save,
# and the copies come on top. And one where it should not save time: a step so small that the card waits for Python,
# not for products.


# %% name="negative-control"
def pair(name, **settings):
    """The peaks of a step in fp32 and with AMP."""
    options = {"budget": BUDGET, "trace": False, **settings, **quick}
    reports = [
        lab.measure(training, name=f"{name}, {precision}", precision=precision, **options)
        for precision in ("fp32", AMP)
    ]
    return [report.peak_bytes for report in reports]


rows = {
    "1 x 256: peak in the optimizer": [runs[1, 256, p].peak_bytes for p in ("fp32", AMP)],
    f"1 x 704: fewer than {even:,.0f} tokens": pair("1 x 704", batch=1, seq=704),
    "3 x 1024, checkpointed": pair("3 x 1024, checkpointed", batch=3, seq=1024, checkpoint=1),
    "3 x 1024, for comparison": [runs[(*BIG, p)].peak_bytes for p in ("fp32", AMP)],
}
display(
    pandas.DataFrame(
        {
            name: {
                "fp32": show(a),
                f"AMP, {AMP}": show(b),
                "AMP takes": f"{(b - a) / MiB:+,.0f} MiB" if a and b else "-",
            }
            for name, (a, b) in rows.items()
        }
    ).T
)
gain = faster(1, 256, AMP)
print(
    f"1 x 256 tokens: AMP is {gain:.2f} times as fast as fp32 ({where})"
    if gain
    else "time at 1 x 256: needs a card or a reference row"
)

# %% [markdown]
# ## Pitfalls
#
# **AMP takes more memory than fp32.** Few tokens, checkpointing, or a large model with a small batch: the 16-bit
# copies come on top. Use AMP for its speed; for memory recompute activations (lesson 03), fuse them (lesson 07), or
# make the weights 16-bit as well, with stochastic rounding.
#
# **"Attempting to unscale FP16 gradients".** The weights are fp16, for example because the file was, and transformers 5
# loads a model in the type of its file. AMP needs fp32 weights: `dtype=torch.float32`.
#
# **Training slowly stops after an upgrade.** The same reason with bf16: weights were loaded in bf16 without a word,
# and updates get lost. Look at `next(model.parameters()).dtype`.
#
# **Clipping makes the model stand still.** `clip_grad_norm_` saw gradients times 65536. Call
# `scaler.unscale_(optimizer)` before it.
#
# **bf16 crawls on a T4 or an RTX 20.** Cards below sm_80 (Turing, Volta) have no bf16; PyTorch emulates it, and
# `torch.cuda.is_bf16_supported()` counts that as support: ask with `including_emulation=False`. There the way is fp16
# with a GradScaler, as `precision="fp16"` above; its memory is that of bf16. No such card was at hand for this
# lesson.
#
# **No gradients after an evaluation.** In older versions of PyTorch, a pass under `no_grad` inside the same autocast
# context leaves copies without a gradient in the cache (pytorch#112583). One context for each pass avoids it.
#
# **The loss is computed from 16-bit logits.** A loss of your own outside the context gets them as they are. Call it
# inside, or on `logits.float()`.

# %% [markdown]
# ## Exercise 1
#
# *4 min, medium.* From how many tokens (batch times length) on does AMP keep less than fp32 for **gpt2-medium**:
# width 1024, 24 blocks, 50257 words? Compare the copies of the weights with what the activations save.
#
# <details><summary>Hint</summary>
#
# The table of the account has both sides: bytes paid once, and bytes saved for each token and block. Do not forget
# the head.
#
# </details>

# %% answer="break_even"
break_even = ...
### BEGIN SOLUTION
width, blocks, words = 1024, 24, 50257
break_even = 2 * (12 * width**2 * blocks + width * words) / (28 * width * blocks)
### END SOLUTION

# %% check="break_even" points=1
lab.check.number(
    "break_even",
    break_even,
    2 * (12 * 1024**2 * 24 + 1024 * 50257) / (28 * 1024 * 24 + 2 * 1024),
    unit="tokens",
    tolerance=0.006,
    mistakes={
        (12 * 1024**2 * 24 + 1024 * 50257)
        / (28 * 1024 * 24): "How many bytes does a 16-bit copy of one weight take?",
        4
        * (12 * 1024**2 * 24 + 1024 * 50257)
        / (28 * 1024 * 24): "A copy has 16 bits: how many bytes are those?",
        2 * 12 * 1024**2 * 24 / (28 * 1024 * 24): (
            "One product is missing: the one outside the blocks.",
            0.5,
        ),
        2 * (12 * 1024**2 + 1024 * 50257) / (28 * 1024 * 24): "How many blocks have copies?",
        2 * 354_823_168 / (28 * 1024 * 24): (
            "This takes all parameters: which of them are multiplied, and so have a copy?",
            0.5,
        ),
        2
        * (12 * 1024**2 * 24 + 2 * 1024 * 50257)
        / (
            28 * 1024 * 24
        ): "The embedding is looked up, and shares its weights with the head: how many copies?",
        2
        * (12 * 1024**2 * 24 + 1024 * 50257)
        / (28 * 1024): "That is what one block saves for a token: how many are there?",
        2 * (12 * 768**2 * 12 + 768 * 50257) / (28 * 768 * 12): "This is the small gpt2.",
        2
        * (12 * 1024**2 * 24 + 1024 * 50257)
        / (86 * 1024 * 24): "86 bytes is what AMP keeps. What does it save?",
        2
        * (12 * 1024**2 * 24 + 1024 * 50257)
        / (114 * 1024 * 24): "114 bytes is what fp32 keeps. What does AMP save?",
    },
    hint="Bytes paid once, divided by bytes saved for each token.",
)

# %% [markdown]
# ## Exercise 2
#
# *8 min, medium.* Write `careful_step`: one optimizer step from several micro-batches under fp16, with the gradient's
# norm clipped to `clip`. `micro_loss(model, batch)` below gives the loss of one micro-batch and contains the autocast
# context. Return the norm of the gradient before clipping, as a number, with the scale taken off. The gradient is
# that of the *mean* loss over the micro-batches; afterwards no gradients are left.
#
# <details><summary>Hint</summary>
#
# Besides `backward` and `optimizer.zero_grad` you need `scale`, `unscale_`, `step` and `update` of the scaler and
# `torch.nn.utils.clip_grad_norm_`, which returns the norm. Which of them belong to every micro-batch, which come once?
# What must have happened to the gradients before their norm means anything?
#
# </details>


# %% answer="careful_step"
def micro_loss(model, batch):
    """Mean squared output of a small model: a loss that is quick to compute."""
    with torch.autocast("cpu", dtype=torch.float16):
        return model(batch).float().square().mean()


def careful_step(model, optimizer, scaler, batches, clip):
    ### BEGIN SOLUTION
    for batch in batches:
        scaler.scale(micro_loss(model, batch) / len(batches)).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)
    ### END SOLUTION


# %% check="careful_step" points=2
class Probe:
    """A small model with all that `careful_step` needs, and what the right step would do to it."""

    def __init__(self, seed, clip, count, overflow=False):
        generator = torch.Generator().manual_seed(seed)
        self.model, self.clip = torch.nn.Linear(8, 4, bias=False), clip
        with torch.no_grad():
            self.model.weight.copy_(torch.randn(4, 8, generator=generator))
        self.batches = [torch.randn(16, 8, generator=generator) for _ in range(count)]
        losses = [self.model(batch).square().mean() for batch in self.batches]
        self.norm = float(torch.autograd.grad(sum(losses) / count, self.model.weight)[0].norm())
        if overflow:
            self.batches[-1][0, 0] = math.inf
        self.before = self.model.weight.detach().clone()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        self.args = (self.model, self.optimizer, self.scaler, self.batches, clip)

    def case(self, judge):
        return lab.check.case(*self.args, expect=judge)

    def length(self):
        """How far the weights went."""
        return float((self.model.weight.detach() - self.before).norm())

    def step(self, norm):
        wanted = min(self.norm, self.clip)
        if self.length() < 0.05 * wanted:
            return "the weights hardly moved: by how much were the gradients multiplied when they were clipped?"
        if self.length() > 20 * max(self.norm, wanted):
            return "the step is far too long: was the scale taken off before the optimizer stepped?"
        if self.length() > 1.05 * wanted:
            return "the step is longer than it should be: is the norm clipped, before the step, and is the loss a mean?"
        if self.length() < 0.95 * wanted:
            return "the step is too short: does every micro-batch count, and as a mean?"
        if isinstance(norm, bool) or not isinstance(norm, (int, float)):
            return f"returns {norm!r}: a number is asked for, the norm before clipping."
        if abs(norm / self.norm - 1) > 0.02:
            return (
                f"returns {norm:.3g} where {self.norm:.3g} is right: is it the norm of the mean loss, "
                "before clipping, without the scale?"
            )
        if self.scaler.get_scale() == 1024.0:
            return "the scale would never change: which call looks after that?"
        if any(p.grad is not None and bool(p.grad.any()) for p in self.model.parameters()):
            return "gradients are left over: the next step would add to them."
        return True

    def skipped(self, norm):
        if self.length() != 0:
            return "an infinite gradient reached the weights: who decides whether the optimizer steps?"
        if self.scaler.get_scale() >= 1024.0:
            return "after an overflow the scale must go down: which call looks after that?"
        return True


long, short, spoilt = Probe(0, 0.5, 3), Probe(1, 100.0, 2), Probe(2, 0.5, 2, overflow=True)
lab.check.code(
    "careful_step",
    careful_step,
    [long.case(long.step), short.case(short.step), spoilt.case(spoilt.skipped)],
    points=2,
)

# %% [markdown]
# ## Exercise 3
#
# *5 min, medium.* Three runs with fp16 autocast and a GradScaler went wrong. What the monitors say:
#
# ```
# A  gradient norm of h.7.mlp.c_fc:   fp16 0.0        the same batch in fp32 2.9e-07      scale 16, never skipped
# B  loss NaN in steps 40, 80, 120    first trouble: inf in forward, output of h.7.mlp.c_fc      scale 65536 -> 8192
# C  rms after h.0.ln_1:              fp16 1.1e-03    the same batch in fp32 1.1e-03      scale 65536, never skipped
# ```
#
# (*rms*: root mean square.) Which of them does a larger scale cure? Say what is wrong with the other two, and what
# would help.
#
# <details><summary>Hint</summary>
#
# A scale multiplies the loss. What comes after the loss, and what before? And what can AMP be blamed for when fp32
# shows the same?
#
# </details>

# %% answer="scaled"
scaled_run = ...
### BEGIN SOLUTION
scaled_run = "A"
### END SOLUTION

# %% check="scaled" points=1
lab.check.choice(
    "scaled",
    scaled_run,
    "A",
    of=("A", "B", "C"),
    mistakes={
        "B": "The trouble of B comes in forward: does the scale act there?",
        "C": "C is the same in fp32: what can a scale, which is there for fp16, change?",
    },
)

# %% answer="diagnosis" points=2
diagnosis = ...
### BEGIN SOLUTION
diagnosis = """B: an activation overflows fp16 (65504) in forward, in one MLP; the scale acts on gradients only. Run
that module in fp32 with autocast switched off around it, or use bf16.
C: fp32 shows the same, so it is no question of precision: the input of the LayerNorm is so small that its variance
disappears beside the epsilon. Make the embeddings larger, or the epsilon smaller."""
### END SOLUTION

# %% check="diagnosis"
lab.check.words(
    "diagnosis",
    diagnosis,
    {
        r"overflow|65504|too (large|big|high)|exceed|out of (the )?range|larger than|infinit|\binf\b|bl[eo]ws? up"
        r"|beyond|explod": ("What happens in B, in forward?"),
        r"bf16|bfloat|autocast(.{0,20})(off|disabled?|false)|fp32|float32|full precision"
        r"|(disabl|switch|turn|without)[^.]{0,30}autocast": "What would help B?",
        r"variance|epsilon|\beps\b|ε|standard deviation|embedding|input (of|to|is)|initiali[sz]|same in (fp32|float32)"
        r"|(no|not|n't)[^.]{0,25}(precision|amp|fp16)": "What is wrong in C, if fp32 shows the same?",
    },
    against={
        r"(do not|don't) know|no idea": "Say what the monitors show for B and for C.",
        r"\bc\b[^.]{0,30}underflow": "Does anything underflow in C, when fp32 has the same number?",
        r"\b(lower|reduce|decrease) the (loss )?scale\b|because the (loss )?scale (is|was) too (high|large|big)": (
            "The log of B shows the scale falling. Does that stop the NaN?"
        ),
        r"\b(raise|increase) the (loss )?scale\b|(larger|higher|bigger) (loss )?scale is needed": (
            "A scale moves gradients. What can it do to an activation?"
        ),
        r"\bc\b[^.]{0,90}\b(use|switch to|try) (bf16|bfloat)": "fp32 shows the same in C: what would bf16 change?",
    },
    points=2,
    least=20,
)

# %% [markdown]
# ## Take-away
#
# 1. AMP is for speed. Of memory it halves a part of the activations and adds 16-bit copies of the weights: for GPT-2 it
#    can never reach the factor of the claim, and with few tokens or checkpointing it takes more.
# 2. bf16 where the card has it; fp16 only with a GradScaler, whose scale should start high. What overflows in forward
#    needs fp32 in that module; a scale cannot help.
# 3. Look with monitors before changing numbers, and at the same batch in fp32. 16-bit weights need stochastic rounding.
#
# Next: lesson 03, gradient checkpointing, for the activations that AMP leaves.

# %% name="finish"
lab.finish(
    "bf16 autocast where it is native, else fp16 with GradScaler; fp32 weights or stochastic rounding. "
    "Count the copies before expecting memory."
)
