# ---
# jupyter:
#   labkit:
#     title: Machine and measurement
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
# means something. This lesson builds both. The same cells run with and without a GPU, and every number names its
# source. Without a GPU there are three: time measured on this processor (`cpu`); memory worked out by the rules of
# PyTorch's **allocator**, its manager of memory (`predicted`); and numbers that a real card, named beside them, wrote
# into a file (`reference`). The first line below says which card. The budget in it is for later lessons: a cap on the
# memory of a training run. This lesson needs less.
#
# Some words first. The **driver** is the part of the operating system that talks to the card. **CUDA** is NVIDIA's
# platform for programs on the card; its **toolkit** is the set of libraries that PyTorch was built with. The **host**
# is the processor with its memory, the **device** is the card. A **kernel** is one function that runs on the device.
# A card's **capability** is the version of its design: `sm_90` is 9.0, NVIDIA's Hopper. The **ledger** is the file
# that keeps every number of the course, one **row** (a line) each.

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
from labkit import show
from labkit.doctor.card import OLDEST_DRIVER, WHEELS  # from NVIDIA's and PyTorch's tables
from labkit.memory.allocator import Allocator
from labkit.plots import canvas

lesson = lab.begin("00_environment")
device = lab.device()
machine = lab.machine.here()

# %% name="tools"
# You may skip this cell: tables, bars, numbers as text, rows of the ledger and of real cards.
torch.set_num_threads(1)  # without a card: one thread is timed more steadily than several
here = machine.card or "processor, 1 thread"
clock = "measured" if machine.card else "cpu"  # where a time of this run comes from
of_cards = "measured" if machine.card else "reference"  # where a number of a card comes from


def sheet_of(title):
    """The data sheet of a card, or None."""
    return next((c for c in lab.machine.PRESETS.values() if c.title == title), None)


sheet = sheet_of(machine.card)
card = sheet or lab.machine.preset()  # where there is no card: the one that predictions are for


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


def duration(seconds):
    """Three digits: `23.2 ms`, `0.941 ms`, `38.1 µs`."""
    return show.number(*((1e3 * seconds, "ms") if seconds >= 1e-4 else (1e6 * seconds, "µs")))


def rate(value, unit):
    """Three digits: `796 TFLOP/s`, `76.2 GFLOP/s`, `4,150 GB/s`."""
    prefix, size = ("T", 1e12) if unit == "FLOP/s" and value >= 1e12 else ("G", 1e9)
    return show.number(value / size, prefix + unit.replace("bytes", "B"))


