# ---
# jupyter:
#   labkit:
#     title: What may live on the host?
#     question: Which bytes may leave the card, and when does the bus cost nothing?
#     after: measure your bus, say what an offload costs before you switch it on, and choose what moves
#     minutes: {gpu: 1, cpu: 0.7}
#     memory: 8 GiB budget
#     needs: [01_baseline_oom]
#     fetch: []
# ---

# %% name="begin"
import math
import os
import tempfile
from pathlib import Path

import torch

from IPython.utils.capture import capture_output
from accelerate import infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch
from safetensors.torch import load_file
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import labkit as lab
from labkit import bus, extras, measuring, offload, quiet

quiet.transformers()  # imported now, silently
lesson = lab.begin("05_offload")
BUDGET = lesson.budget  # bytes that PyTorch may take from the card
on_card = lab.device().type == "cuda"
MiB, GiB = 2**20, 2**30
show, show_time = lab.show_bytes, lab.show_seconds


def quietly():
    """Libraries' progress bars and remarks about themselves stay out of the cell."""
    return capture_output(stdout=False, stderr=True, display=True)


quick = {"budget": BUDGET, "trace": False, "nearest": False, "stateless": True}

# %% [markdown]
# ## Claims
#
# Five sentences about memory that is somewhere else. This run fills in the empty columns at the end.
#
# | word | meaning |
# | --- | --- |
# | host | the computer around the card: its processor and its main memory (RAM) |
# | bus | the link between host and card, as a rule PCI Express (PCIe): generation and lanes (x16) say how fast |
# | to offload | to keep something in the host's memory and to bring it to the card when it is needed |
# | pinned | memory of the host that the system may not move or swap out; the card can read it by itself |
# | pageable | all other memory of the host: copies go through a pinned buffer of the driver's |
# | stream | a queue of work for the card; work in two streams can run at the same time |
# | side stream | a stream for copies, next to the one that computes |
# | to prefetch | to start a copy before its result is asked for |
# | saved tensor | a result of the forward pass that autograd keeps for backward (an activation) |
# | hook | a function of yours that PyTorch calls at a certain moment |
# | arithmetic intensity | operations for each byte that must be moved, in FLOP per byte |
# | break-even | the point from which on something costs less than it brings |

# %% name="claims"
lab.claim(
    "host",
    "What does not fit on the card moves to the host, at the price of the bus.",
    said_by="documentation",
)
lab.claim(
    "hidden",
    "With a side stream and prefetching, offloaded activations cost no time.",
    said_by="blog posts",
)
lab.claim("embedding", "The embedding on the host saves 1.8 GB.", said_by="a training log")
lab.claim("compressed", "Compressed activations save 0.4 GB.", said_by="a training log")
lab.claim("zero", "ZeRO's stages save memory, on one card too.", said_by="forum answers")
lab.claims()

# %% [markdown]
# ## Experiment
#
# ### The bus first
#
# Whatever is offloaded crosses the bus, so its speed decides everything else. It is measured, not read from a box:
# slots are often wired with fewer lanes than the card has. Copies of four sizes go in both directions, from and to
# pinned and pageable memory.

# %% name="guess-bus"
lab.guess("bus", None, "From pinned memory to the card, 256 MiB: how fast?", unit="GB/s")
lab.guess("pageable", None, "Pageable memory, the same copy: how many times slower?", unit="x")

# %% name="bus"
rows = []
copies = ["64KiB", "1MiB", "16MiB", "256MiB"] if on_card else ["256MiB"]
for transfer in bus.measure_bus(copies):
    low, high = transfer.spread()
    rows.append(
        lab.fact(
            "bus",
            transfer.rate / 1e9,
            "GB/s",
            what=f"{transfer.kind}, {transfer.nbytes}",
            transfer=transfer.kind,
            nbytes=transfer.nbytes,
            low=low / 1e9,
            high=high / 1e9,
        )
    )
if not on_card:
    rows += lab.reference("bus")  # of a real card; what was measured here is the host alone
curves, labels = {}, {}
for row in sorted(rows, key=lambda row: row["nbytes"]):
    curves.setdefault(row["transfer"], {})[row["nbytes"]] = row
    labels[row["transfer"]] = row["label"]


def bus_rate(kind):
    """Bytes per second of the largest copies of that kind; None where no card has measured it."""
    return 1e9 * max(curves[kind].items())[1]["value"] if kind in curves else None


TO_HOST, TO_CARD = bus_rate("to host, pinned"), bus_rate("to card, pinned")
PAGEABLE = bus_rate("to card, pageable")
sizes = sorted({row["nbytes"] for row in rows})


def rate(row):
    """GB/s with their spread; nothing where there is no such row."""
    return f"{row['value']:.1f} ({row['low']:.1f} to {row['high']:.1f})" if row else ""


lab.table(
    ["copy", *map(show, sizes), "GB/s from"],
    [
        [kind, *(rate(found.get(n)) for n in sizes), labels[kind]]
        for kind, found in curves.items()
    ],
)
lab.answer(
    "bus", measured=TO_CARD / 1e9 if TO_CARD else None, source=None if on_card else "reference"
)
slower = TO_CARD / PAGEABLE if TO_CARD else None
lab.answer("pageable", measured=slower, source=None if on_card else "reference")
over_the_bus = {
    kind: found for kind, found in curves.items() if kind != "within the host, pageable"
}
if over_the_bus:
    picture = lab.plots.lines(
        {
            kind: ([n / MiB for n in found], [r["value"] for r in found.values()])
            for kind, found in over_the_bus.items()
        },
        x="size of one copy (MiB)",
        y="GB/s",
        title="Copies between host and card",
        source=labels["to card, pinned"],
        log="xy",
    )
    lab.plots.show(picture)
else:
    print("no reference row: the speed of the bus needs a card")

# %% [markdown]
# *What to see:* small copies are slow whatever the memory: each costs some microseconds before the first byte moves.
# Large ones reach the speed of the link, but only from pinned memory. (Without a card, the line *within the host* of
# the table is a copy inside this machine's own memory, by its processor. No bus is in it, so it is not drawn.)
#
# ### What the host must be set to
#
# The generation and width of the link come from the driver. *Swappiness* says how readily Linux writes pages of
# programs to disk: pinned pages never, but an optimizer's state in pageable memory can be swapped out, and each step
# then waits for the disk. `ulimit -l` limits memory that a program *locks* itself (`mlock`; DeepSpeed's copies to
# NVMe and some network libraries do); CUDA's pinned memory is taken by the driver, and the last line of the table
# says whether that limit counted here.

# %% name="host"
host = bus.host()
pinned_most = max(n for n in curves["to host, pinned"]) if on_card else 0
link = f"PCIe {host.link[0]} x{host.link[1]}" if host.link else "no card, or not told"
most = f"PCIe {host.link_most[0]} x{host.link_most[1]}" if host.link_most else "–"
counted = "no limit to try here" if pinned_most else "not tried here"
if pinned_most and host.memlock_bytes is not None:
    counted = f"{show(pinned_most)} were pinned: {'no' if pinned_most > host.memlock_bytes else 'not reached'}"
lab.table(
    ["setting", "here", "wanted"],
    [
        ["link now (idle cards slow it down)", link, "x16, the card's own generation"],
        ["link at most", most, "the same; else: another slot"],
        [
            "at most by the standard",
            f"{host.link_rate / 1e9:.1f} GB/s" if host.link_rate else "–",
            "",
        ],
        [
            "host memory, free now",
            f"{show(host.memory_bytes)}, {show(host.available_bytes)}",
            "16 bytes for each parameter stepped there",
        ],
        ["swappiness", str(host.swappiness), "low (10) where memory is short"],
        ["ulimit -l", host.memlock, "unlimited for DeepSpeed's NVMe"],
        ["did ulimit -l count for CUDA?", counted, "no"],
    ],
)

# %% [markdown]
# ### The optimizer on the host
#
# A run that accumulation cannot cure: gpt2-medium, fp32, AdamW, one sequence of 512 tokens, on a card that has 6 GiB
# left (one of 8 GB that also draws the screen). The model alone takes 16 bytes for each of 355 million parameters. 8
# of the 16 are the optimizer's state, which is used once in a step and is otherwise asleep: the first thing to move.
#
# torchao's `CPUOffloadOptimizer` keeps a copy of the weights and the state on the host and steps *there*, on the
# processor. Over the bus go the gradients, while backward is still running, and the new weights on their way back.
# With `offload_gradients=True` each gradient leaves the card as soon as it is copied; this excludes accumulation,
# because a gradient that is gone cannot be added to. The host needs 16 bytes for each parameter: its copies of weight
# and gradient, both pinned, and the two averages of AdamW.


