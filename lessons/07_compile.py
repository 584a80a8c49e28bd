# ---
# jupyter:
#   labkit:
#     title: One line that makes it faster
#     question: When is torch.compile faster, after how many steps, and what does it save?
#     after: decide whether to compile, what to compile, and say after how many steps it has paid
#     minutes: {gpu: 2, cpu: 0.7}
#     memory: 8 GiB budget
#     needs: [00_environment, 01_baseline_oom]
#     fetch: []
# ---

# %% name="begin"
import contextlib
import functools
import inspect
import io
import json
import logging
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from labkit import toolchain

# what gets compiled is kept here, and nowhere else
CACHE = Path(tempfile.mkdtemp(prefix="lesson-07-"))
# for a processor: the C++ compiler gets ready while the next lines load PyTorch; no first call below pays for either
ready = toolchain.preparing(CACHE)
import torch
import torch._inductor.compile_fx
from torch.utils.checkpoint import checkpoint

import labkit as lab
from labkit import compiling, quiet

quiet.transformers()  # imported now, silently
lesson = lab.begin("07_compile")
BUDGET = lesson.budget  # bytes that PyTorch may take from the card
on_card, device = lab.device().type == "cuda", lab.device()
show, seconds = lab.show_bytes, lab.show_seconds
capability = lesson.machine.capability or lab.machine.preset().capability
half = torch.bfloat16 if capability >= (8, 0) else torch.float16  # below sm_80 bf16 is emulated
torch._logging.set_logs(dynamo=logging.ERROR, inductor=logging.CRITICAL)  # we count instead


def told(number, how):
    """A number as `how` shows it, or a dash where there is none."""
    return "–" if number is None else how(number)


cannot = compiling.why_not(device)  # None, or what the default compiler misses here
print(f"compiler: {cannot or 'there'}")

# %% [markdown]
# ## Claims
#
# Four sentences that one hears about `torch.compile`. This run fills in the empty columns of the table, at the end of
# the lesson.
#
# Words that this lesson uses all the time:
#
# | word | meaning |
# | --- | --- |
# | operation | one call such as `tanh`; in *eager* PyTorch each runs by itself and writes its result to memory |
# | kernel | a program that runs on the card (or a loop on the processor); an eager operation is one or more |
# | fusion | several operations become one kernel, and what lies between them never reaches memory |
# | graph | the list of operations that the compiler has seen and may fuse |
# | Dynamo | the part of `torch.compile` that follows your Python and writes down the graph |
# | Inductor | the part that turns a graph into kernels: in Triton for a card, in C++ for the processor |
# | cold start | the first call, which compiles, with nothing in any cache |
# | warm start | the first call of a new process that finds the kernels on disk |
# | steady | a later call, which only runs |
# | break-even | the step after which the compiled run is ahead |
# | guard | a condition that compiled code relies on ("x has 512 columns"), checked at each call |
# | recompilation | a guard failed, so the same function is compiled once more |
# | graph break | Dynamo cannot follow a line: the graph ends there, Python runs the line, a second graph begins |

# %% name="claims"
lab.claim(
    "faster",
    "One line makes training faster (+27 % tokens/s for a model of 3 billion parameters).",
    said_by="documentation, torchtune",
)
lab.claim(
    "smaller",
    "The same line saves memory (-15 % in that figure).",
    said_by="torchtune",
)
lab.claim(
    "checkpointing",
    "With checkpointing, a compiled model peaks higher than an eager one.",
    said_by="an issue, pytorch#193193",
)
lab.claim("cure", "torch.compile cures any slow model.", said_by="forum answers")
lab.claims()

# %% [markdown]
# ## Experiment
#
# ### One function
#
# The activation of Hugging Face's GPT-2, `gelu_new`, is written as eight operations. Eager PyTorch runs eight kernels:
# each one reads a tensor from memory and writes one back. `torch.compile` gives back a function that does the same.
# Nothing is compiled yet; that happens in the first call.
#
# Three helpers of labkit: `compiling.fresh()` empties the caches, so that a first call is a cold one;
# `compiling.FirstCall` notes the time of a first call, and `compiling.watched` what was compiled in a call, both from
# the counters that PyTorch keeps of itself.


# %% name="gelu"
def gelu_new(x):
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def there_and_back(function, x):
    """A step: forward, and backward to the gradient of `x`."""

    def step():
        function(x).sum().backward()
        x.grad = None

    return step


lab.guess(
    "kernels",
    None,
    "Eight operations forward, and their gradients. How many kernels does the compiler write for both?",
)
lab.guess("gelu", None, "How many times faster is the compiled step, steady?", unit="x")


# %% name="one-function"
def ahead(pays):
    """When a compiled run is ahead, in words."""
    return "never" if pays.steps == math.inf else f"after {pays.steps:,} steps"


x = torch.randn(8192 if on_card else 256, 4 * 768, device=device, requires_grad=True)
eager = lab.time_step(there_and_back(gelu_new, x), repeats=10)
gelu_pays = artifacts = step = None
if cannot:
    print(f"not run: {cannot}")
    written = []
else:
    # as on the first day: nothing compiled in memory, no kernel of this function on disk
    ready.join()
    with compiling.fresh(CACHE):
        gelu_first = compiling.FirstCall()
        step = gelu_first.around(there_and_back(torch.compile(gelu_new), x))
        compiled = lab.time_step(step, repeats=10)
        artifacts = torch.compiler.save_cache_artifacts()  # for the section on the cache
    gelu_pays = compiling.Payback(
        gelu_first.seconds, compiled.median_seconds, eager.median_seconds
    )
    print(f"what was compiled: {gelu_first.activity}")
    print(f"kernels: {gelu_first.activity.kernels}")
    print(f"first call {seconds(gelu_first.seconds)}, later {compiled}; eager {eager}")
    print(f"ahead of eager: {ahead(gelu_pays)}")
    written = [file.read_text() for file in CACHE.rglob("*.py" if on_card else "*.main.cpp")]
rows_of_gelu, x, step = len(x), None, None  # the card is free again
here = "measured" if on_card else "cpu"
lab.answer("kernels", measured=None if cannot else gelu_first.activity.kernels, source=here)
lab.answer("gelu", measured=gelu_pays and gelu_pays.speedup, source=here)