def power(value):
    """`1.10 · 10¹²`"""
    digits, exponent = f"{value:.2e}".split("e")
    raised = str(int(exponent)).translate(str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"))
    return f"{digits} · 10{raised}"


def part(share):
    """A share of the true time: `1.42 %`, or all of it."""
    return f"{100 * share:.3g} %" if share <= 1 else "all of it (the two differ by noise)"


def fact(name, value, unit, source=clock, **more):
    """Keep a number of this run in the ledger; returns the row."""
    where = {"source": source, "card": here, "capability": machine.sm}
    return lesson.write("fact", name=name, value=value, unit=unit, **where, **more)


def reference(name):
    """The number as real cards wrote it, the latest of each; nothing with a card here."""
    return [] if machine.card else lab.reference(name)


def of_a_card(name, value, unit):
    """A number that only a card can tell: from here, else a reference row, else None."""
    mine = {"value": value, "unit": unit, "card": machine.card, "capability": machine.sm}
    nothing = {**mine, "value": None}
    return mine if machine.card else next(iter(reference(name)), nothing)


def answer_of_a_card(name, value, unit, formula=None, note=""):
    """Answer a guess about a card; without one, the processor's number stands beside it."""
    row = of_a_card(name, value, unit)
    if not machine.card:
        by_card = f"Measured on an {row['card']}." if row["card"] else ""
        by_processor = (
            f"This processor: {show.number(value, unit)}." if value is not None else ""
        )
        note = " ".join(said for said in (by_card, note, by_processor) if said)
    answer = {"measured": row["value"], "formula": formula, "source": of_cards}
    lab.answer(name, **answer, note=note or None)
    return row


# %% [markdown]
# ## Claims
#
# Six things that guides, answers and log books say about this subject. The last three columns fill as the lesson runs.
# A verdict is computed from this run, or from a run on the card that is named beside it, and says nothing about others.

# %% name="claims"
lab.claim(
    "old_cuda",
    "Never take the newest: PyTorch 2.1 with CUDA 11.8 is the stable pair",
    said_by="blog posts, early 2024",
)
lab.claim(
    "bf16_fast",
    "A GPU that says it supports bf16 is fast in bf16",
    said_by="`torch.cuda.is_bf16_supported()`",
)
lab.claim(
    "smi_memory",
    "The memory that nvidia-smi shows is what my tensors use",
    said_by="forum answers",
)
lab.claim(
    "one_call",
    "A clock before and after the code, once: that is its time",
    said_by="blog posts",
)
lab.claim("host_clock", "`time.time()` around a call times the call", said_by="tutorials")
sheets = "The peak of the data sheet (H200, 16 bits: 989 TFLOP/s) is what a large product gets"
lab.claim("data_sheet", sheets, said_by="data sheets")
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
# newer driver. There is a second bound: **the card bounds the wheel from below**. A wheel has kernels for some
# capabilities only (`torch.cuda.get_arch_list()`), and a new design needs a new build. Of the current wheels only the
# one built with CUDA 13 knows the RTX 50 series and the B200, so these cards need driver 580.
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
    oldest = {
        cuda: branches[os.name == "nt"] for cuda, branches in OLDEST_DRIVER.items()
    }  # Linux first, then Windows
    return max((cuda for cuda in oldest if branch >= oldest[cuda]), default=None)


table(
    ["what", "here", "who says so"],
    [
        ["card", machine.card or "none", "`torch.cuda.get_device_name()`"],
        ["driver", machine.driver or "none", "`nvidia-smi`, top line"],
        [
            "newest CUDA of the driver",
            machine.driver_cuda or "–",
            "`nvidia-smi`, top right corner",
        ],
        [
            "CUDA that PyTorch was built with",
            machine.cuda or "none: a processor-only wheel",
            "`torch.version.cuda`",
        ],
        [
            "cards it has kernels for",
            " ".join(torch.cuda.get_arch_list()) or "–",
            "`torch.cuda.get_arch_list()`",
        ],
        ["PyTorch, Python", f"{machine.torch}, {machine.python}", "`torch.__version__`"],
    ],
)

# PyTorch's own CUDA matrix: Turing to Blackwell, Maxwell to Hopper
CARDS = {
    13: "sm_75 to sm_120: RTX 20 to RTX 50, B200",
    12: "sm_50 to sm_90: GTX 900 to RTX 40, H200",
}
rows = []
for driver in sorted({"470.256", "535.183", "575.57", "580.95", machine.driver or "580.95"}):
    cuda = newest_cuda(driver)
    mine = " (this machine)" if driver == machine.driver else ""
    wheel = WHEELS.get(cuda, "no current wheel: update the driver")
    rows.append([driver + mine, f"CUDA {cuda}", wheel, CARDS.get(cuda, "–")])
table(["driver", "carries", "TORCH_INDEX", "which has kernels for"], rows)

if machine.card and machine.driver and machine.cuda:
    works = torch.ones(1, device=device).add(1).item() == 2  # a kernel really ran
    built_with = int(machine.cuda.split(".")[0])
    lab.settle(
        "old_cuda",
        measured=f"built with CUDA {machine.cuda}, driver {machine.driver} carries"
        f" {machine.driver_cuda}:"
        f" a kernel {'ran' if works else 'did not run'}",
        verdict="does not hold"
        if works and built_with > 11
        else "holds when the driver carries nothing newer",
    )
else:
    lab.settle(
        "old_cuda",
        measured=f"no driver here; PyTorch {machine.torch} has no CUDA in it",
        verdict="not measured here",
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
        [
            "an environment of its own (venv or conda)?",
            show.number(own),
            "`make setup` makes one in `.venv`",
        ],
        [
            "does torch come from it?",
            show.number(inside),
            "start the notebook with that environment's Python",
        ],
        [
            "is `PYTHONPATH` unset?",
            show.number(not os.environ.get("PYTHONPATH")),
            "unset it: it is searched first",
        ],
        [
            "are `--user` packages left out?",
            show.number(not site.ENABLE_USER_SITE),
            "set `PYTHONNOUSERSITE=1`",
        ],
        [
            "does running out of memory raise an error (on Windows and WSL it may not)?",
            show.number(not windows_driver),
            "see Pitfalls: the driver may move memory to the host",
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
capability = machine.capability or card.capability
native = lab.machine.native_dtypes(capability)

rows = []
for sm in sorted({c.capability for c in lab.machine.PRESETS.values()}):
    names = ", ".join(c.name for c in lab.machine.PRESETS.values() if c.capability == sm)
    formats = lab.machine.native_dtypes(sm).values()
    cells = ["native" if one.native else "no" for one in formats]
    rows.append([f"sm_{sm[0]}{sm[1]}", names, *cells])
table(["capability", "cards", *native], rows)
if machine.card:
    print(f"here: is_bf16_supported() says {torch.cuda.is_bf16_supported()},")
    print(f"      without emulation {torch.cuda.is_bf16_supported(including_emulation=False)}")
half = "bfloat16" if native["bf16"].native else "float16"
reason = native["bf16"].reason
if not machine.card:
    reason = reason.replace("this is", f"predicted for {card.name},")
print(f"16-bit format of this lesson: {half} ({reason})")

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
# The cell after next makes three tensors (1 byte, 5 MiB, 500 MiB), deletes them, and then hands unused segments back
# with `empty_cache()`. Guess first.

# %% name="guess-memory"
lab.guess(
    "reserved",
    None,
    "After all three tensors are deleted, how many MiB does `reserved` still show?",
    unit="MiB",
)
asked = "With only the 1-byte tensor alive, how many MiB does a real card's driver count?"
lab.guess("device", None, asked, unit="MiB")

# %% name="memory"
MiB = 2**20
SIZES = {"1 byte": 1, "5 MiB": 5 * MiB, "500 MiB": 500 * MiB}


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


def predicted_story():  # the allocator's rules; the context is an estimate for `card`
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
        lambda: (
            torch.cuda.memory_allocated(),
            torch.cuda.memory_reserved(),
            lab.machine.device_bytes(),
        ),
    )


stories = {"predicted": predicted_story()}
if machine.card:
    stories["measured"] = measured_story()
table(
    ["after", "source", "allocated", "reserved", "device"],
    [
        [action, s, *map(lab.show_bytes, numbers)]
        for s in stories
        for action, numbers in stories[s].items()
    ],
)
if machine.card:
    same = all(
        stories["predicted"][action][:2] == numbers[:2]
        for action, numbers in stories["measured"].items()
    )
    print(
        f"allocated and reserved are what the rules predict, to the byte: {show.number(same)}"
    )

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
        "Bars of allocated, reserved and device memory after each action. All tensors deleted:"
        f" allocated {lab.show_bytes(end[0])}, reserved {lab.show_bytes(end[1])}, device"
        f" {lab.show_bytes(end[2])}.",
    )
lab.plots.show(ax)

lab.answer(
    "reserved",
    measured=shown["all three deleted"][1] / MiB,
    formula=2 + 20 + 500,
    note="Three segments, one for each class of sizes.",
)
low, high = (lab.show_bytes(nbytes) for nbytes in card.context_band)
note = f"One segment and the context: {low} to {high}, by card, driver and loaded kernels."
if card.measured:
    note += (
        f" The formula's {lab.show_bytes(card.context_bytes)} were read after training steps;"
    )
    note += " here hardly any kernel has been loaded yet."
note += " Where the driver cannot name processes (containers, WSL), it counts the whole card."
counted = shown["+ a tensor of 1 byte"][2] / MiB
by_formula = (card.context_bytes + 2 * MiB) / MiB
answer_of_a_card("device", counted if machine.card else None, "MiB", by_formula, note)
fact("device", counted, "MiB", source=lesson.source)
alive = shown["+ a tensor of 500 MiB"]
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
asked = "How many times longer than a warm call is the very first product on a real card?"
lab.guess("cold", None, asked, unit="times")

# %% name="cold"
size = 4096 if machine.card else 256
a, b = (torch.randn(size, size, device=device) for _ in range(2))
c = torch.empty_like(a)


def product():
    torch.mm(a, b, out=c)


def wait():
    """Let the host wait until the device has done everything (a processor always has)."""
    torch.get_device_module(device).synchronize()


def series():
    """The seconds of 25 calls, each on its own."""
    seconds = []
    for _ in range(25):
        wait()
        start = time.perf_counter()
        product()
        wait()
        seconds.append(time.perf_counter() - start)
    return seconds


seconds, again = series(), series()
cold, warm = seconds[0], statistics.median(seconds[5:])
quarter, _, three_quarters = statistics.quantiles(seconds[5:], n=4)
floor = lab.timing.noise_floor(device)
by = "CUDA events" if machine.card else "the host's clock"
print(f"first call    {duration(cold)}")
print(f"median        {duration(warm)} of {len(seconds) - 5} warm calls")
print(f"middle half   lies between {duration(quarter)} and {duration(three_quarters)}")
print(f"noise floor   {duration(floor.median_seconds)}: timing nothing at all, by {by}")
print(
    f"once more     first call {duration(again[0])},"
    f" median {duration(statistics.median(again[5:]))}"
)

# %% name="cold-figure"
with canvas.drawing(None, height=2.3) as ax:
    ax.plot(range(1, 26), [1e3 * s for s in seconds], "o", color=canvas.BLUE)
    ax.plot([1], [1e3 * cold], "s", color=canvas.VERMILLION)
    ax.axhline(1e3 * warm, color=canvas.BLACK, linewidth=1)
    above = {"xytext": (0, 6), "textcoords": "offset points"}
    ax.annotate(f"first call: {duration(cold)}", (1, 1e3 * cold), **above)
    ax.annotate(f"median: {duration(warm)}", (26, 1e3 * warm), va="bottom")
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
        f"Time of each call: the first takes {duration(cold)}, the median of the warm calls is"
        f" {duration(warm)}.",
    )