# %% name="training"
def training(
    device, size="gpt2", batch=2, seq=1024, optimizer="adamw", on_host="", micro_batches=1
):
    with device:
        model = lab.models.gpt2(size, attention="sdpa").train()
        tokens = torch.randint(0, 50257, (micro_batches, batch, seq))
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
    if on_host:  # "state" or "state and gradients"
        from torchao.optim import CPUOffloadOptimizer

        gradients = on_host == "state and gradients"
        steps = CPUOffloadOptimizer(
            model.parameters(), kind, offload_gradients=gradients, lr=1e-4
        )
    else:
        steps = kind(model.parameters(), lr=1e-4, foreach=True)

    def step():
        for part in tokens:
            loss = model(input_ids=part, labels=part).loss / micro_batches
            loss.backward()
        steps.step()
        steps.zero_grad(set_to_none=True)
        return loss.detach()

    if on_host:  # its hooks hold the model in a circle, see Pitfalls
        offload.drop_hooks_with(step, model)
    step.tokens = micro_batches * batch * seq
    return step


lab.guess(
    "medium", None, "gpt2-medium with state and gradients on the host: the peak?", unit="GiB"
)

# %% name="medium"
medium = {**quick, "budget": "6GiB", "size": "gpt2-medium", "batch": 1, "seq": 512}
plain = lab.measure(training, name="gpt2-medium", repeats=0, **medium)
away = lab.measure(
    training,
    name="gpt2-medium, state and gradients on the host",
    repeats=2,
    on_host="state and gradients",
    **medium,
)
plain_medium, away_medium = lab.with_times([plain, away])
print(plain_medium, away_medium, sep="\n")


def seconds(report):
    """The median time of a step; None where no card has measured it."""
    return report.timing.median_seconds if report.ok and report.timing else None


weights = 4 * 354_823_168
activations = 24 * 114 * 512 * 1024 + 3 * 4 * 512 * 50257  # of 24 blocks, and around the loss
lab.answer(
    "medium",
    measured=away_medium.peak_bytes / GiB if away_medium.ok else None,
    formula=(weights + activations) / GiB,
    note="The weights, and what one sequence makes: activations and logits.",
)

# %% [markdown]
# Now what it saves and costs, on a model that fits either way: GPT-2 124M, one sequence of 256 tokens and two of
# 1024. Few tokens put the peak into the optimizer's step, many into the start of backward (lesson 01).

# %% name="optimizer"
places = {"all on the card": "", "state on the host": "state"}
places["state and gradients on the host"] = "state and gradients"
N = 124_439_808
optimizers, SHAPES = {}, ((1, 256), (2, 1024))
for batch, seq in SHAPES:
    for words, on_host in places.items():
        optimizers[batch, seq, on_host] = lab.measure(
            training,
            name=f"{words}, {batch} x {seq}",
            repeats=3,
            batch=batch,
            seq=seq,
            on_host=on_host,
            **quick,
        )
timed = dict(zip(optimizers, lab.with_times(optimizers.values()), strict=True))
table = []
for (batch, seq, on_host), report in timed.items():
    whole = timed[batch, seq, ""]
    both = whole.ok and report.ok and on_host
    saved = whole.peak_bytes - report.peak_bytes if both else 0
    table.append(
        [
            report.name,
            show(report.peak_bytes) if report.ok else "out of memory",
            f"{show(saved)} ({saved / N:.1f} bytes a parameter)" if both else "",
            show_time(seconds(report)),
        ]
    )
lab.table(["where", f"peak ({lesson.source})", "saved", "one step"], table)

# %% [markdown]
# Count the bytes for each parameter. With 256 tokens the peak is in the optimizer's step. From that moment 12 bytes go,
# 8 for the two averages and 4 for the temporary copy of the `foreach` version, and 4 more with the gradients. Less
# than 12 and 16 are saved, because now another moment makes the peak, in backward. With 2 x 1024 tokens the peak is at
# the start of backward: temporaries and gradients are not there anyway, and only the 8 are saved.
#
# The price is of the order of a whole step here. It varies with the host, with what else its processor does, and with
# how much of it backward can hide; the Account takes it apart.
#
# ### Activations on the host: `save_on_cpu`, and a side stream
#
# Autograd lets two functions of yours decide how a saved tensor is kept: `pack` gets it when an operator saves it,
# `unpack` gives it back when backward asks. `torch.autograd.graph.save_on_cpu` is such a pair: copy to the host, copy
# back. Its copies run on the stream that computes, so computing waits for every one of them.
#
# `labkit.offload.Prefetching` is another pair, on the same hooks: it copies on a side stream, it starts to fetch the
# next tensors before backward asks, it reuses its pinned buffers, it treats each storage once, and it leaves weights
# where they are. (`torchtune` had the same idea in `OffloadActivations`.) A tensor that is being copied stays on the
# card until its copy is done. How much may stay is the `window`: once it is full, computing waits for the bus.
#
# The hooks go around the blocks only. The logits and what the loss makes of them are needed at once, so it would be
# foolish to send them away.


# %% name="keeping"
KINDS = {
    "on the card": None,
    "save_on_cpu": lambda model: save_on_cpu(pin_memory=True),
    "save_on_cpu, pageable": lambda model: save_on_cpu(),  # as it comes
    "prefetching": lambda model: offload.Prefetching(model, window="128MiB"),
    "bfloat16": lambda model: offload.Compressed("bfloat16", model),
    "int8": lambda model: offload.Compressed("int8", model),
}


def around(block, hooks):
    """Make the hooks hold for everything that `block` saves in its forward pass."""
    forward = block.forward

    def inside(*args, **kwargs):
        with hooks:
            return forward(*args, **kwargs)

    block.forward = inside


BATCH = 3 if lesson.budget >= 8 * GiB else 1  # what fits without any of this


def keeping(
    device, kind="on the card", batch=BATCH, seq=1024, blocks=12, last=False, patient=False
):
    """AdamW on GPT-2; what the first (or last) `blocks` blocks save is kept as `kind` says.

    `patient`: no copy is waited for before all blocks have computed, and backward fetches from its first moment on.
    """
    with device:
        model = lab.models.gpt2("gpt2", attention="sdpa").train()
        tokens = torch.randint(0, 50257, (batch, seq))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if KINDS[kind] and not patient:
        hooks = KINDS[kind](model)
        chosen = list(model.transformer.h)
        for block in chosen[-blocks:] if last else chosen[:blocks]:
            around(block, hooks)
    if patient:
        hooks = offload.Prefetching(model, window="4GiB")  # more than all blocks save
        for block in model.transformer.h[:blocks]:
            around(block, hooks)

        def after_the_blocks(module, inputs, hidden):
            hooks.let_go()
            hidden.register_hook(lambda gradient: hooks.fetch())

        model.transformer.ln_f.register_forward_hook(after_the_blocks)

    def step():
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step.tokens = batch * seq
    return step


lab.guess(
    "kept",
    None,
    "GPT-2 124M, one sequence of 1024 tokens: what do 12 blocks keep for backward?",
    unit="MiB",
)
lab.guess(
    "slower",
    None,
    "All of it to the host and back, prefetching: how many times as long is a step?",
    unit="x",
)

# %% name="activations"
kept = {}
for kind in KINDS:
    if kind != "save_on_cpu, pageable":  # slow: one block of it, below
        kept[kind] = lab.measure(
            keeping, name=f"activations: {kind}", repeats=5, kind=kind, **quick
        )
kept = dict(zip(kept, lab.with_times(kept.values()), strict=True))
base = kept["on the card"]
lab.table(
    [
        f"saved tensors of the blocks, {BATCH} x 1024",
        f"peak ({lesson.source})",
        "saved",
        "one step",
        "as long as before",
    ],
    [
        [
            kind,
            show(report.steady.allocated_bytes),
            show(base.steady.allocated_bytes - report.steady.allocated_bytes),
            show_time(seconds(report)),
            f"{seconds(report) / seconds(base):.2f} x"
            if seconds(report) and seconds(base)
            else "–",
        ]
        for kind, report in kept.items()
    ],
)
full = {kind: lab.measure(keeping, name=f"8 x 1024, {kind}", repeats=0, kind=kind, batch=8, **quick)
        for kind in ("on the card", "prefetching")}  # fmt: skip
for report in full.values():
    print(report)


def time_of_keeping(name, **options):
    """Seconds of such a step: on a card measured, else of the card that has measured it; None where none has."""
    if on_card:
        return seconds(lab.measure(keeping, name=name, repeats=5, **options, **quick))
    timed = [r for r in lab.reference(name, kind="report") if r.get("timing")]
    return timed[0]["timing"]["median_seconds"] if timed else None


