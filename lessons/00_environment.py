# ---
# jupyter:
#   labkit:
#     title: Is this machine ready?
#     question: Is this machine ready, and can I trust my measurements?
#     after: >-
#       say what driver, PyTorch and card can do together, and time and weigh a piece of GPU code so that others can
#       repeat the number
#     minutes: {gpu: 1, cpu: 0.5}
#     memory: 2 GiB of the card at most
#     needs: []
#     fetch: []
# ---

# %% [markdown]
# Everything later in this course rests on two habits: know what the machine can do, and measure so that the number
# means something. This lesson builds both. The same cells run with and without a GPU. Without one, time is really
# measured, on the processor (source `cpu`); memory is worked out by the rules of PyTorch's allocator (`predicted`);
# what only a card can tell comes from data sheets and from rows that a real card wrote (`reference`).
#
# Some words first. The **driver** is the part of the operating system that talks to the card. **CUDA** is NVIDIA's
# platform for programs on the card; its **toolkit** is the set of libraries that PyTorch was built with. The **host**
# is the processor with its memory, the **device** is the card. A **kernel** is one function that runs on the device.

# %% name="begin"
import os
import platform
import shutil
import site
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils import benchmark

import labkit as lab
from labkit import places, show
from labkit.doctor.card import OLDEST_DRIVER, WHEELS  # NVIDIA, "CUDA Compatibility"; PyTorch's own CUDA matrix
from labkit.memory.allocator import Allocator
from labkit.plots import canvas

lesson = lab.begin("00_environment")
device = lab.device()
machine = lab.machine.here()

# %% name="tools"
# Small tools: a table, bars, a row for the ledger (the file that keeps every number), and the rows of real cards
# that a machine without one may show.
torch.set_num_threads(1)  # without a card: one thread is timed more steadily than several that wait for each other
here = machine.card or "processor, 1 thread"
clock = "measured" if machine.card else "cpu"  # where a time of this run comes from
of_cards = "measured" if machine.card else "reference"  # where a number comes from that only a card gives


def table(head, rows):
    show.emit(show.text_table(head, rows), show.table(head, rows))


def bars(ax, values, labels, unit):
    """Horizontal bars: `values[row]` holds one number for each of the `labels`."""
    step = 0.8 / len(labels)
    for i, (label, hatch) in enumerate(zip(labels, ("", "///", "..."), strict=False)):
        rows = [row + step * (i - (len(labels) - 1) / 2) for row in range(len(values))]
        heights = [numbers[i] for numbers in values.values()]
        look = {"color": canvas.SERIES[i], "hatch": hatch, "edgecolor": "white", "label": label}
        ax.barh(rows, heights, 0.9 * step, **look)
    ax.set_yticks(range(len(values)), list(values))
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    ax.figure.legend(loc="outside lower center", ncols=len(labels))


def fact(name, value, unit, source=clock, **more):
    """Keep a number of this run in the ledger; returns the row."""
    where = {"source": source, "card": here, "capability": machine.sm}
    return lesson.write("fact", name=name, value=value, unit=unit, **where, **more)


KNOWN = []  # facts that real cards wrote, where there is no card here
for file in [] if machine.card else sorted((places.home() / "data" / "reference").glob("*.jsonl")):
    for row in lab.Ledger(file):
        if (row.get("kind"), row.get("lesson"), row.get("source")) == ("fact", lesson.name, "measured"):
            KNOWN.append(row)


def reference(name):
    """The number as real cards wrote it, the latest of each card."""
    latest = {(row["card"], row.get("what")): row for row in KNOWN if row["name"] == name}
    return [{**row, "label": f"reference · {row['card']}"} for row in latest.values()]


def told(name):
    """What real cards gave, as a sentence; None where there is nothing to tell."""
    rows = reference(name)
    return "; ".join(f"{r['label']}: {show.number(r['value'], r['unit'])}" for r in rows) or None


# %% [markdown]
# ## Claims
#
# Six things that guides, answers and log books say about this subject. The last two columns fill as the lesson runs:
# each verdict is computed from this run and holds for the card that is named beside it.

# %% name="claims"
lab.claim(
    "old_cuda", "Never take the newest: PyTorch 2.1 with CUDA 11.8 is the stable pair", said_by="blog posts, early 2024"
)
lab.claim("bf16_fast", "A GPU that says it supports bf16 is fast in bf16", said_by="`torch.cuda.is_bf16_supported()`")
lab.claim("smi_memory", "The memory that nvidia-smi shows is what my tensors use", said_by="forum answers")
lab.claim("one_call", "A clock before and after the code, once: that is its time", said_by="blog posts")
lab.claim("host_clock", "`time.time()` around a call times the call", said_by="tutorials")
lab.claim("data_sheet", "The TFLOP/s of the data sheet are what a large product gets", said_by="data sheets")
lab.claims()

# %% [markdown]
# ## Experiment
#
# ### Do driver, CUDA and PyTorch fit together?
#
# A PyTorch wheel (the installed package) carries its own CUDA libraries; `torch.version.cuda` names their version. No
# toolkit has to be installed beside it. What the wheel needs from the system is a driver that is new enough: **the
# driver bounds the toolkit**. The bound is the major version. A driver made for any CUDA 12 runs wheels built with
# every CUDA 12, even one above the version that `nvidia-smi` prints; only a wheel of the next major version needs a
# newer driver.
#
# In early 2024 a common advice was PyTorch 2.1 with CUDA 11.8, and "not the newest". The reason was sound: many drivers
# in use did not carry CUDA 12. The pair itself is out of date: it lacks what later lessons use, and it has no kernels
# for newer cards. Today the rule reads: *take the current PyTorch, in the build that your driver carries*. The default
# wheel is built with CUDA 13 and needs driver 580. For an older driver the set-up takes torch from another index:
# `make setup TORCH_INDEX=...`, with the address from the table below, which ends in the CUDA version (`cu126` is 12.6).
# The command `labkit doctor` looks at all of this and names the line to type.