lab.plots.show(ax)

row = answer_of_a_card("cold", cold / warm, "times")
fact("cold", cold / warm, "times")
worst = max(max(s / warm, warm / s) for s in seconds[1:])
found = f"first call {cold / warm:.3g} times the median, later ones up to {worst:.3g} ({here})"
if row["value"] and not machine.card:
    found = f"first call {row['value']:.3g} times the median ({row['card']}); {found}"
first_off = row["value"] or cold / warm  # nothing known of a card: the processor's
lab.settle(
    "one_call",
    measured=found,
    verdict="does not hold" if first_off > 1.1 else "holds when everything is warm",
    source=of_cards if row["value"] else clock,
    scope=row["capability"],
)

# %% [markdown]
# What to see: how far the square (the first call) lies above the line, and how far single calls scatter around it. The
# **noise floor**, printed above the figure, is what the same clock shows for doing nothing: a difference that is not
# well above the floor and the scatter means nothing. A second series ("once more") begins warm.
#
# ### Who waits for whom
#
# A call that starts work on the card returns before the work is done: it only puts a kernel into a queue, called a
# **stream**. This is **asynchronous execution**; it lets Python prepare the next kernel while the card computes. A
# clock that is read right after the call has timed the queueing. On a processor PyTorch computes inside the call; the
# same effect appears when the work is handed to another thread. The cell times both, with and without waiting.
#
# Which of many timings to keep? **Median**: what a call usually takes; report this one. **Minimum**: what it takes
# undisturbed; only for comparing two clocks on one call, where none can read too short.