pageable = time_of_keeping("one block, pageable", kind="save_on_cpu, pageable", blocks=1)
if pageable and seconds(base):
    added = show_time(pageable - seconds(base))
    print(f"one block through pageable memory adds {added} to a step")
if all(seconds(report) for report in kept.values()):
    lab.plots.show(lab.plots.pareto(kept.values()))

# %% [markdown]
# *What to see* (where times are known): to the left is less memory, below is faster; `save_on_cpu` is ahead of
# prefetching by the window, and pays for it with the longest step. At 8 x 1024 the choice is between running out and
# waiting.
#
# ## Account
#
# ### When transfer hides behind computing
#
# A copy costs nothing when the card computes at least as long at the same time. So two times are compared: bytes over
# the bus's rate, and operations over the card's rate. First the bytes. The cell runs one block and counts what autograd
# hands to `pack`: how much in all, how much of it is weights or the same storage again, and what is left.

# %% name="counted"
d, L, V, s = 768, 12, 50257, 1024
packed = []


def one_block(device):
    with device:
        block = lab.models.gpt2("gpt2", attention="sdpa", n_layer=1).transformer.h[0].train()
        x = torch.randn(1, s, d, requires_grad=True)
    weights = {p.untyped_storage()._cdata for p in block.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kind = "weights" if storage._cdata in weights else "activations"
        packed.append(
            (kind, storage._cdata, storage.nbytes(), tensor.numel() * tensor.element_size())
        )
        return tensor

    def step():
        packed.clear()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            y = block(x)
            y = y[0] if isinstance(y, tuple) else y  # a tuple in older versions of transformers
        y.sum().backward()

    return step


lab.measure(one_block, name="one block", repeats=0, trace=False, record=False)
handed = sum(nbytes for *_, nbytes in packed)
of_weights = sum(nbytes for kind, *_, nbytes in packed if kind == "weights")
storages = {number: nbytes for kind, number, nbytes, _ in packed if kind == "activations"}
block_bytes = sum(storages.values())
lab.table(
    ["one block, 1 x 1024, fp32", "bytes"],
    [
        ["handed to `pack` (what save_on_cpu copies)", show(handed)],
        ["of it weights, which are on the card anyway", show(of_weights)],
        ["of it a storage that came before", show(handed - of_weights - block_bytes)],
        [f"left: {len(storages)} storages (what prefetching copies)", show(block_bytes)],
        ["by the formula of lesson 01, 114 b s d", show(114 * s * d)],
    ],
)
lab.answer("kept", measured=L * block_bytes / MiB, formula=L * 114 * s * d / MiB)


# %% [markdown]
# Then the times. One block needs 24 d² operations for each token in its forward pass, and keeps 114 d bytes. Their
# quotient, 24 d² / 114 d = d / 4.75 operations for each byte, is the block's arithmetic intensity. It does not
# contain the batch: twice as many tokens compute twice as long and have twice as much to copy. **Offloading
# activations has no break-even batch; it has a break-even width** (and a break-even card: slow cards hide more).
#
# What can be chosen is how many blocks go, and how long their copies may wait. Two cases. With t the time of a block's
# forward pass, 2 t that of its backward, and c that of copying what it saved:
#
# * **Each block behind itself.** The window holds less than a block. Computing waits for a block's copy before it goes
#   on to the next, so each block costs max(0, c - t) in forward and max(0, c - 2 t) in backward.
# * **All copies behind all blocks.** What goes may stay until the last block has computed, so k blocks are copied in
#   the time that 12 blocks compute: k blocks cost max(0, k c - 12 t) + max(0, k c - 24 t). Up to k = 12 t / c they
#   cost nothing.


# %% name="break-even-blocks"
def block_forward(device):
    with device:
        block = lab.models.gpt2("gpt2", attention="sdpa", n_layer=1).transformer.h[0].train()
        x = torch.randn(BATCH, s, d, requires_grad=True)
    return lambda: block(x)


def on_a_card(measured):
    """What `measured()` gives, on a card, under the budget and with its memory free; None without one."""
    if not on_card:
        return None
    measuring.release()
    with lab.budget(BUDGET):
        return measured()


forward = lab.known(
    "block_forward",
    on_a_card(lambda: lab.time_step(block_forward(lab.device())).median_seconds),
    "s",
    what=f"{BATCH} x 1024",
)
t_block, away_bytes = forward["value"], BATCH * block_bytes
hidden = None
if t_block and TO_HOST:
    c_down, c_up = away_bytes / TO_HOST, away_bytes / TO_CARD
    itself = max(0, c_down - t_block) + max(0, c_up - 2 * t_block)
    hidden = min(L, int(L * t_block / c_down))
    print(
        f"{forward['label']}: a block computes {show_time(t_block)} forward, its activations take "
        f"{show_time(c_down)} to the host.\nBehind all 12 blocks the copies of {hidden} hide. One block hides its own "
        f"copy from a width of about {d * c_down / t_block:,.0f} on (by the formula, at the same rates)."
    )

# how many blocks go; all 12 of the first row are measured above
COUNTS = {
    "first {} blocks, prefetching": (4, 9),
    "last {} blocks, prefetching": (4, 9),
    "first {} blocks, behind all": (2, 4, 6),
}


def how(words, blocks):
    """What *keeping* is told for such a row."""
    patient, last = "behind all" in words, words.startswith("last")
    return {"kind": "prefetching", "blocks": blocks, "last": last, "patient": patient}


def times_of(words):
    """(blocks, seconds of a step), as far as they are known."""
    found = [(0, seconds(base))]
    found += [(n, time_of_keeping(words.format(n), **how(words, n))) for n in COUNTS[words]]
    if "prefetching" in words:
        found.append((L, seconds(kept["prefetching"])))
    return [(n, time) for n, time in found if time]


measured_times = {words: times_of(words) for words in COUNTS}
if hidden is not None and len(measured_times["first {} blocks, prefetching"]) > 2:
    counts = range(L + 1)
    together = [
        max(0, n * c_down - L * t_block) + max(0, n * c_up - 2 * L * t_block) for n in counts
    ]
    start = seconds(base)
    lines = {
        words.replace(" {} blocks", "").replace("prefetching", "each behind itself"): points
        for words, points in measured_times.items()
        if len(points) > 1
    }
    lines["formula, each behind itself"] = [(n, start + n * itself) for n in counts]
    lines["formula, behind all"] = [(n, start + together[n]) for n in counts]
    picture = lab.plots.lines(
        {
            words: ([n for n, _ in points], [1e3 * time for _, time in points])
            for words, points in lines.items()
        },
        x="blocks whose activations go to the host",
        y="one step (ms)",
        title="What hides and what does not",
        source=forward["label"],
        marks={f"hidden: {hidden}": hidden},
        zero=True,
    )
    lab.plots.show(picture)
else:
    print("no reference row: the times of this figure need a card")
words = "first {} blocks, behind all"
waiting = lab.measure(
    keeping, name=f"memory: {words.format(4)}", repeats=0, **how(words, 4), **quick
)
print(f"{words.format(4)}: peak {show(waiting.peak_bytes)}, "
      f"{show(base.peak_bytes - waiting.peak_bytes)} less than with all on the card")  # fmt: skip

# %% [markdown]
# *What to see:* where each block hides its copy behind itself alone, every block costs the same, and it makes no
# difference whether the first blocks go or the last. Where the copies may wait until the last block has computed, the
# formula is flat as long as the bus keeps up, and rises then; how near a real step comes to it, its own points say,
# where a card has measured them. It is not for nothing: what waits is on the card meanwhile. That does no harm here,
# because the peak comes later, with the logits.

# %% name="settle-hidden"
ratio = None
if seconds(kept["prefetching"]) and seconds(base):
    ratio = seconds(kept["prefetching"]) / seconds(base)
lab.answer("slower", measured=ratio, source=None if on_card else "reference")
where = {} if on_card else {"source": "reference", "scope": "sm_90"}
if ratio is None:
    lab.settle("hidden", measured="needs a card", verdict="not measured here")
else:
    said = f"all 12 blocks of GPT-2 124M in fp32: {ratio:.2f} x the time"
    free = max(
        (n, words.format(n))
        for words, points in measured_times.items()
        for n, time in points
        if time < 1.05 * seconds(base)
    )
    if ratio < 1.05:
        verdict = "holds"
    elif free[0]:
        verdict = f"holds when only some go, and their copies may wait ({free[1]}: within 5 %)"
    else:
        verdict = "does not hold"
    lab.settle("hidden", measured=said, verdict=verdict, **where)

# %% [markdown]
# ### The optimizer's break-even batch
#
# With the optimizer the batch does count: 4 N bytes of gradients go down and 4 N bytes of weights come back *once a
# step*, and the processor steps once, however many sequences there were. Gradients leave during backward and hide
# there, as a rule. The processor's AdamW reads and writes 28 bytes for each parameter, in the host's memory, and the
# weights' way back overlaps with it. So the price of a step is about
#
# price = max(processor's AdamW, 4 N / rate to the card) + max(0, 4 N / rate to the host - backward)
#
# and it is at most a tenth of the step from price / (0.1 · time of a sequence) sequences on, by accumulation if need
# be.


# %% name="break-even-batch"
def host_adam(parameters):
    """Seconds that the processor needs for AdamW on so many parameters (a quarter is timed)."""
    weights = torch.zeros(parameters // 4, requires_grad=True)
    weights.grad = torch.ones_like(weights)
    optimizer = torch.optim.AdamW([weights], fused=True)
    return 4 * lab.time_step(optimizer.step, device="cpu", repeats=5, least=3).median_seconds


def time_of(micro_batches, on_host=""):
    """Seconds of a step of so many micro-batches of 2 x 512."""

    def timed():
        sizes = {"batch": 2, "seq": 512, "micro_batches": micro_batches}
        step = training(lab.device(), on_host=on_host, **sizes)
        return lab.time_step(step, warmup=1, repeats=3, least=3).median_seconds

    return on_a_card(timed)


processor = lab.fact("host_adam", host_adam(N), "s", source="measured" if on_card else "cpu")
print(f"AdamW for {N:,} parameters on this processor: {show_time(processor['value'])}")
found = {}
micro_batches = None
if on_card:
    one, three = time_of(1), time_of(3)
    found["sequence"] = (three - one) / 4  # two more micro-batches, of two sequences each
    found["price"] = time_of(1, "state") - one
    backward = 2 / 3 * 2 * found["sequence"]
    formula = max(processor["value"], 4 * N / TO_CARD)
    formula += max(0, 4 * N / TO_HOST - backward)
    micro_batches = math.ceil(formula / (0.1 * found["sequence"]) / 2)
    found["step"] = time_of(micro_batches)
    found["offloaded"] = time_of(micro_batches, "state")
    found |= {"formula": formula, "micro-batches": micro_batches}
host_row = processor if on_card else next(iter(lab.reference("host_adam")), processor)
processor_seconds = host_row["value"]  # of the host behind the card
names = ("sequence", "price", "formula", "micro-batches", "step", "offloaded")
known = {
    name: lab.known("break_even", found.get(name), "" if "-" in name else "s", what=name)
    for name in names
}
values = {name: row["value"] for name, row in known.items()}
if values["formula"]:
    at_break_even = values["offloaded"] / values["step"] - 1
    lab.table(
        [f"GPT-2 124M, 512 tokens, {known['price']['label']}", ""],
        [
            ["one sequence, forward and backward", show_time(values["sequence"])],
            ["AdamW by that host's processor", show_time(processor_seconds)],
            ["gradients down, weights up", show_time(4 * N / TO_HOST + 4 * N / TO_CARD)],
            ["price of a step: formula", show_time(values["formula"])],
            ["price of a step: measured at 2 sequences", show_time(values["price"])],
            [
                "break-even by the formula (10 %)",
                f"{2 * values['micro-batches']:.0f} sequences",
            ],
            [
                "price of a step: measured there",
                show_time(values["offloaded"] - values["step"]),
            ],
            ["measured there: slower by", f"{at_break_even:.1%}"],
        ],
    )
else:
    print("no reference row: the break-even batch needs a card")

away_activations = seconds(kept["prefetching"])
if plain_medium.ok:
    lab.settle(
        "host", measured="this budget is too large for the test", verdict="not measured here"
    )
elif not away_medium.ok:
    said = "gpt2-medium in 6 GiB: out of memory, also with state and gradients on the host"
    lab.settle("host", measured=said, verdict="does not hold")
elif not (values["price"] and hidden is not None and away_activations):
    said = (
        f"gpt2-medium in 6 GiB fits with {show(away_medium.peak_bytes)}; the price needs a card"
    )
    lab.settle("host", measured=said, verdict="not measured here")
else:
    of_optimizer = (4 * N / TO_HOST + 4 * N / TO_CARD) / values["price"]
    of_activations = L * itself / (away_activations - seconds(base))
    said = f"gpt2-medium in 6 GiB: {plain_medium.status}; offloaded: {show(away_medium.peak_bytes)}. "
    said += f"The bus explains {of_activations:.0%} of the price for activations, for the optimizer "
    said += f"{of_optimizer:.0%} of {show_time(values['price'])}, the processor's AdamW "
    said += f"{processor_seconds / values['price']:.0%} (they overlap)"
    if of_optimizer > 0.8 and of_activations > 0.8:
        verdict = "holds"
    elif of_activations > 0.8:
        verdict = "holds when activations move; an optimizer's price is paid to the host's processor, too"
    else:
        verdict = "holds when the bus is not taken for the whole price"
    lab.settle("host", measured=said, verdict=verdict, **where)

# %% [markdown]
# The formula is a lower bound. It leaves out that torchao steps each weight by itself, and that its hooks copy the
# gradients in *every* micro-batch, not once a step (`backward_hook` in its source): with accumulation the price grows
# with the micro-batches. Compare the two measured prices. Where memory allows, one large batch is better than many
# small ones. And look at the two terms: where the processor needs longer for AdamW than the bus for all it carries, a
# faster bus would not help.
#
# ### Which part should live where
#
# Four parts of GPT-2 124M, from their shapes: bytes of weights and of training state (16 for each parameter), bytes
# kept for backward and operations for one sequence of 1024 tokens (forward and backward, 6 for each weight and token;
# attention adds 12 s d for each token). *Intensity* is operations for each byte of training state: low means that
# the part spends its time asleep, and that little computing has to move with it or to wait for it.

# %% name="components"
block_parameters = 12 * d * d + 13 * d
attention = 12 * s * s * d
parts = {
    "embedding (lookup)": (
        V * d + 1024 * d,
        s * d,
        0,
        "host, if the head has weights of its own",
    ),
    "blocks 1 to 6": (
        6 * block_parameters,
        6 * block_bytes,
        6 * (6 * s * 12 * d * d + attention),
        "card; saved first, needed last: theirs can wait on the host",
    ),
    "blocks 7 to 12": (
        6 * block_parameters,
        6 * block_bytes,
        6 * (6 * s * 12 * d * d + attention),
        "card; what they save is needed soon",
    ),
    "head and loss": (
        V * d,
        3 * 4 * s * V,
        6 * s * V * d,
        "card: as dense as the blocks; chunk the loss",
    ),
}
table = []
for name, (parameters, activation_bytes, operations, place) in parts.items():
    table.append(
        [
            name,
            show(4 * parameters),
            show(16 * parameters),
            show(activation_bytes),
            f"{operations / 1e9:.0f} GFLOP",
            f"{operations / (16 * parameters):.0f}",
            f"{operations / activation_bytes:.0f}",
            place,
        ]
    )
lab.table(
    [
        "part",
        "weights",
        "training state",
        "kept",
        "operations",
        "FLOP/B of state",
        "FLOP/B kept",
        "place",
    ],
    table,
)
print(
    f"embedding and head share their {show(4 * V * d)}: the row of the head counts the same weights again"
)

# %% [markdown]
# A lookup multiplies nothing: each token reads one row of 3 KiB, and 154 MB of weights lie there for it. That is why
# the embedding is the part to move. But GPT-2's head uses *the same* weights (they are *tied*), and the head
# multiplies every token with all of them, as a block does with its own. So there are two experiments: GPT-2 as it is,
# where the head borrows the weights from the host for each step (154 MB come, their gradient goes back), and a GPT-2
# whose head has its own.


# %% name="embedding"
class OnHost(torch.nn.Module):
    """An embedding in the host's memory: it looks up there and sends the rows to the card."""

    def __init__(self, vocab, width):
        super().__init__()
        self.table = torch.nn.Embedding(vocab, width, device="cpu")

    def forward(self, tokens):
        return self.table(tokens.cpu()).to(tokens.device)


class Borrowed(torch.nn.Module):
    """A head that takes the embedding's weights from the host when it is called."""

    def __init__(self, table):
        super().__init__()
        self.lender = [table]  # in a list: its parameters are the embedding's, not the head's

    def forward(self, hidden):
        return hidden @ self.lender[0].weight.to(hidden.device).T


def with_embedding(device, host=False, tied=True, vocab=50257, layers=12, batch=1, seq=512):
    with device:
        model = lab.models.gpt2(
            "gpt2", attention="sdpa", n_layer=layers, vocab_size=vocab, tie_word_embeddings=tied
        ).train()
        tokens = torch.randint(0, vocab, (batch, seq))
    optimizers = []
    if host:
        model.transformer.wte = OnHost(vocab, d)
        if tied:
            model.lm_head = Borrowed(model.transformer.wte.table)
        optimizers.append(torch.optim.AdamW(model.transformer.wte.parameters(), fused=True))
    there = [p for p in model.parameters() if p.device == tokens.device]
    optimizers.append(torch.optim.AdamW(there, fused=True))

    def step():
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step.tokens = batch * seq
    return step


lab.guess(
    "embedding",
    None,
    "GPT-2 124M trained in fp32 with AdamW: the embedding on the host saves?",
    unit="MiB",
)

# %% name="embedding-measured"
variants = {  # sizes, and the bytes that should be saved for each parameter of the embedding
    "tied, as GPT-2 is": ({"tied": True, "batch": 1}, 8),
    "own head": ({"tied": False, "batch": 1}, 12),
    "own head, vocabulary of 151,936": (
        {"tied": False, "vocab": 151_936, "layers": 2, "batch": 1, "seq": 128},
        16,
    ),
}
table, saved_by, times = [], {}, {}
for words, (sizes, expected) in variants.items():
    card_run, host_run = lab.with_times(
        [
            lab.measure(
                with_embedding,
                name=f"embedding on the {'host' if host else 'card'}: {words}",
                repeats=3,
                host=host,
                **sizes,
                **quick,
            )
            for host in (False, True)
        ]
    )
    E = sizes.get("vocab", V) * d
    times[words] = seconds(card_run), seconds(host_run)
    if not (card_run.ok and host_run.ok):
        table.append(
            [words, f"{E / 1e6:.1f} M", card_run.status, host_run.status, "", "", "", ""]
        )
        continue
    saved_by[words] = card_run.peak_bytes - host_run.peak_bytes
    table.append(
        [
            words,
            f"{E / 1e6:.1f} M",
            show(card_run.peak_bytes),
            show(host_run.peak_bytes),
            f"{saved_by[words] / 1e9:.2f} GB",
            f"{saved_by[words] / E:.1f}",
            str(expected),
            f"{show_time(seconds(card_run))} to {show_time(seconds(host_run))}",
        ]
    )
lab.table(
    [
        "width 768",
        "embedding",
        "peak, card",
        "peak, host",
        "saved",
        "bytes a parameter",
        "expected",
        "one step",
    ],
    table,
)
prices = []
if TO_CARD:
    for words, tied in (("tied, as GPT-2 is", True), ("own head", False)):
        card_time, host_time = times[words]
        if not (card_time and host_time):
            continue
        adam = processor_seconds * V * d / N
        carried = (
            4 * (V if tied else 512) * d * (1 / PAGEABLE + 1 / bus_rate("to host, pageable"))
        )
        price = host_time - card_time
        prices.append([words, *map(show_time, (adam, carried, price, price - adam - carried))])
if prices:
    lab.table(
        ["price of a step", "AdamW there", "over the bus", "measured", "unexplained"],
        prices,
    )
tied_saved = saved_by.get("tied, as GPT-2 is")
lab.answer(
    "embedding",
    measured=tied_saved / MiB if tied_saved else None,
    formula=8 * V * d / MiB,
    note="AdamW's state of 38.6 M parameters. At the peak the head has the weights on the card.",
)
each = saved_by.get("own head, vocabulary of 151,936", 0) / (151_936 * d)
if tied_saved and each:
    need = 1.8e9 / each
    said = f"GPT-2 124M: {tied_saved / 1e9:.2f} GB; at most {each:.1f} bytes for each of its parameters"
    verdict = f"holds when the embedding has {need / 1e6:.0f} million parameters or more, a head beside it, and the "
    verdict += f"optimizer makes the peak; GPT-2's has {V * d / 1e6:.1f} million and is tied"
    longer = [host / card for card, host in times.values() if card and host]
    if longer:
        said += f"; a step takes {min(longer):.1f} to {max(longer):.1f} times as long"
    if tied_saved > 1.7e9:
        verdict = "holds"
    elif max(saved_by.values()) < 1.7e9:
        verdict = "does not hold"
    lab.settle("embedding", measured=said, verdict=verdict)
else:
    lab.settle("embedding", measured="did not fit this budget", verdict="not measured here")
widths = {"gpt2": 768, "gpt2-medium": 1024, "gpt2-large": 1280, "gpt2-xl": 1600}
states = [f"{name} {16 * V * width / 1e9:.2f} GB" for name, width in widths.items()]
print(f"training state of the embedding, 16 bytes a parameter: {', '.join(states)}")
whole_state = 16 * 120e6
print(
    f"1.8 GB are {1.8e9 / whole_state:.0%} of the training state of a whole model of 120 M parameters"
)

# %% [markdown]
# What is saved depends on who makes the peak. At the start of backward AdamW's state (8 bytes a parameter) is there,
# gradients are not; a tied head has borrowed the 4 bytes of the weights at just this moment. In the optimizer's step
# all 16 are there: a model with few tokens, a large vocabulary and a head of its own saves 16.
#
# The price (where times are known) is far above that of the arithmetic: the bus, and AdamW for 38.6 million parameters
# at the pace measured above, explain a small part of it. On the processor the gradient of a lookup is a table as large
# as the weights, made anew in each step and mostly zeros; how much of the rest that is was not measured here.
#
# ### Compression instead of the bus
#
# Saved tensors can also stay where they are, in fewer bits: 16 instead of 32, or 8 with one scale for each 256
# values. The loss is exact, because forward computes with the original; only backward sees the rounded values. What
# is saved grows with the tokens, as activations do. It is less than half of what the blocks keep: backward restores
# one block after another, and with few tokens another moment makes the peak. (On a Turing card, RTX 20 or T4, take
# float16, which has no room for values beyond 65504; no such card was at hand.)


# %% name="settle-compressed"
def saved_by_halves(seq):
    """Bytes that bfloat16 saves in a step of one sequence."""
    before, after = (
        lab.measure(
            keeping, name=f"1 x {seq}, {kind}", repeats=0, kind=kind, batch=1, seq=seq, **quick
        )
        for kind in ("on the card", "bfloat16")
    )
    return before.steady.allocated_bytes - after.steady.allocated_bytes


saved = {seq: saved_by_halves(seq) for seq in (768, 1024)}
in_base = {kind: base.steady.allocated_bytes - kept[kind].steady.allocated_bytes
           for kind in ("bfloat16", "int8")}  # fmt: skip
saved[BATCH * 1024] = in_base["bfloat16"]
lab.table(
    ["tokens at once", "saved by bfloat16", "of what 12 blocks keep"],
    [
        [f"{tokens:,}", f"{n / 1e9:.2f} GB", f"{n / (L * block_bytes * tokens / s):.0%}"]
        for tokens, n in saved.items()
    ],
)
enough = [tokens for tokens, n in saved.items() if n >= 0.4e9]
said = ", ".join(f"{n / 1e9:.2f} GB at {tokens:,} tokens" for tokens, n in saved.items())
said = f"bfloat16: {said}; int8: {in_base['int8'] / 1e9:.2f} GB there"
if enough and min(enough) > 768:
    verdict = (
        f"holds when a step of GPT-2 124M (fp32) has {min(enough):,} tokens at once (bfloat16)"
    )
else:
    verdict = "holds" if enough else "does not hold"  # at every number of tokens, or at none
lab.settle("compressed", measured=said, verdict=verdict)

# %% [markdown]
# ### ZeRO on one card
#
# ZeRO (Zero Redundancy Optimizer) is for several cards: each of w cards holds 1/w of the optimizer's state (stage 1),
# of the gradients too (stage 2), of the weights too (stage 3). On one card w is 1. The cell really runs a step of a
# small GPT-2 with PyTorch's own versions of stages 1 and 3 in a group of one process, and counts the bytes that it
# holds. What does save memory on one card is *ZeRO-Offload*, and what it saves is what it puts on the host.

# %% name="zero"
import torch.distributed as dist

from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

SMALL = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 500, "n_positions": 128}
SMALL |= {"bos_token_id": 0, "eos_token_id": 0}


def held_bytes(stage):
    """Bytes of weights, gradients and optimizer state in this process after one step."""
    with lab.device():
        model = lab.models.gpt2("gpt2", attention="sdpa", **SMALL).train()
        tokens = torch.randint(0, 500, (2, 64))
    if stage == 3:
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
    if stage == 1:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    states = optimizer.optim.state if stage == 1 else optimizer.state
    tensors = [t for state in states.values() for t in state.values() if t.dim()]
    tensors += [t for p in model.parameters() for t in (p, p.grad)]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local)


group = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
dist.init_process_group("nccl" if on_card else "gloo", **group)
held = {stage: held_bytes(stage) for stage in (0, 1, 3)}
dist.destroy_process_group()
shares = {
    0: (16, 0),
    1: (8, 8),
    2: (4, 12),
    3: (0, 16),
}  # bytes a parameter: whole, divided by w
lab.table(
    ["stage", "formula, bytes a parameter", "1 card", "2", "4", "8", "really held by 1"],
    [
        [
            str(stage) if stage else "none",
            f"{whole} + {part} / w",
            *(f"{whole + part / w:.1f}" for w in (1, 2, 4, 8)),
            show(held[stage]) if stage in held else "",
        ]
        for stage, (whole, part) in shares.items()
    ],
)
same = all(held[stage] >= held[0] for stage in held)
lab.settle(
    "zero",
    measured=f"held by one process: {show(held[0])} without, {show(held[1])} in stage 1, {show(held[3])} in stage 3",
    verdict="does not hold" if same else "holds",
    source="measured" if on_card else "cpu",
)

# %% [markdown]
# ### DeepSpeed's ZeRO-Offload, where it is installed
#
# DeepSpeed is an extra of this package (`deepspeed`). Its setting `offload_optimizer` steps on the host, too, with an
# AdamW of its own for the processor, which it compiles at first use. Two lines of the configuration matter on a small
# card. `stage: 2` lets gradients leave during backward. `reduce_bucket_size` is a buffer on the *card* in which
# gradients wait: the default of 5·10⁸ numbers takes 2 GB in fp32, as much as the training state of GPT-2 124M. It is
# measured in a process of its own, because it leaves much behind. (torchao's README has, for a 1.1B model on a 16 GB
# card, 3.13 s and 6.85 GB with DeepSpeed against 1.52 s and 5.24 GB with `CPUOffloadOptimizer`.)