# %% name="driver"
def newest_cuda(driver):
    """The newest CUDA major version that a driver (``"575.57.08"``) carries, or None."""
    branch = tuple(int(part) for part in driver.split(".")[:2])
    oldest = {cuda: branches[os.name == "nt"] for cuda, branches in OLDEST_DRIVER.items()}  # Linux first, then Windows
    return max((cuda for cuda in oldest if branch >= oldest[cuda]), default=None)


table(
    ["what", "here", "who says so"],
    [
        ["card", machine.card or "none", "`torch.cuda.get_device_name()`"],
        ["driver", machine.driver or "none", "`nvidia-smi`, top line"],
        ["newest CUDA of the driver", machine.driver_cuda or "–", "`nvidia-smi`, top right corner"],
        ["CUDA that PyTorch was built with", machine.cuda or "none: a processor-only wheel", "`torch.version.cuda`"],
        ["cards it has kernels for", " ".join(torch.cuda.get_arch_list()) or "–", "`torch.cuda.get_arch_list()`"],
        ["PyTorch, Python", f"{machine.torch}, {machine.python}", "`torch.__version__`"],
    ],
)

rows = []
for driver in sorted({"470.256", "535.183", "575.57", "580.95", machine.driver or "580.95"}):
    cuda = newest_cuda(driver)
    mine = " (this machine)" if driver == machine.driver else ""
    rows.append([driver + mine, f"CUDA {cuda}", WHEELS.get(cuda, "no current wheel: update the driver")])
table(["driver", "carries", "TORCH_INDEX"], rows)

if machine.card and machine.driver and machine.cuda:
    works = torch.ones(1, device=device).add(1).item() == 2  # a kernel really ran
    built_with = int(machine.cuda.split(".")[0])
    lab.settle(
        "old_cuda",
        measured=f"built with CUDA {machine.cuda}, driver {machine.driver} carries {machine.driver_cuda}:"
        f" a kernel {'ran' if works else 'did not run'}",
        verdict="does not hold" if works and built_with > 11 else "holds when the driver carries nothing newer",
    )
else:
    lab.settle(
        "old_cuda", measured=f"no driver here; PyTorch {machine.torch} has no CUDA in it", verdict="not measured here"
    )

# %% [markdown]
# ### Is the environment its own?
#
# Two projects that share one Python overwrite each other's versions. `venv` (in Python) and `conda` give each project
# a folder of its own. Both can leak: a `PYTHONPATH` is searched first, and packages installed with `--user` are seen
# by every conda environment.

# %% name="isolation"
own = sys.prefix != sys.base_prefix or bool(os.environ.get("CONDA_PREFIX"))
inside = os.path.realpath(torch.__file__).startswith(os.path.realpath(sys.prefix))
windows_driver = platform.system() == "Windows" or "microsoft" in platform.release().lower()
table(
    ["question", "answer", "if not"],
    [
        ["an environment of its own (venv or conda)?", show.number(own), "`make setup` makes one in `.venv`"],
        ["does torch come from it?", show.number(inside), "start the notebook with that environment's Python"],
        ["is `PYTHONPATH` unset?", show.number(not os.environ.get("PYTHONPATH")), "unset it: it is searched first"],
        ["are `--user` packages left out?", show.number(not site.ENABLE_USER_SITE), "set `PYTHONNOUSERSITE=1`"],
        [
            "is a full card an error (not Windows or WSL)?",
            show.number(not windows_driver),
            "see Pitfalls: memory may spill",
        ],
    ],
)

# %% [markdown]
# ### Which number formats are native?
#
# A **dtype** is a number format: `fp32` has 32 bits, `fp16` and `bf16` have 16, `fp8` has 8; `tf32` is fp32 rounded
# inside a product. **Tensor cores** are the units that multiply small matrices. If they know a format it is *native*;
# else it can be *emulated*: the values are converted to fp32 and back, which is correct and slow. PyTorch's
# `is_bf16_supported()` counts emulation as support, so a T4 or an RTX 20 says yes. The honest question is
# `torch.cuda.is_bf16_supported(including_emulation=False)`.

# %% name="dtypes"
sheet = next((c for c in lab.machine.PRESETS.values() if c.title == machine.card), None)  # data sheet of this card
card = sheet or lab.machine.preset()  # the card that predictions are for, where there is none
capability = machine.capability or card.capability
native = lab.machine.native_dtypes(capability)

rows = []
for sm in sorted({c.capability for c in lab.machine.PRESETS.values()}):
    names = ", ".join(c.name for c in lab.machine.PRESETS.values() if c.capability == sm)
    formats = lab.machine.native_dtypes(sm).values()
    rows.append([f"sm_{sm[0]}{sm[1]}", names, *("native" if f.native else "no" for f in formats)])
table(["capability", "cards", *native], rows)
if machine.card:
    print(f"here: is_bf16_supported() says {torch.cuda.is_bf16_supported()},")
    print(f"      without emulation {torch.cuda.is_bf16_supported(including_emulation=False)}")
half = "bfloat16" if native["bf16"].native else "float16"
print(f"16-bit format of this lesson: {half} ({native['bf16'].reason})")

# %% [markdown]
# ### Three numbers for memory
#
# PyTorch takes memory from the driver in large pieces, called **segments**, and hands out parts of them. So there are
# three numbers, and each answers another question:
#
# | number | counts | ask with |
# | --- | --- | --- |
# | allocated | bytes in live tensors | `torch.cuda.memory_allocated()` |
# | reserved | segments that PyTorch holds, in use or not | `torch.cuda.memory_reserved()` |
# | device | what the driver gave to the process: segments and **CUDA context** (its working state) | `nvidia-smi` |
#
# The cell after next makes three tensors (1 byte, 5 MiB, 100 MiB), deletes them, and then hands unused segments back
# with `empty_cache()`. Guess first.

# %% name="guess-memory"
lab.guess("reserved", None, "After all three tensors are deleted, how many MiB does `reserved` still show?", unit="MiB")
lab.guess(
    "device", None, "With nothing but the tensor of 1 byte alive, how many MiB does the driver count?", unit="MiB"
)