# %% name="guess-clock"
asked = "A card gets work, the clock is read at once: what share of the true time is seen?"
lab.guess("unsynced", None, asked, unit="%")

# %% name="clocks"
worker, jobs = ThreadPoolExecutor(max_workers=1), []
# a new thread has settings of its own, and meets the card here, not in the timing
worker.submit(torch.set_num_threads, 1).result()
worker.submit(torch.zeros, 1, device=device).result()


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
for name, pairs in samples.items():  # minimum: two clocks on one call
    seen[name] = [min(side) for side in zip(*pairs, strict=True)]
wait_for_all()
table(
    ["the product is", "not waiting", "waiting", "share seen", "source"],
    [
        [name, duration(short), duration(true), part(short / true), clock]
        for name, (short, true) in seen.items()
    ]
    + [
        ["called directly", "–", "–", part(row["value"] / 100), row["label"]]
        for row in reference("unsynced")
    ],
)
waits = [true for _, true in seen.values()]
if max(waits) > 1.5 * min(waits):
    print(
        "Careful: one product, but the two waiting times differ. This machine is busy;"
        " run the cell again."
    )

# %% name="clocks-figure"
with canvas.drawing(None, height=1.9) as ax:
    in_ms = {n: [1e3 * s for s in both] for n, both in seen.items()}
    bars(ax, in_ms, ["not waiting", "waiting"], "ms")
    for drawn in ax.containers:
        ax.bar_label(drawn, [duration(bar.get_width() / 1e3) for bar in drawn], padding=3)
    ax.margins(x=0.15)
    canvas.entitle(ax, "What the host's clock sees of one product", f"{clock} · {here}")
    words = [
        f"{n}: {duration(s)} not waiting, {duration(t)} waiting" for n, (s, t) in seen.items()
    ]
    canvas.describe(ax, "; ".join(words))
lab.plots.show(ax)

share = {name: short / true for name, (short, true) in seen.items()}
row = of_a_card("unsynced", 100 * share["called directly"], "%")
note = f"The clock is off by a factor of {100 / row['value']:.0f}." if row["value"] else ""
found = "; ".join(f"{name}: {part(seen)}" for name, seen in share.items())
if not machine.card:
    note = f"Measured on an {row['card']}. {note}" if row["value"] else ""
    note = f"{note} Processor, handed to a thread: {part(share['handed to a thread'])}.".strip()
    found = f"this processor, {found}"
    if row["value"]:
        found = f"{row['card']}, called directly: {part(row['value'] / 100)}; {found}"