# %% name="deepspeed"
def settings(batch, bucket):
    """DeepSpeed's configuration."""
    offload_to = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": offload_to,
            "reduce_bucket_size": bucket,
        },
    }


# what a launcher would set for one process
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}


def zero_offload(device, batch=1, seq=256, bucket=5_000_000):
    import deepspeed

    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    with device:
        model = lab.models.gpt2("gpt2", attention="sdpa").train()
        tokens = torch.randint(0, 50257, (batch, seq))
    engine, *_ = deepspeed.initialize(model=model, config=settings(batch, bucket))

    def step():
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    step.tokens = batch * seq
    return step


apart = {"budget": BUDGET, "trace": False, "nearest": False, "isolate": True, "repeats": 5}
runs = {  # name of the row: sizes
    "DeepSpeed, 1 x 256": {"batch": 1, "seq": 256},
    "DeepSpeed, 2 x 1024": {"batch": 2, "seq": 1024},
    "DeepSpeed, 1 x 256, bucket as it comes": {"batch": 1, "seq": 256, "bucket": 500_000_000},
}
found = []
extras.missing("deepspeed", "ZeRO-Offload is not measured in this run")
if extras.has("deepspeed") and not on_card:
    print("DeepSpeed is installed, but needs a card")
elif extras.has("deepspeed"):
    try:
        for name, sizes in runs.items():
            found.append(("this run", lab.measure(zero_offload, name=name, **sizes, **apart)))
    except RuntimeError as error:  # most often its own AdamW could not be built, see Pitfalls
        print(f"DeepSpeed is installed, but does not run: {error}")
