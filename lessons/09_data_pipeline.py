# ---
# jupyter:
#   labkit:
#     title: Feed the card
#     question: Is the GPU waiting for data, and how much of what it computes is padding?
#     after: tell whether a run waits for its loader, cut padding to a few percent, and stop and resume without a trace
#     minutes: {gpu: 2, cpu: 0.7}
#     memory: 8 GiB budget
#     needs: [01_baseline_oom, 02_mixed_precision]
#     fetch: []
# ---

# %% name="begin"
import inspect
import math
import os
import random
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time

from pathlib import Path

os.environ["KINETO_LOG_LEVEL"] = "6"  # the profiler says what it does: only errors, please
import torch

from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader

import labkit as lab
from labkit import accumulating, batching, loading, passages, quiet, stalls
from labkit.checkpoints import CheckpointManager

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # workers are forked: see the pitfalls
quiet.transformers()
lesson = lab.begin("09_data_pipeline")
BUDGET = lesson.budget
device = lab.device()
on_card = device.type == "cuda"
capability = lesson.machine.capability or lab.machine.preset().capability
sixteen = torch.bfloat16 if tuple(capability) >= (8, 0) else torch.float16
CORES = loading.cores()
if not on_card:
    torch.set_num_threads(1)  # many small operations, and workers beside them
show = lab.show_bytes
print(f"{CORES} processor cores for the loader")

# %% [markdown]
# ## Claims
#
# A training loop has two halves. The *loader* reads texts, turns them into tokens and puts them into a rectangle; the
# *step* computes. This lesson asks what each half wastes, and what it takes to stop in the middle.
#
# | word | meaning |
# | --- | --- |
# | worker | a process of its own that prepares batches while the step computes |
# | collate | make one batch out of several texts |
# | padding | filler that makes texts equally long; it is computed and then ignored |
# | real tokens | tokens of texts: all but the padding |
# | waste | the share of the computed tokens that is padding |
# | bucketing | texts of similar length go into one batch |
# | packing | several texts behind one another in one row |
# | pinned memory | memory of the host that stays in its place, so that the card can fetch from it by itself |
# | stall | time in which the loop stands still because no batch is ready |
# | utilisation | what nvidia-smi shows: the share of the time in which *some* kernel ran on the card |

# %% name="claims"
lab.claim(
    "cores", "Set num_workers to the number of cores.", said_by="blog posts, forum answers"
)
lab.claim("pinned", "pin_memory=True is free speed.", said_by="tuning guides")
lab.claim("workers pad", "Padding belongs into the loader's workers.", said_by="a training log")
lab.claim(
    "90th",
    "A cap at the 90th percentile of the lengths costs nothing.",
    said_by="a training log",
)
lab.claim(
    "dynamic", "Dynamic padding takes several times less time.", said_by="repository issues"
)
lab.claim("eight", "Pad to a multiple of 8: it is faster.", said_by="documentation")
lab.claim("70 %", "Utilisation below 70 %: the GPU is waiting for data.", said_by="checklists")
lab.claim(
    "accumulation",
    "Accumulating four batches equals one batch four times as large.",
    said_by="documentation, blog posts",
)
lab.claims()

# %% [markdown]
# ## Experiment
#
# The texts are functions of Python's standard library: some are two lines long, some are pages. A tokenizer for them
# is learned on the spot (byte-pair encoding, 4096 tokens). Nothing is longer than 1024 tokens, GPT-2's limit.

# %% name="texts"
MOST = 1024
texts = passages.functions(2000)
tokenizer = passages.learned_tokenizer(texts[:1000], 4096)
ids = passages.encoded(tokenizer, texts, most=MOST)
lengths = [len(text) for text in ids]
cap = batching.percentile(lengths, 90)
mean = sum(lengths) / len(lengths)
print(
    f"{len(ids)} texts, {sum(lengths):,} tokens; mean {mean:.0f}, median {batching.percentile(lengths, 50)}, "
    f"90th percentile {cap}, longest {max(lengths)}"
)
lab.plots.histograms(
    {"texts": lengths},
    x="length (tokens)",
    title="Lengths of the texts",
    source="cpu",
    bins=64,
    marks={"mean": mean, "90 %": cap},
)

# %% [markdown]
# *What to see:* most texts are short, and a thin tail reaches to the limit. The longest is several times as long as
# the mean, and every rectangle is as wide as its longest row.

# %% name="guess-waste"
lab.guess("waste", None, "Every text padded to 1024 tokens: which share is padding?", unit="%")
lab.guess(
    "waste-dynamic", None, "8 random texts, padded to their longest: which share?", unit="%"
)

# %% [markdown]
# ### Ways to make a rectangle
#
# *Dynamic padding* pads to the longest text of the batch. *Bucketing* also chooses who shares a batch: shuffle, take
# a pool of many batches, sort it by length, cut it into batches, shuffle those. Both are a few lines:
#
# ```python
# def collate(texts, pad=0, multiple=8):
#     width = max(len(text) for text in texts)
#     width = -(-width // multiple) * multiple  # up to a whole multiple
#     ids = torch.full((len(texts), width), pad)
#     labels = torch.full((len(texts), width), -100)  # -100: no loss here
#     for row, text in enumerate(texts):
#         ids[row, : len(text)] = labels[row, : len(text)] = torch.as_tensor(text)
#     return {"input_ids": ids, "labels": labels}
#
# loader = DataLoader(dataset, batch_sampler=batching.LengthBatches(lengths, batch=8), collate_fn=collate)
# ```
#
# `batching.Padded` is this function with options. There is no attention mask on purpose: a causal model looks to the
# left, and padding stands on the right (*Equivalence* checks it).

# %% name="ways"
BATCH = 8
shuffled = batching.LengthBatches(lengths, batch=BATCH, pool=1).order(0)
bucketed = batching.LengthBatches(lengths, batch=BATCH, pool=100).order(0)
Padded = batching.Padded
ways = {
    "to the maximum": (shuffled, Padded(to=MOST)),
    "dynamic": (shuffled, Padded()),
    "dynamic, cap at 90 %": (shuffled, Padded(cap=cap)),
    "dynamic, multiple of 8": (shuffled, Padded(multiple=8)),
    "dynamic, multiple of 64": (shuffled, Padded(multiple=64)),
    "bucketed": (bucketed, Padded()),
    "bucketed, multiple of 8": (bucketed, Padded(multiple=8)),
    "bucketed, multiple of 64": (bucketed, Padded(multiple=64)),
}
wasted = {name: batching.waste(lengths, order, how) for name, (order, how) in ways.items()}
rows_of_texts = batching.pack(lengths, MOST)
wasted["packed"] = batching.packed_waste(lengths, rows_of_texts, MOST, batch=2)
lab.table(
    ("way", "computed", "waste", "tokens cut off", "largest batch"),
    [
        (
            name,
            f"{w.computed:,}",
            f"{w.share:.1%}",
            f"{w.cut_share:.1%}",
            "{} x {}".format(*w.largest),
        )
        for name, w in wasted.items()
    ],
)
for name, w in wasted.items():
    lab.fact("waste", w.share, what=name, source="cpu", cut=w.cut_share)
lab.answer("waste", measured=100 * wasted["to the maximum"].share, source="cpu")
lab.answer("waste-dynamic", measured=100 * wasted["dynamic"].share, source="cpu")
by_pool = []
for pool in (1, 4, 10, 50, 100, None):
    order = batching.LengthBatches(lengths, batch=BATCH, pool=pool).order(0)
    name = f"pool of {pool} batches" if pool else "all sorted"
    by_pool.append((name, batching.waste(lengths, order, Padded())))