lab.answer("unsynced", measured=row["value"], source=of_cards, note=note)
fact("unsynced", 100 * share["called directly"], "%")
judged = row["value"] / 100 if row["value"] else share["called directly"]
inside = "holds when the call computes before it returns"
lab.settle(
    "host_clock",
    measured=f"share seen: {found}",
    verdict="does not hold" if judged < 0.8 else inside,
    source=of_cards if row["value"] else clock,
    scope=row["capability"],
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
asked = "How many times faster than in fp32 is the same product in 16 bits on a real card?"
lab.guess("half_speedup", None, asked, unit="times")

# %% name="products"
side = 8192 if machine.card else 128
ceilings = []  # rows of what was reached, for the account below


def keep(found, what, work, peak):
    """Note a ceiling: the `work` (operations or bytes) of one call, the sheet's `peak`."""
    row = {"what": what, "work": work, "seconds": found.timing.median_seconds, "sheet": peak}
    fact("ceiling", found.rate, found.unit, **row)
    reached = {"value": found.rate, "unit": found.unit, "card": here}
    ceilings.append({**reached, "label": f"{clock} · {here}", **row})
    return found


products = {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    name = str(dtype).removeprefix("torch.")
    peak = sheet and (sheet.fp32_flops if dtype == torch.float32 else sheet.half_flops)
    best = lab.timing.product_ceiling(dtype, side)
    products[name] = keep(best, f"product, {name}", 2 * side**3, peak)
table(
    ["product", "one call", "rate", "source"],
    [
        [row["what"], duration(row["seconds"]), rate(row["value"], row["unit"]), row["label"]]
        for row in ceilings + reference("ceiling")
        if row["unit"] == "FLOP/s"
    ],
)

speedup = products[half].rate / products["float32"].rate
sheet_there = sheet_of(of_a_card("half_speedup", speedup, "times")["card"])
by_sheet = sheet_there and sheet_there.half_flops / sheet_there.fp32_flops
note = "The formula is the ratio of the data sheet." if by_sheet else ""
answer_of_a_card("half_speedup", speedup, "times", by_sheet, note)
if not machine.card and speedup < 0.5:
    print(
        f"This processor is slower in {half}: the format is not native, numbers are converted."
    )
fact("half_speedup", speedup, "times", what=half)
if machine.card:
    ratio = products["bfloat16"].rate / products["float16"].rate
    cards = [fact("bf16", ratio, "x the rate of fp16", says=torch.cuda.is_bf16_supported())]
else:
    cards = reference("bf16")
for row in cards[:1]:
    native_there = "holds, on the card measured; open for one that emulates"
    lab.settle(
        "bf16_fast",
        measured=f"says {show.number(row['says'])}; bf16 has {row['value']:.3g} times the rate"
        f" of fp16 ({row['card']})",
        verdict=native_there if row["value"] > 0.5 else "does not hold",
        source=of_cards,
        scope=row["capability"],
    )
if not cards:
    lab.settle(
        "bf16_fast",
        measured=f"no card; on this processor {half} has {speedup:.2g} times the rate of fp32",
        verdict="not measured here",
    )

# %% [markdown]
# A copy reads every byte once and writes it once. How fast depends on where the bytes lie: a **cache** is a small fast
# memory between the computing units and the large one. The sweep copies ever larger pieces; the ceiling of the memory
# is the rate of the copies that are too large for any cache.

# %% name="copies"
sizes = [2**k for k in (range(14, 29) if machine.card else range(14, 27, 2))]
copies = {nbytes: lab.timing.copy_ceiling(nbytes) for nbytes in sizes}
before, largest = sorted(copies)[-2:]
flat = abs(copies[largest].rate / copies[before].rate - 1) < 0.1
print(
    f"from {lab.show_bytes(before)} to {lab.show_bytes(largest)}:",
    f"{copies[before].rate / 1e9:.3g} to {copies[largest].rate / 1e9:.3g} GB/s,",
    "flat: a ceiling" if flat else "not flat yet: not a ceiling",
)
name = f"copy, {lab.show_bytes(largest)}" + ("" if flat else ", not flat")
keep(copies[largest], name, 2 * largest, sheet and sheet.bandwidth_bytes)
with canvas.drawing(None, height=2.4) as ax:
    ax.plot(
        [n / MiB for n in copies],
        [found.rate / 1e9 for found in copies.values()],
        "o-",
        color=canvas.BLUE,
    )
    if sheet:
        ax.axhline(
            sheet.bandwidth_bytes / 1e9,
            color=canvas.VERMILLION,
            label=f"data sheet: {sheet.source}",
        )
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
        f"The rate of a copy by size: highest at {lab.show_bytes(fastest)} with"
        f" {copies[fastest].rate / 1e9:.0f} GB/s, and {copies[largest].rate / 1e9:.0f} GB/s at"
        f" {lab.show_bytes(largest)}.",
    )
ax

# %% [markdown]
# What to see: small copies are slow because starting them takes longer than doing them; then, where a cache holds
# everything, a hump; then the rate falls to that of the memory. Only a flat end is the memory's ceiling; the line above
# the figure says whether this one is flat.
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


half_a, half_b = (matrix.to(getattr(torch, half)) for matrix in (a, b))
half_c = torch.empty_like(half_a)


def half_product():
    torch.mm(half_a, half_b, out=half_c)


idle = lab.machine.state()
busy = load(half_product, 1.5) if machine.card else {}
for key, value in busy.items():
    fact("state", value, key, what=key, load=f"product, {half}")
WORDS = {
    "sm_mhz": "clock of the computing units, MHz",
    "memory_mhz": "clock of the memory, MHz",
    "temperature_c": "temperature, °C",
    "power_w": "power, W",
    "bus_generation": "bus generation (PCIe)",
    "bus_width": "bus width, lanes",
}
elsewhere, beside = {}, "reference"
for row in reference("state"):
    elsewhere[row["what"]] = show.number(row["value"])
    beside = f"{row.get('load', 'product, float32')}, {row['label']}"  # no load named: fp32
table(
    ["state", "idle, here", f"product, {half}, here", beside],
    [
        [words, show.number(idle.get(k)), show.number(busy.get(k)), elsewhere.get(k, "–")]
        for k, words in WORDS.items()
    ],
)
if shutil.which("nvidia-smi"):
    query = "--query-gpu=name,utilization.gpu,memory.used,power.draw,clocks.sm"
    query += ",pcie.link.gen.current"
    asked = ["nvidia-smi", query, "--format=csv"]
    print(subprocess.run(asked, capture_output=True, text=True).stdout)

rows = []
for p in lab.machine.PRESETS.values():
    ratio = p.bandwidth_bytes / p.bus_bytes
    rows.append([p.name, p.bus, f"{p.bus_bytes / 1e9:.1f} GB/s", f"{ratio:.0f} x"])
table(["card", "bus", "each way", "its own memory is faster by"], rows)

# %% [markdown]
# The last table is from the bus standard and the data sheets. It says why moving data to the host and back is the last
# resort; lesson 05 measures when it pays.
#
# ### Where the time goes: profilers
#
# A **profiler** records which operators and kernels ran, and for how long. PyTorch has one. Below, forward and
# backward of a small network, three times; `aten::` marks PyTorch's own operators. **Own time** is the time in the
# operator itself, without those that it calls. The whole **trace** (who ran when) opens in Perfetto, a viewer in the
# browser.

# %% name="profiler"
os.environ.setdefault(
    "KINETO_LOG_LEVEL", "6"
)  # the profiler's own start and stop messages are of no interest
network = torch.nn.Sequential(
    torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)
).to(device)
inputs = torch.randn(128, 512, device=device)


def forward_backward():
    network(inputs).square().mean().backward()


forward_backward()  # the cold one stays outside
with torch.profiler.profile(acc_events=True) as recorded:
    for _ in range(3):
        with torch.profiler.record_function(
            "forward and backward"
        ):  # a label of our own in the trace
            forward_backward()
    wait()