if not found:
    rows = [row for name in runs for row in lab.reference(name, kind="report")]
    found = [(row["label"], lab.Report.from_dict(dict(row))) for row in rows]
beside = [
    (lesson.source, timed[batch, seq, where])
    for batch, seq in SHAPES
    for where in places.values()
]
if found:
    lab.table(
        ["GPT-2 124M, fp32, AdamW", "peak", "one step", "peak from"],
        [
            [r.name, show(r.peak_bytes) if r.ok else r.status, show_time(seconds(r)), source]
            for source, r in [*beside, *found]
        ],
    )
else:
    print("no reference row of DeepSpeed")

# %% [markdown]
# ### Loading: what the host needs
#
# Before anything trains, a checkpoint passes through the host's memory. Read the usual way it is there twice: once in
# the model, once in the file's copy. `torch.load(mmap=True)` maps the file instead of reading it: the system brings
# in pages as they are touched, and may drop them again, because the file has them. `assign=True` makes the mapped
# tensors the model's own, so that the model needs no memory of its own; safetensors does the same. The memory is read
# from the system while each variant runs, *own* pages and pages of *files* apart.

# %% name="load"
scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name)
SHORT = {"n_layer": 2, "vocab_size": 8_000, "bos_token_id": 0, "eos_token_id": 0}


def empty(device="cpu"):
    """A GPT-2 of two blocks whose weights are memory without meaning (or, on "meta", no memory)."""
    with torch.device("meta"):
        model = lab.models.gpt2("gpt2", **SHORT)
    if device == "cpu":
        model = model.to_empty(device="cpu")
        model.tie_weights()
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0.01)
    return model


with quietly():
    model = empty()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder / "model")
    torch.save(model.state_dict(), folder / "weights.pt")
    del model


def read(mmap=False, assign=False, safetensors=False):
    """Load the weights into a model and read each of them once."""
    model = empty("meta" if assign else "cpu")
    if safetensors:
        weights = load_file(folder / "model" / "model.safetensors")
        weights["lm_head.weight"] = weights[
            "transformer.wte.weight"
        ]  # saved once: they are tied
    else:
        weights = torch.load(folder / "weights.pt", mmap=mmap, weights_only=True)
    model.load_state_dict(weights, assign=assign)
    model.tie_weights()
    return sum(float(p.detach().sum()) for p in model.parameters())


ways = {
    "torch.load": ({}, 2, 0),
    "torch.load(mmap=True)": ({"mmap": True}, 1, 1),
    "torch.load(mmap=True), assign=True": ({"mmap": True, "assign": True}, 0, 1),
    "safetensors, assign=True": ({"safetensors": True, "assign": True}, 0, 1),
}
table = []
for words, (options, own, mapped) in ways.items():
    taken = bus.host_peak(lambda options=options: read(**options))
    lab.fact(
        "load",
        taken.own_bytes,
        "bytes",
        what=words,
        file_bytes=taken.file_bytes,
        source="measured" if on_card else "cpu",
    )
    table.append(
        [
            words,
            show(taken.own_bytes),
            f"{own} x {show(whole)}",
            show(taken.file_bytes),
            f"{mapped} x",
            show_time(taken.seconds),
        ]
    )
lab.table(
    ["way", "own memory, peak", "expected", "pages of the file", "expected", "time"], table
)

# %% [markdown]
# ### Inference with weights on the host or on disk: accelerate
#
# For inference whole modules can stay away. `init_empty_weights` builds a model without memory;
# `infer_auto_device_map` plans, from what each place may hold, where each module goes; `load_checkpoint_and_dispatch`
# loads each weight straight to its place and sets hooks that bring a module's weights to the card just before it
# runs, and drop them after. So each forward pass carries all weights that are away over the bus, whatever the batch.
# Transformers' `device_map="auto"` does the same in one call. None of this can train.


# %% name="accelerate"
with init_empty_weights():
    skeleton = lab.models.gpt2("gpt2")
skeleton.tie_weights()
room = {0: "300MiB", "cpu": "100MiB", "disk": "10GiB"}
with quietly():  # it remarks that there is no card 0 where there is none
    plan = infer_auto_device_map(
        skeleton, max_memory=dict(room), no_split_module_classes=["GPT2Block"]
    )
where = {}
for module, place in plan.items():
    where.setdefault(str(place), []).append(module)
print(f"GPT-2 124M with {room[0]} on the card and {room['cpu']} on the host:")
for place, modules in where.items():
    print(
        f"  {'card' if place == '0' else place:5s} {modules[0]} ... {modules[-1]} ({len(modules)} modules)"
    )


def dispatched(place):
    """A model whose blocks are on `place`, everything else on the card (on the processor without one)."""
    main = 0 if on_card else "cpu"
    with init_empty_weights():
        model = lab.models.gpt2("gpt2", **SHORT)
    model.tie_weights()
    modules = (
        "transformer.wte",
        "transformer.wpe",
        "transformer.drop",
        "transformer.ln_f",
        "lm_head",
    )
    device_map = dict.fromkeys(modules, main)
    device_map["transformer.h"] = main if place == "card" else place
    with quietly():
        return load_checkpoint_and_dispatch(
            model,
            str(folder / "model"),
            device_map=device_map,
            offload_folder=str(folder / "away"),
        ).eval()