by_tokens = batching.LengthBatches(lengths, tokens=4 * MOST, pool=None).order(0)
by_pool.append(("at most 4096 tokens, sorted", batching.waste(lengths, by_tokens, Padded())))
lab.table(
    ("batches", "waste", "number", "largest"),
    [(name, f"{w.share:.1%}", w.batches, "{} x {}".format(*w.largest)) for name, w in by_pool],
)
pooled = by_pool[4][1].share
print(
    f"dynamic padding with a pool of 100: {pooled:.1%} of the tokens are padding, "
    f"{'which is' if pooled <= 0.05 else 'which is not'} 5 % or less"
)
lab.plots.grouped(
    {name: [100 * w.share] for name, w in wasted.items()},
    labels=["padding"],
    unit="share of the computed tokens (%)",
    title="Padding",
    source="cpu, 8 texts in a batch",
)

# %% [markdown]
# *What to see:* dynamic padding alone leaves most of the waste, because among 8 random texts one is long. Bucketing
# takes nearly all of it away. Look at the column *largest batch*, too: dynamic padding does not lower the peak.
#
# A larger pool wastes less, but the same texts meet more often. This is what the pool's size does, and what a batch
# of a fixed number of *tokens* does (`tokens=`): short texts then come in large batches, and the rectangle, which is
# what memory depends on, never grows.
#
# (In transformers' `Trainer` bucketing is `train_sampling_strategy="group_by_length"`; the older switch
# `group_by_length=True` is gone in version 5.)
#
# ### Packing
#
# Packing puts several texts into one row. What keeps them apart are two things: *positions* start at 0 in each text,
# and a token may look at its own text only. transformers (version 5) makes that mask by itself when it gets
# `position_ids` that start again, and neither an attention mask nor a cache. The first token of a text has no label,
# because it would have to be guessed from the text before.

# %% name="packing"
example = batching.Packed(seq=10)([[[11, 12, 13], [21, 22], [31, 32, 33, 34]]])
for name, tensor in example.items():
    print(f"{name:13s}", "".join(f"{value:5d}" for value in tensor[0].tolist()))
mask = batching.same_document(example["position_ids"])[0, 0]
print(
    "who looks at whom:", *("".join("#" if x else "." for x in row) for row in mask), sep="\n"
)
print(
    f"{len(ids)} texts in {len(rows_of_texts)} rows of {MOST}, waste {wasted['packed'].share:.2%}"
)

# %% [markdown]
# ### What the peak depends on
#
# The largest batch decides whether a run fits, however rare it is. With dynamic padding it comes at some moment of
# the epoch, perhaps after hours. Eight texts, GPT-2 124M, mixed precision:


# %% name="peak"
# Hopper's first choice for attention plans anew for every shape: with batches of changing length one would time plans
torch.backends.cuda.enable_cudnn_sdp(False)


def language_model(device):
    """GPT-2 124M, AdamW, and a step for a batch, in mixed precision."""
    with device:
        model = lab.models.gpt2(
            "gpt2", attention="sdpa", activation_function="gelu_pytorch_tanh"
        ).train()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler(device.type) if sixteen == torch.float16 else None

    def step(batch):
        inputs = {name: t.to(device, non_blocking=True) for name, t in batch.items()}
        with torch.autocast(device.type, dtype=sixteen):
            loss = model(**inputs).loss
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def rectangle(device, rows, columns):
    """The step on a rectangle of this size."""
    train = language_model(device)
    with device:
        batch = dict.fromkeys(("input_ids", "labels"), torch.randint(0, 4096, (rows, columns)))

    def step():
        return train(batch)

    step.tokens = rows * columns
    return step


typical = math.ceil(wasted["dynamic"].computed / len(shuffled) / BATCH)
peaks = {}
for name, (rows, columns) in {
    "the average dynamic batch": (BATCH, typical),
    "the largest": (BATCH, MOST),
    "4096 tokens": (4, MOST),
}.items():
    peaks[name] = lab.measure(
        rectangle,
        budget=BUDGET,
        name=f"{rows} x {columns}",
        rows=rows,
        columns=columns,
        repeats=0,
        trace=False,
        nearest=False,
    )
lab.table(
    ("batch", "size", f"peak ({lesson.source})"),
    [(n, r.name, show(r.peak_bytes) if r.ok else "out of memory") for n, r in peaks.items()],
)

# %% [markdown]
# So put the largest batch first, once, before the run: what breaks then would have broken later. A fixed number of
# tokens makes every batch alike.
#
# ### Tokens per second that are real
#
# A rate of tokens counts padding unless somebody takes it out. The same 320 texts, once through the step in each way.
# The first three take 4 texts at a time, the last two fill 4096 tokens, so that the largest rectangle is the same for
# all.

# %% name="guess-rate"
lab.guess(
    "times",
    None,
    "4 texts at a time: bucketed against padded to 1024, how many times the real tokens per second?",
    unit="x",
)

# %% name="rates"
SOME = 320
few = lengths[:SOME]
orders = {
    "to the maximum": (batching.LengthBatches(few, batch=4, pool=1).order(0), Padded(to=MOST)),
    "dynamic": (batching.LengthBatches(few, batch=4, pool=1).order(0), Padded()),
    "bucketed": (batching.LengthBatches(few, batch=4, pool=None).order(0), Padded()),
    "bucketed, 4096 tokens": (
        batching.LengthBatches(few, tokens=4096, pool=None, multiple=8).order(0),
        Padded(multiple=8),
    ),
}
epochs = {
    n: [how([ids[i] for i in batch]) for batch in order] for n, (order, how) in orders.items()
}
packed_rows = batching.pack(few, MOST)
epochs["packed, 4 x 1024"] = [
    batching.Packed(MOST)([[ids[i] for i in row] for row in packed_rows[k : k + 4]])
    for k in range(0, len(packed_rows), 4)
]


def epoch_seconds(step, batches):
    """Time of all batches, after one step with the largest."""
    step(max(batches, key=lambda batch: batch["input_ids"].numel()))
    torch.cuda.synchronize()
    start = time.perf_counter()
    for batch in batches:
        step(batch)
    torch.cuda.synchronize()
    return time.perf_counter() - start


if on_card:
    with lab.budget(BUDGET):
        train = language_model(device)
        took = {name: epoch_seconds(train, batches) for name, batches in epochs.items()}
else:
    took = dict.fromkeys(epochs)
table, rate = [], {}
for name, batches in epochs.items():
    computed = sum(batch["input_ids"].numel() for batch in batches)
    known = lab.known("epoch", took[name], "s", what=name, computed=computed, real=sum(few))
    if known["value"]:
        seconds, every, real = known["value"], known["computed"], known["real"]
        rate[name] = (every / seconds, real / seconds)
        cells = [f"{seconds:.2f} s", f"{every / seconds:,.0f}", f"{real / seconds:,.0f}"]
    else:
        cells = ["–", "–", "–"]
    share = 1 - known.get("real", sum(few)) / known.get("computed", computed)
    table.append((name, len(batches), f"{share:.1%}", *cells, known["label"]))
lab.table(("way", "steps", "waste", "epoch", "tokens/s", "real tokens/s", "where from"), table)
if rate:
    lab.plots.show(
        lab.plots.grouped(
            {name: [pair[0] / 1e3, pair[1] / 1e3] for name, pair in rate.items()},
            labels=["all tokens", "real tokens"],
            unit="thousand tokens per second",
            title="GPT-2 124M, mixed precision",
            source=known["label"],
        )
    )
times = rate["bucketed"][1] / rate["to the maximum"][1] if rate else None
lab.answer("times", measured=times, source="measured" if on_card else "reference")

# %% [markdown]
# *What to see* (where a card has measured): the two bars of a way differ by its waste, and the bars of real tokens are
# what trains. Where steps with fewer tokens take as long, the host is the limit, and padding costs nothing there: a
# batch of four short texts is too little work for a large card. Compare it with the batches of 4096 tokens. (Rows of
# another card come from the texts of its own Python; the steps are counted here.)
#
# Does the width itself matter? Matrix units work in tiles of 8 or more. The step with 6 texts, at widths around 512:


# %% name="widths"
def settle_by(row, **said):
    """Settle a claim whose numbers come from `row`: measured here, or on another card."""
    if row["value"] is None:
        lab.settle(said.pop("key"), measured="no reference row", verdict="not measured here")
    elif on_card:
        lab.settle(said.pop("key"), **said)
    else:
        lab.settle(said.pop("key"), source="reference", scope=row["card"], **said)