operators = [event for event in recorded.key_averages() if event.key.startswith("aten::")]
where = "device" if any(event.self_device_time_total for event in operators) else "cpu"
own_time = {
    event.key: getattr(event, f"self_{where}_time_total") / 1e6 for event in operators
}  # it counts in µs
total = sum(own_time.values())
top = sorted(operators, key=lambda event: -own_time[event.key])[:6]
table(
    ["operator", "calls", f"own time ({where})", "share"],
    [
        [
            e.key,
            str(e.count),
            duration(own_time[e.key]),
            f"{100 * own_time[e.key] / total:.0f} %",
        ]
        for e in top
    ],
)
trace = lesson.folder / "00_environment-trace.json"
trace.parent.mkdir(parents=True, exist_ok=True)
recorded.export_chrome_trace(str(trace))
print(f"the whole trace, for Perfetto (ui.perfetto.dev): {trace.name}, beside the ledger")

# %% [markdown]
# What to see: the operators that do the work (`addmm` and `mm` are matrix products) and the many small ones around
# them. If small ones take most of the time, the network is too small for the machine, or its small operators are
# **unfused**: several kernels where one could do (lesson 07).
#
# **Nsight Systems** (`nsys`) is NVIDIA's profiler of the whole system. It records everything without a change to the
# code and shows it on one time axis. Start at *CUDA HW*, and there at *Kernels* (are there gaps? then the card waits)
# and *Memory* (do transfers overlap with kernels?). Then *Threads*: which one is busy while the card waits? Below each
# thread, *CUDA API*: a long `cudaStreamSynchronize` is the host waiting, not working. `--trace` says what is recorded:
# `cuda`, `osrt` (calls into the operating system) and `nvtx`, named ranges; `emit_nvtx` puts such a range around every
# operator, so that you see which one started a kernel. Where `nsys` is installed the cell records a trace; it opens in
# the program `nsys-ui`.

# %% name="nsys"
program = """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
a = torch.randn(1024, 1024, device=device)
with torch.autograd.profiler.emit_nvtx(enabled=device == "cuda"):  # operators as ranges
    for _ in range(20):
        (a @ a).sum().item()
"""
target = lesson.folder / "00_environment-nsys"
command = [
    "nsys",
    "profile",
    "--trace=cuda,nvtx,osrt",
    "--force-overwrite=true",
    f"--output={target}",
]
if shutil.which("nsys"):
    try:
        done = subprocess.run(
            [*command, sys.executable, "-c", program], capture_output=True, timeout=60
        )
        print(
            "trace written:"
            if done.returncode == 0
            else f"nsys ended with code {done.returncode}:",
            target.name,
        )
    except subprocess.TimeoutExpired:
        print("nsys did not end within a minute; no trace")
else:
    print("nsys is not installed here. To record a program of yours:")
    print("  " + " ".join([*command[:-1], "--output=trace", "python train.py"]))

# %% [markdown]
# ## Account
#
# A product of two matrices with `side` rows and columns makes `side²` sums of `side` products: `2 side³` operations,
# one multiply and one add each. A copy moves every byte twice. Divided by the peak of the data sheet, this work gives a
# time that nothing can beat. The share says how much of the peak was reached; above 100 % it is flagged, because a
# result beyond a physical ceiling is an error of the count, the clock or the sheet.

# %% name="account"
rows = ceilings + reference("ceiling")
known = [row for row in rows if row["sheet"]]  # those with a data sheet beside them


def flagged(part):
    """A share of a peak, flagged above 100 %, shown as a factor from 1,000 % on."""
    shown = f"{100 * part:.3g} %" if part < 10 else f"{part:.3g} times"
    return shown + (" · beyond the ceiling!" if part > 1 else "")


def of_work(row):
    unit = "operations" if row["unit"] == "FLOP/s" else "bytes, read + written"
    return f"{power(row['work'])} {unit}"


row = (known or ceilings)[0]
length = round((row["work"] / 2) ** (1 / 3))
print(f"{row['what']} ({row['label']}), side {length:,}:")
print(f"  2 · {length:,}³ = {power(row['work'])} operations")
if known:
    bound = duration(row["work"] / row["sheet"])
    print(f"  at {rate(row['sheet'], row['unit'])}: {bound} at least")
print(f"  measured {duration(row['seconds'])}, that is {rate(row['value'], row['unit'])}")

table(
    ["what", "work", "no faster than", "measured", "share of the sheet", "source"],
    [
        [
            row["what"],
            of_work(row),
            duration(row["work"] / row["sheet"]) if row["sheet"] else "no data sheet",
            duration(row["seconds"]),
            flagged(row["value"] / row["sheet"]) if row["sheet"] else "–",
            row["label"],
        ]
        for row in rows
    ],
)
best = max(
    (row for row in known if "16" in row["what"]), key=lambda row: row["value"], default=None
)
if best:
    lab.settle(
        "data_sheet",
        measured=f"{100 * best['value'] / best['sheet']:.0f} % of the sheet's 16-bit rate"
        f" ({best['card']})",
        verdict="holds" if best["value"] > 0.95 * best["sheet"] else "does not hold",
        source=of_cards,
        scope=best.get("capability") or machine.sm,
    )
else:
    reached = max(row["value"] for row in ceilings if row["unit"] == "FLOP/s")
    lab.settle(
        "data_sheet",
        measured=f"{rate(reached, 'FLOP/s')} on {here}; no data sheet is known",
        verdict="not measured here",
    )

