# ---
# jupyter:
#   labkit:
#     title: Where do 8 GB go?
#     question: What takes the memory of a training step, and what breaks first?
#     after: name every gigabyte of a training step and say what will break before it does
#     minutes: {gpu: 2, cpu: 0.7}
#     memory: 8 GiB budget
#     needs: [00_environment]
#     fetch: []
# ---

# %% name="begin"
import contextlib
import gc
import io
import textwrap

import numpy
import pandas
import torch

from IPython.display import display

import labkit as lab

lesson = lab.begin("01_baseline_oom")
BUDGET = lesson.budget  # bytes that PyTorch may take from the card
on_card = lab.device().type == "cuda"
MiB, GiB = 2**20, 2**30
show = lab.show_bytes  # 1536 MiB -> "1.50 GiB"

# %% [markdown]
# ## Claims
#
# Four sentences that one hears about memory. This run fills in the empty columns of the table, at the end of the
# lesson.
#
# Words that this lesson uses all the time:
#
# | word | meaning |
# | --- | --- |
# | GiB, MiB | 2³⁰ and 2²⁰ bytes; the "8 GB" on a card's box are about 8 GiB |
# | parameter, weight | a number that training changes; GPT-2 "124M" has 124 million of them, 4 bytes each in fp32 |
# | gradient | how the loss changes with one parameter; backward makes one for each |
# | optimizer state | what AdamW remembers of each parameter: two running averages |
# | activation | a result of the forward pass that backward needs again and that is therefore kept |
# | logits | the scores that the model gives to every word of its vocabulary, for every token |
# | peak | the most bytes that are alive at one moment of a step: this is what must fit |
# | allocator | the part of PyTorch that takes memory from the driver in large pieces and hands it out in small ones |
# | allocated | bytes in the allocator's blocks that tensors hold |
# | requested | the same before the allocator rounds each block up |
# | reserved | bytes that the allocator has taken from the driver, free pieces included |
# | steady | the fourth step, when everything that stays is there; the first one has no optimizer state yet |
# | temporary | alive for a moment within a step: nobody keeps it |
# | workspace | scratch memory that cuBLAS, the library of matrix products, takes once and keeps |
# | unattributed | the part of the peak that no tensor accounts for |
# | sm_90 | a card's generation as NVIDIA counts it (9.0: Hopper, the H200); verdicts name the one that they are for |

# %% name="claims"
lab.claim(
    "linear",
    "Memory grows linearly with the batch: twice as many, twice as much.",
    said_by="documentation, blog posts",
)
lab.claim(
    "square",
    "Memory grows with the square of the sequence length: twice as long, four times as much.",
    said_by="papers, blog posts",
)
lab.claim(
    "accumulation",
    "Gradient accumulation cures running out of memory: 4 x 8 = 32.",
    said_by="forum answers",
)
lab.claim("driver", "nvidia-smi shows what my model needs.", said_by="forum questions")
lab.claims()

# %% [markdown]
# ## Experiment
#
# GPT-2 with 124 million parameters, trained as a first try would: fp32, AdamW, 8 sequences of 1024 tokens. *Eager*
# attention means that each operation of attention runs by itself and leaves its result in memory.
#
# An experiment is a function of a device that builds everything and returns `step`. It is plain PyTorch; your own
# model can stand here. Tokens and weights are random: memory does not depend on their values.
#
# `lab.measure` runs the experiment under the budget. With a card the limit is real: PyTorch's allocator refuses to
# take more. Without one the same function runs on tensors that have shapes and no data, and its memory is predicted.
# Either way, running out of memory is a result here, not a crash.


# %% name="baseline"
def baseline(device, batch=8, seq=1024, attention="eager"):
    with device:  # create everything there
        model = lab.models.gpt2("gpt2", attention=attention, n_positions=max(seq, 1024)).train()
        tokens = torch.randint(0, 50257, (batch, seq))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)  # the default on a GPU

    def step():
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step.tokens = batch * seq
    return step


# %% name="guess-fits"
lab.guess("fits", None, "Does this step fit into the budget above? (True or False)")

# %% name="oom"
oom = lab.measure(baseline, budget=BUDGET, name="GPT-2 124M, 8 x 1024, eager", nearest=False)
oom

# %% name="answer-fits"
lab.answer("fits", measured=oom.ok)
if on_card:
    print(
        f"Python is alive. Still allocated: {show(torch.cuda.memory_allocated())}, of it left by "
        f"the failed run: {show(oom.leftover_bytes)}; the rest are cuBLAS workspaces, which stay."
    )
else:
    print(
        "Python is alive. Nothing was taken, because the run was a prediction; "
        "on a card this line says what is left."
    )

# %% [markdown]
# ### Reading the error
#
# The report above is short for what PyTorch says when it gives up. Three numbers of its sentence matter, and the
# first is the one most often misread: it is the size of one tensor, not what is missing in all. (PyTorch rounds it up,
# large ones to whole 2 MiB: 392.6 MiB become 394.)

# %% name="message"
if oom.failure:
    failed = oom.failure
    parts = [
        ("Tried to allocate", failed.wanted_bytes, "the one tensor that did not fit"),
        ("allocated by PyTorch", BUDGET - failed.free_bytes, "alive: your tensors"),
        ("reserved but unallocated", failed.scattered_bytes, "free, in pieces too small"),
    ]
    shapes = {
        "the attention scores of a block": 4 * 8 * 12 * 1024**2,
        "a dropout mask of attention (1 byte each)": 8 * 12 * 1024**2,
        "a result inside the MLP": 4 * 8 * 1024 * 4 * 768,
        "what goes from block to block": 4 * 8 * 1024 * 768,
    }
    known = next(iter(lab.reference(oom.name, kind="report")), None) if not on_card else None
    if known and known["failure"]:
        print(f"reference, {known['card']}, budget {show(known['budget_bytes'])}:")
    sentence = known["failure"]["message"] if known and known["failure"] else failed.message
    print(textwrap.fill(sentence, 96), end="\n\n")
    for words, nbytes, meaning in parts:
        print(f"{words:26s} {show(nbytes):>10s}   {meaning}")
    like = [what for what, nbytes in shapes.items() if nbytes == failed.wanted_bytes]
    print(
        f"\nThat tensor is as large as: {', or '.join(like) or 'none of the shapes that we know'}."
    )
    unreserved = failed.free_bytes - failed.scattered_bytes
    print(
        f"{show(failed.free_bytes)} are free, but {show(failed.scattered_bytes)} of them lie in pieces under "
        f"{show(failed.wanted_bytes)},\nand the other {show(unreserved)} are too little for a new piece."
    )

# %% [markdown]
# The place where it broke, the phase and module in the report, is only where the *last straw* fell. What filled the
# memory before is the bar in the report, and that is what to act on. (When the third number is large, most of what is
# free lies about in pieces: see *Three numbers for memory* below.)
#
# ### A step that fits
#
# Next come two sequences instead of eight (and fewer or shorter ones where the budget is smaller than 8 GiB). Guess
# the terms before you see them: GPT-2 124M, 12 blocks, width 768, 12 heads, 50257 words, 2 sequences of 1024 tokens,
# fp32.