WIDTHS = (497, 500, 504, 512)
if on_card:
    with lab.budget(BUDGET):
        timings = {
            width: lab.time_step(rectangle(device, 6, width), max_seconds=0.6)
            for width in WIDTHS
        }
        per_token = {w: 1e6 * t.median_seconds / (6 * w) for w, t in timings.items()}
        noise = {w: t.spread_seconds / t.median_seconds for w, t in timings.items()}
else:
    per_token, noise = dict.fromkeys(WIDTHS), dict.fromkeys(WIDTHS)
width_rows = [
    lab.known("microseconds a token", per_token[w], "µs", what=f"width {w}", noise=noise[w])
    for w in WIDTHS
]
lab.table(
    ("6 texts of", "multiple of (up to 64)", "µs a token", "spread", "where from"),
    [
        (
            str(w),
            str(math.gcd(w, 64)),
            "–" if r["value"] is None else f"{r['value']:.2f}",
            "–" if r["value"] is None else f"{r['noise']:.0%}",
            r["label"],
        )
        for w, r in zip(WIDTHS, width_rows, strict=True)
    ],
)
odd, _, eight, _ = [row["value"] for row in width_rows]
if odd:
    gain, floor = odd / eight - 1, max(0.02, *(row["noise"] for row in width_rows))
    more = wasted["bucketed, multiple of 8"].computed / wasted["bucketed"].computed - 1
    said = f"an odd width takes {gain:+.1%} a token (noise {floor:.1%}); the multiple adds {more:.1%} padding"
    verdict = "holds" if gain > more else "does not hold"
    if abs(gain) <= floor and floor > more:
        verdict = "not measured here: the differences are within the noise"
else:
    said, verdict = "", "does not hold"
settle_by(width_rows[0], key="eight", measured=said, verdict=verdict)
if rate:
    alone = rate["dynamic"][1] / rate["to the maximum"][1]
    filled = rate["bucketed, 4096 tokens"][1] / rate["to the maximum"][1]
    said = f"real tokens/s: dynamic {alone:.1f} times, bucketed {times:.1f} times, to 4096 tokens {filled:.1f} times"
    verdict = "does not hold"
    if filled >= 2:
        verdict = "holds when a batch has a fixed number of tokens"
    if times >= 2:
        verdict = "holds when texts of like length share a batch"
    if alone >= 2:
        verdict = "holds"
else:
    said, verdict = "", "does not hold"
settle_by(known, key="dynamic", measured=said, verdict=verdict)

# %% [markdown]
# ### Is the card waiting?
#
# Two clocks answer that. One stands in the loop:
#
# ```python
# asked = time.perf_counter()
# batch = next(batches)
# waited += time.perf_counter() - asked
# ```
#
# A loop that runs ahead of the card may wait for a batch while the card still works, so the second clock is the card's:
# an event at the end of a step and one at the beginning of the next; the time between them is the card's wait for a
# batch. Gaps inside a step are not counted. `stalls.StallMeter` keeps both.
#
# Three datasets: *whole files* are read from disk and tokenised at every access, and then cut to 1024 tokens (what
# `truncation=True` does); *cut first* tokenises only as much text as 1024 tokens need; the *cache* was tokenised once,
# lies on disk as plain numbers, and is mapped into memory. Without a card, the step is a pause of 40 ms, as a card
# that needs no processor would give.

# %% name="guess-workers"
lab.guess(
    "workers",
    None,
    "Whole files, 4 in a batch: from how many workers on is the step not waiting (under 5 %)?",
)

# %% name="loaders"
root = Path(sysconfig.get_paths()["stdlib"])
files = [root / name for name, _ in lab.data.stdlib().files]
random.Random(1).shuffle(files)
files = files[:48]
whole = loading.TextFiles(files, tokenizer, most=MOST)
cut_first = loading.TextFiles(files, tokenizer, most=MOST, cut_first=True)
start = time.perf_counter()
cache = loading.TokenCache.write(
    lesson.folder / "tokens", [cut_first[i] for i in range(len(files))]
)
print(
    f"cache of {len(cache)} files: {show(2 * cache.starts[-1])}, made in {time.perf_counter() - start:.2f} s"
)

if on_card:
    train = language_model(device)
else:

    def train(batch):
        with record_function("step"):
            time.sleep(0.04)


def loop(dataset, workers, step=None, **options):
    """Train on the dataset; where did the time go?"""
    loader = DataLoader(
        dataset,
        batch_size=4,
        collate_fn=Padded(to=MOST),
        num_workers=workers,
        pin_memory=on_card,
        **options,
    )
    meter = stalls.StallMeter(device)
    for batch in meter(loader):
        (step or train)(batch)
    return meter.result()


counts = sorted({w for w in (0, 1, 2, 4, 8, 16, CORES) if w <= CORES})
with lab.budget(BUDGET if on_card else None):
    runs = {("whole files", w): loop(whole, w) for w in counts}
    for name, dataset in (("cut first", cut_first), ("cache", cache)):
        runs |= {(name, w): loop(dataset, w) for w in counts if w in (0, 2)}
lab.table(
    ("dataset", "workers", "waiting", "idle between steps", "a batch every", "first batch"),
    [
        (
            name, workers, f"{r.waited:.0%}", "–" if r.idle is None else f"{r.idle:.0%}",
            f"{1e3 * r.step_seconds:.0f} ms", f"{1e3 * r.first_seconds:.0f} ms",
        )
        for (name, workers), r in runs.items()
    ],
)  # fmt: skip
for (name, workers), r in runs.items():
    lab.fact("stalled", r.stalled, what=f"{name}, {workers}", step_seconds=r.step_seconds)
enough = next((w for w in counts if runs["whole files", w].stalled < 0.05), None)
lab.answer("workers", measured=enough, source="measured" if on_card else "cpu")
borrowed = (
    {row["what"]: row["value"] for row in lab.reference("stalled")} if not on_card else {}
)
on_other = [
    (int(w.split(", ")[1]), 100 * v) for w, v in borrowed.items() if w.startswith("whole")
]
curves = {"whole files": (counts, [100 * runs["whole files", w].stalled for w in counts])}
tried = [w for w in counts if w in (0, 2)]
for name in ("cut first", "cache"):
    curves[name] = (tried, [100 * runs[name, w].stalled for w in tried])
if on_other:
    curves["whole files, on a card (reference)"] = tuple(zip(*sorted(on_other), strict=True))
intervals = {w: runs["whole files", w].step_seconds for w in counts}
best = min(intervals.values())
fewest = min(w for w in counts if intervals[w] < 1.05 * best)
here = f"{fewest} of {CORES} cores give a batch every {1e3 * intervals[fewest]:.0f} ms, "
here += f"{max(counts)} workers every {1e3 * intervals[max(counts)]:.0f} ms"
print(here)
row = lab.known("fewest workers", fewest, "workers", cores=CORES, said=here)
if row["value"] is None:
    verdict = "holds" if fewest >= CORES else "does not hold"
    lab.settle("cores", measured=here, verdict=verdict, source="cpu")
else:
    verdict = "holds" if row["value"] >= row["cores"] else "does not hold"
    settle_by(row, key="cores", measured=row["said"], verdict=verdict)
ax = lab.plots.lines(
    curves,
    x="workers",
    y="stalled (% of the time)",
    title="Waiting for the loader",
    source=f"{'measured' if on_card else 'cpu'}, {CORES} cores",
    zero=True,
)
ax.set_xticks(sorted({int(x) for xs, _ in curves.values() for x in xs}))
ax

# %% [markdown]
# *What to see:* the curve falls until the workers together are as fast as the step, and stays flat from there: further
# workers have nothing to do. The cache does not need any.
#
# ### What the driver says
#
# The driver's *utilisation* is the share of the time in which some kernel ran. Four loops on a card: one starved by
# its loader, one fed from the cache, one with tiny batches, where each kernel has little to do, and one that writes
# 256 MiB to disk every eighth step.


