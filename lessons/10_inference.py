# ---
# jupyter:
#   labkit:
#     title: What does a written token cost?
#     question: What takes the time and the memory when a model writes, and what makes it cheaper?
#     after: say what the cache takes, what bounds the speed of writing, and which switch helps in which case
#     minutes: {gpu: 2, cpu: 0.7}
#     memory: 8 GiB budget
#     needs: [00_environment, 01_baseline_oom]
#     fetch: [smollm2-135m]
# ---

# %% name="begin"
import importlib.util
import tempfile
import time
from pathlib import Path

import onnxruntime
import torch

import labkit as lab
from labkit import compiling, exporting, generating, quantising, quiet

quiet.transformers()  # imported now, silently
from transformers import DynamicCache, StaticCache

lesson = lab.begin("10_inference")
BUDGET = lesson.budget  # bytes that PyTorch may take from the card
on_card, device = lab.device().type == "cuda", lab.device()
here = "measured" if on_card else "cpu"
show, seconds = lab.show_bytes, lab.show_seconds
capability = lesson.machine.capability or lab.machine.preset().capability
half = torch.bfloat16 if capability >= (8, 0) else torch.float16  # below sm_80 bf16 is emulated
if not on_card:  # beside another busy process, two threads would mostly wait for each other
    torch.set_num_threads(1)


def told(number, how):
    """A number as `how` shows it, or a dash where there is none."""
    return "–" if number is None else how(number)


# %% [markdown]
# ## Claims
#
# Five sentences about writing with a language model. This run fills in the empty columns, at the end of the lesson.
#
# Words that this lesson uses:
#
# | word | meaning |
# | --- | --- |
# | prompt | the tokens that are given; reading them is one forward pass over all of them (*prefill*) |
# | decoding | writing one token after the other; each needs a forward pass of its own |
# | key, value | what attention keeps of a token in each layer: two vectors as wide as the model |
# | cache | the keys and values of all tokens so far, so that a later token need not compute them again |
# | dynamic cache | grows by one token at a time: a new tensor each time, and the old one is freed |
# | static cache | has its full length from the start: nothing moves, and nothing changes shape |
# | time to first token | reading the prompt and choosing one token |
# | latency | the time between two tokens of one sequence |
# | throughput | tokens of all sequences together in a second |

# %% name="claims"
lab.claim(
    "cache",
    "The cache makes writing faster: a token costs the same, however long the text is.",
    said_by="courses",
)
lab.claim(
    "compile",
    "A static cache and torch.compile make decoding up to 4 times faster.",
    said_by="documentation, transformers",
)
lab.claim(
    "batch",
    "More sequences at once cost hardly any time: the throughput grows with the batch.",
    said_by="forum answers",
)
lab.claim(
    "int8",
    "A model in 8 or 4 bits writes faster, because it reads fewer bytes.",
    said_by="forum answers",
)
lab.claim("onnx", "ONNX Runtime writes faster than PyTorch.", said_by="blog posts")
lab.claims()

# %% [markdown]
# ## Experiment
#
# ### A file for later
#
# The lesson ends with a small model that becomes a file for ONNX Runtime. The export takes ten seconds and more, so it
# begins here, in a process of its own.