def forward_of(place):
    """Seconds of a forward pass of 64 tokens, and its logits."""
    model = dispatched(place)
    tokens = torch.arange(64, device=lab.device())[None]
    with torch.no_grad():
        timing = lab.time_step(
            lambda: model(input_ids=tokens), repeats=10 if on_card else 3, least=3
        )
        return timing.median_seconds, model(input_ids=tokens).logits.float().cpu()


blocks_bytes = 2 * 4 * block_parameters
rows, first_logits = [], None
for place in ("card", "cpu", "disk") if on_card else ("card", "disk"):
    time_taken, logits = forward_of(place)
    first_logits = logits if first_logits is None else first_logits
    label = place if on_card else {"card": "host's memory"}.get(place, place)
    lab.fact("dispatched", time_taken, "s", what=place, source="measured" if on_card else "cpu")
    rows.append(
        [label, show_time(time_taken), f"{float((logits - first_logits).abs().max()):.1e}"]
    )
for row in [] if on_card else lab.reference("dispatched"):
    rows.append([f"{row['what']} ({row['label']})", show_time(row["value"]), ""])
lab.table(["two blocks live on", "forward, 64 tokens", "logits differ by"], rows)
if PAGEABLE:
    print(
        f"their {show(blocks_bytes)} take {show_time(blocks_bytes / PAGEABLE)} over the bus, from pageable memory"
    )
scratch.cleanup()

# %% [markdown]
# ## Equivalence
#
# A copy is exact, so gradients must be equal *to the last bit*, whoever carried the activations. Compression rounds;
# bfloat16 keeps 8 binary digits, so that a value is off by at most 2⁻⁸ of itself (0.4 %), and int8 by half a
# step, 1/254 of the largest of its 256 values. The gradient of a weight is a sum over many values, whose errors
# partly cancel: an error of the order of one rounding is expected, and 1 % for bfloat16, 2 % for int8 is the
# tolerance.
#
# The optimizer on the host computes the same AdamW, but on another processor, whose roots and divisions round
# differently. What it does to the weights in three steps is compared with what the card does, on a card only; the
# tolerance is a thousandth of the change.


# %% name="equivalence"
def small_model():
    """A small GPT-2 and fixed random tokens: the same every time."""
    torch.manual_seed(0)
    with lab.device():
        model = lab.models.gpt2("gpt2", attention="eager", **{**SMALL, "n_layer": 4}).train()
        return model, torch.randint(0, 500, (4, 64))


def small_gradients(hooks):
    """Its loss and gradients, with the hooks around its blocks."""
    model, tokens = small_model()
    hooks = hooks(model)
    for block in model.transformer.h if hooks else ():
        around(block, hooks)
    torch.manual_seed(1)  # the same dropout masks every time
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def change_of_weights(kind):
    """What three steps do to its weights."""
    model, tokens = small_model()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = kind(model.parameters(), lr=1e-4)
    torch.manual_seed(1)
    for _ in range(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat(
        [(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]
    )


def host_optimizer_off():
    """How far the weights' change by torchao's optimizer on the host is from the card's, relative to the change."""
    from torchao.optim import CPUOffloadOptimizer

    card, host = change_of_weights(torch.optim.AdamW), change_of_weights(CPUOffloadOptimizer)
    return float((card - host).norm() / card.norm())


fine = {"least_bytes": 1024}  # the tensors of a small model are small
carriers = {
    "save_on_cpu": lambda model: save_on_cpu(pin_memory=on_card),
    "prefetching": lambda model: offload.Prefetching(model, window="256KiB", **fine),
    "bfloat16": lambda model: offload.Compressed("bfloat16", model, **fine),
    "float16": lambda model: offload.Compressed("float16", model, **fine),
    "int8": lambda model: offload.Compressed("int8", model, **fine),
}
loss, wanted = small_gradients(lambda model: None)
table, worst = [], {}
for words, hooks in carriers.items():
    other, gradients = small_gradients(hooks)
    equal = all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))
    worst[words] = max(
        float((a - b).norm() / b.norm()) for a, b in zip(gradients, wanted, strict=True)
    )
    tolerance = {"bfloat16": 0.01, "float16": 0.01, "int8": 0.02}.get(words, 0)
    lab.fact("gradient_error", worst[words], "", what=words)
    table.append(
        [
            words,
            "equal" if torch.equal(other, loss) else "differs",
            "equal to the last bit" if equal else f"off by {worst[words]:.1e}",
            "yes" if worst[words] <= tolerance else "no",
        ]
    )
lab.table(["saved tensors", "loss", "gradients (worst weight)", "within tolerance"], table)
moved = lab.known("host_optimizer_off", on_a_card(host_optimizer_off), "")
if moved["value"] is not None:
    verdict = "within" if moved["value"] <= 1e-3 else "not within"
    print(f"optimizer on the host: the weights' change is off by {moved['value']:.1e}, {verdict} "
          f"the tolerance ({moved['label']})")  # fmt: skip

# %% [markdown]
# ## Negative control
#
# Offloading must not help where there is nothing to move. Three such cases: the optimizer on the host under SGD
# without momentum, which has no state; the optimizer under LoRA, which trains a few small matrices and freezes the
# rest; and activations on the host with one sequence of 64 tokens, where the peak is made of weights and state.


# %% name="negative-control"
def lora(device, on_host="", batch=1, seq=256):
    from peft import LoraConfig, get_peft_model

    with device:
        model = lab.models.gpt2("gpt2", attention="sdpa").train()
        config = LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True)
        with quietly():
            model = get_peft_model(model, config)
        tokens = torch.randint(0, 50257, (batch, seq))
    trained = [p for p in model.parameters() if p.requires_grad]
    if on_host:
        from torchao.optim import CPUOffloadOptimizer

        optimizer = CPUOffloadOptimizer(trained, torch.optim.AdamW, lr=1e-4)
    else:
        optimizer = torch.optim.AdamW(trained, foreach=True)

    def step():
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    if on_host:
        offload.drop_hooks_with(step, model)
    return step


sgd = {"optimizer": "sgd", "batch": 1, "seq": 256}
tiny = {"batch": 1, "seq": 64}
cases = {
    "SGD, optimizer": [(training, sgd), (training, {**sgd, "on_host": "state"})],
    "LoRA, optimizer": [(lora, {}), (lora, {"on_host": "state"})],
    "64 tokens, activations": [(keeping, tiny), (keeping, {**tiny, "kind": "prefetching"})],
}
table, shares = [], []
for words, pair in cases.items():
    before, after = (
        lab.measure(build, name=f"{words}: {where}", repeats=0, **sizes, **quick)
        for where, (build, sizes) in zip(("card", "host"), pair, strict=True)
    )
    shares.append(1 - after.peak_bytes / before.peak_bytes)
    peaks = show(before.peak_bytes), show(after.peak_bytes)
    table.append([words, *peaks, f"{shares[-1]:.1%}"])
lab.table(["what goes to the host", "peak before", "peak after", "saved"], table)
helps = [words for words, share in zip(cases, shares, strict=True) if share > 0.01]
print(f"it helps where it should not: {', '.join(helps)}" if helps
      else "nothing is saved (below 1 %), as expected")  # fmt: skip

# %% [markdown]
# ## Pitfalls
#
# **Activation offload makes each step many times as long.** Synchronous copies, from pageable memory, of weights and
# of shared storages too: that is `save_on_cpu()` as it comes. Use a side stream, pinned buffers and prefetching, and
# send only as many blocks as the bus can hide.
#
# **After `del model, optimizer` the card's memory is still taken.** torchao's optimizer hangs a hook on every weight
# that refers to the weight itself: a circle through C++ that Python's collector does not see. Clear the hooks
# (`parameter._post_accumulate_grad_hooks.clear()`), or end the process.
#
# **The host runs out of memory, or begins to swap.** PyTorch rounds a pinned allocation up to the next power of two
# (65 MiB take 128; `CachingHostAllocator.h` in its source) and keeps it. Reuse a pool of buffers, and watch what the
# host has left.
#
# **"can't train a model loaded with CPU or disk offload".** Device maps are for inference. To train, move the
# optimizer's state or the activations, not the modules.
#
# **Accumulation does not work with `offload_gradients=True`.** A gradient that has left the card cannot be added to.
# Accumulate without it, or not at all.
#
# **The optimizer's step on the host takes seconds.** An AdamW that is not fused runs operation by operation. torchao
# switches the fused one on; "DeepSpeedCPUAdam has no attribute ds_opt_adam" means that the build of DeepSpeed's own
# failed: the real error stands further up, most often a CUDA toolkit that does not match PyTorch (DeepSpeed#1846).
#
# **The link runs at a quarter of its speed.** The second slot of many boards is wired with 4 lanes. Read *link at
# most* above while the card works.