# %% name="utilisation"
def watched(dataset, workers, step, batches):
    """A loop of so many batches, and what the driver said meanwhile."""
    sampler = [i % len(dataset) for i in range(4 * batches)]
    with stalls.Utilisation(settle_seconds=0.8) as used:
        result = loop(dataset, workers, step, sampler=sampler)
    return {
        "value": used.mean,
        "waited": result.waited,
        "idle": result.idle,
        "stalled": result.stalled,
    }


LOOPS = ("starved", "fed", "tiny batches", "saves often")
seen = {name: {"value": None} for name in LOOPS}
if on_card:
    manager, done = CheckpointManager(lesson.folder / "often", keep_last=1), []
    weights = torch.nn.Linear(8192, 8192).to(device)  # 256 MiB to write

    def tiny_batch(batch):
        return train({name: t[:1, :64] for name, t in batch.items()})

    def step_and_save(batch):
        done.append(train(batch))
        if len(done) % 8 == 0:
            manager.save(len(done), model=weights)

    with lab.budget(BUDGET):
        seen["starved"] = watched(whole, 0, train, 26)
        seen["fed"] = watched(cache, 2, train, 60)
        seen["tiny batches"] = watched(cache, 2, tiny_batch, 90)
        seen["saves often"] = watched(cache, 2, step_and_save, 32)
    for kept in manager.kept():
        kept.path.unlink()
    del weights
used = {
    n: lab.known(
        "utilisation", s["value"], what=n, **{k: v for k, v in s.items() if k != "value"}
    )
    for n, s in seen.items()
}


def percent(value):
    return "–" if value is None else f"{value:.0%}"


lab.table(
    ("loop", "utilisation", "waits for the loader", "idle between steps", "where from"),
    [
        (n, percent(r["value"]), percent(r.get("waited")), percent(r.get("idle")), r["label"])
        for n, r in used.items()
    ],
)
known = used["starved"]
low = {n: r for n, r in used.items() if r["value"] is not None and r["value"] < 0.7}
others = [n for n, r in low.items() if r["stalled"] < 0.05]
if not low:
    lab.settle("70 %", measured="no loop fell below 70 %", verdict="not measured here")
else:
    said = ", ".join(
        f"{n} {r['value']:.0%} (waits {percent(r.get('waited'))})" for n, r in low.items()
    )
    verdict = "holds when the loop's own clock says so too" if others else "holds"
    settle_by(known, key="70 %", measured=f"below 70 %: {said}", verdict=verdict)

# %% [markdown]
# So a low utilisation is a question, and the loop's clock answers it: waiting for the loader, or not. The other way
# round is no proof either: a high utilisation does not say how much each kernel did.
#
# ### Pinned memory
#
# The card can fetch from pinned memory by itself, while the processor goes on (`non_blocking=True`); what is pageable
# is copied to a pinned buffer first. The price is the call that pins. A batch of 4 x 1024 tokens and its labels are 64
# KiB; 64 MiB are a batch of large images.

# %% name="pinned"
KiB, MiB = 2**10, 2**20
SIZES = {"64 KiB": 64 * KiB, "64 MiB": 64 * MiB}
micro = {}
if on_card:
    from labkit.bus import measure_bus

    for transfer in measure_bus(SIZES.values()):
        if transfer.direction == "to card":
            micro[transfer.nbytes, transfer.pinned] = 1e6 * transfer.timing.median_seconds
    for size in SIZES.values():
        host = torch.zeros(size, dtype=torch.uint8)
        micro[size, "pinning"] = (
            1e6 * lab.time_step(host.pin_memory, device="cpu").median_seconds
        )
    micro["step"] = 1e6 * runs["cache", 2].step_seconds if ("cache", 2) in runs else None
pieces = {}
for label, size in SIZES.items():
    for kind in (False, True, "pinning"):
        what = f"{label}, {'pageable' if kind is False else 'pinned' if kind is True else 'pinning'}"
        pieces[label, kind] = lab.known(
            "copy to the card", micro.get((size, kind)), "µs", what=what
        )
a_step = lab.known("step", micro.get("step"), "µs", what="4 x 1024")


def microseconds(row):
    return "–" if row["value"] is None else f"{row['value']:,.0f} µs"


kinds = (False, True, "pinning")
lab.table(
    ("batch", "copy, pageable", "copy, pinned", "pinning it", "where from"),
    [
        (
            label,
            *(microseconds(pieces[label, kind]) for kind in kinds),
            pieces[label, True]["label"],
        )
        for label in SIZES
    ],
)
if a_step["value"]:
    saved = {
        n: (pieces[n, False]["value"] - pieces[n, True]["value"]) / a_step["value"]
        for n in SIZES
    }
    said = ", ".join(
        f"{n}: {part:.2%} of a {a_step['value'] / 1e3:.0f} ms step" for n, part in saved.items()
    )
    said += f"; pinning 64 MiB takes {pieces['64 MiB', 'pinning']['value'] / 1e3:.1f} ms"
    net = {  # with the call that pins, when nothing hides it
        n: pieces[n, False]["value"] - pieces[n, True]["value"] - pieces[n, "pinning"]["value"]
        for n in SIZES
    }
    said += "; pinning included, it saves " + ", ".join(
        f"{n}: {gain:,.0f} µs" for n, gain in net.items()
    )
    large = saved["64 MiB"] > 0.01 and net["64 MiB"] > 0
    verdict = "holds when a batch has many megabytes" if large else "does not hold"
    verdict = "holds" if saved["64 KiB"] > 0.01 else verdict
else:
    said, verdict = "", "does not hold"
settle_by(a_step, key="pinned", measured=f"the copy gets shorter by {said}", verdict=verdict)

# %% [markdown]
# ### Where to pad
#
# `collate_fn` runs in the worker. Should padding? The cell times padding alone, and the loop with padding in the
# workers and in the loop itself (the worker then passes a list of texts on).

# %% name="where-to-pad"
batch_of_four = [cache[i] for i in range(4)]
pad_seconds = lab.time_step(lambda: Padded()(batch_of_four), device="cpu").median_seconds
load_seconds = runs["whole files", 0].waited_seconds / runs["whole files", 0].steps


def pad_and_train(texts):
    train(Padded(to=MOST)(texts))


def padding_in(place):
    """A batch every so many seconds: the best of two loops over the cache, with two workers at most."""
    found = []
    for _ in range(2):
        loader = DataLoader(
            cache,
            batch_size=4,
            num_workers=min(2, CORES),
            collate_fn=Padded(to=MOST) if place == "workers" else list,
        )
        meter = stalls.StallMeter(device)
        for batch in meter(loader):
            (train if place == "workers" else pad_and_train)(batch)
        found.append(meter.result().step_seconds)
    return min(found)


with lab.budget(BUDGET if on_card else None):
    every = {place: padding_in(place) for place in ("workers", "loop")}
print(
    f"padding 4 texts: {1e6 * pad_seconds:.0f} µs; reading and tokenising 4 whole files: {1e3 * load_seconds:.0f} ms"
)
print(
    ", ".join(
        f"padding in the {place}: a batch every {1e3 * s:.1f} ms" for place, s in every.items()
    )
)
share = pad_seconds / every["workers"]
lab.settle(
    "workers pad",
    measured=f"padding takes {share:.2%} of a step, loading {load_seconds / pad_seconds:,.0f} times as long",
    verdict="holds" if share > 0.01 else "does not hold",
    source="measured" if on_card else "cpu",
)

# %% [markdown]
# Padding is no work; reading and tokenising are. (Where the two loops differ by more than padding takes, their
# difference is noise, or the transport of what the workers pass on.) What belongs into the workers, or before the run
# into a cache, is what takes milliseconds.
#
# ### A trace, read to a fix
#
# `torch.profiler` writes down what the processor and the card do. A trace is a picture of thousands of bars, and the
# question to ask of it is short: *where does the card have nothing to do, and what does the processor do meanwhile?*
# `stalls.gaps` asks exactly that. (The file opens in [ui.perfetto.dev](https://ui.perfetto.dev). With Nsight Systems:
# `nsys profile -t cuda,nvtx,osrt python train.py`, then look for white space in the row of the GPU.) Without a card
# the pauses stand for its work.