# %% name="guess-terms"
lab.guess("state", None, "Optimizer state of AdamW, all parameters together?", unit="MiB")
lab.guess("gradients", None, "Gradients that are alive at the peak of the step?", unit="MiB")
lab.guess("activations", None, "Activations of the 12 blocks?", unit="GiB")
lab.guess(
    "logits", None, "Logits, and everything the loss makes of them, at the peak?", unit="MiB"
)
lab.guess("peak", None, "The peak of the whole step?", unit="GiB")

# %% name="small"
for batch, seq in [(2, 1024), (1, 1024), (1, 512)]:
    name = f"GPT-2 124M, {batch} x {seq}, eager"
    small = lab.measure(baseline, budget=BUDGET, name=name, batch=batch, seq=seq, nearest=False)
    if small.ok:
        break
display(small)
lab.plots.bars([report for report in (oom, small) if report.held_by()])

# %% [markdown]
# *What to see:* in the upper bar almost everything is activations. The pale piece is free, but in pieces too small, and
# the dashed one, the tensor that found no room, would cross the budget. The optimizer's state is missing there: it is
# born in the first `optimizer.step()`, and the run never got so far.

# %% [markdown]
# ## Account
#
# Everything in these bars follows from shapes. We start with what grows with the model alone. Let N be the number of
# parameters.
#
# | term | bytes | why |
# | --- | --- | --- |
# | weights | 4 N | fp32 has 4 bytes |
# | gradients | 4 N | one number for each weight; born during backward, gone after `zero_grad(set_to_none=True)` |
# | AdamW state | 8 N | running averages of the gradient and of its square; born in the *first* `optimizer.step()` |
# | AdamW while it works | 4 N | the `foreach` version takes the square root for all parameters at once: one more copy |
#
# ### What a block keeps
#
# Activations need more care, because only what backward will need is kept. PyTorch can be asked: every operator in
# the graph behind a result holds its *saved tensors*. The cell runs one block on (batch, seq, width) numbers and
# lists them in the order in which forward made their operators.

# %% name="saved"
with torch.device("meta"):  # shapes without memory
    shapes = lab.models.gpt2("gpt2")
N = sum(
    p.numel() for p in shapes.parameters()
)  # head and embedding share their weights: counted once
config = shapes.config
L, d, h, V = config.n_layer, config.n_embd, config.n_head, config.vocab_size
print(
    f"N = {N:,}   weights {show(4 * N)}   gradients {show(4 * N)}   AdamW state {show(8 * N)}"
)