# %% [markdown]
# What the account leaves open is the difference between the bound and the measurement. A peak is arithmetic: units x
# operations a clock x clock. An H200 has 132 units. In fp32: 132 x 256 x 1.98 GHz = 67 TFLOP/s. In 16 bits: 132 x 4,096
# x 1.83 GHz = 989 TFLOP/s. So a sheet may use two clocks, and neither needs to be the one under load (the table of
# the card's state shows that one). The rest is not explained here, and later lessons divide by the *measured* ceiling.
#
# The flag also catches a common mistake: a utilisation above 100 % because the formula holds another card's peak. It
# catches only a peak that is too small; one that is too large makes a good run look bad. The next cell divides one and
# the same measured rate by the peak of every card.

# %% name="wrong-sheet"
row = max((r for r in (known or ceilings) if r["unit"] == "FLOP/s"), key=lambda r: r["value"])
print(f"{row['what']}: {rate(row['value'], row['unit'])} ({row['label']})")
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
# One product, one truth: all ways that wait must agree; the first row is the mistake, for comparison. A **CUDA event**
# is a mark in the stream that the card itself stamps with the time when it gets there, so the host's clock does not
# enter. In `torch.utils.benchmark`, `timeit(n)` warms up, waits and runs `n` times, and `blocked_autorange()` chooses
# `n` itself. `lab.time_step` is what this course uses (events on a card, the host's clock elsewhere). The ways take
# turns, twelve times. The minimum of each is kept, for the reason above: they are clocks on one call. They may differ
# by a tenth: the host's clock also sees launching and waiting, and the clock of the chip is not constant.


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
ours = f"lab.time_step, by {by}"
rounds = []
for _ in range(12):
    wait_for_all()
    step = lab.time_step(product, device=device, repeats=5, warmup=1)
    found = {
        "host clock, not waiting": time_once(product, waiting=False),
        "host clock, waiting": time_once(product, waiting=True),
        "torch.utils.benchmark": timer.timeit(1).median,
        ours: step.median_seconds,
    }
    if machine.card:
        found["CUDA events"] = by_events(product)
    rounds.append(found)
ways = {way: min(found[way] for found in rounds) for way in rounds[0]}
table(
    ["way", "one product, minimum of 12", "against lab.time_step", "source"],
    [[way, duration(s), f"{s / ways[ours]:.3g} times", clock] for way, s in ways.items()],
)
waited = [s for way, s in ways.items() if "not waiting" not in way]
apart = max(waited) / min(waited) - 1
row = fact("equivalence", apart, "fraction")
print(
    f"the ways that wait differ by {100 * apart:.1f} %;",
    f"within a tenth: {show.number(apart < 0.1)}",
)

# %% [markdown]
# ## Negative control
#
# A function that never touches the device: here synchronising must change nothing. If it did, the clock itself would
# be at fault. Again two clocks on one call, so the minimum.


# %% name="control"
def on_the_host():
    sum(range(50_000))


pairs = [
    (time_once(on_the_host, waiting=False), time_once(on_the_host, waiting=True))
    for _ in range(41)
]
without, with_wait = (min(side) for side in zip(*pairs, strict=True))
table(
    ["a sum in Python", "minimum of 41", "source"],
    [["not waiting", duration(without), clock], ["waiting", duration(with_wait), clock]],
)
change = with_wait / without - 1
print(f"waiting changes the time by {100 * change:.1f} %")
too_much = "that is too much: is this machine busy? Run it again"
print("synchronising changes nothing" if abs(change) < 0.1 else too_much)