# %% name="trace"
activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_card else [])]
works = None if on_card else (lambda event: event.name == "step")


def traced(dataset, workers=0):
    """The gaps of a few steps, and the share of the time that they are."""
    loader = DataLoader(
        dataset,
        batch_size=4,
        collate_fn=Padded(to=MOST),
        sampler=range(24),
        num_workers=workers,
    )
    batches = iter(loader)
    train(next(batches))  # warm
    with profile(activities=activities) as trace:
        for batch in batches:
            train(batch)
        if on_card:
            torch.cuda.synchronize()
    return trace, stalls.gaps(trace, least_seconds=2e-3, busy=works)


with lab.budget(BUDGET if on_card else None):
    trace, before = traced(whole)
    trace.export_chrome_trace(str(lesson.folder / "trace.json"))
    _, after = traced(cache)
lab.table(
    ("gap", "length", "meanwhile the processor"),
    [
        (f"at {1e3 * g.start_seconds:.0f} ms", f"{1e3 * g.seconds:.0f} ms", g.during)
        for g in before[:4]
    ],
)
by_loader = sum("DataLoader" in gap.during for gap in before)
was, gone = (1e3 * sum(gap.seconds for gap in gaps) for gaps in (before, after))
print(
    f"the loader is {by_loader} of {len(before)} gaps. The fix, the cache: {len(after)} gaps of 2 ms or more are left, "
    f"{gone:.0f} ms instead of {was:.0f}"
)

# %% [markdown]
# The longest gaps have one name: the loader's `__next__`. That is the fix: work in it has to go, into workers or into
# a cache. Had the gaps been under `aten::item` or `cudaStreamSynchronize`, the step itself would have been asking the
# card for a number and waiting for it.
#
# ### What a cap costs
#
# The cap at the 90th percentile computes much less. What it cuts off are the ends of the longest texts. A small GPT-2
# is trained twice on the same texts, with the cap and without. How far has each position's vector moved? And, on a
# card, where the model is larger: the loss on held-out texts, apart for tokens before the cap and beyond it.

# %% name="guess-cap"
lab.guess(
    "cap-loss",
    None,
    "Held-out loss beyond the cap: how much higher after training with the cap?",
    unit="nats",
)

# %% name="cap"


def small_gpt2(seed, width, layers):
    torch.manual_seed(seed)
    return lab.models.gpt2(
        "gpt2", attention="sdpa", n_layer=layers, n_embd=width, n_head=4, vocab_size=4096, n_positions=MOST,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ).to(device)  # fmt: skip


def trained(how, texts, seed, width, layers, epochs=1):
    model = small_gpt2(seed, width, layers).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sampler = batching.LengthBatches(
        [how.kept(len(t)) for t in texts], batch=16, pool=None, seed=seed
    )
    for epoch in range(epochs):
        for batch in sampler.order(epoch):
            inputs = {name: t.to(device) for name, t in how([texts[i] for i in batch]).items()}
            model(**inputs).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return model.eval()


@torch.no_grad()
def losses_around(model, texts, place):
    """Mean held-out loss of the tokens before `place` and from there on, in nats."""
    sums, counts = torch.zeros(2), torch.zeros(2)
    for batch in batching.LengthBatches([len(t) for t in texts], batch=8, pool=None).order(0):
        inputs = {name: t.to(device) for name, t in Padded()([texts[i] for i in batch]).items()}
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
        target = inputs["labels"][:, 1:]
        loss = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), target, reduction="none"
        )
        beyond = torch.arange(1, 1 + target.shape[1], device=device) >= place
        for k, where in enumerate((~beyond, beyond)):
            sums[k] += float((loss * where).sum())
            counts[k] += float(((target != batching.IGNORED) & where).sum())
    return (sums / counts).tolist()


size = {"width": 256, "layers": 4} if on_card else {"width": 32, "layers": 1}
some = ids if on_card else ids[:48]
held_out = passages.functions(400, split="held-out") if on_card else []
held_out = passages.encoded(tokenizer, held_out, most=MOST)
place = batching.percentile([len(t) for t in some], 90)
cut = batching.waste([len(t) for t in some], [range(len(some))], Padded(cap=place)).cut_share
quality, moved = {}, {}
for name, how in {"whole texts": Padded(), f"cap at {place}": Padded(cap=place)}.items():
    pairs = []
    for seed in range(2 if on_card else 1):
        found = trained(how, some, seed, **size)
        vectors = (
            found.transformer.wpe.weight
            - small_gpt2(seed, size["width"], size["layers"]).transformer.wpe.weight
        )
        moved[name] = vectors.detach().norm(
            dim=1
        )  # how far training has moved each position's vector
        pairs.append(losses_around(found, held_out, place) if on_card else (math.nan, math.nan))
    quality[name] = [lab.training.Spread.of(values) for values in zip(*pairs, strict=True)]
for name, distance in moved.items():
    longest = max(len(t) for t in some)
    print(
        f"{name}: a position's vector has moved by {float(distance[:place].mean()):.3f} before token {place}, "
        f"by {float(distance[place:longest].mean()):.4f} from there to {longest}"
    )
(before, beyond), (before_cap, beyond_cap) = quality.values()
worse = lab.known(
    "cap, loss beyond", beyond_cap.mean - beyond.mean if on_card else None, "nats",
    cut=cut, before=before_cap.mean - before.mean, place=place, values=[str(beyond), str(beyond_cap)],
)  # fmt: skip
if worse["value"] is None:
    print("The losses need a card, and there is no reference row yet.")
    said = ""
else:
    said = f"{worse['cut']:.0%} of the tokens are cut off; held-out loss beyond token {worse['place']} "
    said += f"{worse['value']:+.2f} nats, before it {worse['before']:+.2f}"
    print(
        f"{worse['label']}: {said}; beyond it {worse['values'][0]} with whole texts, {worse['values'][1]} with the cap"
    )
lab.answer("cap-loss", measured=worse["value"], source="measured" if on_card else "reference")
if on_card:
    close = beyond.overlaps(beyond_cap)
elif worse["value"] is not None:  # "5.94 (5.87 to 6.01, 2 seeds)"
    ends = [[float(x) for x in re.findall(r"[\d.]+", words)[1:3]] for words in worse["values"]]
    close = ends[0][0] <= ends[1][1] and ends[1][0] <= ends[0][1]
else:
    close = True
verdict = "does not hold" if (worse["value"] or 0) > 0.02 else "holds"
if close:
    verdict = "not measured here: the seeds differ by more than the cap does"
settle_by(worse, key="90th", measured=said, verdict=verdict)

# %% [markdown]
# Beyond the cap the model has seen nothing: GPT-2 learns a vector for each position, and those never got a gradient.
# Whether that shows in the loss depends on how much a model has learnt of those positions at all: compare the ranges
# above. A tenth of the texts is not a tenth of the tokens either. Where the end of a text does not matter (a class that
# its first lines tell), a cap may be right; then the reason is the task, and not the percentile. Bucketing wastes less
# than the cap does, and cuts nothing.
#
# ## Account
#
# **Waste.** Let l be the length of a text, and B texts in a batch. Padding to the maximum M wastes 1 - mean(l) / M.
# Dynamic padding wastes 1 - mean(l) / E, where E is the mean of the *longest of B*: of n texts sorted by length, the
# i-th is the longest of B random ones in (i/n)ᴮ - ((i-1)/n)ᴮ of all cases. After sorting, a batch's longest and its
# mean are neighbours, and what is left are the steep places of the curve, the long texts.
#
# **Time.** A batch takes *load* seconds of one worker and *step* seconds of the card. In the loop itself they add up;
# W workers deliver a batch every load / W seconds, and the slower half decides:
#
# | workers | a batch every |
# | --- | --- |
# | 0 | step + load |
# | W | max(step, load / W) |
#
# So W = load / step, rounded up, is the least that can be enough. The number of cores is not in this formula; it only
# bounds W.