def saved_tensors(result, but_not):
    """What the graph behind `result` keeps for backward: (operator, shape, dtype, bytes) of each storage."""
    nodes, waiting = set(), [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += [earlier for earlier, _ in node.next_functions]
    found = {}
    for node in sorted(nodes, key=lambda node: node._sequence_nr()):  # as forward made them
        for name in dir(node):
            tensor = getattr(node, name) if name.startswith("_saved_") else None
            if isinstance(tensor, torch.Tensor) and tensor.dim():
                storage = tensor.untyped_storage()
                if storage._cdata not in but_not:  # weights are saved too, but are there anyway
                    operator, shape = node.name().removesuffix("Backward0"), tuple(tensor.shape)
                    found.setdefault(
                        storage._cdata, (operator, shape, tensor.dtype, storage.nbytes())
                    )
    return list(found.values())


def part_of(operator, shape, seq=1024):
    """Where in the block something saved belongs, and the unit to count it in."""
    if shape[-2:] == (seq, seq):
        return "attention probabilities", "b h s²"
    if operator == "NativeLayerNorm":
        return "LayerNorms", "b s" if shape[-1] == 1 else "b s d"
    if operator == "NativeDropout":
        return "dropouts", "b s d"
    return "MLP activation" if shape[-1] == 4 * d else "products", "b s d"


kept = []


def one_block(device, batch=2, seq=1024):
    with device:
        block = lab.models.gpt2("gpt2", attention="eager", n_layer=1).transformer.h[0].train()
        x = torch.randn(batch, seq, d, requires_grad=True)
        mask = torch.zeros(batch, 1, seq, seq)
    weights = {p.untyped_storage()._cdata for p in block.parameters()}

    def step():
        y = block(x, attention_mask=mask)
        y = y[0] if isinstance(y, tuple) else y  # a tuple in older versions of transformers
        kept[:] = saved_tensors(y, weights)
        y.sum().backward()
        block.zero_grad(set_to_none=True)
        x.grad = None

    return step


lab.measure(one_block, name="one block of GPT-2", repeats=0, trace=False)
units = {"b s d": 2 * 1024 * d, "b h s²": 2 * h * 1024**2, "b s": 2 * 1024}
frame = pandas.DataFrame(kept, columns=["operator", "shape", "dtype", "bytes"])
parts = [part_of(operator, shape) for operator, shape, *_ in kept]
frame.insert(0, "part", [part for part, _ in parts])
frame["per element"] = [
    row[3] / units[unit] for row, (_, unit) in zip(kept, parts, strict=True)
]
frame["of"] = [unit for _, unit in parts]
frame["dtype"] = frame["dtype"].astype(str).str.removeprefix("torch.")
display(frame)
frame.groupby(["part", "of"], sort=False)[["bytes", "per element"]].sum()

# %% [markdown]
# Read the small table as a sum, with b sequences of s tokens, width d and h heads. In brackets: bytes for each of the
# b s d elements, in the last line for each of the b h s².
#
# | part | kept | bytes |
# | --- | --- | --- |
# | LayerNorms (two) | their inputs (4 + 4), and mean and deviation of each token | 8 b s d + 16 b s |
# | products: q k v, attention, output, MLP in | their inputs: 4 + (4 + 4 + 4) + 4 + 4 | 24 b s d |
# | MLP activation (`gelu_new`) | input, tanh, input / 2, 1 + tanh, result: 4 d wide, (16) each | 80 b s d |
# | dropouts (two) | masks of true and false: 1 + 1 | 2 b s d |
# | attention probabilities | the softmax (4), its dropout mask (1), what dropout leaves of it (4) | 9 b h s² |
#
# Together **114 b s d + 9 b h s² + 16 b s** bytes. Adding and scaling keep nothing, because their gradient does not
# need their input.
#
# ### All terms together
#
# Three terms are left. The *loss* turns logits into log-probabilities and keeps them; backward then makes the
# gradient of the log-probabilities, and of the logits, before it can drop one: three tensors of the logits' size,
# 4 b s V bytes each, at the same moment. *Around the blocks* lie the embedding's dropout mask (1), the last LayerNorm's
# input (4) and its output, which is the head's input (4): 9 b s d, and 8 b s for mean and deviation. The *workspace* of
# cuBLAS is 32 MiB on Hopper cards and 8.125 MiB on others, once for the main thread and once for the thread that runs
# backward, and 1 MiB for cuBLASLt, the part of it that adds biases: 65 MiB or 17.25.
#
# The peak is at the start of backward: all activations are there, the logits are there three times, and the first
# gradient is not.

# %% name="terms"
from labkit.memory.workspaces import workspaces


def block_bytes(batch, seq):
    """Activations of one eager GPT-2 block in fp32 with dropout, kept for backward, in bytes."""
    return 114 * batch * seq * d + 9 * batch * h * seq**2 + 16 * batch * seq


listed = sum(row[3] for row in kept)
print(
    f"one block of 2 x 1024: listed by the graph {listed:,} bytes, by the formula {block_bytes(2, 1024):,}, "
    f"difference {listed - block_bytes(2, 1024):,}"
)


capability = lesson.machine.capability or lab.machine.preset().capability


def terms(batch, seq):
    """What is alive at the start of backward in a steady eager step, term by term, in bytes."""
    tokens = batch * seq
    return {
        "weights": 4 * N,
        "optimizer state": 8 * N,
        "gradients": 0,
        "blocks": L * block_bytes(batch, seq),
        "around the blocks": 9 * tokens * d + 8 * tokens,
        "logits and loss": 3 * 4 * tokens * V,
        "workspace": sum(workspaces(capability)),
        "rounding": 0,
    }


def term_of(holding):
    """The term that something alive at the peak belongs to."""
    known = {
        "parameter": "weights",
        "gradient": "gradients",
        "optimizer state": "optimizer state",
        "workspace": "workspace",
    }
    if holding.category in known:
        return known[holding.category]
    if ".h." in holding.module:
        return "blocks"
    if holding.module in ("", "lm_head") and holding.category != "input":
        return "logits and loss"
    return "around the blocks"


batch, seq = small.settings["batch"], small.settings["seq"]
formula = terms(batch, seq)
found = dict.fromkeys(formula, 0)
for holding in small.alive:
    found[term_of(holding)] += holding.nbytes
peak = small.steady.allocated_bytes
found["rounding"] = peak - sum(found.values())  # what no tensor holds

table = pandas.DataFrame({"formula": formula, small.source: found})
table.loc["all"] = [sum(formula.values()), peak]
table["unexplained"] = table[small.source] - table["formula"]
display(table.map(show))
lab.plots.waterfall({name: (formula[name], found[name]) for name in formula}, report=small)

# %% [markdown]
# *What to see:* each bar starts where the one above it ends, and the hollow bar under it is the formula. Compare what
# the batch makes, blocks and logits, with what the model makes, weights and state. The column *unexplained* is what
# the formulas do not say: PyTorch rounds every block of memory up (*rounding*), and small tensors such as the indices
# of tokens are not in our list.
#
# ### Three peaks in one step, and the first step is different
#
# Each phase has a peak of its own. In forward the logits are there twice (logits and log-probabilities); in the
# optimizer the activations are gone and the gradients have come. The first step has no optimizer state yet, so its
# peak is lower: **a run can pass its first step and die in the second**. The table counts requested bytes, as the
# formulas do.

# %% name="phases"
lab.answer(
    "state",
    measured=found["optimizer state"] / MiB,
    formula=8 * N / MiB,
    note="8 bytes for each parameter: twice the weights.",
)
lab.answer(
    "gradients",
    measured=found["gradients"] / MiB,
    formula=0.0,
    note="Gradients are born as activations die: at the peak there are none yet. Accumulation changes that.",
)
lab.answer("activations", measured=found["blocks"] / GiB, formula=formula["blocks"] / GiB)
lab.answer(
    "logits",
    measured=found["logits and loss"] / MiB,
    formula=formula["logits and loss"] / MiB,
    note="Three tensors of tokens x 50257 numbers. A smaller model does not make them smaller.",
)
lab.answer("peak", measured=peak / GiB, formula=sum(formula.values()) / GiB)

model_only = formula["weights"] + formula["optimizer state"] + formula["workspace"]
activations = formula["blocks"] + formula["around the blocks"]
each = sum(terms(2, seq).values()) - sum(terms(1, seq).values())
most = (BUDGET - model_only) // each
more = lab.measure(
    baseline,
    budget=BUDGET,
    batch=most + 1,
    seq=seq,
    repeats=0,
    trace=False,
    nearest=False,
    record=False,
)
print(
    f"{show(model_only)} do not grow, and each sequence of {seq} tokens takes {show(each)}: by the formula {most} fit "
    f"into {show(BUDGET)}.\n{most + 1} would take {show(model_only + (most + 1) * each)}; {lesson.source}: "
    f"{'they fit' if more.ok else 'out of memory'}."
)
rows = {
    "peak in forward": (
        model_only + activations + 2 * 4 * batch * seq * V,
        small.phase_peaks["forward"],
    ),
    "peak in backward": (
        model_only + activations + 3 * 4 * batch * seq * V,
        small.phase_peaks["backward"],
    ),
    "peak in the optimizer": (model_only + 4 * N + 4 * N, small.phase_peaks["optimizer"]),
    "first step is lower by": (
        8 * N,
        small.steady.requested_bytes - small.first.requested_bytes,
    ),
}
pandas.DataFrame(rows, index=["formula", small.source]).T.map(show)

# %% [markdown]
# ### Who is alive at the peak
#
# The same peak, by the module that made each tensor: the ten largest holders. `h.*` stands for all blocks together,
# *(step)* for what the loss and the optimizer made outside any module, *phase* for when it was born.

# %% name="alive"
alive = pandas.DataFrame([vars(holding) for holding in small.alive])
alive["module"] = alive["module"].str.replace(r"\.\d+", ".*", regex=True).replace("", "(step)")
alive.loc[alive["category"].isin(["parameter", "optimizer state"]), "module"] = "(all)"
alive.loc[alive["category"] == "parameter", "phase"] = "build"  # before the first step
alive = alive.groupby(["module", "category", "phase"])[["count", "nbytes"]].sum().reset_index()
top = alive.sort_values("nbytes", ascending=False).head(10).reset_index(drop=True)
display(top.assign(nbytes=top["nbytes"].map(show)))
lab.plots.heatmap(small)

# %% [markdown]
# *What to see:* time runs to the right, each row is a part of the model, dark is much. Block after block fills (a
# staircase), the head flashes once when the logits come, then the staircase empties from below. The optimizer's state
# is a stripe that is always there; while it works, its own temporaries come on top. What stays of a block after it has
# drained are its gradients; the head's stripe is the gradient of the embedding, whose weights it shares. The line above
# is the total of requested bytes: its peak is the report's without the rounding.
#
# ### Other tools, and what they see
#
# `pytorch_memlab` has two tools. Its `MemReporter` lists the tensors that Python's garbage collector knows. Saved
# tensors are held by the graph, in C++; the reporter lists those that passed through Python once, and misses those that
# an operator made for itself. The cell compares. Its line profiler reads the allocator's counter after every line of a
# function; it is exact, but all of backward is *one* line, `loss.backward()`.

# %% name="memlab"
with torch.device("meta"):
    model = lab.models.gpt2("gpt2")
model = model.to_empty(device=lab.device())  # real memory, with whatever values were there
model.tie_weights()
model.eval()  # without dropout

quiet = io.StringIO()  # the reporter prints a line for every tensor
with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
    from pytorch_memlab import LineProfiler, MemReporter


def listed(model):
    """What MemReporter lists: (name, shape, elements, bytes) of each tensor; 0 bytes if one of them came before."""
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        reporter = MemReporter(model)
        reporter.report(device=next(model.parameters()).device)
    return reporter.device_tensor_stat[next(model.parameters()).device]


before = listed(model)
lines = [line for line in quiet.getvalue().splitlines() if line.startswith("transformer.")]
seen = [row for row in before if row[0].startswith("transformer.")]
elements, used = sum(row[2] for row in seen), sum(row[3] for row in seen)
print(*lines[:3], "...", sep="\n")
print(f"MemReporter: {elements:,} elements in {len(seen)} tensors, {show(used)}")
print(
    f"our count:   {N:,} elements, {show(4 * N)}; the reporter says {used / (4 * N):.2f} times that\n"
)

ids = torch.zeros(1, 32, dtype=torch.long, device=lab.device())
loss = model(input_ids=ids, labels=ids).loss
after = listed(model)
more_bytes = (sum(row[3] for row in after) - sum(row[3] for row in before)) / (used / (4 * N))
saved = saved_tensors(loss, {p.untyped_storage()._cdata for p in model.parameters()})
print(
    f"one forward pass of 32 tokens: the graph keeps {show(sum(row[3] for row in saved))} in {len(saved)} tensors;"
)
print(f"MemReporter lists {show(more_bytes)} more than before (its factor taken off)")
del model, loss, ids

# %% [markdown]
# The counts of weights agree. Where the bytes come out four times as large, it is the reporter's mistake (version 0.3.2
# multiplies the size of a storage, which is in bytes already, by the 4 bytes of fp32); PyTorch's own counter decides,
# and it agrees with 4 N.
#
# PyTorch's own tools need a card: `memory_summary()` prints the allocator's counters as a table, and
# `_record_memory_history()` writes down every allocation with the line of Python that asked for it. Drop the file on
# [pytorch.org/memory_viz](https://pytorch.org/memory_viz): the page draws it in your browser, without sending it
# anywhere.


# %% name="tools"
def train_once(model, optimizer, tokens):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def look_inside(file):
    """The line profiler, the allocator's history and its summary, on a small step: one sequence of 512 tokens."""
    with torch.device("cuda"):
        model = lab.models.gpt2("gpt2", attention="eager").train()
        tokens = torch.randint(0, 50257, (1, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    train_once(model, optimizer, tokens)
    with LineProfiler(train_once) as profiler:
        train_once(model, optimizer, tokens)
    by_line = io.StringIO()
    profiler.print_stats(stream=by_line)
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    train_once(model, optimizer, tokens)
    torch.cuda.memory._dump_snapshot(str(file))
    torch.cuda.memory._record_memory_history(enabled=None)
    return {
        "line profiler": by_line.getvalue(),
        "memory_summary": torch.cuda.memory_summary(abbreviated=True),
    }


if on_card:
    with lab.budget(BUDGET):
        tables = look_inside(lesson.folder / "memory_history.pickle")
    gc.collect()
    torch.cuda.empty_cache()
    for name, text in tables.items():
        print(text)
        lesson.write("fact", name=name, value=text, unit="text", source="measured")
    print(f"history: {lesson.folder.name}/memory_history.pickle")
else:
    print(
        "These three read the counters of a real card, and there is none here. "
        "What they would count is the step in the figures above."
    )
    for name in ("line profiler", "memory_summary"):
        known = next(iter(lab.reference(name)), None)
        if known:
            rows = [
                line
                for line in known["value"].splitlines()
                if not line.startswith(("|---", "|==="))
            ]
            print(f"\n{name}, reference, {known['card']}:", *rows[:9], sep="\n")

# %% [markdown]
# ### How the peak grows
#
# The formulas say how: every term with b is linear in the batch, and only the attention probabilities have s². SDPA
# (scaled dot product attention) is PyTorch's fused attention: one program on the card that never writes the s x s
# probabilities to memory; [lesson 06](06_attention.ipynb) is about it. Guess first. Both figures count requested bytes.

# %% name="guess-growth"
lab.guess(
    "growth",
    None,
    "Eager, batch 2: from 512 to 1024 tokens the peak grows how many times?",
    unit="x",
)

# %% name="sweeps"
by_batch = lab.sweep(
    baseline, budget=BUDGET, name="eager", repeats=0, batch=[1, 2, 3, 4, 8], seq=512
)
lengths = {"eager": [128, 768, 896], "sdpa": [512, 768, 1024]}
by_seq = {
    kind: lab.sweep(
        baseline,
        budget=BUDGET,
        name=kind,
        repeats=0,
        batch=2,
        seq=lengths[kind],
        attention=kind,
    )
    for kind in lengths
}
by_seq["eager"] += [
    r for r in (by_batch[1], small) if r.settings["batch"] == 2
]  # known already
lab.plots.show(lab.plots.sweep(by_batch, x="batch", y="requested"))
lab.plots.sweep(by_seq, x="seq", y="requested", fit=False)

# %% [markdown]
# *What to see, above:* a straight line that does not start at zero; a cross is a batch that ran out of memory.
# *Below:* SDPA is a straight line, eager bends upwards. The first eager point is special: with so few activations the
# peak is in the optimizer, and that does not depend on the tokens at all.
#
# Now the two claims. A constant lies under the curve, so the exponent is fitted after taking it off; and the points
# at which the optimizer makes the peak say nothing about activations, so they are left out. The fit uses *requested*
# bytes: allocated ones without the allocator's rounding.

# %% name="settle-growth"
floor = 1.02 * (small.phase_peaks["optimizer"])  # where the optimizer makes the peak


def points(reports, size):
    """Sizes and requested peaks of the runs that fit and whose peak is not the optimizer's."""
    pairs = [
        (r.settings[size], r.steady.requested_bytes)
        for r in reports
        if r.ok and r.steady.requested_bytes > floor
    ]
    return [a for a, _ in pairs], [b for _, b in pairs]


sizes, peaks = points(by_batch, "batch")
if len(sizes) >= 4:
    line = lab.plots.fit_exponent(sizes, peaks, offset=True)
    said = f"exponent {line.exponent:.2f} after taking off {show(line.offset)}; "
    said += (
        f"from batch {sizes[0]} to {sizes[-1]} the peak grows {peaks[-1] / peaks[0]:.2f} times"
    )
    linear, through_zero = abs(line.exponent - 1) < 0.05, line.offset < 0.05 * peaks[0]
    holds = "holds" if through_zero else "holds when the model's own bytes are taken off"
    verdict = holds if linear else "does not hold"
    lab.settle("linear", measured=said, verdict=verdict)
else:
    lab.settle("linear", measured="too few sizes fit", verdict="not measured here")

curves = {}
for kind, reports in by_seq.items():
    sizes, peaks = points(reports, "seq")
    if len(sizes) >= 3:
        square, slope, constant = numpy.polyfit(sizes, peaks, 2)
        curves[kind] = (square, slope)
        print(
            f"{kind:6s} peak = {constant / GiB:.2f} GiB + {slope / MiB:.2f} MiB s + {round(square):,} B s²"
        )
per_token = 2 * (114 * d * L + 9 * d + 12 * V)
print(
    f"by the formula, eager: {model_only / GiB:.2f} GiB + {per_token / MiB:.2f} MiB s + {9 * 2 * h * L:,} B s²"
)
print(f"the constant is 12 N and the workspace: {show(12 * N)} + {show(formula['workspace'])}")

if len(curves) == 2:
    (square, slope), (square_sdpa, slope_sdpa) = curves["eager"], curves["sdpa"]
    share = {kind: c * 1024**2 / (c * 1024**2 + s * 1024) for kind, (c, s) in curves.items()}
    said = f"at 1024 tokens s² is {share['eager']:.0%} of what grows, with SDPA {abs(share['sdpa']):.0%}"
    if share["eager"] < 0.05:
        verdict = "does not hold"
    elif share["eager"] > 0.95:
        verdict = "holds"
    else:
        verdict = "holds when attention is eager and the sequence long: "
        verdict += f"s² outgrows the linear part at {slope / square:,.0f} tokens"
    lab.settle("square", measured=said, verdict=verdict)
else:
    lab.settle("square", measured="too few lengths fit", verdict="not measured here")

eager = {r.settings["seq"]: r.steady.requested_bytes for r in by_seq["eager"] if r.ok}
both = 512 in eager and 1024 in eager
lab.answer(
    "growth",
    measured=eager[1024] / eager[512] if both else None,
    formula=sum(terms(2, 1024).values()) / sum(terms(2, 512).values()),
    note=f"Close to 2 by accident: {show(model_only)} do not grow, the linear part doubles, and the s² part "
    f"({9 * 2 * h * 1024**2 / block_bytes(2, 1024):.0%} of the blocks at 1024 tokens) grows fourfold.",
)

# %% [markdown]
# ### Three numbers for memory
#
# *Allocated* is what your tensors take. *Reserved* is what PyTorch's allocator has taken from the driver; it keeps
# freed memory, to hand it out again quickly. *Device* is what the driver counts for the whole process, as nvidia-smi
# shows it: reserved plus the *CUDA context* (the driver's own bookkeeping and its programs). The cell
# allocates, frees, empties the cache, and then fragments on purpose: a scratch block comes and goes, and something
# that is kept moves into its place and is a little too large to leave room for the next one. At the start the
# workspaces are there already.

# %% name="counters"
from labkit.memory.allocator import Allocator, OutOfMemory
from labkit.memory.expandable import ExpandableAllocator


class Memory:
    """Named blocks of bytes: in PyTorch's allocator on a card, in a replay of its rules without one."""

    def __init__(self, limit, expandable=False):
        self.blocks, self.replays = {}, []
        if not on_card:
            first = Allocator()  # the workspaces, which are there before anything else
            for nbytes in workspaces(capability):
                first.take(nbytes)
            kind = ExpandableAllocator if expandable else Allocator
            self.replays = [first, kind(lab.parse_size(limit) - first.reserved)]

    def take(self, name, nbytes):
        if self.replays:
            self.blocks[name] = self.replays[-1].take(nbytes)
        else:
            self.blocks[name] = torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def give(self, name):
        block = self.blocks.pop(name)
        if self.replays:
            self.replays[-1].give(block)

    def empty_cache(self):
        self.replays[-1].empty_cache() if self.replays else torch.cuda.empty_cache()

    def counters(self):
        """Bytes allocated, reserved, and those that the driver counts."""
        if self.replays:
            allocated, reserved = (
                sum(getattr(replay, counter) for replay in self.replays)
                for counter in ("allocated", "reserved")
            )
            return allocated, reserved, reserved + lab.machine.preset().context_bytes
        counted = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        return *counted, lab.machine.device_bytes()


def a_round(memory, number):
    memory.take("scratch", 100 * MiB)
    memory.give("scratch")
    memory.take(f"kept {number}", 60 * MiB)


rows = []
with lab.budget("1GiB"):
    memory = Memory("1GiB")
    rows.append(("at the start", *memory.counters()))
    memory.take("a", 512 * MiB)
    rows.append(("allocate 512 MiB", *memory.counters()))
    memory.give("a")
    rows.append(("free it", *memory.counters()))
    after_free = memory.counters()
    memory.empty_cache()
    rows.append(("empty_cache()", *memory.counters()))
    for number in range(5):
        a_round(memory, number)
    rows.append(("5 rounds: 100 MiB come and go, 60 are kept", *memory.counters()))
    memory.empty_cache()
    rows.append(("empty_cache() again", *memory.counters()))
    memory.blocks.clear()
    memory.empty_cache()
print(
    "measured"
    if on_card
    else "a replay of the allocator's rules; device: reserved + an estimate of the context"
)
driver = small.steady.device_bytes or small.steady.reserved_bytes + small.context_bytes
need = small.steady.allocated_bytes
shown = f"driver {show(driver)} for {show(need)} ({driver / need - 1:+.0%})"
idle = after_free[2] - after_free[0]
close, honest = driver < 1.05 * need, idle < 0.05 * after_free[2]
verdict = "holds" if close and honest else "does not hold"
shown += f"; with everything freed it still shows {show(after_free[2])}"
lab.settle("driver", measured=shown, verdict=verdict)
pandas.DataFrame(rows, columns=["after", "allocated", "reserved", "device"]).set_index(
    "after"
).map(show)

# %% [markdown]
# After *free it* the driver still shows what the tensors no longer need: that is the cache at work, not a leak. In
# the last line `empty_cache()` changes nothing: every piece of reserved memory has something alive in it. This is
# *fragmentation*, and it is why `empty_cache()` is no cure for running out of memory (the allocator has tried that
# already before it gives up).
#
# `expandable_segments` is another way to reserve: one address range that grows and shrinks page by page, instead of
# separate pieces. The cell runs the same rounds until 1 GiB is used up, workspaces included.
#
# In your own runs, on Linux only: `PYTORCH_ALLOC_CONF=expandable_segments:True`, set before Python starts
# (`PYTORCH_CUDA_ALLOC_CONF` is the older name, both work). The cell changes the same setting at run time, to show both
# ways in one run. It helps when sizes change from step to step (sequences of different lengths). It cannot make room
# for what is alive.


# %% name="guess-kept"
lab.guess(
    "kept",
    None,
    "Separate segments, 1 GiB: how many MiB are kept when there is no room for another round?",
    unit="MiB",
)


# %% name="fragmentation"
def rounds_until_full(limit, expandable):
    """How many rounds fit into `limit`, and the counters at the end."""
    memory = Memory(limit, expandable)
    try:
        for number in range(1000):
            a_round(memory, number)
    except (torch.OutOfMemoryError, OutOfMemory):
        return number, memory.counters()


def separate_or_expandable(expandable):
    """Change the allocator of a card at run time; the replay is told when it is made."""
    if on_card:  # the call moved after PyTorch 2.8
        change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (change or torch.cuda.memory._set_allocator_settings)(
            f"expandable_segments:{expandable}"
        )


rows, kept_mib = {}, {}
for expandable in (False, True):
    separate_or_expandable(expandable)
    with lab.budget("1GiB"):
        rounds, (allocated, reserved, _) = rounds_until_full("1GiB", expandable)
    kept_mib[expandable] = 60 * rounds
    rows["expandable segments" if expandable else "separate segments"] = (
        rounds,
        show(allocated),
        show(reserved),
        show(reserved - allocated),
    )
    gc.collect()
    if on_card:
        torch.cuda.empty_cache()
separate_or_expandable(False)
room = 1024 * MiB - formula["workspace"]
lab.answer(
    "kept",
    measured=kept_mib[False],
    formula=60 * (room // (100 * MiB)),
    note="Each round needs a new segment of 100 MiB and leaves 40 MiB of it that nobody can use.",
)
pandas.DataFrame(
    rows,
    index=[
        "rounds that fit",
        "allocated at the end",
        "reserved at the end",
        "reserved, not allocated",
    ],
).T

# %% [markdown]
# ## Equivalence
#
# *Gradient accumulation* is the first cure one hears of. Take 32 sequences not at once but as 8 *micro-batches* of 4:
# gradients of all micro-batches add up in place, and the optimizer steps once. Each loss is divided by their number,
# so that the sum of the gradients is the gradient of the mean.


# %% name="accumulating"
def accumulating(device, micro_batch=4, micro_batches=8, seq=512, attention="eager"):
    with device:
        model = lab.models.gpt2("gpt2", attention=attention, n_positions=max(seq, 1024)).train()
        tokens = torch.randint(0, 50257, (micro_batches, micro_batch, seq))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step():
        for part in tokens:
            loss = model(input_ids=part, labels=part).loss / micro_batches
            loss.backward()  # adds to the gradients that are there
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step.tokens = micro_batches * micro_batch * seq
    return step


lab.guess(
    "accumulated",
    None,
    "4 sequences of 512 tokens peak where the batch curve above says. 8 x 4 of them, accumulated: the peak?",
    unit="GiB",
)

# %% name="accumulation-memory"
quick = {
    "budget": BUDGET,
    "repeats": 0,
    "trace": False,
    "nearest": False,
}  # only: does it fit, and the peak
whole = lab.measure(baseline, name="32 at once", batch=32, seq=512, **quick)
parts = lab.measure(accumulating, name="8 x 4 accumulated", **quick)
display(whole, parts)
lab.answer(
    "accumulated",
    measured=parts.steady.allocated_bytes / GiB if parts.ok else None,
    formula=(sum(terms(4, 512).values()) + 4 * N) / GiB,
    note="The peak of one micro-batch and 4 N more: from the second on, gradients are alive with activations.",
)

# %% [markdown]
# Is it the same step? We compute it: a small GPT-2 without dropout (dropout would draw other masks), 8 sequences at
# once against 4 micro-batches of 2, loss and all gradients. In exact arithmetic both are equal. In floating point,
# sums are taken in another order, and each addition rounds by at most half of the machine's ε (1.2e-7 in fp32,
# 2.2e-16 in fp64). If the difference shrinks with ε, it is rounding; a real difference would stay.
#
# A gradient here is a sum over 8 x 32 = 256 tokens, so √256 · ε / 2 = 8 ε is typical and the tolerance of 100 ε is
# generous. One condition was met silently: all micro-batches have the same number of tokens. When they do not
# (padding), the mean of means is not the mean, and the loss must be weighted by tokens; lesson 09 (planned) does that.


# %% name="equivalence"
def loss_of(model, tokens):
    """Mean cross-entropy of the next token in the model's precision (GPT2LMHeadModel's own is in fp32)."""
    logits = model(input_ids=tokens).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def both_ways(dtype, device):
    """Largest relative difference of the loss and of the gradients between 8 at once and 4 x 2 accumulated."""
    torch.manual_seed(0)
    small_sizes = {
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 4,
        "vocab_size": 500,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tiny = lab.models.gpt2("gpt2", **small_sizes, **no_dropout).to(device, dtype)
    tokens = torch.randint(0, 500, (8, 32), device=device)
    loss = loss_of(tiny, tokens)
    loss.backward()
    loss, wanted = loss.detach(), [p.grad.clone() for p in tiny.parameters()]
    tiny.zero_grad()
    total = torch.zeros_like(loss)
    for part in tokens.split(2):
        micro_loss = loss_of(tiny, part) / 4
        micro_loss.backward()
        total += micro_loss.detach()
    worst = max(
        float((p.grad - g).norm() / g.norm())
        for p, g in zip(tiny.parameters(), wanted, strict=True)
    )
    return float(abs(total - loss) / loss), worst


rows = {}
for dtype in (torch.float32, torch.float64):
    eps = torch.finfo(dtype).eps
    loss_off, gradient_off = both_ways(dtype, lab.device())
    rows[str(dtype).removeprefix("torch.")] = (
        f"{eps:.1e}",
        f"{loss_off:.1e}",
        f"{gradient_off:.1e}",
        gradient_off < 100 * eps,
    )
pandas.DataFrame(rows, index=["ε", "loss differs by", "gradients differ by", "within 100 ε"]).T

# %% [markdown]
# ## Negative control
#
# Accumulation splits a batch into sequences. It cannot split a sequence. So here is one sequence that is too long by
# itself (the position table is made longer than GPT-2's 1024 for it; the weights are random anyway), alone, as one of
# two micro-batches, and once with the attention that keeps no square. The accumulated run dies in its first
# micro-batch, because that micro-batch is the same sequence with the same activations.

# %% name="negative-control"
for long in (2048, 4096, 8192):  # the first that does not fit
    alone = lab.measure(baseline, name=f"1 x {long}", batch=1, seq=long, **quick)
    if not alone.ok:
        break
split = lab.measure(
    accumulating,
    name=f"2 x 1 x {long}, accumulated",
    micro_batch=1,
    micro_batches=2,
    seq=long,
    **quick,
)
fused = lab.measure(
    baseline, name=f"1 x {long}, SDPA", batch=1, seq=long, attention="sdpa", **quick
)
display(alone, split, fused)

helpless = not alone.ok and not split.ok
said = f"32 x 512 at once: {whole.status}, as 8 x 4: {parts.status}; "
said += f"1 x {long} alone: {alone.status}, accumulated: {split.status}"
if whole.ok or alone.ok:
    verdict = "not measured here"  # this budget is too large to run out of
elif not parts.ok:
    verdict = "not measured here"  # this budget is too small for one micro-batch of 4 x 512
else:
    verdict = (
        "holds when one micro-batch of at least one sequence fits" if helpless else "holds"
    )
lab.settle("accumulation", measured=said, verdict=verdict)

# %% [markdown]
# ## Pitfalls
#
# **Out of memory at batch 1, and accumulation does not help.** It cannot go below one sequence. Shorten the sequence,
# drop the s² (SDPA), recompute activations, cut the loss into chunks, or shrink the optimizer's state (lessons 06, 03,
# 08 and 04).
#
# **Training fits, evaluation runs out.** Logits of the whole validation set are being collected: 4 s V bytes for each
# sequence, 196 MiB for 1024 tokens of GPT-2's vocabulary. Keep the loss of each batch, not its logits, and run under
# `torch.no_grad()`.
#
# **Memory creeps up with every step.** Something keeps a graph alive, most often `total += loss`: with the loss, all
# of its saved tensors. Write `total += loss.detach()`.
#
# **nvidia-smi shows far more than `memory_allocated()`.** Cached segments and the CUDA context. Read all three
# numbers; only *allocated* says what your model needs.
#
# **It ran out, was caught, and the retry runs out too.** Inside `except`, the exception still holds every frame of
# the failed step, and with them its tensors. Leave the `except` block first, then retry.
#
# **The second step dies, not the first.** The optimizer's state was born in between: 8 N bytes with AdamW.

# %% [markdown]
# ## Exercise 1
#
# *3 min, easy.* How many **MiB** does one block of **gpt2-medium** (width 1024, 16 heads) keep for backward, with 4
# sequences of 512 tokens, eager attention, fp32 and dropout, when its activation is the fused `gelu_pytorch_tanh`? It
# is one kernel that keeps only its input. Start from the table in *What a block keeps*.
#
# <details><summary>Hint</summary>
#
# Go through the table line by line. Only one line changes: of five tensors of width 4 d, which two are still needed
# by somebody? Then put in the new b, s, d and h, and divide by 2²⁰.
#
# </details>

# %% answer="block_mib"
block_mib = ...
### BEGIN SOLUTION
b, s, width, heads = 4, 512, 1024, 16
mlp = 2 * 16  # the input of the activation and its result, 4 bytes each, 4 times as wide
block_mib = ((8 + 24 + mlp + 2) * b * s * width + 9 * b * heads * s**2 + 16 * b * s) / 2**20
### END SOLUTION

# %% check="block_mib" points=1
lab.check.number(
    "block_mib",
    block_mib,
    (66 * 4 * 512 * 1024 + 9 * 4 * 16 * 512**2 + 16 * 4 * 512) / 2**20,
    unit="MiB",
    tolerance=0.003,
    mistakes={
        (114 * 4 * 512 * 1024 + 9 * 4 * 16 * 512**2 + 16 * 4 * 512)
        / 2**20: "This is the block with `gelu_new`: what does the fused one keep?",
        (50 * 4 * 512 * 1024 + 9 * 4 * 16 * 512**2 + 16 * 4 * 512)
        / 2**20: "The product after the activation keeps its own input, too.",
        (64 * 4 * 512 * 1024 + 8 * 4 * 16 * 512**2 + 16 * 4 * 512) / 2**20: (
            "Dropout keeps something for backward as well.",
            0.5,
        ),
        (66 * 4 * 512 * 1024 + 8 * 4 * 16 * 512**2 + 16 * 4 * 512) / 2**20: (
            "One dropout is missing: the one inside attention.",
            0.5,
        ),
        (64 * 4 * 512 * 1024 + 9 * 4 * 16 * 512**2 + 16 * 4 * 512) / 2**20: (
            "Two dropouts are missing: small, but there.",
            0.5,
        ),
        (72 * 4 * 512 * 1024 + 12 * 4 * 16 * 512**2 + 16 * 4 * 512) / 2**20: (
            "How many bytes does true or false take on a GPU?",
            0.5,
        ),
        (66 * 4 * 512 * 1024 + 4 * 4 * 16 * 512**2 + 16 * 4 * 512)
        / 2
        ** 20: "The square of the sequence is kept more than once: look at the last line of the table.",
        (66 * 4 * 512 * 1024 + 5 * 4 * 16 * 512**2 + 16 * 4 * 512) / 2**20: (
            "Either the line of the MLP is missing (its fused activation still keeps something), "
            "or the last line was counted short: the square of the sequence is kept three times."
        ),
        (98 * 4 * 512 * 1024 + 9 * 4 * 16 * 512**2 + 16 * 4 * 512)
        / 2**20: "This has four of the five tensors of the MLP: who still needs each of them?",
        (82 * 4 * 512 * 1024 + 9 * 4 * 16 * 512**2 + 16 * 4 * 512)
        / 2**20: "This has three of the five tensors of the MLP: who still needs each of them?",
        (66 * 4 * 512 * 1024 + 9 * 4 * 16 * 512**2 + 16 * 4 * 512) / 2**21: "fp32 has 4 bytes.",
        (66 * 4 * 512 * 768 + 9 * 4 * 12 * 512**2 + 16 * 4 * 512)
        / 2**20: "These are the width and the heads of the small gpt2.",
        (66 * 512 * 1024 + 9 * 16 * 512**2 + 16 * 512)
        / 2**20: "This is one sequence: how many are there?",
        24
        * (66 * 4 * 512 * 1024 + 9 * 4 * 16 * 512**2 + 16 * 4 * 512)
        / 2**20: "This is the whole model; one block is asked for.",
    },
    hint="Which lines of the table did you add up?",
)

# %% [markdown]
# ## Exercise 2
#
# *8 min, medium.* Write `largest_batch(experiment, budget)`: the largest batch from 0 to 63 that fits, found by
# bisection with **at most 6 measurements**; 0 when not even one sequence fits. `fits` below makes one measurement.
# You may rely on this: if a batch fits, every smaller one does.
#
# <details><summary>Hint</summary>
#
# Keep two numbers: `low`, which is known to fit (0 always does), and `high`, which is known not to (64). Measure in
# the middle and move one of them. How many times can 64 be halved?
#
# </details>


# %% name="fits"
def fits(experiment, budget, batch):
    """One measurement: does `experiment` with this batch run inside `budget`?"""
    quick = {"repeats": 0, "trace": False, "nearest": False, "record": False}
    return lab.measure(experiment, budget=budget, batch=batch, **quick).ok


# %% answer="largest_batch"
def largest_batch(experiment, budget):
    ### BEGIN SOLUTION
    low, high = 0, 64
    while high - low > 1:
        middle = (low + high) // 2
        if fits(experiment, budget, middle):
            low = middle
        else:
            high = middle
    return low
    ### END SOLUTION


# %% check="largest_batch" points=2
class Rows:
    """An experiment that takes `mib` MiB for each sequence, and remembers which batches were tried."""

    def __init__(self, mib):
        self.mib, self.tried = mib, []

    def __call__(self, device, batch=1):
        self.tried.append(batch)
        block = torch.empty(batch * self.mib * 2**20, dtype=torch.uint8, device=device)
        return lambda: block.numel()


def judge(rows, right):
    """What `lab.check.code` asks about the batch that was found: True, or what is wrong with it."""

    def verdict(found):
        tried, rows.tried = set(rows.tried), []
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            return (
                f"returns {found!r}: a number of sequences is asked for. Is there a `return`?"
            )
        if not tried:
            return "measures nothing: call `fits(experiment, budget, batch)`."
        if found < right:
            return f"returns {found:g}, but a larger batch still fits. Does your bisection stop early?"
        if found > right:
            return f"returns {found:g}, and that does not fit. Which of your two numbers is known to fit?"
        if len(tried) > 6:
            return f"right, but with {len(tried)} measurements; 6 are enough if each halves the range."
        return True

    return verdict


some, few, none, all_of_them = Rows(132), Rows(150), Rows(1600), Rows(1)
lab.check.code(
    "largest_batch",
    largest_batch,
    [
        lab.check.case(some, "4GiB", expect=judge(some, 30)),
        lab.check.case(few, "1GiB", expect=judge(few, 6)),
        lab.check.case(none, "1GiB", expect=judge(none, 0)),
        lab.check.case(all_of_them, "1GiB", expect=judge(all_of_them, 63)),
    ],
    points=2,
    seconds=60,
)

# %% [markdown]
# ## Exercise 3
#
# *5 min, medium.* Three runs ran out of an 8 GiB budget (fp32, AdamW, eager attention, batch x sequence length; C has
# a longer position table). Their logs, as `labkit` predicts them for an H200:
#
# ```
# A  gpt2, 16 x 1024:      out of memory in forward (transformer.h.2.attn)   wanted 768 MiB
# B  gpt2-large, 1 x 512:  out of memory in optimizer                        wanted 25 MiB
#    alive: parameter 2.88 GiB · gradient 2.88 GiB · optimizer state 1.49 GiB · workspace 65.0 MiB
# C  gpt2, 1 x 4096:       out of memory in forward (transformer.h.3.attn)   wanted 768 MiB
# ```
#
# Which of them does gradient accumulation cure, and why not the other two? Say for each of the others what fills the
# memory.
#
# <details><summary>Hint</summary>
#
# What does accumulation make smaller, and how small can it get? For B: gpt2-large has 774 million parameters;
# multiply. For C: compare what was wanted with A, and count the sequences.
#
# </details>

# %% answer="cured"
cured_run = ...
### BEGIN SOLUTION
cured_run = "A"
### END SOLUTION

# %% check="cured" points=1
lab.check.choice(
    "cured",
    cured_run,
    "A",
    of=("A", "B", "C"),
    mistakes={
        "B": "B has one sequence and dies in the optimizer: what does a smaller batch change there?",
        "C": "C wanted as much at once as A did. How many sequences does its batch have?",
    },
)

# %% answer="why" points=2
why = ...
### BEGIN SOLUTION
why = """A: 16 sequences fill the memory with activations; as micro-batches of one or two sequences they fit.
B: weights, gradients and optimizer state take 16 bytes for each of 774 million parameters, 12.4 GB: the model itself is
too large, whatever the batch.
C: the batch is one sequence already, and accumulation cannot split a sequence; the attention probabilities grow with
the square of its 4096 tokens."""
### END SOLUTION

# %% check="why"
lab.check.words(
    "why",
    why,
    {
        r"(weight|gradient|moments?\b|momentum|(moving|running) averages|optimi[sz]er|adam|state|parameter)"
        r"[^.!?]*(t[ao]k|fill|large|big|much|exceed|more than|memory|bytes|\bgi?b\b|fit|need|\d\d)"
        r"|(t[ao]k|fill|large|big|much|exceed|more than|memory|bytes|\bgi?b\b|fit|need|\d\d)"
        r"[^.!?]*(weight|gradient|moments?\b|momentum|(moving|running) averages|optimi[sz]er|adam|state|parameter)": (
            "What fills the memory in B, and does it depend on the batch?"
        ),
        r"(one|single|1) (sequence|row)|size (of )?(one|1)\b|(at )?batch (of |is |size )?(already )?(one|1)\b"
        r"|(cannot|can't|can not|not be|never) (be )?(split|divide|cut)": "Why can C have no smaller batch?",
        r"square|quadrat|s²|s\^2|s\*\*2|4096": "What grows so fast with the length of C?",
    },
    against={
        r"(?<!not )(?<!n't )(?<!never )(?<!cannot )\bcures? (b|c|all|both|every)": "Does accumulation cure B or C?",
        r"(do not|don't) know|no idea": "Say what you do know: what is alive in B, and in C?",
    },
    points=2,
    least=20,
)

# %% [markdown]
# ## Take-away
#
# 1. Peak = 12 N for weights and AdamW state (16 N once gradients are alive with the activations) + activations + three
#    times the logits + a workspace. 12 N follows from the model, activations and logits from batch and sequence, the
#    workspace from the card.
# 2. Activations are linear in the batch and, with eager attention, have a part in s². The optimizer's state comes
#    in the first `optimizer.step()`.
# 3. Look at *who is alive*, not at who asked last. Accumulation cures a batch that is too large, never a sequence or
#    a model that is.
#
# What would have made the first step fit? Each of the lessons that follow adds a switch. `lab.plan` tries all of them
# for a model, a card and a batch: it predicts the memory of each recipe, estimates its time from counted operations and
# bytes, and keeps the fastest that fit. (Compiled blocks are left out here: searching them takes longer.) Its rows
# read from the left: a way to keep weights, gradients and state; how the 8 sequences are split into micro-batches; the
# reserved peak; an estimated speed, good for an order and not for a promise; the switches. `print(plan)` says what
# each switch saves and costs, and which lesson it belongs to.
#
# Next: [lesson 02](02_mixed_precision.ipynb), mixed precision. Below the plan: where the memory went in this run, and
# what became of the claims.

# %% name="finish"
plan = lab.plan("gpt2", budget=BUDGET, batch=8, seq=1024, compile=False)
wanted = show(plan.plain_need.reserved_bytes)
print(
    f"{plan.plain}, fp32: {wanted}, which {'fits' if plan.nothing_needed else 'does not fit'}"
)
lab.table(plan.columns, plan.rows)

print(f"{small.name}, peak {show(peak)} ({small.source}):")
for name, nbytes in sorted(found.items(), key=lambda item: -item[1]):
    print(f"  {name:18s} {show(nbytes):>10s}  {nbytes / peak:5.1%}")
lab.finish(
    "Does one sequence fit? If not, look at who is alive: state, activations or logits. "
    "If it does, accumulate to the batch you want."
)