# %% [markdown]
# One graph of eight operations went in. One kernel came out for each direction. The compiler leaves what it wrote in
# its cache folder; these are the lines of the forward kernel that compute.

# %% name="written"
forward = [text for text in written if "tanh" in text and not re.search(r"in_ptr1", text)]
for line in forward[0].splitlines() if forward else ():
    if re.search(r"\btmp\d+ = |\bstore\(", line):
        print(
            re.sub(r"static_cast<\w+>|at::vec::Vectorized<float>(::)?|auto ", "", line.strip())
        )
if not forward:
    print("no kernel to show here")

# %% [markdown]
# *What to see:* one load, arithmetic on numbers that live in registers, one store. That is the whole of fusion, and it
# says where compiling helps: where a program moves bytes between many small operations. A matrix product is one
# operation already.
#
# ### The cache
#
# Kernels are kept on disk (`TORCHINDUCTOR_CACHE_DIR`; by default a folder in `/tmp`, which a cluster or a container
# forgets). The next process follows the Python again but takes the kernels from there. For a new machine,
# `torch.compiler.save_cache_artifacts()` packs everything into bytes, and `load_cache_artifacts` unpacks them (the
# "mega-cache"; it is for the same kind of card and the same versions). The cell starts new processes that compile the
# same function, one with the folder of the cell above, and on a card one with an empty folder and the packed bytes.
# (For the processor those bytes hold C++ source, which would be compiled again.) We look at the result when they are
# done, below.

# %% name="new-process"
child = f"""
import json, math, sys, time, torch
import torch._inductor.compile_fx

{inspect.getsource(gelu_new)}
if len(sys.argv) > 1:
    torch.compiler.load_cache_artifacts(open(sys.argv[1], "rb").read())
x = torch.randn({rows_of_gelu}, 3072, device="{device.type}", requires_grad=True)
(x * 2).sum().backward()
start = time.perf_counter()
torch.compile(gelu_new)(x).sum().backward()
x.grad[0, 0].item()
print(json.dumps(time.perf_counter() - start))
"""