# %% name="memory"
MiB = 2**20
SIZES = {"1 byte": 1, "5 MiB": 5 * MiB, "100 MiB": 100 * MiB}


def story(take, give, empty, read):
    """Make three tensors, delete them, empty the cache; the numbers after every action."""
    rows, held = {"nothing yet": read()}, []
    for name, nbytes in SIZES.items():
        held.append(take(nbytes))
        rows[f"+ a tensor of {name}"] = read()
    while held:
        give(held.pop())
    rows["all three deleted"] = read()
    empty()
    rows["empty_cache()"] = read()
    return rows


def predicted_story():  # the allocator's rules, without a card; the context is an estimate for `card`
    rules = Allocator()
    return story(
        rules.take,
        rules.give,
        rules.empty_cache,
        lambda: (rules.allocated, rules.reserved, card.context_bytes + rules.reserved),
    )


def measured_story():
    torch.cuda.empty_cache()
    return story(
        lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device),
        lambda tensor: None,  # the last name is gone, and with it the tensor
        torch.cuda.empty_cache,
        lambda: (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), lab.machine.device_bytes()),
    )


stories = {"predicted": predicted_story()}
if machine.card:
    stories["measured"] = measured_story()
table(
    ["after", "source", "allocated", "reserved", "device"],
    [[action, s, *map(lab.show_bytes, numbers)] for s in stories for action, numbers in stories[s].items()],
)
if machine.card:
    same = all(stories["predicted"][action][:2] == numbers[:2] for action, numbers in stories["measured"].items())
    print(f"allocated and reserved are what the rules predict, to the byte: {show.number(same)}")

# %% name="memory-figure"
shown = stories[lesson.source]
with canvas.drawing(None, height=2.6) as ax:
    in_mib = {action: [n / MiB for n in numbers] for action, numbers in shown.items()}
    bars(ax, in_mib, ["allocated", "reserved", "device"], "MiB")
    origin = f"{lesson.source} · {machine.card or card.name}"
    canvas.entitle(ax, "Three numbers for the same tensors", origin)
    end = shown["all three deleted"]
    canvas.describe(
        ax,
        "Bars of allocated, reserved and device memory after each action. With all tensors deleted:"
        f" allocated {lab.show_bytes(end[0])}, reserved {lab.show_bytes(end[1])}, device {lab.show_bytes(end[2])}.",
    )
lab.plots.show(ax)

lab.answer(
    "reserved",
    measured=shown["all three deleted"][1] / MiB,
    formula=2 + 20 + 100,
    note="Three segments, one for each class of sizes.",
)
low, high = (lab.show_bytes(nbytes) for nbytes in card.context_band)
note = f"The context (of {low} to {high}, by card and driver) and one segment. Where the driver cannot name processes"
note += " (containers, WSL) this is the use of the whole card."
lab.answer(
    "device",
    measured=shown["+ a tensor of 1 byte"][2] / MiB,
    formula=(card.context_bytes + 2 * MiB) / MiB,
    note=f"{note} {told('device') or ''}".strip(),
)
fact("device", shown["+ a tensor of 1 byte"][2] / MiB, "MiB", source=lesson.source)
alive = shown["+ a tensor of 100 MiB"]
lab.settle(
    "smi_memory",
    measured=f"tensors {lab.show_bytes(alive[0])}, device {lab.show_bytes(alive[2])}",
    verdict="holds" if alive[2] < 1.1 * alive[0] else "does not hold",
)

# %% [markdown]
# What to see: the first bar of each group goes back to nothing at "all three deleted", the second only at
# `empty_cache()`, and the third never does.
#
# `allocated` follows the tensors, in steps of 512 bytes. `reserved` follows the segments: 2 MiB for small tensors,
# 20 MiB for those of 1 to 10 MiB, and for larger ones their size rounded up to 2 MiB. Deleting a tensor returns its
# place to PyTorch, not to the driver.
#
# ### The first call is not like the others
#
# `torch.mm(a, b)` is the product of two matrices. The first one in a process also loads libraries, picks a kernel and
# takes working memory. Calls after it do not. The first is called **cold**, the later ones **warm**.

# %% name="guess-cold"
lab.guess("cold", None, "How many times longer than a warm call does the very first product of this process take?")

# %% name="cold"
size = 4096 if machine.card else 256
a, b = (torch.randn(size, size, device=device) for _ in range(2))
c = torch.empty_like(a)


def product():
    torch.mm(a, b, out=c)


def wait():
    """Let the host wait until the device has done all that it was given (on a processor: nothing to wait for)."""
    torch.get_device_module(device).synchronize()


seconds = []
for _ in range(25):
    wait()
    start = time.perf_counter()
    product()
    wait()
    seconds.append(time.perf_counter() - start)

cold, warm = seconds[0], statistics.median(seconds[5:])
quarter, _, three_quarters = statistics.quantiles(seconds[5:], n=4)
floor = lab.timing.noise_floor(device)
print(f"first call    {lab.show_seconds(cold)}")
print(f"median        {lab.show_seconds(warm)} of {len(seconds) - 5} warm calls")
print(f"half of them  {lab.show_seconds(quarter)} to {lab.show_seconds(three_quarters)}")
print(f"noise floor   {lab.show_seconds(floor.median_seconds)}: timing nothing at all, by {floor.clock}")

# %% name="cold-figure"
with canvas.drawing(None, height=2.3) as ax:
    ax.plot(range(1, 26), [1e3 * s for s in seconds], "o", color=canvas.BLUE)
    ax.plot([1], [1e3 * cold], "s", color=canvas.VERMILLION)
    ax.axhline(1e3 * warm, color=canvas.BLACK, linewidth=1)
    ax.annotate(f"first call: {lab.show_seconds(cold)}", (1, 1e3 * cold), xytext=(0, 6), textcoords="offset points")
    ax.annotate(f"median: {lab.show_seconds(warm)}", (26, 1e3 * warm), va="bottom")
    ax.set_xlim(0, 34)
    ax.set_xticks([1, 5, 10, 15, 20, 25])
    ax.set_ylim(0.5e3 * min(seconds), 2e3 * max(seconds))
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("")
    ax.set_xlabel("call")
    ax.set_ylabel("ms")
    title = f"The same product {len(seconds)} times, {size} x {size}, fp32"
    canvas.entitle(ax, title, f"{clock} · {here}")
    canvas.describe(
        ax,
        f"Time of each call: the first takes {lab.show_seconds(cold)}, the median of the warm calls is"
        f" {lab.show_seconds(warm)}.",
    )