# %% name="account"
ordered = sorted(lengths)
n = len(ordered)
longest_of = sum(
    length * ((i / n) ** BATCH - ((i - 1) / n) ** BATCH) for i, length in enumerate(ordered, 1)
)
lab.table(
    ("waste", "formula", "counted", "unexplained"),
    [
        (
            name,
            f"{formula:.1%}",
            f"{wasted[name].share:.1%}",
            f"{wasted[name].share - formula:+.1%}",
        )
        for name, formula in {
            "to the maximum": 1 - mean / MOST,
            "dynamic": 1 - mean / longest_of,
        }.items()
    ],
)
by_itself = runs["whole files", 0]
step_seconds = by_itself.step_seconds - load_seconds
source = "measured" if on_card else "cpu"
table = []
for w in counts:
    formula = step_seconds + load_seconds if w == 0 else max(step_seconds, load_seconds / w)
    got = intervals[w]
    table.append(
        (
            str(w),
            f"{1e3 * formula:.0f} ms",
            f"{1e3 * got:.0f} ms",
            f"{1e3 * (got - formula):+.0f} ms",
        )
    )
lab.table(("workers", "formula", source, "unexplained"), table)
needed = max(1, math.ceil(load_seconds / step_seconds))
print(
    f"load {1e3 * load_seconds:.0f} ms, step {1e3 * step_seconds:.0f} ms: by the formula at least {needed} worker(s)"
    + (f", and there are {CORES} cores" if needed > CORES else "")
)

# %% [markdown]
# What is unexplained: workers share the cores with the loop and with each other, and files differ, so that a worker
# with a long one lets the others wait (batches come in order). Both need more than the formula says (row 0 fits by
# construction). Start at the formula, and add workers until the stall is gone.
#
# ## Equivalence
#
# ### Padding and packing compute the same
#
# The same four texts: each alone; padded, without an attention mask and with one; packed; and packed *without* starting
# the positions again, as "concatenate and cut" does. The model is in float64, so that hardly anything that differs is
# rounding. Each loss is the mean over tokens that all ways score.

# %% name="equal"
model = small_gpt2(0, width=48, layers=2).double().eval()
four = [t[:40] for t in ids if len(t) >= 20][:4]


def loss_and_gradients(batches, **options):
    """The mean loss over all predicted tokens, and its gradient as one vector."""
    model.zero_grad(set_to_none=True)
    batches = [{name: t.to(device) for name, t in batch.items()} for batch in batches]
    loss = accumulating.accumulate(model, batches)
    return float(loss), torch.cat([p.grad.flatten() for p in model.parameters()])


together = batching.Packed(seq=200)([four])
mixed = {**together, "position_ids": torch.arange(200)[None]}
ways_to_run = {
    "each alone": [Padded()([text]) for text in four],
    "padded, no mask": [Padded()(four)],
    "padded, with mask": [Padded(mask=True)(four)],
    "packed": [together],
    "packed, positions go on": [mixed],
}
outcomes = {name: loss_and_gradients(batches) for name, batches in ways_to_run.items()}
loss, gradient = outcomes["each alone"]
off = {
    name: (abs(x - loss), float((g - gradient).norm() / gradient.norm()))
    for name, (x, g) in outcomes.items()
}
lab.table(
    ("way", "loss", "loss differs by", "gradient differs by"),
    [
        (name, f"{outcomes[name][0]:.6f}", f"{a:.0e}", f"{b:.0e}")
        for name, (a, b) in off.items()
    ],
)
same = [name for name in off if off[name][0] < 1e-5 and off[name][1] < 1e-5]
print("the same:", ", ".join(same))

# %% [markdown]
# The tolerance, 1e-5, is a hundred roundings of float32 (6e-8): transformers scores in float32, whatever the model is
# in. A mask changes nothing for a causal model with padding
# on the right; without one, SDPA can take its fastest kernel ([lesson 06](06_attention.ipynb)). "Concatenate and cut"
# trains a different model: each text reads its predecessors, and begins at positions that it never has in use.
#
# ### Accumulation, token by token
#
# [Lesson 01](01_baseline_oom.ipynb) divided the loss of each of four micro-batches by four. That is right when all
# have equally many real tokens. Here they do not, and after bucketing they never do. The cell compares with one large
# batch:
#
# ```python
# count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches)
# for batch in micro_batches:
#     loss = model(**batch, num_items_in_batch=count).loss  # a sum over tokens, divided by all of them
#     loss.backward()
# ```
#
# `accumulating.accumulate` is this loop.

# %% name="accumulate"
few_long = sorted(range(len(ids[:64])), key=lambda i: len(ids[i]))
sixteen_texts = [ids[i][:96] for i in few_long[::4]]
micro = [Padded()(sixteen_texts[k : k + 4]) for k in range(0, 16, 4)]
large = [Padded()(sixteen_texts)]


def mean_of_means(batches):
    """Each micro-batch counts the same, however many tokens it has."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        inputs = {name: t.to(device) for name, t in batch.items()}
        loss = model(**inputs).loss / len(batches)
        loss.backward()
        total += float(loss.detach())
    return total, torch.cat([p.grad.flatten() for p in model.parameters()])


alike = [t[:20] for t in ids if len(t) >= 20][:16]  # here every micro-batch has as many tokens
equal_micro = [Padded()(alike[k : k + 4]) for k in range(0, 16, 4)]


def off_from(batches, whole, by):
    """The loss, that of one large batch, and how far the gradient is from its gradient."""
    x, g = by(batches)
    wanted, gradient = loss_and_gradients(whole)
    return x, wanted, float((g - gradient).norm() / gradient.norm())


compared = {
    "mean of means": off_from(micro, large, mean_of_means),
    "by tokens": off_from(micro, large, loss_and_gradients),
    "mean of means, equal lengths": off_from(equal_micro, [Padded()(alike)], mean_of_means),
}
lab.table(
    ("accumulation", "loss", "one large batch", "gradient differs by"),
    [(name, f"{x:.6f}", f"{y:.6f}", f"{off:.0e}") for name, (x, y, off) in compared.items()],
)
print(
    "real tokens in the micro-batches:",
    [accumulating.predicted_tokens(b["labels"]) for b in micro],
)
plain, weighted = compared["mean of means"][2], compared["by tokens"][2]
verdict = (
    "holds when every micro-batch counts by its tokens" if weighted < 1e-5 else "does not hold"
)
lab.settle(
    "accumulation",
    measured=f"gradient off by {plain:.0%} as a mean of means, by {weighted:.0e} by tokens",
    verdict="holds" if plain < 1e-5 else verdict,
    source="cpu" if not on_card else "measured",
)

# %% [markdown]
# ### Stopped and resumed
#
# A run of days is killed some day, and should go on as if nothing had been. For the same losses to the last bit, a
# checkpoint needs everything that the next step depends on: weights, optimizer, schedule, scaler, *the place in the
# data*, and all random states (dropout draws from them). And the file must be whole, whenever the process dies:
# `CheckpointManager` writes under another name, forces the bytes to the disk, and renames, which is atomic; the name
# holds a digest of the content, so that a damaged file is known as one.
#
# The function below is a whole training script. It runs here once, from beginning to end; then in a process of its own
# that is killed with `kill -9` in the middle, and then here again, where it finds what the dead process left.


# %% name="script"
def run(folder, steps=60, device="cpu", stop_at=None):
    """Train for so many steps, from the last checkpoint in the folder on; append each loss to losses.txt."""
    torch.manual_seed(0)
    if device == "cpu":
        torch.set_num_threads(
            1
        )  # the order of additions, and with it the last bit, depends on it
    cache = loading.TokenCache(Path(folder).parent / "tokens")
    sampler = batching.LengthBatches([64] * len(cache), batch=4, seed=0)
    loader = DataLoader(
        cache,
        batch_sampler=sampler,
        collate_fn=batching.Padded(to=64),
        generator=torch.Generator(),  # its own: see the pitfalls
    )
    embed, head = torch.nn.Embedding(4096, 32), torch.nn.Linear(32, 4096)
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.2, batch_first=True)
    model = torch.nn.ModuleList([embed, layer, head]).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(64, device=device)

    manager = CheckpointManager(folder, keep_last=2, keep_best=1)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    found = manager.restore(**parts)
    step, place = (found.step, found.position) if found else (0, {"epoch": 0, "batches": 0})
    with open(Path(folder).parent / f"{Path(folder).name}-losses.txt", "a") as log:
        while step < steps:
            sampler.start_at(place["epoch"], place["batches"])
            for batch in loader:
                x, y = batch["input_ids"].to(device), batch["labels"][:, 1:].to(device)
                logits = head(layer(embed(x), src_mask=causal, is_causal=True))[:, :-1]
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
                loss.backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad(set_to_none=True)
                step, place["batches"] = step + 1, place["batches"] + 1
                print(step, loss.item().hex(), file=log, flush=True)
                if step % 5 == 0:
                    manager.save(step, position=place, metrics={"loss": loss.item()}, **parts)
                if step in (steps, stop_at):
                    return
            place = {"epoch": place["epoch"] + 1, "batches": 0}


lab.guess(
    "resume",
    None,
    "Largest difference between the two loss curves on the processor?",
    unit="nats",
)

# %% name="killed"
home = lesson.folder / "resume"
for left in sorted(home.rglob("*"), reverse=True):  # of an earlier run
    left.rmdir() if left.is_dir() else left.unlink()
cache = loading.TokenCache.write(home / "tokens", [t[:64] for t in ids if len(t) >= 64][:80])
SCRIPT = f"""import sys
from pathlib import Path
import torch
from torch.utils.data import DataLoader
from labkit import batching, loading
from labkit.checkpoints import CheckpointManager