# %% [markdown]
# ## Exercise 1
#
# *4 min, easy.* gpt2-xl has 1557.6 million parameters. Its weights and gradients are in bf16, and its optimizer lives
# on the host, behind a bus that carries 25 GB/s in each direction. How many **milliseconds** of transfer does one
# step need, gradients down and weights up, if nothing overlaps?
#
# <details><summary>Hint</summary>
#
# bf16 has 2 bytes. Each parameter crosses the bus twice in a step: once as a gradient, once as a weight. 25 GB/s are
# 25 · 10⁹ bytes for each second.
#
# </details>

# %% answer="bus_ms"
bus_ms = ...
### BEGIN SOLUTION
bus_ms = 2 * 1557.6e6 * 2 / 25e9 * 1000
### END SOLUTION

# %% check="bus_ms" points=1
lab.check.number(
    "bus_ms",
    bus_ms,
    2 * 1557.6e6 * 2 / 25e9 * 1000,
    unit="ms",
    tolerance=0.01,
    mistakes={
        1557.6e6
        * 2
        / 25e9
        * 1000: "One direction only (or one byte each): what else crosses the bus?",
        2 * 1557.6e6 * 4 / 25e9 * 1000: "bf16 does not have 4 bytes.",
        2 * 1557.6e6 * 2 / 25e9: "These are seconds.",
        2 * 1557.6e6 * 16 / 25e9 * 1000: "Bits or bytes? GB/s are gigabytes.",
        16
        * 1557.6e6
        / 25e9
        * 1000: "The optimizer's state stays on the host: it does not cross the bus.",
        2 * 124.4e6 * 2 / 25e9 * 1000: "This is the small gpt2.",
    },
    hint="Bytes that cross, over bytes for each second.",
)

# %% [markdown]
# ## Exercise 2
#
# *10 min, medium.* Write the two functions of a compression of your own. `pack(tensor)` keeps an fp32 tensor as
# bfloat16 and everything else (other dtypes) as it is; `unpack(kept)` gives back what backward expects: a tensor of
# the dtype that was saved. `kept` may be anything you like, for example a tuple.
#
# <details><summary>Hint</summary>
#
# `pack` decides and remembers its decision; `unpack` sees only what `pack` returned. A pair `(tensor, dtype)` tells
# `unpack` everything it needs, also for tensors that were bfloat16 before.
#
# </details>


# %% answer="halves"
def pack(tensor):
    ### BEGIN SOLUTION
    if tensor.dtype == torch.float32:
        return tensor.to(torch.bfloat16), torch.float32
    return tensor, tensor.dtype
    ### END SOLUTION


def unpack(kept):
    ### BEGIN SOLUTION
    tensor, dtype = kept
    return tensor.to(dtype)
    ### END SOLUTION


# %% check="halves" points=2
def tensors_in(kept):
    """All tensors in what `pack` returned."""
    if isinstance(kept, torch.Tensor):
        return [kept]
    if isinstance(kept, dict):
        kept = list(kept.values())
    return (
        [t for part in kept for t in tensors_in(part)]
        if isinstance(kept, (list, tuple))
        else []
    )


def both(tensor):
    """What `pack` keeps and what `unpack` gives back; `...` while they are not written."""
    kept = pack(tensor)
    if kept is None or kept is ...:
        return ...
    return kept, unpack(kept)


def judge(tensor, size, exact):
    """What `lab.check.code` asks about one tensor that went through `pack` and `unpack`."""

    def verdict(found):
        kept, back = found
        nbytes = sum(t.untyped_storage().nbytes() for t in tensors_in(kept))
        if not isinstance(back, torch.Tensor):
            return f"unpack returns {type(back).__name__}: a tensor is asked for. Is there a `return`?"
        if back.dtype != tensor.dtype:
            return (
                f"{tensor.dtype} went in, {back.dtype} comes back: what does backward expect?"
            )
        if back.shape != tensor.shape:
            return "the shape is not the one that went in."
        if nbytes == 0:
            return "pack keeps no tensor: where are the values?"
        if nbytes > size:
            return f"{nbytes} bytes are kept of {tensor.numel() * tensor.element_size()}: {size} are enough."
        if not bool(back.isfinite().all()):
            return "some values became infinite: which 16-bit format has the range of fp32?"
        off = (back.double() - tensor.double()).abs()
        if exact and bool(off.any()):
            return f"{tensor.dtype} must come back as it was."
        if bool((off > 2**-8 * tensor.double().abs()).any()):  # of each value, small ones too
            return "the values are further off than bfloat16 rounds: was anything else changed?"
        return True

    return verdict


torch.manual_seed(0)
single, large = torch.randn(4, 32), 1e30 * torch.randn(4, 32)
mask, brain = torch.rand(4, 32) > 0.5, torch.randn(4, 32).bfloat16()
lab.check.code(
    "halves",
    both,
    [
        lab.check.case(single, expect=judge(single, 256, False), raw=True),
        lab.check.case(large, expect=judge(large, 256, False), raw=True),
        lab.check.case(mask, expect=judge(mask, 128, True), raw=True),
        lab.check.case(brain, expect=judge(brain, 256, True), raw=True),
    ],
    points=2,
)

# %% [markdown]
# ## Exercise 3
#
# *6 min, medium.* Three people ran out of memory on an 8 GiB card with 64 GiB of host memory behind it:
#
# ```
# A  gpt2 (124M), fp32, SGD without momentum, batch 16 x 1024
# B  gpt2-large (774M), fp32, AdamW, batch 1 x 512
# C  gpt2-xl (1.56B) frozen in 4 bits, LoRA with rank 8, batch 8 x 1024
# ```
#
# For which of them is the *optimizer* on the host the cure? Say for the other two why it is not, and what fills their
# memory instead.
#
# <details><summary>Hint</summary>
#
# How many bytes of optimizer state does each of them have? Count trained parameters, and what the optimizer remembers
# of each.
#
# </details>

# %% answer="cured"
cured_run = ...
### BEGIN SOLUTION
cured_run = "B"
### END SOLUTION

# %% check="cured" points=1
lab.check.choice(
    "cured",
    cured_run,
    "B",
    of=("A", "B", "C"),
    mistakes={
        "A": "What does SGD without momentum remember of each parameter?",
        "C": "How many parameters does LoRA train, and which of them have a state?",
    },
)

# %% answer="why" points=2
why = ...
### BEGIN SOLUTION
why = """A: SGD without momentum has no optimizer state, so there is nothing to move; 16 sequences of activations and
logits fill the memory, and a smaller batch with accumulation, or activations on the host, is the cure.
C: LoRA trains only small adapters; their AdamW state is a few megabytes. The frozen weights are small in 4 bits, so the
activations and logits of 8 sequences are what fills it.
B: 8 of the 16 bytes of each of 774 million parameters are state."""
### END SOLUTION

# %% check="why"
lab.check.words(
    "why",
    why,
    {
        r"sgd[^.!?]*(no|nothing|without|not|zero|stateless|0)\b|(no|nothing|zero)[^.!?]*(state|remember|moments?)"
        r"|stateless|keeps? (nothing|none)": "What does SGD without momentum remember of each parameter?",
        r"lora[^.!?]*(few|small|tiny|little|only|adapter|low|hardly|megabyte|mb\b|mib\b|%)"
        r"|(few|small|tiny|little|only|hardly)[^.!?]*(trained|trainable|adapter|lora)": (
            "How much state does LoRA's optimizer have?"
        ),
        r"activation|logit|batch|sequences|tokens": "What fills the memory of A and C instead?",
    },
    against={
        r"(?<!not )(?<!n't )(?<!never )\bcures? (a|c|all|both|every)\b": "Does it cure A or C?",
        r"(do not|don't) know|no idea": "Say what you do know: what does each optimizer remember?",
    },
    points=2,
    least=20,
)

# %% [markdown]
# ## Take-away
#
# 1. Measure the bus first. What is used once in a step (optimizer state) pays its price once a step, whatever the
#    batch; what grows with the tokens (activations) pays for each of them.
# 2. Transfer hides where the card computes long enough meanwhile. For the optimizer that is a matter of the batch; for
#    activations of the model's width, of the card, of how many blocks go, and of how much may wait for its copy.
# 3. Look at the peak before you move anything. An optimizer without state, activations of a few tokens: moving them
#    saves nothing. A tied embedding saves its state only. The bus is paid all the same.
#
# Next: lesson 06, attention.

# %% name="finish"
lab.finish(
    "Is the peak made of optimizer state? Put it on the host; the more tokens a step has, the less it costs. "
    "Is it activations? Count their bytes against the bus first; checkpoint what it cannot carry."
)