# %% name="small"
torch.manual_seed(0)
sizes = {
    "n_layer": 2,
    "n_embd": 256,
    "n_head": 4,
    "vocab_size": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
with torch.device("cpu"):
    small = lab.models.gpt2("gpt2", attention="sdpa", **sizes).eval()
file = Path(tempfile.mkdtemp(prefix="lesson-10-")) / "step.onnx"
export = exporting.Exporting(small, file)  # started, not waited for

# %% [markdown]
# ### The loop
#
# A causal language model gives, for each token of its input, scores for the token that comes next (`logits`, shape
# `(batch, seq, vocab)`). Writing is a loop: take the scores of the last token, choose one, append it, and go on.
# Without a cache the whole text goes in each time. With one, only the newest token does: the cache holds the keys and
# values of all others.
#
# The loop yields one token for each sequence. `generating.timed` runs it and stops the clock twice, when the card has
# finished the first token and when it has finished the last.


# %% name="loop"
@torch.no_grad()
def greedy(model, prompt, new, cache=None, decode=None):
    """The most likely next token of every sequence, `new` times; `decode` runs the steps of one token."""
    fed = text = prompt
    for _ in range(new):
        run = decode if decode and fed.shape[1] == 1 else model
        # logits_to_keep=1: only the last token's scores are computed
        out = run(fed, logits_to_keep=1, **generating.with_cache(model, cache))
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        yield token
        text = torch.cat([text, token], 1)
        fed = text if cache is None else token


# %% [markdown]
# `generating.with_cache` hands the cache over. The argument is called `cache` in transformers 5.24; in
# 5.17 it was `past_key_values`, and what it took was once a tuple of tuples. (`model.generate(...)` does all this and
# more; the loop is what it does, without sampling, beams and stopping rules.)
#
# First a real model, on this machine: SmolLM2 with 135 million parameters goes on with a text from Python's standard
# library.

# %% name="guess-speedup"
PROMPT, NEW = (192, 24) if on_card else (64, 6)
lab.guess(
    "real",
    None,
    f"A prompt of {PROMPT} tokens, then {NEW} more: how many times faster is a token with the cache?",
    unit="x",
)

# %% name="real-model"
real, timings = lab.models.has("smollm2-135m"), {}
if real:
    tokenizer = lab.models.tokenizer("smollm2-135m")
    smol = lab.models.pretrained("smollm2-135m", device=device, dtype=torch.float32).eval()
    prompt = lab.data.token_blocks(tokenizer, seq=PROMPT, count=1, split="held-out").to(device)
    for name, make in {"no cache": lambda: None, "dynamic cache": DynamicCache}.items():
        generating.timed(greedy(smol, prompt, 1, make()), device)  # warm
        timings[name] = generating.timed(greedy(smol, prompt, NEW, make()), device)
    rows = []
    for name, t in timings.items():
        rows.append(
            [
                name,
                seconds(t.first_seconds),
                seconds(t.token_seconds),
                f"{t.tokens_per_second:.1f}",
            ]
        )
        lab.fact("token", t.token_seconds, "s", what=f"SmolLM2, {PROMPT} + {NEW}, {name}")
    head = ["SmolLM2, fp32, 1 sequence", "first token", "each later token", "tokens/s"]
    lab.table([*head[:3], f"{head[3]} ({here})"], rows)
    same = torch.equal(timings["no cache"].tokens, timings["dynamic cache"].tokens)
    print(f"the same {NEW} tokens: {same}")
    words = timings["dynamic cache"].tokens[0]
    print(repr(tokenizer.decode(words, clean_up_tokenization_spaces=False)))
    real_gain = timings["no cache"].token_seconds / timings["dynamic cache"].token_seconds
    del smol  # the card is to be empty for what follows
else:
    print("not run: SmolLM2 is not here (labkit fetch brings it)")
    real_gain = None
lab.answer("real", measured=real_gain, source=here)

# %% [markdown]
# *What to see:* the first token takes as long with a cache as without, since the prompt must be read once in any
# case. Later tokens are where the cache helps.
#
# ### One token, from a short text to a long one
#
# Now the time and the memory of one decoding step, as the text gets longer: GPT-2 with 124 million parameters and
# GPT-2 XL with 1.56 billion, weights in 16 bits. The experiment builds a model and a cache of `past` tokens, and its
# step writes one token. (The keys are random numbers: neither time nor memory depends on them.)


# %% name="one-token"
def cache_of(model, batch, past):
    """The keys and values of `past` tokens, one pair of tensors for each layer, made when it is asked for."""
    c, weight = model.config, model.get_input_embeddings().weight
    shape = (batch, c.n_head, past, c.n_embd // c.n_head)
    new = {"dtype": weight.dtype, "device": weight.device}
    return ((torch.randn(shape, **new), torch.randn(shape, **new)) for _ in range(c.n_layer))


def one_token(device, model="gpt2", past=256, batch=1, cached=True, weights="16"):
    kind = torch.float16 if weights == "int8" else half  # int8's products are fp16's
    network = lab.models.causal_lm(lab.models.config(model), device=device, dtype=kind).eval()
    tokens = torch.randint(0, 50257, (batch, past + 1), device=device)
    if weights != "16":
        quantising.quantise_blocks(network, weights)
    cache = DynamicCache(cache_of(network, batch, past)) if cached else None
    fed = tokens[:, -1:] if cached else tokens

    @torch.no_grad()
    def step():
        out = network(fed, logits_to_keep=1, **generating.with_cache(network, cache))
        if cached:
            cache.crop(-1)  # forget this token: every step writes the same one
        return out.logits[:, -1].argmax(-1, keepdim=True)

    step.tokens = batch
    return step


lab.guess(
    "kept",
    None,
    "GPT-2 XL, 16 bits: how many KiB does one token take in the cache?",
    unit="KiB",
)
lab.guess(
    "xl",
    None,
    "GPT-2 XL, 960 tokens so far: how many times faster is a token with the cache?",
    unit="x",
)

# %% name="lengths"
quick = {"budget": BUDGET, "trace": False, "nearest": False, "stateless": True}
PASTS = (64, 256, 512, 960)


def step_report(repeats=20, **settings):
    words = ", ".join(f"{k} {v}" for k, v in settings.items())
    return lab.measure(one_token, name=words, repeats=repeats, **quick, **settings)


steps = {}
for model in ("gpt2", "gpt2-xl"):
    for past in PASTS:
        for cached in (True, False):
            if on_card or (model == "gpt2-xl" and past in (64, 960) and cached):
                steps[model, past, cached] = step_report(model=model, past=past, cached=cached)
            else:  # only its time is asked for below
                steps[model, past, cached] = None


def token_timing(model, past, cached):
    """Median and spread of a decoding step in seconds: of this card, or of the reference; (None, None) without."""
    report = steps[model, past, cached]
    if on_card:
        timed = report.to_dict()["timing"] if report.ok else None
    else:
        rows = lab.reference(f"model {model}, past {past}, cached {cached}", kind="report")
        timed = rows[-1].get("timing") if rows else None
    return (timed["median_seconds"], timed["spread_seconds"]) if timed else (None, None)


def token_time(model, past, cached):
    """Seconds of a decoding step; None where no time is known."""
    return token_timing(model, past, cached)[0]


where = f"measured · {lesson.machine.card}" if on_card else "reference"
rows = lab.reference(f"model gpt2, past {PASTS[0]}, cached True", kind="report")
where = rows[-1]["label"] if rows and not on_card else where
curves = {}
for model in ("gpt2", "gpt2-xl"):
    for cached in (True, False):
        ys = [token_time(model, past, cached) for past in PASTS]
        if None not in ys:
            curves[f"{model}, {'cache' if cached else 'no cache'}"] = (
                PASTS,
                [1e3 * y for y in ys],
            )
if curves:
    lab.plots.show(
        lab.plots.lines(
            curves,
            x="tokens so far",
            y="ms for one token",
            log="y",
            title="One more token of one sequence",
            source=where,
        )
    )
else:
    print("no reference row yet: this picture needs a card")
have = token_time("gpt2-xl", 960, False), token_time("gpt2-xl", 960, True)
times_faster = None if None in have else have[0] / have[1]
lab.answer("xl", measured=times_faster, source=here if on_card else "reference")

# %% [markdown]
# *What to see:* whether the lines with a cache are flat: then a token does not cost more in a long text. Where a line
# without a cache is flat as well, the card waits for the host, which launches many small kernels for each layer,
# and it does not matter how much each of them computes. Lines that rise and fall again show a busy host, not the
# length: such points decide nothing.
#
# ### What bounds a token
#
# A decoding step multiplies one vector with every weight. So it must read every weight once, and a card cannot do
# that faster than its memory allows. The cell puts this floor beside what was measured.

# %% name="floor"
sheet = lab.machine.preset()
bandwidth = sheet.bandwidth_bytes if sheet else None
rows, floors = [], {}
for model in ("gpt2", "gpt2-xl"):
    with torch.device("meta"):
        network = lab.models.gpt2(model, attention="sdpa")
    weights = 2 * sum(p.numel() for p in network.parameters())  # bytes in 16 bits
    layers = network.config.n_layer
    floors[model] = weights / bandwidth if bandwidth else None
    measured = token_time(model, 256, True)
    rows.append(
        [
            model,
            show(weights),
            told(floors[model], seconds),
            told(measured, seconds),
            told(measured, lambda t, layers=layers: seconds(t / layers)),
            told(
                measured and floors[model] and measured / floors[model],
                lambda r: f"{r:.0f} times the floor",
            ),
        ]
    )
card_name = sheet.name if sheet else "this card"
lab.table(
    ["model", "weights", f"floor on {card_name}", f"one token ({where})", "for each layer", ""],
    rows,
)

# %% [markdown]
# Where a step waits for the host it is far above the floor, and the time for each layer is the same in the small and
# in the large model, because the number of kernels is. On a slower card the floor is higher and the host the same, so
# the distance is smaller.
#
# ### A static cache, compiled
#
# The host's share can be taken away: record all kernels of a step once and replay them (lesson 07, a CUDA graph).
# That needs addresses and shapes that do not change, which a dynamic cache cannot give: it is a new, longer tensor
# for each token. A static cache is allocated for the longest text and filled from the front.

# %% name="guess-static"
lab.guess(
    "static",
    None,
    "GPT-2 124M, static cache and compiled: how many times faster is a token?",
    unit="x",
)

# %% name="static"
WAYS = (
    "dynamic cache",
    "dynamic cache, cuDNN's attention off",
    "static cache",
    "static cache, compiled",
)
cannot = compiling.why_not(device) if on_card else "its times are a card's"
written, first_call = dict.fromkeys(WAYS), None
if not cannot:
    with device:
        network = lab.models.gpt2("gpt2", attention="sdpa").to(half).eval()
        prompt = torch.randint(0, 50257, (1, 64))
    compiled = torch.compile(network.forward, mode="reduce-overhead", fullgraph=True)
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    for way in WAYS:
        torch.backends.cuda.enable_cudnn_sdp(cudnn and "off" not in way)
        decode = compiled if "compiled" in way else None
        for new in (8, 128):  # the first time warms up, or compiles
            cache = DynamicCache()
            if "static" in way:
                cache = StaticCache(config=network.config, max_cache_len=256)
            begun = time.perf_counter()
            written[way] = generating.timed(greedy(network, prompt, new, cache, decode), device)
            if decode and new == 8:
                first_call = time.perf_counter() - begun
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    # the card is to be empty for what follows; a recorded graph holds its memory until it is forgotten
    network = compiled = decode = cache = None
    torch.compiler.reset()
rows, token = [], {}
known_rows = {
    way: lab.known(
        "token", written[way] and written[way].token_seconds, "s", what=f"gpt2, 64 + 128, {way}"
    )
    for way in WAYS
}
token = {way: row["value"] for way, row in known_rows.items()}
dynamic = min(
    (token[way] for way in WAYS[:2] if token[way]), default=None
)  # the better of the two
for way, row in known_rows.items():
    gain = dynamic and token[way] and dynamic / token[way]
    rows.append(
        [way, told(row["value"], seconds), told(gain, lambda g: f"{g:.2f} times"), row["label"]]
    )
lab.table(
    ["GPT-2 124M, 16 bits, 1 sequence", "a token", "against the better dynamic", "source"], rows
)
paid = lab.known("first call", first_call, "s", what="gpt2, decoding step compiled")
print(
    f"the first tokens of the compiled step took {told(paid['value'], seconds)} ({paid['label']})"
)
known = None not in token.values()
uncompiled = dynamic if known else None
static_gain = uncompiled / token["static cache, compiled"] if known else None
lab.answer("static", measured=static_gain, source=here if on_card else "reference")
scope = lesson.sm if on_card else paid.get("capability", "")
if static_gain:
    alone = uncompiled / token["static cache"]
    won = uncompiled - token["static cache, compiled"]  # seconds a token
    back = paid["value"] / won if static_gain > 1 else None
    verdict = "does not hold"
    if static_gain > 1.1 and back:
        verdict = f"holds when more than {back:,.0f} tokens are written by one process"
    lab.settle(
        "compile",
        measured=f"static cache alone {alone:.2f} times, compiled {static_gain:.2f} times",
        verdict=verdict,
        source=here if on_card else "reference",
        scope=scope,
    )
else:
    lab.settle("compile", measured=cannot or "no reference row", verdict="not measured here")

# %% [markdown]
# A static cache alone does not make a token faster here. It is there so that the step can be recorded. The price is the
# first call, and memory for the longest text from the start.
#
# The first two lines differ on cards where SDPA asks cuDNN first (Hopper): cuDNN makes a plan for every shape that it
# has not seen, and a cache that grows has a new shape at every token (pytorch#155958). So take it out of the choice
# before you write with a growing cache: `torch.backends.cuda.enable_cudnn_sdp(False)`.
#
# ### More sequences at once
#
# Where a step waits for the host, a second sequence costs no further launch; where it waits for memory, the weights are
# read once for all sequences of a batch. So a second sequence is nearly free, until something else fills up: the card's
# arithmetic, or its memory, since each sequence brings a cache of its own.

# %% name="guess-batch"
lab.guess(
    "batch",
    None,
    "GPT-2 XL, 8 GiB, 256 tokens so far: how many times the throughput of batch 1 does batch 16 give?",
    unit="x",
)

# %% name="batches"
BATCHES = (1, 16, 32, 64)
sweep = [
    lab.measure(
        one_token,
        name=f"model gpt2-xl, past 256, batch {batch}",
        repeats=20,
        model="gpt2-xl",
        batch=batch,
        **quick,
    )
    for batch in BATCHES
]
sweep = lab.with_times(sweep)
rows, latency = [], {}
for batch, report in zip(BATCHES, sweep, strict=True):
    t = report.timing.median_seconds if report.ok and report.timing else None
    latency[batch] = t
    rows.append(
        [
            batch,
            show(report.peak_bytes) if report.ok else "out of memory",
            told(t, seconds),
            told(t, lambda t, batch=batch: f"{batch / t:,.0f}"),
            report.source
            if on_card or t is None
            else f"{report.source}, time: {report.timing.clock}",
        ]
    )
lab.table(["batch", "peak", "latency", "tokens/s", "source"], rows)
fits = [b for b, r in zip(BATCHES, sweep, strict=True) if r.ok]
timed_batches = [b for b in fits if latency[b]]
batch_gain = latency[1] / latency[16] * 16 if latency.get(1) and latency.get(16) else None
lab.answer("batch", measured=batch_gain, source="reference" if not on_card else here)
if batch_gain:
    slower = {b: latency[b] / latency[1] for b in timed_batches}
    free = [b for b in timed_batches if slower[b] < 1.25]
    said = ", ".join(
        f"batch {b}: {s:.2f} times the latency" for b, s in slower.items() if b > 1
    )
    last = f"; batch {BATCHES[len(fits)]} does not fit" if len(fits) < len(BATCHES) else ""
    verdict = "holds" if free[-1] == fits[-1] else f"holds when the batch is at most {free[-1]}"
    lab.settle(
        "batch",
        measured=said + last,
        verdict=verdict if free[-1] > 1 else "does not hold",
        source="reference" if not on_card else here,
        scope=scope,
    )
else:
    lab.settle("batch", measured="no reference row", verdict="not measured here")

lab.plots.show(
    lab.plots.sweep({"GPT-2 XL, 256 tokens so far": sweep}, x="batch", y="peak", fit=False)
)

# %% [markdown]
# *What to see:* the line begins at the weights and rises by one cache for each sequence, until the budget ends it. A
# longer text makes it steeper.
#
# ### Weights in 8 and 4 bits
#
# If a token must read every weight, smaller weights should be read faster. But NF4 must be turned back into 16 bits
# before the product, and for int8 the activations are quantised and the result is scaled: more kernels either way.
# GPT-2 XL again, with the formats of lesson 04.

# %% name="guess-int8"
lab.guess(
    "int8", None, "How many times as fast as 16 bits is a token of GPT-2 XL in int8?", unit="x"
)

# %% name="formats"
FORMATS = {"int8": "int8", "nf4": "NF4"}
smaller = lab.with_times(
    lab.measure(
        one_token,
        name=f"gpt2-xl, {name}",
        repeats=20,
        model="gpt2-xl",
        weights=weights,
        **quick,
    )
    for weights, name in FORMATS.items()
)
rows, speed = [], {}
formats = {"16 bits": sweep[0], **dict(zip(FORMATS.values(), smaller, strict=True))}
for name, report in formats.items():
    t = report.timing.median_seconds if report.timing else None
    speed[name] = t
    rows.append(
        [
            name,
            show(report.peak_bytes),
            told(t, seconds),
            told(t, lambda t: f"{1 / t:,.1f}"),
            report.source,
        ]
    )
lab.table(["GPT-2 XL, 1 sequence, 256 tokens", "peak", "a token", "tokens/s", "memory"], rows)
if None not in speed.values():
    ratio = {name: speed["16 bits"] / t for name, t in speed.items()}
    lab.answer("int8", measured=ratio["int8"], source="reference" if not on_card else here)
    faster = [name for name in ("int8", "NF4") if ratio[name] > 1.05]
    lab.settle(
        "int8",
        measured=", ".join(
            f"{name}: {ratio[name]:.2f} times the speed" for name in ("int8", "NF4")
        ),
        verdict="holds"
        if len(faster) == 2
        else f"holds when the format is {faster[0]}"
        if faster
        else "does not hold",
        source="reference" if not on_card else here,
        scope=scope,
    )
else:
    lab.answer("int8", measured=None, source="reference")
    lab.settle("int8", measured="no reference row", verdict="not measured here")

# %% [markdown]
# *What to see:* the peak falls, and that is what these formats are for (lesson 04). Where the step in 16 bits waits
# for the host already, reading fewer bytes cannot save time, and the additional kernels cost some.
#
# ### ONNX Runtime
#
# ONNX is a file format for the graph of a model; ONNX Runtime runs it without Python, on many kinds of hardware
# (*execution providers*: CPU, CUDA, TensorRT and others). What is exported is one decoding step: tokens and the
# cache's tensors go in, scores and longer tensors come out. The same graph with an empty cache reads the prompt.
# TorchScript and `torch.fx` exports are the old ways; today `torch.onnx.export(..., dynamo=True)` is used, with names
# for the sizes that may change.
#
# The model is small, so that the export takes seconds, and both run on the processor, which every machine has, with one
# thread.

# %% name="onnx"
names = export.result()  # of the model from above; generating.export_step writes it
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1  # one thread for each of the two: the model is small
session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
size = sum(part.stat().st_size for part in file.parent.iterdir())
providers = ", ".join(onnxruntime.get_available_providers())
print(f"{file.name} and its weights: {show(size)}; providers here: {providers}")


def empty_cache(batch):
    heads, width = small.config.n_head, small.config.n_embd // small.config.n_head
    return [torch.zeros(batch, heads, 0, width) for _ in names]


def greedy_onnx(prompt, new):
    """The same loop. IO binding: the cache stays where the runtime has put it, and is handed back as it is."""
    past = [
        onnxruntime.OrtValue.ortvalue_from_numpy(t.numpy()) for t in empty_cache(len(prompt))
    ]
    fed = prompt
    for _ in range(new):
        binding = session.io_binding()
        binding.bind_cpu_input("input_ids", fed.numpy())
        for name, value in zip(names, past, strict=True):
            binding.bind_ortvalue_input(f"{name}.past", value)
        for name in ("logits", *names):
            binding.bind_output(name)
        session.run_with_iobinding(binding)
        logits, *past = binding.get_outputs()
        fed = torch.from_numpy(logits.numpy()[:, -1:].argmax(-1))
        yield fed


prompt = torch.randint(0, 512, (1, 64))
runs, threads = {}, torch.get_num_threads()
torch.set_num_threads(1)
for name, loop in {
    "PyTorch, eager": lambda: greedy(small, prompt, 64, DynamicCache()),
    "ONNX Runtime": lambda: greedy_onnx(prompt, 64),
}.items():
    generating.timed(loop(), "cpu")  # warm
    runs[name] = min(
        (generating.timed(loop(), "cpu") for _ in range(3)), key=lambda w: w.later_seconds
    )
    lab.fact(
        "token",
        runs[name].token_seconds,
        "s",
        what=f"2 layers of width 256, processor, {name}",
        source="cpu",
    )
lab.table(
    ["2 layers of width 256, on the processor", "first token", "each later token"],
    [[name, seconds(w.first_seconds), seconds(w.token_seconds)] for name, w in runs.items()],
)
eager, ort = runs.values()
onnx_gain = eager.token_seconds / ort.token_seconds
lab.settle(
    "onnx",
    measured=f"{onnx_gain:.2f} times as fast, a model of 2 layers and width 256",
    verdict="holds" if onnx_gain > 1.05 else "does not hold",
    source="cpu",
    scope="a small model on this processor",
)
missing = [
    name for name in ("tensorrt", "tensorrt_llm") if importlib.util.find_spec(name) is None
]
print(f"not installed here: {', '.join(missing)}" if missing else "TensorRT is installed")

# %% [markdown]
# The model is so small that most of a token's time goes into starting its operations, and that is what a runtime
# without Python shortens. Compare on your own model and your own machine before you move.
#
# On NVIDIA cards the same file can be run by TensorRT (`pip install tensorrt`; as an execution provider of ONNX
# Runtime, or by itself), which searches for the fastest kernels for one kind of card. NVIDIA's FasterTransformer has
# ended; its successor is TensorRT-LLM, a server for large models with paged caches and batches that change while they
# run. It was not measured here.
#
# ## Account
#
# What does the cache take? A key and a value, as wide as the model, in each layer:
#
# > bytes of a token = 2 x layers x width x bytes of a value
#
# The cell compares this with the difference of two peaks, of the same step after 64 and after 960 tokens.

# %% name="account"
with torch.device("meta"):
    xl = lab.models.gpt2("gpt2-xl", attention="sdpa")
each = generating.token_bytes(xl.config, half)
short_text, long_text = (steps["gpt2-xl", past, True].peak_bytes for past in (64, 960))
slope = (long_text - short_text) / (960 - 64)
layer = each / xl.config.n_layer
weights = 2 * sum(p.numel() for p in xl.parameters())
rows = [
    ["weights, 16 bits", show(weights), ""],
    ["cache of 961 tokens", show(961 * each), f"961 x {each:,} bytes"],
    [
        "one layer's cache once more, while it grows",
        show(round(961 * layer)),
        f"961 x {layer:,.0f} bytes",
    ],
    ["sum", show(round(weights + 961 * (each + layer))), ""],
    [f"peak ({steps['gpt2-xl', 960, True].source})", show(long_text), ""],
    [
        "unexplained",
        show(round(long_text - weights - 961 * (each + layer))),
        "cuBLAS' workspaces, rounding by the allocator",
    ],
]
lab.table(["GPT-2 XL after 960 tokens", "bytes", "how"], rows)
print(
    f"peaks grow by {slope:,.0f} bytes a token; formula {each:,}, with the growing layer {each + layer:,.0f}"
)
lab.answer(
    "kept",
    measured=slope / 1024,  # with the layer that grows
    formula=2 * 48 * 1600 * 2 / 1024,
    source="predicted" if not on_card else here,
)
cached_gain = dict.fromkeys(PASTS)
for past in PASTS:
    pair = token_time("gpt2-xl", past, False), token_time("gpt2-xl", past, True)
    cached_gain[past] = None if None in pair else pair[0] / pair[1]
flat = [token_time("gpt2-xl", past, True) for past in (64, 960)]
if None not in (*cached_gain.values(), *flat):
    grows = flat[1] / flat[0]
    said = ", ".join(
        f"after {past} tokens {gain:.2f} times" for past, gain in cached_gain.items()
    )
    certain = {}  # by length: whether the cache helps, where the difference is larger than both spreads
    for past in PASTS:
        (without, a), (cached, b) = (token_timing("gpt2-xl", past, c) for c in (False, True))
        if abs(without - cached) > a + b:
            certain[past] = without > 1.1 * cached
    loses = [past for past, wins in certain.items() if not wins]
    helps = [past for past, wins in certain.items() if wins and past > max(loses, default=0)]
    noise = sum(token_timing("gpt2-xl", past, True)[1] for past in (64, 960))
    constant = ""
    if grows > 1.1 and flat[1] - flat[0] > noise:
        constant = f", but a token after 960 costs {grows:.2f} times one after 64"
    verdict = "not measured here: the differences are within the noise"
    if helps:
        verdict = f"holds when the text has {helps[0]} tokens or more{constant}"
    elif loses:
        verdict = "does not hold"
    lab.settle(
        "cache",
        measured=f"GPT-2 XL: {said}",
        verdict=verdict,
        source=here if on_card else "reference",
        scope=scope,
    )
elif real_gain:
    lab.settle(
        "cache",
        measured=f"SmolLM2, {PROMPT} tokens and {NEW} more: {real_gain:.1f} times",
        verdict="holds" if real_gain > 1.1 else "does not hold",
        source="cpu",
        scope="this processor",
    )
else:
    lab.settle("cache", measured="no reference row", verdict="not measured here")

# %% [markdown]
# ## Equivalence
#
# The cache must not change what is written. The cell compares scores, in fp32 and on a small model: all tokens at
# once, one at a time with each kind of cache, and through ONNX Runtime. Sums are taken in another order, so the last
# bits may differ; a hundred rounding errors of fp32, relative to the largest score, are allowed.

# %% name="equivalence"
text = torch.randint(0, 512, (2, 48))
with torch.no_grad():
    truth = small(text, use_cache=False).logits


def one_by_one(cache):
    with torch.no_grad():
        found = [
            small(t, **generating.with_cache(small, cache)).logits for t in text.split(1, 1)
        ]
    return torch.cat(found, 1)


def one_by_one_onnx():
    past, found = [t.numpy() for t in empty_cache(2)], []
    for t in text.split(1, 1):
        feed = {"input_ids": t.numpy()}
        feed |= {f"{name}.past": value for name, value in zip(names, past, strict=True)}
        logits, *past = session.run(None, feed)
        found.append(torch.from_numpy(logits))
    return torch.cat(found, 1)


ways = {
    "dynamic cache": one_by_one(DynamicCache()),
    "static cache": one_by_one(StaticCache(config=small.config, max_cache_len=64)),
    "ONNX Runtime": one_by_one_onnx(),
}
torch.set_num_threads(threads)  # as before the small model
allowed = 100 * torch.finfo(torch.float32).eps
rows = []
for name, found in ways.items():
    off = float((found - truth).abs().max() / truth.abs().max())
    same = float((found.argmax(-1) == truth.argmax(-1)).double().mean())
    rows.append([name, f"{off:.1e}", off < allowed, f"{same:.0%}"])
lab.table(
    [
        "against all tokens at once",
        "largest difference",
        f"below {allowed:.1e}",
        "the same next token",
    ],
    rows,
)

# %% [markdown]
# In 16 bits two scores can be so close that rounding decides between them, and from that token on two texts go
# different ways. That is no error of the cache. Compare scores, not texts.
#
# ## Negative control
#
# Where a cache must not help: when nothing is written. To *score* a text (its perplexity, or a class), all its tokens
# go in at once, and each needs its keys only then. The cell measures a forward pass over 960 tokens with a cache to
# fill and without one.


# %% name="negative-control"
def scoring(device, cached):
    with device:
        network = lab.models.gpt2("gpt2", attention="sdpa").to(half).eval()
        tokens = torch.randint(0, 50257, (1, 960))

    @torch.no_grad()
    def step():
        cache = DynamicCache() if cached else None
        return network(tokens, logits_to_keep=1, **generating.with_cache(network, cache)).logits

    step.tokens = 960
    return step


control = lab.with_times(
    lab.measure(
        scoring, name=f"score 960 tokens, cached {cached}", cached=cached, repeats=20, **quick
    )
    for cached in (False, True)
)
rows = []
for name, report in zip(("without a cache", "with a cache"), control, strict=True):
    t = report.timing.median_seconds if report.timing else None
    rows.append(
        [
            name,
            show(report.peak_bytes),
            told(t, seconds),
            report.timing.clock if report.timing else report.source,
        ]
    )
lab.table(["GPT-2 124M, 960 tokens at once", "peak", "time", "time from"], rows)
more = control[1].peak_bytes - control[0].peak_bytes
print(f"the cache adds {show(more)} to the peak, and there is nobody who reads it")

# %% [markdown]
# ## Pitfalls
#
# **Writing became slow, or wrong, after training.** Checkpointing is still on, which switches the cache off, or the
# model is in train mode and drops values (trl#3891). `model.eval()`, `model.gradient_checkpointing_disable()`,
# `model.config.use_cache = True`.
#
# **The prompt alone runs out of memory.** The scores of all prompt tokens were computed: `(batch, seq, vocab)` in 32
# bits. `logits_to_keep=1`, which `generate` sets, computes those of the last one.
#
# **The memory grows with each request.** A cache, or its outputs, are kept, or `torch.no_grad()` is missing and the
# graph of every step is alive.
#
# **Sentences of a batch come out broken.** They have different lengths and were padded on the right, so the model
# goes on after padding. Pad on the left, and pass the attention mask.
#
# **It compiles for minutes, again and again.** Prompts have different lengths. Compile the step of one token only, or
# pad prompts to a few lengths (lesson 07).
#
# **GPT-2 fails after 1024 tokens.** Its position table ends there (lesson 08). A cache does not make it longer.
#
# **A T4 or RTX 20 crawls in bf16.** It is emulated there: use fp16, as this lesson's code does. No such card was at
# hand.
#
# ## Exercise 1
#
# *4 min, easy.* GPT-2 large (36 layers, width 1280) writes with a batch of 24, up to 1000 tokens each, cache in fp16.
# How many **GiB** does the cache take at the end?
#
# <details><summary>Hint</summary>
#
# What does one token of one sequence keep in one layer, and how many values is that? Then count layers, tokens and
# sequences, and divide by 2³⁰.
#
# </details>

# %% answer="cache_gib"
cache_gib = ...
### BEGIN SOLUTION
cache_gib = 2 * 36 * 1280 * 2 * 1000 * 24 / 2**30
### END SOLUTION

# %% check="cache_gib" points=1
lab.check.number(
    "cache_gib",
    cache_gib,
    2 * 36 * 1280 * 2 * 1000 * 24 / 2**30,
    unit="GiB",
    tolerance=0.01,
    mistakes={
        36 * 1280 * 2 * 1000 * 24 / 2**30: (
            "Attention keeps two vectors of a token, not one.",
            0.5,
        ),
        2 * 36 * 1280 * 4 * 1000 * 24 / 2**30: ("fp16 has 2 bytes.", 0.5),
        2 * 1280 * 2 * 1000 * 24 / 2**30: "This is one layer.",
        2 * 36 * 1280 * 2 * 1000 / 2**30: "This is one sequence.",
        2 * 36 * 1280 * 2 * 24 / 2**30: "This is one token of each sequence.",
        3
        * 36
        * 1280
        * 2
        * 1000
        * 24
        / 2**30: "Which of query, key and value does a later token still need?",
        2 * 36 * 1280 * 2 * 1024 * 24 / 2**30: "The texts have 1000 tokens.",
        2
        * 36
        * 20
        * 1280
        * 2
        * 1000
        * 24
        / 2**30: "The width is shared out among the heads: do not multiply by their number.",
    },
    hint="Count: vectors of a token in a layer, layers, width, bytes, tokens, sequences.",
)

# %% [markdown]
# ## Exercise 2
#
# *10 min, medium.* Write `speculate(model, text, draft)`. `draft` are tokens that a smaller, faster model proposes as
# the continuation of `text` (shapes `(1, n)` and `(1, k)`). Return how many of them, from the first on, are what
# `model` itself would have written greedily. Call the model **once**: that is the point, since one call on k tokens
# takes hardly longer than on one.
#
# <details><summary>Hint</summary>
#
# Give the model text and draft together. Its scores at position i are for the token at position i + 1: which
# positions decide about the draft? Then count matches until the first that fails.
#
# </details>


# %% answer="speculate"
def speculate(model, text, draft):
    ### BEGIN SOLUTION
    with torch.no_grad():
        logits = model(torch.cat([text, draft], 1)).logits
    wanted = logits[:, text.shape[1] - 1 : -1].argmax(-1)
    return int((wanted == draft).long().cumprod(1).sum())
    ### END SOLUTION


# %% check="speculate" points=2
class Output:
    """What a model of transformers returns: logits by name, and as the first of a tuple."""

    def __init__(self, logits):
        self.logits = logits

    def __getitem__(self, place):
        return getattr(self, place) if isinstance(place, str) else (self.logits,)[place]


class Counting:
    """A model that writes the next number modulo 10, and counts how often it is called."""

    def __init__(self):
        self.calls = 0

    def eval(self):
        return self

    def __call__(self, input_ids, **kwargs):
        self.calls += 1
        scores = torch.nn.functional.one_hot((input_ids + 1) % 10, 10).float()
        keep = kwargs.get("logits_to_keep", 0)
        return Output(scores[:, -keep:] if keep else scores)


def drafted(text, draft, right):
    counting = Counting()
    as_tensor = [torch.tensor([tokens]) for tokens in (text, draft)]

    def verdict(got):
        calls, counting.calls = counting.calls, 0
        if isinstance(got, torch.Tensor) and got.numel() == 1:
            got = got.item()
        if isinstance(got, bool) or not isinstance(got, int):
            return f"returns {got!r}: a whole number is asked for. Is there a `return`?"
        if got != right and right == 0:
            return "the first proposed token is wrong already: what follows it does not count."
        if got != right and right == len(draft):
            return "a draft that is right to its end is not counted in full."
        if got != right:
            return "a draft that goes wrong in the middle: only what comes before the first error counts."
        return True if calls == 1 else f"calls the model {calls} times: once is enough."

    return lab.check.case(counting, *as_tensor, expect=verdict, raw=True)


lab.check.code(
    "speculate",
    speculate,
    [
        drafted([1, 2, 3], [4, 5, 6], 3),
        drafted([1, 2, 3], [4, 5, 9, 0], 2),
        drafted([7], [3, 4, 5], 0),
        drafted([5, 6], [7, 9, 9, 0, 1], 1),
    ],
    points=2,
)

# %% [markdown]
# ## Exercise 3
#
# *6 min, medium.* Three services write with a model on one card:
#
# ```
# A  one user, 124M parameters, 2 ms a token; the card's arithmetic is busy 4 % of the time, its memory 10 %
# B  200 users, one after the other; each waits for all before; the card as in A
# C  64 users at once, 1.5B parameters; now and then a request runs out of memory when texts get long
# ```
#
# For which of them is a static, compiled step the cure? And what do the other two need, and why?
#
# <details><summary>Hint</summary>
#
# What waits for what in each of them? What does a second sequence cost in a step? What grows with the length of a
# text?
#
# </details>

# %% answer="served"
served = ...
### BEGIN SOLUTION
served = "A"
### END SOLUTION

# %% check="served" points=1
lab.check.choice(
    "served",
    served,
    "A",
    of=("A", "B", "C"),
    mistakes={
        "B": "It would help each of the 200 a little. What lets one step serve many of them?",
        "C": "What fills the memory in C, and does compiling make that smaller?",
    },
)

# %% answer="why_served" points=2
why_served = ...
### BEGIN SOLUTION
why_served = """B: the users should share steps: in a batch the weights are read once for all of them, so the throughput
grows while the latency hardly changes.
C: the caches fill the memory: they grow with every token of all 64 texts. It needs a limit on length or batch, a
cache in fewer bits or in pages, or fewer users at once."""
### END SOLUTION

# %% check="why_served"
lab.check.words(
    "why_served",
    why_served,
    {
        r"batch|together|at once|share|same step|in parallel|side by side": (
            "What lets one step of the model serve many users of B?"
        ),
        r"weight|read once|throughput|hardly (any )?(longer|more)|nearly free|cheap|idle|launch|host": (
            "Why does that cost B hardly any time?"
        ),
        r"cache|keys? and values?|\bkv\b": "What grows with the length of a text in C?",
        r"limit|shorter|fewer|smaller|quanti|bits|page|evict|window|less": "What can be done about it in C?",
    },
    against={
        r"(do not|don't) know|no idea": "Say what you do know: what waits in B, and what grows in C?",
        r"\bb\b[^.]*\b(larger|bigger|second) (gpu|card)": "The card of B is busy a tenth of the time.",
        r"\bb\b[^.]{0,40}\b(static|compil)": "That helps each of the 200 a little. What lets one step serve many?",
        r"empty_cache": "That hands back what nobody uses. Is the memory of C unused?",
    },
    points=2,
    least=20,
)

# %% [markdown]
# ## Take-away
#
# 1. The cache turns a pass over the whole text into a pass over one token, and takes 2 x layers x width values for
#    each token of each sequence.
# 2. A small model on a fast card waits for its host: record the step (static cache, compiled) or let more sequences
#    share it. A model large enough to wait for its memory (none did here) shares the reading of its weights in a batch.
# 3. 8 and 4 bits are for fitting. Measure before you believe that they are faster.

# %% name="finish"
lab.finish(
    "Write with a cache and logits_to_keep=1; count the cache's bytes for the longest text and the "
    "largest batch; batch requests first, then record the step."
)