lab.plots.show(ax)

lab.answer("cold", measured=cold / warm, source=clock, note=told("cold"))
fact("cold", cold / warm, "times")
worst = max(abs(s / warm - 1) for s in seconds)
lab.settle(
    "one_call",
    measured=f"first call {cold / warm:.2g} x the median; a single call is off by up to {100 * worst:.0f} %",
    verdict="does not hold" if worst > 0.1 else "holds when everything is warm",
    source=clock,
)

# %% [markdown]
# What to see: how far the square (the first call) lies above the line, and how far single calls scatter around it. The
# **noise floor**, printed above the figure, is what the same clock shows for doing nothing: a difference that is not
# well above the floor and the scatter means nothing. Run the two cells again: the first call is no longer cold.
#
# ### Who waits for whom
#
# A call that starts work on the card returns before the work is done: it only puts a kernel into a queue, called a
# **stream**. This is **asynchronous execution**; it lets Python prepare the next kernel while the card computes. A
# clock that is read right after the call has timed the queueing. On a processor PyTorch computes inside the call; the
# same effect appears when the work is handed to another thread. The cell times both, with and without waiting.

# %% name="guess-clock"
lab.guess(
    "unsynced", None, "Work is queued and the clock is read at once: what share of its true time is seen?", unit="%"
)

# %% name="clocks"
worker, jobs = ThreadPoolExecutor(max_workers=1), []
worker.submit(torch.zeros, 1, device=device).result()  # a new thread meets the card here, not in the timing


def handed_over():
    jobs.append(worker.submit(product))  # returns at once; the worker thread computes


def wait_for_all():
    while jobs:
        jobs.pop().result()
    wait()


def time_once(call, waiting):
    wait_for_all()
    start = time.perf_counter()
    call()
    if waiting:
        wait_for_all()
    return time.perf_counter() - start


calls = {"called directly": product, "handed to a thread": handed_over}
samples = {name: [] for name in calls}
for _ in range(22):
    for name, call in calls.items():
        samples[name].append((time_once(call, waiting=False), time_once(call, waiting=True)))
seen = {}
for name, pairs in samples.items():  # the fastest of all: other programs on the host can only add time
    seen[name] = [min(side) for side in zip(*pairs, strict=True)]
wait_for_all()
table(
    ["the product is", "not waiting", "waiting", "share seen", "source"],
    [
        [name, lab.show_seconds(short), lab.show_seconds(true), f"{100 * short / true:.3g} %", clock]
        for name, (short, true) in seen.items()
    ]
    + [["called directly", "–", "–", f"{row['value']:.3g} %", row["label"]] for row in reference("unsynced")],
)

# %% name="clocks-figure"
with canvas.drawing(None, height=1.9) as ax:
    bars(ax, {n: [1e3 * s for s in both] for n, both in seen.items()}, ["not waiting", "waiting"], "ms")
    for drawn in ax.containers:
        ax.bar_label(drawn, [lab.show_seconds(bar.get_width() / 1e3) for bar in drawn], padding=3)
    ax.margins(x=0.15)
    canvas.entitle(ax, "What the host's clock sees of one product", f"{clock} · {here}")
    words = [f"{n}: {lab.show_seconds(s)} not waiting, {lab.show_seconds(t)} waiting" for n, (s, t) in seen.items()]
    canvas.describe(ax, "; ".join(words))
lab.plots.show(ax)

queued = "called directly" if machine.card else "handed to a thread"
share = {name: short / true for name, (short, true) in seen.items()}
off = f"The product was {queued}: the clock is off by a factor of {1 / share[queued]:.0f}."
lab.answer("unsynced", measured=100 * share[queued], source=clock, note=f"{off} {told('unsynced') or ''}".strip())
fact("unsynced", 100 * share["called directly"], "%")
lab.settle(
    "host_clock",
    measured=", ".join(f"{name}: {100 * part:.3g} % of the time seen" for name, part in share.items()),
    verdict="does not hold" if share["called directly"] < 0.8 else "holds when the call computes before it returns",
    source=clock,
)

# %% [markdown]
# What to see: where the plain bar is all but missing, the clock was read before the work was done. Where both bars are
# equally long, the call computed before it returned.
#
# ### Ceilings
#
# A **ceiling** is the best rate a machine reaches at one kind of work; no training step can beat it. Two matter: the
# large matrix product, in FLOP/s (**floating-point operations** a second), and the copy inside the device's memory, in
# bytes/s. The data sheet states both as peaks. The cell measures the product in three number formats.

# %% name="guess-half"
lab.guess(
    "half_speedup", None, "How many times faster than in fp32 is the same product in the 16-bit format?", unit="times"
)

# %% name="products"
side = 8192 if machine.card else 128
ceilings = []  # rows of what was reached, for the account below


def keep(found, what, work, peak):
    """Note a ceiling: `work` (operations or bytes) in one call, and the data sheet's `peak` where there is one."""
    row = {"what": what, "work": work, "seconds": found.timing.median_seconds, "sheet": peak}
    fact("ceiling", found.rate, found.unit, **row)
    ceilings.append({"value": found.rate, "unit": found.unit, "card": here, "label": f"{clock} · {here}", **row})
    return found


