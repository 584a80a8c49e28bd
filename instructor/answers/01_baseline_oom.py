# %% [markdown]
# Typical answers to the exercises of lesson 01, one cell each, with the score and the status that each must get. Most of
# them are wrong, some are right in another way than the solutions in lessons/01_baseline_oom.py.

# %% answer="block_mib" score=0 status="wrong" what="has the block with gelu_new"
block_mib = (114 * 4 * 512 * 1024 + 9 * 4 * 16 * 512**2 + 16 * 4 * 512) / 2**20

# %% answer="block_mib" score=0.5 status="partial" what="leaves out the masks of dropout"
block_mib = (64 * 4 * 512 * 1024 + 8 * 4 * 16 * 512**2 + 16 * 4 * 512) / 2**20

# %% answer="block_mib" score=0.5 status="partial" what="counts four bytes for true and false"
block_mib = (72 * 4 * 512 * 1024 + 12 * 4 * 16 * 512**2 + 16 * 4 * 512) / 2**20

# %% answer="block_mib" score=0 status="wrong" what="takes the sizes of gpt2"
block_mib = (66 * 4 * 512 * 768 + 9 * 4 * 12 * 512**2 + 16 * 4 * 512) / 2**20

# %% answer="block_mib" score=0 status="wrong" what="is the whole model"
block_mib = 24 * (66 * 4 * 512 * 1024 + 9 * 4 * 16 * 512**2 + 16 * 4 * 512) / 2**20

# %% answer="block_mib" score=0 status="wrong" what="is in bytes"
block_mib = 66 * 4 * 512 * 1024 + 9 * 4 * 16 * 512**2 + 16 * 4 * 512

# %% answer="block_mib" score=0 status="error" what="raises"
block_mib = (66 * b * s * d + 9 * b * h * s**2) / 0

# %% answer="largest_batch" score=0 status="wrong" what="stops one early"
def largest_batch(experiment, budget):
    low, high = 0, 64
    while high - low > 1:
        middle = (low + high) // 2
        if fits(experiment, budget, middle):
            low = middle
        else:
            high = middle
    return low - 1

# %% answer="largest_batch" score=0 status="wrong" what="returns the first that does not fit"
def largest_batch(experiment, budget):
    low, high = 0, 64
    while high - low > 1:
        middle = (low + high) // 2
        if fits(experiment, budget, middle):
            low = middle
        else:
            high = middle
    return high

# %% answer="largest_batch" score=1.5 status="partial" what="never returns 0"
def largest_batch(experiment, budget):
    low, high = 1, 64
    while high - low > 1:
        middle = (low + high) // 2
        if fits(experiment, budget, middle):
            low = middle
        else:
            high = middle
    return low

# %% answer="largest_batch" score=0.5 status="partial" what="counts upwards"
def largest_batch(experiment, budget):
    batch = 0
    while batch < 63 and fits(experiment, budget, batch + 1):
        batch += 1
    return batch

# %% answer="largest_batch" score=0.5 status="partial" what="doubles"
def largest_batch(experiment, budget):
    batch = 1
    while batch < 63 and fits(experiment, budget, batch):
        batch *= 2
    return batch // 2

# %% answer="largest_batch" score=1 status="partial" what="searches half of the range"
def largest_batch(experiment, budget):
    low, high = 0, 32
    while high - low > 1:
        middle = (low + high) // 2
        if fits(experiment, budget, middle):
            low = middle
        else:
            high = middle
    return low

# %% answer="largest_batch" score=0 status="wrong" what="returns nothing"
def largest_batch(experiment, budget):
    low, high = 0, 64
    while high - low > 1:
        middle = (low + high) // 2
        if fits(experiment, budget, middle):
            low = middle
        else:
            high = middle
    print(low)

# %% answer="largest_batch" score=0 status="wrong" what="measures nothing"
def largest_batch(experiment, budget):
    return 30

# %% answer="largest_batch" score=0 status="error" visible="right" what="knows the visible cases"
def largest_batch(experiment, budget):
    fits(experiment, budget, 1)
    return {132: 30, 150: 6, 1600: 0, 1: 63}[experiment.mib]

# %% answer="largest_batch" score=0 status="error" what="raises"
def largest_batch(experiment, budget):
    low, high = 0, 64
    while high - low > 1:
        if fits(experiment, budget, midle):
            low = midle
    return low

# %% answer="largest_batch" score=0 status="error" what="does not parse"
def largest_batch(experiment, budget)
    return 30

# %% answer="largest_batch" score=0 status="wrong" what="is no function"
largest_batch = 30

# %% answer="largest_batch" score=2 status="graded" what="another way: bit by bit"
def largest_batch(experiment, budget):
    batch = 0
    for step in (32, 16, 8, 4, 2, 1):
        if fits(experiment, budget, batch + step):
            batch += step
    return batch

# %% answer="largest_batch" score=2 status="graded" what="another way: recursive"
def largest_batch(experiment, budget, low=0, high=64):
    if high - low == 1:
        return low
    middle = (low + high) // 2
    if fits(experiment, budget, middle):
        return largest_batch(experiment, budget, middle, high)
    return largest_batch(experiment, budget, low, middle)

# %% answer="cured" score=0 status="wrong" what="takes the run that dies in the optimizer"
cured_run = "B"

# %% answer="cured" score=0 status="wrong" what="takes the run with one sequence"
cured_run = "C"

# %% answer="cured" score=0 status="wrong" what="names two"
cured_run = ["A", "C"]

# %% answer="cured" score=0 status="wrong" what="is a number"
cured_run = 1

# %% answer="why" score=0 status="needs-manual" what="is one phrase"
why = "Because A is too big."

# %% answer="why" score=0 status="needs-manual" what="says nothing of B and C"
why = """Accumulation makes a batch smaller; that is why it helps with A and why it does not help with the others. That
is what I think of it."""

# %% answer="why" score=1.3333 status="needs-manual" what="thinks that both are cured"
why = """The weights and the optimizer state fill B. C is one sequence whose length is squared, and it cures both."""

# %% answer="why" score=0 status="needs-manual" what="is a number"
why = 42

# %% answer="why" score=0 status="blank" what="is empty"
why = ""