def new_process(folder, *arguments):
    """A Python that runs `child` with `folder` as its cache; started, not waited for."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
    caches["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # what is found is not compiled: no helpers
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", child, *arguments],
        env={**os.environ, **caches},
        stdout=pipe,
        stderr=pipe,
        text=True,
    )


processes = {}
if not cannot:
    processes["a new process, same folder"] = new_process(str(CACHE))
    packed = CACHE / "packed.bin"
    packed.write_bytes(artifacts[0])
    if on_card:
        empty = tempfile.mkdtemp(prefix="lesson-07-")
        processes["a new process, packed bytes"] = new_process(empty, str(packed))
print(f"started: {len(processes)}")

# %% [markdown]
# ### Graph breaks
#
# Dynamo cannot follow everything. Three lines of the next function stop it: a `print`, an `if` that depends on the
# numbers in a tensor, and `.item()`, which fetches a number to the host. At each one the graph ends. The result is
# right; what is lost is fusion over the break, and the card waits for the host.


# %% name="breaks"
def chatty(x):
    y = torch.tanh(x)
    print("norm", end=" ")
    if y.sum() > 0:
        y = 2 * y
    return y * y.sum().item()


def silent(x):
    """The same numbers in one graph."""
    y = torch.tanh(x)
    y = torch.where(y.sum() > 0, 2 * y, y)
    return y * y.sum()


sample = torch.linspace(-1, 2, 50, device=device)
for function in (chatty, silent):
    with compiling.fresh():
        activity = compiling.watched(torch.compile(function, backend="eager"), sample)
    print(f"\n{function.__name__}: {activity}\n")
print("equal:", torch.allclose(chatty(sample), silent(sample)))
with compiling.fresh():
    try:
        torch.compile(chatty, backend="eager", fullgraph=True)(sample)
    except torch._dynamo.exc.Unsupported as error:
        print(f"fullgraph=True: {type(error).__name__}: {str(error).splitlines()[0]}")

# %% [markdown]
# `fullgraph=True` turns a break into an error: use it while you clean up a model. For a whole report of one function,
# `torch._dynamo.explain(function)(x)`; for the reasons during a run, start it with the variable
# `TORCH_LOGS="graph_breaks,recompiles"`.
#
# ### Shapes that change
#
# Compiled code is for the shapes that it has seen. When a length changes, a guard fails and the function is compiled
# again. From then on PyTorch assumes that this dimension changes and compiles for *any* length ("automatic dynamic").
# `dynamic=False` forbids that: every length has its own code, up to a limit of 8
# (`torch._dynamo.config.recompile_limit`); what comes later runs eagerly, after one warning in the log. Padding to
# multiples makes fewer lengths. `mark_dynamic` tells PyTorch before the first call that a dimension changes.

# %% name="guess-shapes"
lab.guess(
    "lengths",
    None,
    "Twelve different lengths, default settings: how many times is the function compiled?",
)
lab.guess("static", None, "And with dynamic=False?")

# %% name="shapes"
LENGTHS = [64 * i - 17 for i in range(4, 16)]  # 239, 303, ..., 943


def padded(length, multiple):
    return -(-length // multiple) * multiple


def lengths_of(multiple=1, mark=False):
    for length in LENGTHS:
        x = torch.randn(1, padded(length, multiple), 64, device=device)
        if mark:
            torch._dynamo.mark_dynamic(x, 1)
        yield x


tries = {
    "default": ({}, {}),
    "dynamic=False": ({"dynamic": False}, {}),
    "dynamic=False, padded to 256": ({"dynamic": False}, {"multiple": 256}),
    "mark_dynamic": ({}, {"mark": True}),
}
weight, table, compiled_times = torch.randn(64, 64, device=device), [], {}


def half_of_an_mlp(x):
    return gelu_new(x @ weight)


def run_all(function, inputs):
    for x in inputs:
        function(x)


for name, (options, inputs) in tries.items():
    with compiling.fresh():
        function = torch.compile(half_of_an_mlp, backend="eager", **options)
        activity = compiling.watched(run_all, function, lengths_of(**inputs))
    compiled_times[name] = activity.graphs
    extra = sum(x.shape[1] for x in lengths_of(**inputs)) / sum(LENGTHS) - 1
    first = activity.recompilations[0].why if activity.recompilations else "–"
    table.append([name, activity.graphs, first, f"{extra:.0%}"])
lab.table(
    ["settings", "compiled", "the first guard that failed", "extra tokens computed"], table
)
lab.answer("lengths", measured=compiled_times["default"], source=here)
lab.answer(
    "static",
    measured=compiled_times["dynamic=False"],
    source=here,
    note="Eight is the limit: the last four lengths ran eagerly.",
)

# %% [markdown]
# ### The whole model, or block by block
#
# There are two ways to compile a model. `model.compile()` makes one graph of everything. *Regional* compilation
# compiles the block that the model repeats: each block by itself, `block.compile()`. All of them have the same code, so
# the first that runs is compiled and the others use what it made.
#
# The compiler's work grows with the operations that it is shown. The cell only follows the Python and counts: its
# backend, the function that gets the graph, compiles nothing and looks. The model is narrow and has two blocks, because
# neither width nor depth changes what one block is.


# %% name="regional"
def small_gpt2(layers):
    """A narrow GPT-2 that has the same operations as the large one."""
    sizes = {
        "n_layer": layers,
        "n_embd": 64,
        "n_head": 2,
        "vocab_size": 512,
        "n_positions": 1024,
    }
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    with device:
        return lab.models.gpt2("gpt2", attention="sdpa", **sizes, **drop, **ends).train()


masked = []  # of each attention call that the compiler sees: does it get a mask?


def looking(graph, inputs):
    """A backend that compiles nothing: it notes what is in the graph and gives it back."""
    for node in graph.graph.nodes:
        if node.target is torch.nn.functional.scaled_dot_product_attention:
            masked.append(node.kwargs.get("attn_mask") is not None)
    return graph.forward


tokens, table, counted = torch.randint(0, 512, (2, 64), device=device), [], {}
for how in ("whole", "blocks"):
    masked.clear()
    with compiling.fresh():
        model = small_gpt2(2)
        for part in model.transformer.h if how == "blocks" else [model]:
            part.compile(backend=looking)
        activity = compiling.watched(model, input_ids=tokens, labels=tokens)
    counted[how] = activity.operations
    table.append([how, activity.graphs, activity.operations, len(activity.breaks), any(masked)])
head = [
    "2 blocks, compiled as",
    "graphs",
    "operations in them",
    "breaks",
    "attention gets a mask",
]
lab.table(head, table)
around = counted["whole"] - 2 * counted["blocks"]
print(f"one block: {counted['blocks']} operations; around the blocks: {around}")
print(f"twelve blocks in one graph: {around + 12 * counted['blocks']}")

# %% [markdown]
# Two things to see. The work of the compiler: one block's operations, once, against all of them. And the last column:
# transformers (5.17 to 5.24, PyTorch before 2.14) cannot ask while it is being traced whether a mask is needed, so a
# model that is compiled as a whole makes one, and SDPA may then not use its fastest kernel (lesson 06). Blocks that are
# compiled by themselves get no mask, as in eager mode.
#
# What the regional way leaves out is everything between and after the blocks: the embedding, the last LayerNorm, the
# loss. Remember the loss: its logits are among the largest tensors of a step (lesson 01), and we come back to them in
# the account.
#
# By now the new processes of the section *The cache* have finished. On the card and here:

# %% name="cache"
first_calls = {"nothing kept": None if cannot else gelu_first.seconds}
for name, process in processes.items():
    out, complaint = process.communicate(timeout=120)
    first_calls[name] = None if process.returncode else json.loads(out)
    if process.returncode:
        print(f"{name}: {complaint.splitlines()[-1]}")
table = []
for name in ("nothing kept", "a new process, same folder", "a new process, packed bytes"):
    row = lab.known("first call of gelu_new", first_calls.get(name), "s", what=name)
    table.append([name, told(row["value"], seconds), row["label"]])
    if not on_card and first_calls.get(name):
        lab.fact("first call of gelu_new", first_calls[name], "s", what=name)
        table.append([name, seconds(first_calls[name]), "cpu"])
lab.table(["first call", "time", "source"], table)
if artifacts:
    print(f"packed bytes: {show(len(artifacts[0]))}")

# %% [markdown]
# A warm start still follows the Python, checks and loads. (These processes ran beside other work: compare roughly.)
# Caches are also why a second measurement looks better than the first: but for the warm rows of this table, a compiled
# first call of this lesson starts from an empty folder.
#
# ### A training step
#
# GPT-2 with 124 million parameters, 3 sequences of 1024 tokens, under autocast in 16 bits. (bf16 on Ampere and later;
# on Turing cards, RTX 20 and T4, fp16 with a `GradScaler`, as the code does. No such card was at hand. Triton from 3.3
# on cannot compile matrix products for them: the default mode writes none, `max-autotune` and FlexAttention do.)


# %% name="training"
def training(device, how="eager", activation="gelu_new", note=None):
    with device:
        model = lab.models.gpt2(
            "gpt2", attention="sdpa", activation_function=activation
        ).train()
        tokens = torch.randint(0, 50257, (3, 1024))
    if how == "blocks":
        for block in model.transformer.h:
            block.compile()
    if how == "whole":
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    scaler = torch.amp.GradScaler(device.type, enabled=half is torch.float16)

    def step():
        with torch.autocast(device.type, dtype=half):
            loss = model(input_ids=tokens, labels=tokens).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step.tokens = 3 * 1024
    return note.around(step) if note else step


lab.guess(
    "break-even",
    None,
    "The whole model compiled: after how many training steps is it ahead of eager?",
    unit="steps",
)
lab.guess("speedup", None, "And how many times faster is it then?", unit="x")

# %% name="whole-and-blocks"
FIELDS = ("first call", "step", "peak")  # seconds, seconds, bytes
ways = {
    "eager": {"how": "eager"},
    "eager, fused GELU": {"how": "eager", "activation": "gelu_pytorch_tanh"},
    "each block compiled": {"how": "blocks"},
    "whole model compiled": {"how": "whole"},
}


def trained(name, experiment=training, predict=False, **sizes):
    """First call, step and peak of an experiment: measured on a card, else what a card wrote in this lesson.

    With `predict` and no card, `"here"` is the report of its predicted memory.
    """
    found, report = dict.fromkeys(FIELDS), None
    plain = "eager" in (sizes.get("how"), sizes.get("mode"))
    quick = {"budget": BUDGET, "name": name, "trace": False, "nearest": False, "repeats": 8}
    if on_card and (plain or not cannot):
        note = compiling.FirstCall()
        with compiling.fresh():
            report = lab.measure(experiment, note=note, **quick, **sizes)
        if report.ok:
            times = note.seconds, report.timing.median_seconds
            found = dict(zip(FIELDS, (*times, report.peak_bytes), strict=True))
            print(f"{name}: {str(note.activity).splitlines()[0]}")
    elif predict:
        report = lab.measure(experiment, stateless=True, **quick, **sizes)
    rows = {
        field: lab.known(field, found[field], "bytes" if field == "peak" else "s", what=name)
        for field in FIELDS
    }
    return {**rows, "here": report}


runs = {name: trained(name, predict=True, **sizes) for name, sizes in ways.items()}


def value(name, field):
    return runs[name][field]["value"]


def payback(name):
    """When a way to compile has paid; None where a number is missing."""
    numbers = value(name, "first call"), value(name, "step"), value("eager", "step")
    return None if None in numbers else compiling.Payback(*numbers)


def predicted(report):
    """A predicted peak, with the band of an estimate; a dash on a card."""
    if report is None or report.source != "predicted" or not report.ok:
        return "–"
    band = f" ({' to '.join(map(show, report.band_bytes))})" if report.band_bytes else ""
    return show(report.peak_bytes) + band


table = []
for name, run in runs.items():
    pays = payback(name) if "compiled" in name else None
    table.append(
        [
            name,
            told(value(name, "first call"), seconds),
            told(value(name, "step"), seconds),
            told(value(name, "step"), lambda s: f"{3 * 1024 / s:,.0f}"),
            told(value(name, "peak"), show),
            told(pays, ahead),
            run["step"]["label"],
            predicted(run["here"]),
        ]
    )
head = [
    "first call",
    "step",
    "tokens/s",
    "peak",
    "ahead",
    "source",
    "peak predicted here",
]
lab.table(["124M, 3 x 1024", *head], table)

# %% [markdown]
# The price is paid once and the gain comes back with every step, so
#
# > break-even steps = (first call - later step) / (eager step - later step)
#
# If a compiled step is no faster, the number is infinite. Here is the same as a picture. (*Predicted* peaks need no
# card. For compiled code they are estimates with a band: which operations the compiler fuses, and in which order the
# kernels run, is not modelled.)

# %% name="break-even"
whole, regional = payback("whole model compiled"), payback("each block compiled")
source = runs["eager"]["step"]["label"]
if whole and regional:
    last = 2 * max([p.steps for p in (whole, regional) if p.steps < math.inf], default=500)
    counts = [last * i / 24 for i in range(25)]

    def gained(pays):
        return [eager - compiled for eager, compiled in map(pays.after, counts)]

    lab.plots.show(
        lab.plots.lines(
            {
                "eager (zero)": (counts, [0.0] * 25),
                "each block compiled": (counts, gained(regional)),
                "whole model compiled": (counts, gained(whole)),
            },
            x="training steps",
            y="seconds gained",
            title="What compiling has gained after so many steps",
            source=source,
        )
    )
else:
    print("no reference row yet: this picture needs a card")
where = here if on_card else "reference"
scope = f"{runs['eager']['step'].get('capability', lesson.sm)}"
lab.answer("break-even", measured=whole and whole.steps, source=where)
lab.answer("speedup", measured=whole and whole.speedup, source=where)
if whole:
    said = "; ".join(
        f"{name}: {pays.speedup:.2f} times the tokens/s, ahead {ahead(pays)}"
        for name, pays in {"whole model": whole, "blocks": regional}.items()
        if pays
    )
    earlier = min(pays.steps for pays in (whole, regional) if pays)
    verdict = f"holds when a run is longer than {earlier:,} steps"
    lab.settle(
        "faster",
        measured=said,
        verdict=verdict if earlier < math.inf else "does not hold",
        source=where,
        scope=scope,
    )
else:
    lab.settle("faster", measured="no reference row", verdict="not measured here")

# %% [markdown]
# *What to see:* each line starts below zero, at the price of its first call. Where it crosses the zero line it has
# paid; from there on the gain grows with every step. Where the two compiled lines cross, the whole model overtakes the
# blocks: they start sooner, it ends higher.
#
# Look at the two eager rows, too. The fused GELU moves fewer bytes and launches fewer kernels, so these two rows cannot
# say which of both helped; and where two steps differ by less than they scatter, they say nothing.
#
# The same first call is paid again by every new length that is compiled for: count the lengths of your data, as the
# section on shapes did, before you multiply.
#
# ### Modes
#
# `mode="reduce-overhead"` records the launches of all kernels once (a *CUDA graph*) and replays them: less work for
# the host. It keeps its inputs and results at fixed addresses, in a memory pool of its own. The cell measures the MLP
# of one block, once with few tokens and once with 64 times as many.
#
# `mode="max-autotune"` lets Triton's matrix products compete with the library's for each shape. Trying them all takes
# long, so the cell does it only when you ask for it: `TRY_ALL = True`. Until then the last row is what a card measured
# once, if it has. (Its form without CUDA graphs, so that only the products differ from `default`.)


# %% name="modes"
TRY_ALL = False


def mlp(device, mode="eager", batch=1, seq=128, note=None):
    with device:
        part = lab.models.gpt2("gpt2", n_layer=1).transformer.h[0].mlp.train()
        x = torch.randn(batch, seq, 768, requires_grad=True)
    if mode != "eager":
        part.compile(mode=mode)

    def step():
        torch.compiler.cudagraph_mark_step_begin()  # a new step: old results may be overwritten
        with torch.autocast(device.type, dtype=half):
            y = part(x)
        y.float().square().mean().backward()
        part.zero_grad(set_to_none=True)
        x.grad = None

    step.tokens = batch * seq
    return note.around(step) if note else step


trials = [(1, 128, "eager"), (1, 128, "default"), (1, 128, "reduce-overhead")]
trials += [(8, 1024, "eager"), (8, 1024, "default"), (8, 1024, "reduce-overhead")]
AUTOTUNE = "max-autotune-no-cudagraphs"
trials += [(8, 1024, AUTOTUNE)]
table = []
for batch, seq, mode in trials:
    name, sizes = f"MLP, {batch} x {seq}, {mode}", {"mode": mode, "batch": batch, "seq": seq}
    if mode == AUTOTUNE and not TRY_ALL:
        none = [{"value": None, "label": "not measured"}]
        run = {field: (lab.reference(field, what=name) or none)[0] for field in FIELDS}
    else:
        with contextlib.redirect_stderr(io.StringIO()):  # max-autotune lists every choice there
            run = trained(name, mlp, **sizes)
    cells = zip([run[field] for field in FIELDS], (seconds, seconds, show), strict=True)
    shown = [told(row["value"], how) for row, how in cells]
    table.append([f"{batch} x {seq}", mode, *shown, run["step"]["label"]])
lab.table(["MLP of one block", "mode", "first call", "step", "peak", "source"], table)

# %% [markdown]
# *What to see:* if 64 times the tokens take hardly longer, the card was waiting for the host. Compare `reduce-overhead`
# with `default` in each size, and trust only what exceeds the spread. Part of this step (autocast, backward's start,
# freeing gradients) runs outside the graph, and no graph shortens that. `max-autotune` is worth its first call only if
# its step is shorter than that of `default`.
#
# ### Checkpointing
#
# Checkpointing keeps a block's input and runs the block again in backward (lesson 03). Inside one graph the compiler
# sees all these second runs at once, and is free to order them. When several blocks are recomputed before the first of
# them is used, their activations are alive together. The cell is the case of the issue, with simpler blocks: four MLPs
# with a fused GELU, each in a checkpoint, all run twice in one step.


# %% name="checkpointing"
class Layer(torch.nn.Module):
    def __init__(self, width=768):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = (
            torch.nn.Linear(width, 4 * width),
            torch.nn.Linear(4 * width, width),
        )

    def forward(self, x):
        wide = torch.nn.functional.gelu(self.up(self.norm(x)), approximate="tanh")
        return x + self.down(wide)


def twice(device, how="eager", note=None):
    with device:
        layers = torch.nn.ModuleList(Layer() for _ in range(4))
        x = torch.randn(8, 1024, 768)

    def through(h):
        for layer in layers:
            h = checkpoint(layer, h, use_reentrant=False)
        return h

    def forward(x):
        first = through(x)
        second = through(x / 2)
        return first.float().square().mean() + second.float().square().mean()

    if how == "blocks":
        for layer in layers:
            layer.compile()
    run = torch.compile(forward) if how == "whole" else forward

    def step():
        with torch.autocast(device.type, dtype=half):
            loss = run(x)
        loss.backward()
        layers.zero_grad(set_to_none=True)

    return note.around(step) if note else step


three_ways = {
    "eager": "eager",
    "each layer compiled": "blocks",
    "one graph": "whole",
}
table, peaks = [], {}
for name, how in three_ways.items():
    run = trained(f"4 layers twice, checkpointed: {name}", twice, how=how)
    cells = zip([run[field] for field in FIELDS], (seconds, seconds, show), strict=True)
    table.append([name, *(told(row["value"], show_it) for row, show_it in cells)])
    table[-1].append(run["peak"]["label"])
    peaks[name] = run["peak"]["value"]
lab.table(["4 layers twice, checkpointed", "first call", "step", "peak", "source"], table)
if None in peaks.values():
    lab.settle("checkpointing", measured="no reference row", verdict="not measured here")
else:
    ratio = {name: peak / peaks["eager"] for name, peak in peaks.items()}
    said = ", ".join(f"{name} {r:.2f}" for name, r in ratio.items() if name != "eager")
    higher = [name for name in ("each layer compiled", "one graph") if ratio[name] > 1.1]
    verdict = "holds" if len(higher) == 2 else "does not hold"
    if higher == ["one graph"]:
        verdict = "holds when several checkpointed blocks are recomputed in one graph"
    lab.settle(
        "checkpointing",
        measured=f"peak against eager: {said}",
        verdict=verdict,
        source=where,
        scope=scope,
    )

# %% [markdown]
# *What to see:* the peaks. (The times say little: a step has so little work for the card that starting kernels, and
# checking guards before each compiled layer, is part of what is timed.)
#
# ## Account
#
# Where does the saved memory come from? First from the blocks. Each saved tensor can be listed: PyTorch lets us look
# at every tensor that is put away for backward. The compiler decides anew what to put away: it has both graphs,
# forward and backward, and cuts between them where the fewest bytes cross. What is cheap to compute again, it
# computes again. The cell lists for one block of the narrow model, without dropout. (It uses the backend
# `aot_eager_decomp_partition`: the same cut, but no kernels are written.)

# %% name="saved"
backend = "aot_eager_decomp_partition"


def put_away(module, x):
    """What ``module(x)`` keeps for backward: (shape, dtype, bytes) of each storage that is no weight."""
    weights, found = {p.untyped_storage()._cdata for p in module.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            row = (
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                storage.nbytes(),
            )
            found.setdefault(storage._cdata, row)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)
    return list(found.values())


b, s, d = 2, 96, 64
kept = {}
for name, activation, compiled in [
    ("eager, gelu_new", "gelu_new", False),
    ("eager, gelu_pytorch_tanh", "gelu_pytorch_tanh", False),
    ("compiled, gelu_new", "gelu_new", True),
]:
    block = small_gpt2(1).transformer.h[0]
    block.mlp.act = {
        "gelu_new": block.mlp.act,
        "gelu_pytorch_tanh": torch.nn.GELU(approximate="tanh"),
    }[activation]
    x = torch.randn(b, s, d, device=device, requires_grad=True)
    with compiling.fresh():
        if compiled:
            block.compile(backend=backend)
        kept[name] = put_away(block, x)
table = []
for name, rows in kept.items():
    wide = sum(n for shape, _, n in rows if math.prod(shape) == 4 * b * s * d)
    everything = sum(n for _, _, n in rows)
    table.append(
        [name, len(rows), f"{everything / (b * s * d):.1f}", f"{wide / (b * s * d):.1f}"]
    )
lab.table(["one block, fp32", "tensors kept", "bytes / (b s d)", "of it 4 d wide"], table)

# %% [markdown]
# Eager `gelu_new` puts away its input, its tanh, half of its input and 1 + tanh, each 4 d wide, and the product that
# follows keeps the result: 5 x 16 = 80 bytes for each of the b s d elements (lesson 01). Compiled, the input and the
# result are left, 2 x 16 = 32: exactly what the fused `gelu_pytorch_tanh` keeps. The gain is 3 x 16 = 48 bytes.
#
# Under autocast it is 48 as well, from other terms: `pow` gets a copy of its input in fp32 (16), tanh and 1 + tanh are
# in fp32 (16 + 16), half of the input and the result in 16 bits (8 + 8); of these 64, 16 are left.
#
# > 48 b s d bytes a block; for 12 blocks of width 768 and 3 x 1024 tokens: 1296 MiB
#
# Writing `activation_function="gelu_pytorch_tanh"` into the configuration gives the same without a compiler.
#
# The second part is the loss. Eager, the logits exist several times at once: 16 bits, fp32, log-probabilities and
# gradients. The compiler sees the loss only if it is given the whole model, and then it makes one fp32 copy less:
# 4 b s V bytes with a vocabulary of V. The formulas next to the runs above:

# %% name="account"
gelu_bytes, per_copy = 12 * 48 * 3 * 1024 * 768, 4 * 3 * 1024 * 50257
formula = {
    "eager, fused GELU": gelu_bytes,
    "each block compiled": gelu_bytes,
    "whole model compiled": gelu_bytes + per_copy,
}
full, peak_source = {name: value(name, "peak") for name in runs}, where
if None in full.values() and not on_card:  # no reference row: the predictions
    full = {name: run["here"].peak_bytes for name, run in runs.items()}
    peak_source = "predicted"
table = []
if None not in full.values():
    for name, terms in formula.items():
        less = full["eager"] - full[name]
        part = f"{less / full['eager']:.0%}"
        table.append([name, show(full[name]), show(less), part, show(terms)])
    head = [f"124M, 3 x 1024 ({peak_source})", "peak", "less than eager", "share", "by formula"]
    lab.table(head, table)
    saved_by = {name: 1 - peak / full["eager"] for name, peak in full.items()}
    fused, all_of_it = saved_by["eager, fused GELU"], saved_by["whole model compiled"]
    said = f"whole model {all_of_it:.0%}, each block {saved_by['each block compiled']:.0%}; "
    said += f"a fused GELU alone {fused:.0%}"
    against_fused = 1 - full["whole model compiled"] / full["eager, fused GELU"]
    blocks_fused = 1 - full["each block compiled"] / full["eager, fused GELU"]
    said += f"; against the fused one {against_fused:.0%} and {blocks_fused:.0%}"
    verdict = "holds" if min(against_fused, blocks_fused) > 0.05 else "does not hold"
    if verdict != "holds" and all_of_it > 0.05:
        loss_too = "the loss is compiled too, or " if against_fused > 0.05 else ""
        verdict = f"holds when {loss_too}the eager model has unfused operations"
    lab.settle("smaller", measured=said, verdict=verdict, source=peak_source, scope=scope)
else:
    lab.settle("smaller", measured="it did not fit", verdict="not measured here")
print(f"GELU of 12 blocks: {show(gelu_bytes)}; one fp32 copy of the logits: {show(per_copy)}")

# %% [markdown]
# ## Equivalence
#
# Fusion changes rounding: numbers stay in registers in fp32 where eager rounds each result to memory's type, a sum is
# taken in another order, and a multiplication with an addition becomes one instruction that rounds once. So compiled
# and eager differ. By how much is right? We compute the truth in fp64 and compare both with it: if the compiled result
# is as near to the truth as the eager one, nothing is wrong with it. The tolerance is 100 ε of fp32, as in lesson 01.
#
# The kernels of `gelu_new` come from the first cell (their second start is a warm one). Of a model the blocks are
# compiled: cut and recomputed as the compiler wants it (the backend of the account), and on a card also by Inductor,
# with its kernels. The last row must fail, or the tolerance would let everything pass: blocks with another activation,
# SiLU.


# %% name="equivalence"
def gelu_and_gradient(function, x):
    x = x.detach().requires_grad_()
    y = function(x)
    y.sum().backward()
    return y.detach().double(), x.grad.double()


def loss_and_gradient(model, tokens):
    logits = model(input_ids=tokens).logits[:, :-1]  # the model's own loss is in fp32
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    gradient = torch.cat([p.grad.flatten().double() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return loss.detach().double(), gradient


def off(found, truth):
    """Relative difference of a result and of its gradient."""
    return [float((f - t).norm() / t.norm()) for f, t in zip(found, truth, strict=True)]


compared = {}
x = torch.randn(rows_of_gelu, 4 * 768, device=device)  # the shape of the first cell
truth = gelu_and_gradient(gelu_new, x.double())
compared["gelu_new, eager"] = off(gelu_and_gradient(gelu_new, x), truth)
if not cannot:
    with compiling.fresh(CACHE):
        compiled = gelu_and_gradient(torch.compile(gelu_new), x)
    compared["gelu_new, compiled"] = off(compiled, truth)
truth = loss_and_gradient(small_gpt2(2).double(), tokens)
compared["2 blocks, eager"] = off(loss_and_gradient(small_gpt2(2), tokens), truth)
with compiling.fresh():
    model = compiling.compile_blocks(small_gpt2(2), backend=backend)
    compared["2 blocks, cut by the compiler"] = off(loss_and_gradient(model, tokens), truth)
if on_card and not cannot:  # a processor compiles them for too long
    # TF32 is recommended on stderr here; it would change the numbers
    with compiling.fresh(), contextlib.redirect_stderr(io.StringIO()):
        model = compiling.compile_blocks(small_gpt2(2))
        compared["2 blocks, Inductor"] = off(loss_and_gradient(model, tokens), truth)
model = small_gpt2(2)
for block in model.transformer.h:
    block.mlp.act = torch.nn.SiLU()
compared["2 blocks, SiLU instead"] = off(loss_and_gradient(model, tokens), truth)
epsilon = torch.finfo(torch.float32).eps
table = [
    [name, *(f"{number:.1e}" for number in found), max(found) < 100 * epsilon]
    for name, found in compared.items()
]
lab.table(["fp32 against fp64", "result off by", "gradient off by", "within 100 ε"], table)

masks = []
with compiling.fresh():
    dropout = torch.nn.functional.dropout
    for drop in (dropout, torch.compile(dropout, backend=backend)):
        torch.manual_seed(1)
        masks.append(drop(torch.ones(10_000, device=device)) > 0)
same = float((masks[0] == masks[1]).double().mean())
print(f"dropout of one half, the same seed, eager and compiled: {same:.0%} of the masks agree")

# %% [markdown]
# Where half of the masks agree, the two have nothing to do with each other: compiled code draws its random numbers in
# its own way. The same holds for every dropout of a model, so compare without dropout.
#
# ## Negative control
#
# Two programs that compiling must not speed up. First, one large matrix product: there is nothing to fuse, and the
# library is used in both cases. Second, a model that decides by its numbers when to stop. The decision is inside a
# loop. Depending on its version, PyTorch cuts the function into a graph for each turn, or gives it up and runs it as it
# was (0 graphs); either way the host reads a number in each turn.


# %% name="negative-control"
def product(a, b):
    return a @ b


def until_settled(a, b):
    """Layers until the result hardly moves."""
    for _ in range(4):
        new = torch.tanh(a @ b)
        if (new - a).abs().mean().item() < 1e-9:
            break
        a = new
    return a


n = 8192 if on_card else 256
a = torch.randn(n, n, device=device) / math.sqrt(n)
c = torch.randn(n, n, device=device) / math.sqrt(n)
gains, table, untouched = {}, [], []
for function in (product, until_settled):
    if cannot:
        continue
    eager = lab.time_step(functools.partial(function, a, c), repeats=6)
    with compiling.fresh(), contextlib.redirect_stderr(io.StringIO()):  # TF32 again
        note = compiling.FirstCall()
        step = note.around(functools.partial(torch.compile(function), a, c))
        compiled = lab.time_step(step, repeats=6)
    gains[function.__name__] = gain = eager.median_seconds / compiled.median_seconds
    graphs = note.activity.graphs
    untouched += [function.__name__] if gain < 1.15 or not graphs else []
    table.append([function.__name__, str(eager), str(compiled), f"{gain:.2f}", graphs])
lab.table(["function", "eager", "compiled", "times faster", "graphs"], table)
if gains:
    said = ", ".join(f"{name} {gain:.2f} times" for name, gain in gains.items())
    if gelu_pays:
        said += f"; gelu_new {gelu_pays.speedup:.2f} times"
    verdict = "does not hold" if untouched else "holds"
    lab.settle(
        "cure",
        measured=said,
        verdict=verdict,
        source=here,
        scope=lesson.sm if on_card else "this processor",
    )
else:
    lab.settle("cure", measured=cannot, verdict="not measured here")

# %% [markdown]
# ## Pitfalls
#
# **It compiles again and again.** Lengths, batch sizes or a Python number change. Ask for the reasons with
# `TORCH_LOGS="recompiles"`; pad to multiples, drop the last incomplete batch, use `mark_dynamic` or `dynamic=True`.
#
# **No gain at all.** Look for graph breaks (`.item()`, `print`, NumPy in the forward pass), for a program that spends
# its time in large products, or for a loader that the card waits for.
#
# **An automatic search for the batch size is slow and then runs out of memory.** Every size is compiled. Search with
# the eager model, then compile.
#
# **The peak is higher with checkpointing than without compiling.** Several blocks were recomputed in one graph. Compile
# each block and wrap it in a checkpoint from outside; the issue also tells of `torch._dynamo.graph_break()` between the
# parts.
#
# **The names in the checkpoint begin with `_orig_mod.`** That is what `torch.compile(model)` returns: a wrapper.
# `model.compile()` compiles in place and leaves the names alone.
#
# **The loss is different with the same seed.** Dropout: compiled code draws its random numbers itself.
# `torch._inductor.config.fallback_random = True` draws them as eager does, to compare the two ("slow", says its comment
# in torch/_inductor/config.py).
#
# **`Unsupported conversion` or a failed compilation on a T4 or an RTX 20.** Triton from 3.3 on does not support matrix
# products below sm_80: leave out `max-autotune` and FlexAttention. No such card was at hand.
#
# ## Exercise 1
#
# *4 min, easy.* A log says: eager step 480 ms; compiled, the first step takes 64.4 s and later ones 400 ms. The last
# batch of the first epoch, at step 250, is smaller, and that step takes 16 s longer because it is compiled again (for
# any size from then on). After how many steps has the compiled run caught up?
#
# <details><summary>Hint</summary>
#
# What does each later step bring back? Add up everything that was paid, and see whether the catching up comes before or
# after step 250.
#
# </details>

# %% answer="caught_up"
caught_up = ...
### BEGIN SOLUTION
caught_up = (64.4 - 0.4 + 16) / (0.480 - 0.400)
### END SOLUTION

# %% check="caught_up" points=1
lab.check.number(
    "caught_up",
    caught_up,
    (64.4 - 0.4 + 16) / 0.08,
    tolerance=0.006,
    mistakes={
        64.0 / 0.08: ("The recompilation is paid by the same run.", 0.5),
        64.4 / 0.08: ("The recompilation is paid by the same run.", 0.5),
        80.0 / 0.4: "Add up all that was paid, and divide it by what a step brings back.",
        80.4 / 0.4: "Divide by what a step brings back, not by what it takes.",
        80.0 / 0.48: "Divide by what a step brings back, not by what it takes.",
        80.4 / 0.48: "Divide by what a step brings back, not by what it takes.",
        80 / 0.08 + 250: "The steps before the recompilation brought something back, too.",
        80 / 80: "Milliseconds and seconds are mixed up.",
    },
    hint="How much was paid in all, and how much comes back with each step?",
)

# %% [markdown]
# ## Exercise 2
#
# *8 min, medium.* `clipped` scales a tensor down when its norm is above a limit. The `if` breaks the graph. Write
# `clipped_in_one_graph(x, limit)`: the same result for every `x` (zeros included), and one graph.
#
# <details><summary>Hint</summary>
#
# `torch.where` computes both cases and picks one; or think of a factor that is never larger than 1. What happens to
# your factor when the norm is 0?
#
# </details>


# %% name="clipped"
def clipped(x, limit):
    norm = x.norm()
    if norm > limit:
        x = x * (limit / norm)
    return x


# %% answer="clipped_in_one_graph"
def clipped_in_one_graph(x, limit):
    ### BEGIN SOLUTION
    norm = x.norm()
    return torch.where(norm > limit, x * (limit / norm), x)
    ### END SOLUTION


# %% check="clipped_in_one_graph" points=2
def judged(x, limit):
    """One case: the values of `clipped`, and one graph."""
    before = x.clone()
    wanted = clipped(before, limit)

    def verdict(got):
        if not isinstance(got, torch.Tensor):
            return f"returns {type(got).__name__}: a tensor is asked for. Is there a `return`?"
        if not torch.equal(x, before):
            return "changes the tensor that it is given; `clipped` leaves it as it was."
        if got.shape != wanted.shape:
            return f"returns shape {tuple(got.shape)} instead of {tuple(wanted.shape)}."
        if not torch.isfinite(got).all():
            return "returns values that are not finite: which division goes wrong?"
        if not torch.allclose(got.float(), wanted, rtol=1e-4, atol=1e-6):
            below = torch.equal(wanted, before)
            return f"other values than `clipped` where the norm is {'below' if below else 'above'} the limit."
        torch.compiler.reset()
        run = torch.compile(clipped_in_one_graph, backend="eager")
        activity = compiling.watched(run, x.clone(), limit)
        if activity.breaks:
            return (
                "right, but the graph breaks: which line still asks for a number of a tensor?"
            )
        return (
            True
            if activity.graphs == 1
            else "computes nothing that Dynamo could see as one graph."
        )

    return lab.check.case(x, limit, expect=verdict, raw=True)


lab.check.code(
    "clipped_in_one_graph",
    clipped_in_one_graph,
    [
        judged(torch.tensor([3.0, 4.0]), 1.0),
        judged(torch.tensor([0.3, 0.4]), 1.0),
        judged(torch.zeros(3), 1.0),
        judged(torch.full((2, 3), 5.0), 0.5),
        judged(torch.tensor([0.9, -0.9, 0.1]), 1.0),
    ],
    points=2,
    seconds=60,
)

# %% [markdown]
# ## Exercise 3
#
# *6 min, medium.* Three models train slowly. A profiler says where the time of a step goes:
#
# ```
# A   88 % matrix products of large tensors,  9 % LayerNorm, GELU, dropout, additions,  3 % card idle
# B   41 % matrix products,                  52 % LayerNorm, GELU, dropout, additions,  7 % card idle
# C   20 % matrix products,                  10 % LayerNorm, GELU, dropout, additions, 70 % card idle:
#     in every layer the host reads a loss with .item() and decides whether to go on
# ```
#
# Which one gains most from `torch.compile`, with the code as it is? And why do the other two gain little?
#
# <details><summary>Hint</summary>
#
# What can be fused, and how much would be left of the step if that part took no time? What happens to a graph at
# `.item()`?
#
# </details>

# %% answer="gains"
gains_most = ...
### BEGIN SOLUTION
gains_most = "B"
### END SOLUTION

# %% check="gains" points=1
lab.check.choice(
    "gains",
    gains_most,
    "B",
    of=("A", "B", "C"),
    mistakes={
        "A": "If all that can be fused took no time at all, how much faster would A be?",
        "C": "Can the compiler see past a number that the host must read first?",
    },
)

# %% answer="why_little" points=2
why_little = ...
### BEGIN SOLUTION
why_little = """A spends its time in large matrix products, which the library does as well as the compiler: only
9 % can be fused, so at most a tenth is gained.
C waits for the host: each .item() breaks the graph, the card idles, and nothing can be fused over the break. The
decision has to move onto the card (torch.where, or a check every few steps) first."""
### END SOLUTION

# %% check="why_little"
lab.check.words(
    "why_little",
    why_little,
    {
        r"matrix|matmul|product|multipl|gemm|cublas|library": "What does A spend its time on, and can that be fused?",
        r"\.?item\b|graph.?break|break|host|cpu|sync|data.?dependent|decision|decid": "What stops the compiler in C?",
        r"fus|9 ?%|small part|little (left|to)|nothing (left )?to|tenth|wait|idle": (
            "What is left to be gained in A, and what does the card do in C?"
        ),
    },
    against={
        r"(do not|don't) know|no idea": "Say what you do know: what takes the time in A, and in C?",
        r"\b(a|c) gains (the )?most": "Does A or C gain most?",
        r"\ba\b[^.]{0,40}graph.?breaks": "Is it A that stops at a number, and idles?",
        r"products?\b(?!.{0,30}(not|n't|never|hardly)).{0,30}(twice|times) as fast": (
            "Who computes a large product in A, with and without the compiler?"
        ),
        r"(both|all|a) (is|are) memory.?bound": "Does A move bytes or compute?",
    },
    points=2,
    least=20,
)

# %% [markdown]
# ## Take-away
#
# 1. Compiling fuses what lies between matrix products. It pays after (first call - later step) / (eager - later step)
#    steps; compile the repeated block to start sooner, the whole model to fuse the loss as well.
# 2. Count graphs, breaks and recompilations before you believe a time. Changing lengths: pad to multiples, or say that
#    they change.
# 3. Part of the saved memory is one unfused activation, and a fused one is a line in the configuration. With
#    checkpointing, compile inside the checkpoint, block by block.

# %% name="finish"
lab.finish(
    "Compile the blocks when the run is longer than the break-even steps; check that there is one graph, "
    "and that a second shape compiles at most once more."
)