# %% [markdown]
# ## Pitfalls
#
# - **Allocated is small, nvidia-smi shows a lot.** Cached segments and the context are in its number. Read allocated,
#   reserved and device apart; `empty_cache()` makes the number smaller and gives your tensors nothing.
# - **bf16 crawls on a T4 or RTX 20.** It is emulated. Use fp16 with a `GradScaler`, which multiplies the loss so that
#   small gradients do not vanish (lesson 02), and ask with `including_emulation=False`.
# - **Utilisation of more than 100 %.** The wrong card's peak stands in the formula, or a peak "with sparsity" (half of
#   the weights are zero and skipped), which is twice the dense one. Measure the ceiling.
# - **Windows and WSL: nothing fails, everything is slow.** The driver can move what does not fit into the host's
#   memory (NVIDIA control panel: *CUDA - Sysmem Fallback Policy*; choose *Prefer No Sysmem Fallback*). A memory budget
#   (`lab.budget`) gives the honest out-of-memory error in any case.
# - **`.item()`, `print(loss)` and `loss.cpu()` look slow in a profile.** They wait for the card; the work was queued
#   before them. The time belongs to the kernels, not to the line that waits.
# - **MPS, the Multi-Process Service**, is recommended for "higher utilisation". It lets kernels of *several processes*
#   run on one card at the same time (Linux only), which helps many small programs. A single training process gains
#   nothing from it. `nvidia-cuda-mps-control -d` starts it.
# - **fp32 products leave the tensor cores idle** unless tf32 is allowed:
#   `torch.backends.cuda.matmul.fp32_precision = "tf32"` (before PyTorch 2.9: `allow_tf32`, or
#   `torch.set_float32_matmul_precision("high")`). It rounds the inputs of the product.
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
# each as a formula or as its value.
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
        2 * 4096 * 1024 * 8192 / 0.8e-3 / 1e12: (
            "This is in TFLOP/s; FLOP/s is asked for.",
            0.5,
        ),
        4096 * 1024 * 8192 / 0.8: "Two things: operations a step, and milliseconds.",
        4096 * 1024 * 8192 / 38e-3: "Two things: operations a step, and which call is warm.",
        2 * 4096 * 1024 * 8192 / 38e-3: "This divides by the cold call.",
        2 * 4096 * 1024 * 8192 / 38.8e-3: "This adds the cold call to the warm one.",
        2 * 4096 * 1024 * 8192: "These are the operations; how many are they in a second?",
        2 * 4096 * 8192 / 0.8e-3: "Each number of the result is a sum of how many products?",
        2 * 4096**3 / 0.8e-3: "These matrices are not square.",
        0.8e-3
        / (
            2 * 4096 * 1024 * 8192
        ): "This is seconds per operation: the fraction is upside down.",
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
        256 * 2**20 / 0.5e-3: (
            "Each byte counts once here. What comes before writing it?",
            0.5,
        ),
        2 * 256 * 2**20 / 0.5: ("A millisecond is not a second.", 0.5),
        2 * 256e6 / 0.5e-3: ("1 MiB is not 10⁶ bytes.", 0.5),
        256e6 / 0.5e-3: "Two things: how often is each byte touched, and what is a MiB?",
        256 * 2**20 / 2e-3: "Two things: is a byte touched once, and which call is warm?",
        2 * 256 * 2**20 / 2e-3: "This divides by the cold call.",
        2 * 256 * 2**20 / 2.5e-3: "This adds the cold call to the warm one.",
        2 * 256 * 2**20: "These are the bytes; how many are they in a second?",
        0.5e-3 / (2 * 256 * 2**20): "This is seconds per byte: the fraction is upside down.",
    },
    hint="Count the bytes that are touched, then divide by the time of one warm call.",
)

# %% [markdown]
# ## Exercise 2
#
# *8 min, medium.* Write `honest_timer(call, wait, repeats=9)`: the seconds that one warm call of `call()` usually
# takes, the middle one of `repeats` timings. `wait()` returns when everything that was started is done. The check tries
# it on pretended cards that queue work as a real one does, so that a timer which forgets to wait is found on any
# machine.
#
# <details><summary>Hint</summary>What is special about the first call, and when is it over? Where must the two readings
# of the clock stand so that the work lies between them? What is the middle of nine numbers?</details>


# %% name="pretended-card"
class PretendedCard:
    """Queues work like a card: `launch` returns at once, `wait` when all is done."""

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
        trial(
            PretendedCard(WORK),
            3,
            "The card queues its work: is the clock read before it is done?",
        ),
        trial(
            PretendedCard(0.2, WORK),
            1,
            "The first call of this card is slow: is it counted, or still running?",
        ),
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
Forward and backward only put kernels into the card's queue and return at once: execution is
asynchronous. loss.item() needs the value, so the host waits there until the card has finished
everything before it; the time is that of the queued kernels, not of the print. Without the line
the work takes just as long, and the waiting shows up at the next place that needs a result. To
time the step, warm up, call torch.cuda.synchronize() before each reading of the clock (or use
CUDA events), and take the median of several steps.
"""
### END SOLUTION

# %% check="slow_print"
lab.check.words(
    "slow_print",
    slow_print,
    {
        r"queue|asynchron|launch|submit|not (yet )?(been )?(done|finished|complete)|"
        r"return\w* (at once|immediately|before)": (
            "What has the card done when backward() returns?"
        ),
        r"\bwait|block|until|\bstall|\bhold|\bhang": (
            "What must .item() do before it has a number?"
        ),
        r"elsewhere|where else|(next|other) (place|line|call|point|spot|statement|read|sync)|"
        r"same (time|total|amount|duration|speed)|takes? (just |exactly |about )?the same|"
        r"as long|equally|unchanged|shows? up|\bmove[sd]?\b|\bshift|"
        r"(gain|save|change)s? nothing|nothing (is|would be|will be|was) (gained|saved|won)|"
        r"(\b(no|not|never|nothing|neither|nor|hardly)\b|n't)[^.;!?]{0,40}"
        r"\b(faster|quicker|shorter|gain|save|change)": (
            "Would the step be faster without the line?"
        ),
        r"synchroni[sz]e|\bevents?\b": (
            "How would you read the clock so that the work is inside?"
        ),
    },
    against={
        r"(^|[.;:!?])((?!\b(no|not|never|nothing|neither|nor|hardly|only|if|seem\w*|looks?|"
        r"thinks?|believes?)\b|n't)[^.;:!?])*\b(much|gets?|makes?|be|becomes?|is|are|runs?)\b"
        r"((?!\b(no|not|never|nothing)\b|n't)[^.;:!?])*\bfaster": (
            "Would the step be faster without the line?"
        ),
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
guessed = [r for r in lab.calibration() if min(r["guess"] or 0, r["measured"] or 0) > 0]
if guessed:  # your guesses against what came out; both axes are logarithmic
    lab.plots.show(lab.plots.calibration(guessed))
lab.finish(
    "Before any optimisation: `labkit doctor` is green, number formats are native, the ceilings"
    " of this machine are measured, every timing is warm, synchronised and a median."
)