{inspect.getsource(run)}
run(sys.argv[1])
"""
(home / "train.py").write_text(SCRIPT)


def losses(name):
    """Loss of each step as it was written last: [(step, loss)]."""
    lines = (home / f"{name}-losses.txt").read_text().splitlines()
    whole_lines = [line.split() for line in lines if len(line.split()) == 2]
    return {int(step): float.fromhex(value) for step, value in whole_lines}


def start_process(name):
    paths = [str(Path(lab.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(home / "train.py"), str(home / name)]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def kill_at(process, log, steps):
    """kill -9, as soon as the process has logged so many steps."""
    while process.poll() is None and not (
        log.exists() and len(log.read_text().splitlines()) >= steps
    ):
        time.sleep(0.002)
    process.send_signal(getattr(signal, "SIGKILL", signal.SIGTERM))
    process.wait()


threads = torch.get_num_threads()
victim = start_process("killed")
killer = threading.Thread(target=kill_at, args=(victim, home / "killed-losses.txt", 23))
killer.start()
run(home / "whole")  # meanwhile, here: the run that nobody stops
killer.join()
reached = max(losses("killed"))
names = [kept.path.name for kept in CheckpointManager(home / "killed").kept()]
run(home / "killed")  # what another process left is found and continued
torch.set_num_threads(threads)
print(
    f"killed after step {reached}, exit code {victim.returncode}; it left behind:",
    *names,
    sep="\n  ",
)
straight, resumed = losses("whole"), losses("killed")
worst = max(abs(straight[step] - resumed.get(step, math.inf)) for step in straight)
equal = sum(straight[step] == resumed.get(step) for step in straight)
print(
    f"{equal} of {len(straight)} losses are equal to the last bit; largest difference {worst:.1e}"
)
lab.fact("resumed, largest difference", worst, "nats", what="processor", source="cpu")
lab.answer("resume", measured=worst, source="cpu")
shown = sorted(straight)
card_gap = twice_gap = None
if on_card:
    for name, stops in {"first": [None], "second": [None], "stopped": [33, None]}.items():
        for stop in stops:
            run(home / f"card-{name}", device="cuda", stop_at=stop)
    first, second, stopped = (losses(f"card-{name}") for name in ("first", "second", "stopped"))
    twice_gap = max(abs(first[s] - second[s]) for s in first)
    card_gap = max(abs(first[s] - stopped[s]) for s in first)
row = lab.known(
    "resumed, largest difference", card_gap, "nats", what="card", unstopped=twice_gap
)
if row["value"] is None:
    print("No card here, and no reference row yet.")
else:
    print(
        f"{row['label']}: stopped and resumed differs by {row['value']:.1e} nats at most, "
        f"two runs that were not stopped by {row['unstopped']:.1e}"
    )
lab.plots.lines(
    {
        "never stopped": (shown, [straight[s] for s in shown]),
        "killed and resumed": (shown, [resumed.get(s) for s in shown]),
    },
    x="step",
    y="loss (nats a token)",
    title="A killed run",
    source="cpu",
    marks={"killed": reached},
)

# %% [markdown]
# *What to see:* one curve, because the second lies on the first. On a card the same code may differ in the last bits:
# some kernels add in whatever order their threads arrive. The bound is what two runs differ by that were *not*
# stopped.
#
# ## Negative control
#
# Where nothing is padded, bucketing saves nothing; where nobody waits, workers save nothing.

# %% name="control"
alike = [128] * 512
for pool in (1, None):
    order = batching.LengthBatches(alike, batch=8, pool=pool).order(0)
    name = "bucketed" if pool is None else "shuffled"
    print(
        f"512 texts of 128 tokens, {name}: waste {batching.waste(alike, order, Padded()).share:.1%}"
    )
fed = [runs["cache", w] for w in counts if w in (0, 2)]
print(
    "from the cache: "
    + ", ".join(
        f"{w} workers: a batch every {1e3 * r.step_seconds:.1f} ms, stalled {r.stalled:.1%}"
        for w, r in zip([w for w in counts if w in (0, 2)], fed, strict=True)
    )
)
change = fed[-1].step_seconds / fed[0].step_seconds - 1
helps = "as it should be" if change > -0.05 else "they should not: something else differs"
print(f"workers change the time of a step in the fed loop by {change:+.1%}: {helps}")

# %% [markdown]
# ## Pitfalls
#
# The cell below shows two of them: a loader with workers asks for batches that the loop has not seen yet, and a new
# iterator draws a random number.
#
# **Every new length is slow once.** On a Hopper card PyTorch 2.11 asks cuDNN for attention first, and cuDNN makes a
# plan for each shape that it has not seen (pytorch#155958, FunASR#3704: about a second for a step). This lesson
# switched it off before it timed anything: `torch.backends.cuda.enable_cudnn_sdp(False)`. A few fixed widths help, too.
#
# **The resumed run skips or repeats texts.** The place was taken from the sampler, which is ahead of the loop. Count
# what was trained on. (`torchdata`'s `StatefulDataLoader` keeps this count for you.)
#
# **The resumed curve is close, but not equal.** A random number more or less was drawn: `iter(loader)` draws one from
# PyTorch's global state. Give the loader a `generator` of its own, or restore after `iter(loader)`.
#
# **"The current process just got forked, after parallelism has already been used"**, or workers that hang. The
# tokenizer's threads and `fork` do not go together: `TOKENIZERS_PARALLELISM=false`, or tokenise before.
#
# **Workers read garbage.** A file that was opened before the workers were forked has *one* reading position for all of
# them, and `seek` in one moves it for the others. Open it in the worker, at the first access; so does
# `loading.TokenCache`.
#
# **"Can't get attribute ... on module __main__".** Where workers are started afresh instead of forked (Windows, macOS;
# Linux with Python 3.14), they import the dataset's class. It must stand in a file, not in the notebook.
#
# **Memory of the host grows with the workers.** A list of Python strings is copied, page by page, as soon as a worker
# counts references to them. Arrays and mapped files are shared.
#
# **Each epoch begins with a pause.** Workers are started anew each epoch: `persistent_workers=True`. The column *first
# batch* above shows what a start costs.
#
# **Utilisation is high, and the run is slow.** Some kernel always runs: padding keeps a card busy too. Count real
# tokens per second.

# %% name="pitfalls"
asked = []


class Counting(batching.LengthBatches):
    """Writes down which batches the loader asks for."""

    def __iter__(self):
        for batch in super().__iter__():
            asked.append(batch)
            yield batch


sampler = Counting([64] * len(cache), batch=4)
loader = DataLoader(
    cache, batch_sampler=sampler, collate_fn=Padded(), num_workers=2 if CORES > 1 else 1
)
batches = iter(loader)
next(batches)
print(f"the loop has 1 batch, the loader has asked for {len(asked)}")
del batches, loader

for name, options in {"": {}, ", own generator": {"generator": torch.Generator()}}.items():
    torch.manual_seed(0)
    iter(DataLoader(cache, **options))
    after = float(torch.rand(()))
    torch.manual_seed(0)
    print(
        f"a new iterator{name}: the next random number is {'the same' if after == float(torch.rand(())) else 'another'}"
    )

# %% [markdown]
# ## Exercise 1
#
# *4 min, easy.* One worker needs 260 ms to prepare a batch; the card's step takes 60 ms. The machine has 32 cores. By
# the account above, what is the least number of workers with which the card does not wait?
#
# <details><summary>Hint</summary>
#
# How often does the card want a batch, and how often does one worker deliver? Half a worker does not exist.
#
# </details>

# %% answer="least_workers"
least_workers = ...
### BEGIN SOLUTION
least_workers = math.ceil(260 / 60)
### END SOLUTION

# %% check="least_workers" points=1
lab.check.number(
    "least_workers",
    least_workers,
    5,
    tolerance=0.001,
    mistakes={
        4: "With these, a batch comes every 65 ms. Is that often enough?",
        260 / 60: ("The ratio is right; how many whole workers are that?", 0.5),
        6: "One less also delivers in time.",
        32: "That is the number of cores. What do the others do all day?",
        31: "That is the number of cores less one. What do the others do all day?",
        1: "One worker delivers every 260 ms.",
        0: "Then step and loading add up.",
    },
    hint="Compare how often the card wants a batch with how often W workers deliver one.",
)

# %% [markdown]
# ## Exercise 2
#
# *12 min, medium.* Write `batches_of(lengths, most)`: put all texts into batches, so that no batch computes more than
# `most` tokens, *padding included* (rows times the longest), into as few batches as that allows, with little padding.
# Every text is in exactly one batch. Return a list of lists of indices. A text is never longer than `most`.
#
# <details><summary>Hint</summary>
#
# Go through the texts in the order of their lengths. A text may join the last batch if the batch, with the new longest
# text, still is no larger than `most`.
#
# </details>


# %% answer="batches_of"
def batches_of(lengths, most):
    ### BEGIN SOLUTION
    batches = [[]]
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if lengths[index] * (len(batches[-1]) + 1) > most:  # sorted: this one is the longest
            batches.append([])
        batches[-1].append(index)
    return [batch for batch in batches if batch]
    ### END SOLUTION


# %% check="batches_of" points=2
def small_texts(lengths, most, padding, worth=1.0):
    """One case: these lengths, and at most so many tokens of padding."""

    def judge(batches):
        if not isinstance(batches, list) or not all(isinstance(b, list) for b in batches):
            return "a list of lists of indices is asked for."
        flat = [i for batch in batches for i in batch]
        if not all(isinstance(i, int) and 0 <= i < len(lengths) for i in flat):
            return "these are no indices: a batch holds places in `lengths`, not lengths."
        if len(flat) != len(set(flat)):
            return "an index is in two batches. (Are these indices, places in `lengths`, and not lengths?)"
        if len(flat) < len(lengths):
            return f"{len(lengths) - len(flat)} of {len(lengths)} texts are in no batch: is the last batch there?"
        sizes = [len(b) * max(lengths[i] for i in b) for b in batches if b]
        if max(sizes) > most:
            return "a batch is too large: count rows times the longest, padding included."
        if sum(sizes) - sum(lengths) > padding:
            return f"{sum(sizes) - sum(lengths)} tokens of padding: which texts should share a batch?"
        if len(sizes) > 2 * sum(sizes) / most + 2:
            return "there is little padding, but the batches are far from full."
        return True

    return lab.check.case(lengths, most, expect=judge, worth=worth)


chance = random.Random(7)
lab.check.code(
    "batches_of",
    batches_of,
    [
        small_texts([5, 1, 5, 1, 1, 1], 10, 0),
        small_texts([7, 2, 3], 8, 1),
        small_texts([9], 9, 0),
        small_texts([chance.randint(1, 60) for _ in range(200)], 240, 400, worth=2.0),
    ],
    points=2,
)

# %% [markdown]
# ## Exercise 3
#
# *6 min, medium.* Three runs that somebody calls slow:
#
# | run | utilisation | loop waits for the loader | padding | step |
# | --- | --- | --- | --- | --- |
# | A | 38 % | 61 % of the time | 4 % | 90 ms |
# | B | 45 % | 0 % | 3 % | 9 ms, batch of 1 x 64 tokens |
# | C | 99 % | 0 % | 85 % | 310 ms |
#
# Which one do more workers (or a cache of tokens) make faster? Say for each of the others what is slow there and what
# to change.
#
# <details><summary>Hint</summary>
#
# Strike out the runs whose loop does not wait. What does the card do in what is left?
#
# </details>

# %% answer="starved_run"
starved_run = ...
### BEGIN SOLUTION
starved_run = "A"
### END SOLUTION

# %% check="starved_run" points=1
lab.check.choice(
    "starved_run",
    starved_run,
    "A",
    of=("A", "B", "C"),
    mistakes={
        "B": "Its utilisation is low, but how long does its loop wait for a batch?",
        "C": "How long does its loop wait for a batch?",
    },
)

# %% answer="slow_why" points=2
slow_why = ...
### BEGIN SOLUTION
slow_why = """B: the batch is tiny, the card's kernels are shorter than Python needs to launch them; a larger batch,
or compile with CUDA graphs, keeps it busy. C: most of what the busy card computes is padding; bucketing by length or
packing makes most of the tokens real."""
### END SOLUTION

# %% check="slow_why"
lab.check.words(
    "slow_why",
    slow_why,
    {
        r"launch|python|host|overhead|processor|\bcpu\b|small kernel|tiny|short|too (small|few)|kernels": (
            "Why is the card of B idle, when no batch is late?"
        ),
        r"(large|big|more|several|increas|rais|bigger).{0,40}(batch|text|row|sequence|token)|batch.{0,30}(large|big|increas)"
        r"|compil|cuda graph|fus(e|ing)": "What keeps the card of B busy?",
        r"padd|\bfill|not real|real token": "What does the card of C compute most of the time?",
        r"bucket|pack|sort|similar|length|dynamic|group|equal": "What makes C's tokens real ones?",
    },
    against={
        r"(more|add|increase).{0,20}workers? (would|will|does|do|can)? ?(help|cure|fix|speed)": (
            "Does anybody wait for the loader in B or C?"
        ),
        r"(do not|don't) know|no idea": "Say what you do know: what does the card do in B, and in C?",
        r"do(es)?( not|n't)( all)? matter": "What then keeps the cards of B and C from doing useful work?",
    },
    points=2,
    least=15,
)

# %% [markdown]
# ## Take-away
#
# 1. Let the loop say whether it waits, before anything is changed. At least load / step workers are needed; a cache of
#    tokens needs next to none. Padding takes microseconds.
# 2. Texts of like length share a batch of a fixed number of tokens, or a row. Count real tokens per second. A cap cuts
#    more than it seems to.
# 3. Weigh accumulated batches by their tokens. Save the place in the data and the random states with the weights, and
#    rename when the file is complete: then a killed run goes on bit by bit.
#
# Next: [lesson 10](10_inference.ipynb), inference. What became of the claims:

# %% name="finish"
lab.finish(
    "Does the loop wait for the loader? Tokenise once, then at least load / step workers. Then bucket by length to a "
    "fixed number of tokens, and count real tokens."
)