products = {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    name = str(dtype).removeprefix("torch.")
    peak = sheet and (sheet.fp32_flops if dtype == torch.float32 else sheet.half_flops)
    products[name] = keep(lab.timing.product_ceiling(dtype, side), f"product, {name}", 2 * side**3, peak)
table(
    ["product", "one call", "rate", "source"],
    [
        [row["what"], lab.show_seconds(row["seconds"]), f"{row['value'] / 1e12:.3g} TFLOP/s", row["label"]]
        for row in ceilings + reference("ceiling")
        if row["unit"] == "FLOP/s"
    ],
)

speedup = products[half].rate / products["float32"].rate
lab.answer(
    "half_speedup",
    measured=speedup,
    formula=sheet and sheet.half_flops / sheet.fp32_flops,
    source=clock,
    note=told("half_speedup") or ("The formula is the ratio of the data sheet." if sheet else None),
)
fact("half_speedup", speedup, "times", what=half)
if machine.card:
    ratio = products["bfloat16"].rate / products["float16"].rate
    cards = [fact("bf16", ratio, "x the rate of fp16", says=torch.cuda.is_bf16_supported())]
else:
    cards = reference("bf16")
for row in cards[:1]:
    fast = row["value"] > 0.5
    lab.settle(
        "bf16_fast",
        measured=f"says {show.number(row['says'])}; bf16 runs at {row['value']:.2g} x the rate of fp16 ({row['card']})",
        verdict="holds when the format is native (sm_80 and newer)" if fast else "does not hold",
        source=of_cards,
        scope=row["capability"],
    )
if not cards:
    lab.settle(
        "bf16_fast",
        measured=f"no card; on this processor {half} runs at {speedup:.2g} x the rate of fp32",
        verdict="not measured here",
    )

# %% [markdown]
# A copy reads every byte once and writes it once. How fast depends on where the bytes lie: a **cache** is a small fast
# memory between the computing units and the large one. The sweep copies ever larger pieces; the ceiling of the memory
# is the rate of the copies that are too large for any cache.

# %% name="copies"
sizes = [2**k for k in (range(14, 29) if machine.card else range(14, 27, 2))]
copies = {nbytes: lab.timing.copy_ceiling(nbytes) for nbytes in sizes}
largest = max(copies)
keep(copies[largest], f"copy, {lab.show_bytes(largest)}", 2 * largest, sheet and sheet.bandwidth_bytes)
with canvas.drawing(None, height=2.4) as ax:
    ax.plot([n / MiB for n in copies], [found.rate / 1e9 for found in copies.values()], "o-", color=canvas.BLUE)
    if sheet:
        ax.axhline(sheet.bandwidth_bytes / 1e9, color=canvas.VERMILLION, label=f"data sheet: {sheet.source}")
        ax.legend()
    ticks = sizes[:: len(sizes) // 5]
    ax.set_xscale("log", base=2)
    ax.set_xticks([n / MiB for n in ticks], [lab.show_bytes(n) for n in ticks])
    ax.set_xlabel("copied")
    ax.set_ylabel("GB/s, read + written")
    ax.set_ylim(bottom=0)
    canvas.entitle(ax, "Rate of a copy inside the memory, by size", f"{clock} · {here}")
    fastest = max(copies, key=lambda n: copies[n].rate)
    canvas.describe(
        ax,
        f"The rate of a copy by size: highest at {lab.show_bytes(fastest)} with {copies[fastest].rate / 1e9:.0f} GB/s,"
        f" and {copies[largest].rate / 1e9:.0f} GB/s at {lab.show_bytes(largest)}.",
    )
ax

# %% [markdown]
# What to see: small copies are slow because starting them takes longer than doing them; then a hump, where a cache
# holds everything; then the flat end at the right. Only that end is the memory's ceiling.
#
# ### Watching a card at work
#
# `nvidia-smi` prints the card's state once, `nvidia-smi -l 1` every second; `nvtop` and `nvitop` draw it as curves,
# with the processes below. Its "GPU-Util" is the share of time in which *any* kernel ran, however small: 100 % does not
# mean that the card is well used. Clocks fall when the card is hot or reaches its power limit; a measurement should say
# in which state it was taken, so every report of this course holds clocks, temperature and power. Python reads them
# through **NVML**, the library behind `nvidia-smi` (here: `lab.machine.state()`).
#
# The link to the host, the **PCIe bus**, saves power too: an idle card often shows a lower bus generation than it has.
# Under load the generation and the width (x16: sixteen lanes) must be those of the card; if not, the slot, a riser
# cable or a BIOS setting is to blame, and every transfer to the card is slower.


# %% name="watch"
def load(step, seconds):
    """Keep the device busy, and read the card's state at the end."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        wait()
        for _ in range(20):
            step()
    return lab.machine.state()


idle = lab.machine.state()
busy = load(product, 1.5) if machine.card else {}
for key, value in busy.items():
    fact("state", value, key, what=key)
WORDS = {
    "sm_mhz": "clock of the computing units, MHz",
    "memory_mhz": "clock of the memory, MHz",
    "temperature_c": "temperature, °C",
    "power_w": "power, W",
    "bus_generation": "bus generation (PCIe)",
    "bus_width": "bus width, lanes",
}
elsewhere = {row["what"]: f"{show.number(row['value'])} ({row['card']})" for row in reference("state")}
table(
    ["state", "idle, here", "under load, here", "under load, reference"],
    [[words, show.number(idle.get(k)), show.number(busy.get(k)), elsewhere.get(k, "–")] for k, words in WORDS.items()],
)
if shutil.which("nvidia-smi"):
    query = "--query-gpu=name,utilization.gpu,memory.used,power.draw,clocks.sm,pcie.link.gen.current"
    print(subprocess.run(["nvidia-smi", query, "--format=csv"], capture_output=True, text=True).stdout)

rows = []
for p in lab.machine.PRESETS.values():
    rows.append([p.name, p.bus, f"{p.bus_bytes / 1e9:.1f} GB/s", f"{p.bandwidth_bytes / p.bus_bytes:.0f} x"])
table(["card", "bus", "each way", "its own memory is faster by"], rows)

# %% [markdown]
# The last table is from the bus standard and the data sheets. It says why moving data to the host and back is the last
# resort; lesson 05 measures when it pays.
#
# ### Where the time goes: profilers
#
# A **profiler** records which operators and kernels ran, and for how long. PyTorch has one. Below, forward and
# backward of a small network, three times; `aten::` marks PyTorch's own operators.

# %% name="profiler"
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's own start and stop messages are of no interest
network = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)).to(device)
inputs = torch.randn(128, 512, device=device)


def forward_backward():
    network(inputs).square().mean().backward()


forward_backward()  # the cold one stays outside
with torch.profiler.profile(acc_events=True) as recorded:
    for _ in range(3):
        with torch.profiler.record_function("forward and backward"):  # a label of our own in the trace
            forward_backward()
    wait()

operators = [event for event in recorded.key_averages() if event.key.startswith("aten::")]
where = "device" if any(event.self_device_time_total for event in operators) else "cpu"
own_time = {event.key: getattr(event, f"self_{where}_time_total") / 1e6 for event in operators}  # it counts in µs
total = sum(own_time.values())
top = sorted(operators, key=lambda event: -own_time[event.key])[:6]
table(
    ["operator", "calls", f"own time ({where})", "share"],
    [[e.key, str(e.count), lab.show_seconds(own_time[e.key]), f"{100 * own_time[e.key] / total:.0f} %"] for e in top],
)
trace = lesson.folder / "00_environment-trace.json"
trace.parent.mkdir(parents=True, exist_ok=True)
recorded.export_chrome_trace(str(trace))
print(f"the whole trace, for Perfetto (ui.perfetto.dev): {trace.name}, beside the ledger")

# %% [markdown]
# What to see: the operators that do the work (`addmm` and `mm` are matrix products) and the many small ones around
# them. If small ones take most of the time, the network is too small for the machine, or unfused (lesson 07).
#
# **Nsight Systems** (`nsys`) is NVIDIA's profiler of the whole system. It records everything without a change to the
# code and shows it on one time axis. Read its rows from the bottom: *kernels* (are there gaps? then the card waits),
# *memory transfers* (do they overlap with kernels?), *CUDA API* (a long `cudaStreamSynchronize` is the host waiting,
# not the host working), *threads* (which one is busy while the card waits?). Where `nsys` is installed the cell records
# a trace; it opens in the program `nsys-ui`.

# %% name="nsys"
program = """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
a = torch.randn(1024, 1024, device=device)
with torch.autograd.profiler.emit_nvtx(enabled=device == "cuda"):  # names of operators as ranges
    for _ in range(20):
        (a @ a).sum().item()
"""
target = lesson.folder / "00_environment-nsys"
command = ["nsys", "profile", "--trace=cuda,nvtx,osrt", "--force-overwrite=true", f"--output={target}"]
if shutil.which("nsys"):
    try:
        done = subprocess.run([*command, sys.executable, "-c", program], capture_output=True, timeout=60)
        print("trace written:" if done.returncode == 0 else f"nsys ended with code {done.returncode}:", target.name)
    except subprocess.TimeoutExpired:
        print("nsys did not end within a minute; no trace")
else:
    print("nsys is not installed here. To record a program of yours:")
    print("  " + " ".join([*command[:-1], "--output=trace", "python train.py"]))

# %% [markdown]
# ## Account
#
# A product of two matrices with `size` rows and columns makes `size²` sums of `size` products: `2 size³` operations,
# one multiply and one add each. A copy moves every byte twice. Divided by the peak of the data sheet, this work gives a
# time that nothing can beat. The share says how much of the peak was reached; above 100 % it is flagged, because a
# result beyond a physical ceiling is an error of the count, the clock or the sheet.

# %% name="account"
known = [row for row in ceilings + reference("ceiling") if row["sheet"]]  # those with a data sheet beside them


def flagged(part):
    return f"{100 * part:.3g} %" + (" · beyond the ceiling!" if part > 1 else "")


def of_work(row):
    return f"{row['work']:.3g} {'operations' if row['unit'] == 'FLOP/s' else 'bytes, read + written'}"


table(
    ["what", "work", "no faster than", "measured", "share of the sheet", "source"],
    [
        [
            row["what"],
            of_work(row),
            lab.show_seconds(row["work"] / row["sheet"]) if row["sheet"] else "no data sheet",
            lab.show_seconds(row["seconds"]),
            flagged(row["value"] / row["sheet"]) if row["sheet"] else "–",
            row["label"],
        ]
        for row in ceilings + reference("ceiling")
    ],
)
best = max((row for row in known if "16" in row["what"]), key=lambda row: row["value"], default=None)
if best:
    lab.settle(
        "data_sheet",
        measured=f"{100 * best['value'] / best['sheet']:.0f} % of the sheet's 16-bit rate ({best['card']})",
        verdict="holds" if best["value"] > 0.95 * best["sheet"] else "does not hold",
        source=of_cards,
        scope=best.get("capability") or machine.sm,
    )
else:
    rate = max(row["value"] for row in ceilings if row["unit"] == "FLOP/s")
    lab.settle(
        "data_sheet",
        measured=f"{rate / 1e9:.3g} GFLOP/s on {here}; no data sheet is known",
        verdict="not measured here",
    )

# %% [markdown]
# What the account leaves open is the difference between the bound and the measurement. Two known parts of it: under
# full load the clocks stay below those of the data sheet, and the last round of work does not fill every unit. That is
# why later lessons divide by the *measured* ceiling.
#
# The flag also catches a common mistake: a utilisation above 100 % because the formula holds another card's peak. The
# next cell divides one and the same measured rate by the peak of every card.

# %% name="wrong-sheet"
row = max((r for r in (known or ceilings) if r["unit"] == "FLOP/s"), key=lambda r: r["value"])
print(f"{row['what']}: {row['value'] / 1e12:.3g} TFLOP/s ({row['label']})")
table(
    ["divided by the peak of", "16-bit peak, TFLOP/s", "utilisation"],
    [
        [p.name, f"{p.half_flops / 1e12:.4g}", flagged(row["value"] / p.half_flops)]
        for p in lab.machine.PRESETS.values()
    ],
)

# %% [markdown]
# ## Equivalence
#
# One product, one truth: all ways of timing it must agree. A **CUDA event** is a mark in the stream that the card
# itself stamps with the time when it gets there, so the host's clock does not enter. `torch.utils.benchmark` warms up,
# synchronises and repeats; `lab.time_step` is what this course uses (events on a card, the host's clock elsewhere).
# The ways take turns, twelve times, and the fastest of each is kept, because other programs can only add time. They may
# differ by a tenth: the host's clock also sees launching and waiting, and the clock of the chip is not constant.


# %% name="equivalence"
def by_events(call):
    """Seconds between two marks in the stream, stamped by the card."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3  # elapsed_time() is in ms


timer = benchmark.Timer("product()", globals={"product": product})
rounds = []
for _ in range(12):
    wait_for_all()
    step = lab.time_step(product, device=device, repeats=5, warmup=1)
    found = {
        "host clock, not waiting": time_once(product, waiting=False),
        "host clock, waiting": time_once(product, waiting=True),
        "torch.utils.benchmark": timer.timeit(1).median,
        f"lab.time_step, by {step.clock}": step.median_seconds,
    }
    if machine.card:
        found["CUDA events"] = by_events(product)
    rounds.append(found)
ways = {way: min(found[way] for found in rounds) for way in rounds[0]}
table(
    ["way", "one product", "against lab.time_step", "source"],
    [
        [way, lab.show_seconds(s), f"{s / ways[f'lab.time_step, by {step.clock}']:.3g} x", clock]
        for way, s in ways.items()
    ],
)
waited = [s for way, s in ways.items() if "not waiting" not in way]
apart = max(waited) / min(waited) - 1
row = fact("equivalence", apart, "fraction")
print(f"the ways that wait differ by {100 * apart:.1f} %; within a tenth: {show.number(apart < 0.1)}")

# %% [markdown]
# ## Negative control
#
# A function that never touches the device: here synchronising must change nothing. If it did, the clock itself would
# be at fault.


# %% name="control"
def on_the_host():
    sum(range(50_000))


pairs = [(time_once(on_the_host, waiting=False), time_once(on_the_host, waiting=True)) for _ in range(41)]
without, with_wait = (min(side) for side in zip(*pairs, strict=True))
table(
    ["a sum in Python", "fastest of 41", "source"],
    [["not waiting", lab.show_seconds(without), clock], ["waiting", lab.show_seconds(with_wait), clock]],
)
change = with_wait / without - 1
print(f"waiting changes the time by {100 * change:.1f} %")
print("synchronising changes nothing" if abs(change) < 0.1 else "that is too much: is this machine busy? Run it again")

# %% [markdown]
# ## Pitfalls
#
# - **Allocated is small, nvidia-smi shows a lot.** Cached segments and the context are in its number. Read allocated,
#   reserved and device apart; `empty_cache()` makes the number smaller and gives your tensors nothing.
# - **bf16 crawls on a T4 or RTX 20.** It is emulated. Use fp16 with a `GradScaler` (lesson 02), and ask with
#   `including_emulation=False`.
# - **Utilisation of more than 100 %.** The wrong card's peak stands in the formula, or a peak "with sparsity", which is
#   twice the dense one. Measure the ceiling.
# - **Windows and WSL: nothing fails, everything is slow.** The driver can move what does not fit into the host's
#   memory (NVIDIA control panel: *CUDA - Sysmem Fallback Policy*; choose *Prefer No Sysmem Fallback*). A memory budget
#   (`lab.budget`) gives the honest out-of-memory error in any case.
# - **`.item()`, `print(loss)` and `loss.cpu()` look slow in a profile.** They wait for the card; the work was queued
#   before them. The time belongs to the kernels, not to the line that waits.
# - **MPS, the Multi-Process Service**, is recommended for "higher utilisation". It lets kernels of *several processes*
#   run on one card at the same time (Linux only), which helps many small programs. A single training process gains
#   nothing from it. `nvidia-cuda-mps-control -d` starts it.
# - **fp32 products leave the tensor cores idle** unless tf32 is allowed: `torch.set_float32_matmul_precision("high")`
#   (older code: `allow_tf32`). It rounds the inputs of the product.
# - **`memory_allocated() / 1024**2` is MiB, not MB.** 1 MiB is 2²⁰ bytes, 1 MB is 10⁶.

# %% [markdown]
# ## Exercise 1
#
# *3 min, easy.* Suppose a log says:
#
# ```
# (4096, 1024) @ (1024, 8192)    first call 38 ms, then 0.8 ms
# copy of 256 MiB on the card    first call  2 ms, then 0.5 ms
# ```
#
# How many floating-point operations a second does the product do, and how many bytes a second does the copy move? Write
# the two as formulas.
#
# <details><summary>Hint</summary>How many numbers does the result have, and how many multiplications and additions does
# each of them need? How often does a copy touch every byte?</details>

# %% answer="product_rate"
product_rate = ...  # FLOP/s
### BEGIN SOLUTION
product_rate = 2 * 4096 * 1024 * 8192 / 0.8e-3
### END SOLUTION

# %% check="product_rate" points=1
lab.check.number(
    "product_rate",
    product_rate,
    2 * 4096 * 1024 * 8192 / 0.8e-3,
    unit="FLOP/s",
    mistakes={
        4096 * 1024 * 8192 / 0.8e-3: ("Each step is a multiply *and* an add.", 0.5),
        2 * 4096 * 1024 * 8192 / 0.8: ("A millisecond is not a second.", 0.5),
        2 * 4096 * 1024 * 8192 / 0.8e-3 / 1e12: ("This is in TFLOP/s; FLOP/s is asked for.", 0.5),
        2 * 4096 * 1024 * 8192 / 38e-3: "This divides by the cold call.",
        2 * 4096 * 1024 * 8192: "These are the operations; how many are they in a second?",
        2 * 4096 * 8192 / 0.8e-3: "Each number of the result is a sum of how many products?",
        2 * 4096**3 / 0.8e-3: "These matrices are not square.",
        0.8e-3 / (2 * 4096 * 1024 * 8192): "This is seconds per operation: the fraction is upside down.",
    },
    hint="Count the operations first, then divide by the time of one warm call.",
)

# %% answer="copy_rate"
copy_rate = ...  # bytes/s
### BEGIN SOLUTION
copy_rate = 2 * 256 * 2**20 / 0.5e-3
### END SOLUTION

# %% check="copy_rate" points=1
lab.check.number(
    "copy_rate",
    copy_rate,
    2 * 256 * 2**20 / 0.5e-3,
    unit="bytes/s",
    mistakes={
        256 * 2**20 / 0.5e-3: ("This counts every byte once. What does a copy do before it writes a byte?", 0.5),
        2 * 256 * 2**20 / 0.5: ("A millisecond is not a second.", 0.5),
        2 * 256e6 / 0.5e-3: ("1 MiB is not 10⁶ bytes.", 0.5),
        2 * 256 * 2**20 / 2e-3: "This divides by the cold call.",
        2 * 256 * 2**20: "These are the bytes; how many are they in a second?",
        0.5e-3 / (2 * 256 * 2**20): "This is seconds per byte: the fraction is upside down.",
    },
    hint="Count the bytes that are touched, then divide by the time of one warm call.",
)

# %% [markdown]
# ## Exercise 2
#
# *8 min, medium.* Write `honest_timer(call, wait, repeats=9)`: the seconds that one warm call of `call()` takes.
# `wait()` returns when everything that was started is done. The check tries it on pretended cards that queue work as a
# real one does, so that a timer which forgets to wait is found on any machine.
#
# <details><summary>Hint</summary>Four things in this order: call once without counting and wait; then, `repeats` times,
# read the clock, call, wait, read the clock; then take the middle of the sorted values
# (`statistics.median`). What if something is still running when you begin?</details>


# %% name="pretended-card"
class PretendedCard:
    """Queues work like a card: `launch` returns at once, `wait` when all is done. It only sleeps."""

    def __init__(self, *durations):
        self.durations, self.calls, self.free_at = durations, 0, 0.0

    def launch(self):
        """Queue one piece of work; the last of the durations repeats."""
        duration = self.durations[min(self.calls, len(self.durations) - 1)]
        self.calls += 1
        self.free_at = max(self.free_at, time.perf_counter()) + duration

    def wait(self):
        while (left := self.free_at - time.perf_counter()) > 0:
            time.sleep(left)


# %% answer="honest_timer"
def honest_timer(call, wait, repeats=9):
    ### BEGIN SOLUTION
    call()
    wait()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
    ### END SOLUTION


# %% check="honest_timer" points=4
WORK = 0.02  # seconds that a warm call takes


def trial(card, repeats, say):
    """A case: the result is near the true time, else `say` asks what may be wrong."""

    def judge(got):
        if got is None:
            return "returns nothing: is there a `return`?"
        if not isinstance(got, (int, float)) or isinstance(got, bool):
            return f"returns a {type(got).__name__}; one number of seconds is asked for"
        if abs(got - 1e3 * WORK) <= 400 * WORK:
            return "the result is in milliseconds; seconds are asked for"
        if card.calls < repeats:
            return f"{card.calls} calls were made where {repeats} were to be timed"
        if abs(got - WORK) <= 0.4 * WORK:
            return True
        return f"{lab.show_seconds(got)} for work that takes {lab.show_seconds(WORK)}. {say}"

    return lab.check.case(card.launch, card.wait, repeats=repeats, expect=judge)


lab.check.code(
    "honest_timer",
    honest_timer,
    [
        trial(PretendedCard(WORK), 3, "The card queues its work: is the clock read before it is done?"),
        trial(PretendedCard(0.2, WORK), 1, "The first call of this card is slow: is it counted, or still running?"),
        trial(
            PretendedCard(WORK, WORK, WORK, 0.3, WORK),
            9,
            "One of the nine calls was disturbed: which summary of the nine does not move?",
        ),
        trial(
            PretendedCard(WORK, WORK, WORK, WORK, 1e-3, WORK),
            9,
            "One of the nine calls was oddly short: which summary of the nine does not move?",
        ),
    ],
    points=4,
)

# %% [markdown]
# ## Exercise 3
#
# *5 min, medium.* A friend times one training step with `time.time()`: forward and backward together take next to no
# time, but the line `print(loss.item())` after them takes long. "The print is slow, I will remove it." Explain in three
# or four sentences what really happens, what removing the line would change, and how to time the step instead.
#
# <details><summary>Hint</summary>What has the card done when `backward()` returns? What does `.item()` need before it
# can give a number to Python?</details>

# %% answer="slow_print" points=2
slow_print = ...
### BEGIN SOLUTION
slow_print = """
Forward and backward only put kernels into the card's queue and return at once: execution is asynchronous. loss.item()
needs the value, so the host waits there until the card has finished everything before it; the time is that of the
queued kernels, not of the print. Without the line the work takes just as long, and the waiting shows up at the next
place that needs a result. To time the step, warm up, call torch.cuda.synchronize() before each reading of the clock (or
use CUDA events), and take the median of several steps.
"""
### END SOLUTION

# %% check="slow_print"
lab.check.words(
    "slow_print",
    slow_print,
    {
        r"queue|asynchron|launch|submit|not (yet )?(done|finished|complete)|return\w* (at once|immediately|before)": (
            "What has the card done when backward() returns?"
        ),
        r"\bwait|block|until": "What must .item() do before it has a number?",
        r"elsewhere|\bnext\b|\bsame\b|as long|not (be |get )?(any )?faster|later|still|nothing (is )?(gained|saved)": (
            "Would the step be faster without the line?"
        ),
        r"synchroni[sz]e|\bevents?\b": "How would you read the clock so that the work is inside?",
    },
    points=2,
    least=25,
)

# %% [markdown]
# ## Take-away
#
# 1. The driver bounds CUDA by its major version: take the current PyTorch in the build that your driver carries.
# 2. Warm up, synchronise (or use CUDA events), take a median, and know the noise floor and the ceiling.
# 3. Allocated, reserved and device are three different numbers; say which one you mean.

# %% name="finish"
worker.shutdown()
if machine.card:
    torch.cuda.empty_cache()
lab.finish(
    "Before any optimisation: `labkit doctor` is green, number formats are native, the ceilings of this machine are"
    " measured, every timing is warm, synchronised and a median."
)
