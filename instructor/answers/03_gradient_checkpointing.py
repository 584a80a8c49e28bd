# %% [markdown]
# Typical answers to the exercises of lesson 03, one cell each, with the score and the status that each must get. Most of
# them are wrong, some are right in another way than the solutions in lessons/03_gradient_checkpointing.py.

# %% answer="best_mib" score=0 status="wrong" what="takes segments of one block"
best_mib = (48 * 2 + 34) * 1600 * 1024 / 2**20

# %% answer="best_mib" score=0.5 status="partial" what="takes the root, which is no whole number"
best_mib = 2 * (48 * 2 * 34) ** 0.5 * 1600 * 1024 / 2**20

# %% answer="best_mib" score=0 status="wrong" what="takes the root of the number of blocks"
best_mib = (7 * 2 + 7 * 34) * 1600 * 1024 / 2**20

# %% answer="best_mib" score=0.5 status="partial" what="leaves out the inputs"
best_mib = 68 * 1600 * 1024 / 2**20

# %% answer="best_mib" score=0 status="wrong" what="is an N"
best_mib = 2

# %% answer="in_segments_of" score=0.5 status="partial" what="looks its part up when backward comes"
def in_segments_of(blocks, hidden, every):
    def run_part(x):
        for block in part:
            x = block(x)
        return x

    for start in range(0, len(blocks), every):
        part = blocks[start : start + every]
        hidden = checkpoint(run_part, hidden, use_reentrant=False)
    return hidden

# %% answer="in_segments_of" score=0 status="wrong" what="stores everything"
def in_segments_of(blocks, hidden, every):
    for block in blocks:
        hidden = block(hidden)
    return hidden

# %% answer="in_segments_of" score=0 status="wrong" what="checkpoints each block by itself"
def in_segments_of(blocks, hidden, every):
    for block in blocks:
        hidden = checkpoint(block, hidden, use_reentrant=False)
    return hidden

# %% answer="in_segments_of" score=0 status="wrong" what="checkpoints one block in so many"
def in_segments_of(blocks, hidden, every):
    for place, block in enumerate(blocks):
        if place % every == 0:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        else:
            hidden = block(hidden)
    return hidden

# %% answer="in_segments_of" score=0.5 status="partial" what="leaves out the last, shorter segment"
def in_segments_of(blocks, hidden, every):
    for number in range(len(blocks) // every):
        part = torch.nn.Sequential(*blocks[number * every : (number + 1) * every])
        hidden = checkpoint(part, hidden, use_reentrant=False)
    return hidden

# %% answer="in_segments_of" score=0 status="wrong" what="makes so many segments instead of segments of so many"
def in_segments_of(blocks, hidden, every):
    size = max(1, len(blocks) // every)
    for start in range(0, len(blocks), size):
        part = torch.nn.Sequential(*blocks[start : start + size])
        hidden = checkpoint(part, hidden, use_reentrant=False)
    return hidden

# %% answer="in_segments_of" score=0.5 status="partial" what="gives every segment the first input"
def in_segments_of(blocks, hidden, every):
    result = hidden
    for start in range(0, len(blocks), every):
        part = torch.nn.Sequential(*blocks[start : start + every])
        result = checkpoint(part, hidden, use_reentrant=False)
    return result

# %% answer="in_segments_of" score=0 status="wrong" visible="right" what="knows the visible cases"
def in_segments_of(blocks, hidden, every):
    sizes = {6: [3, 3], 5: [2, 2, 1], 3: [1, 1, 1], 2: [2]}.get(len(blocks), [1] * len(blocks))
    start = 0
    for size in sizes:
        part = torch.nn.Sequential(*blocks[start : start + size])
        hidden = checkpoint(part, hidden, use_reentrant=False)
        start += size
    return hidden

# %% answer="in_segments_of" score=0 status="wrong" what="returns nothing"
def in_segments_of(blocks, hidden, every):
    for start in range(0, len(blocks), every):
        part = torch.nn.Sequential(*blocks[start : start + every])
        hidden = checkpoint(part, hidden, use_reentrant=False)

# %% answer="in_segments_of" score=0 status="error" what="raises"
def in_segments_of(blocks, hidden, every):
    for part in blocks.split(every):
        hidden = checkpoint(part, hidden, use_reentrant=False)
    return hidden

# %% answer="in_segments_of" score=2 status="graded" what="another way: modules in a row, reentrant"
def in_segments_of(blocks, hidden, every):
    for start in range(0, len(blocks), every):
        part = torch.nn.Sequential(*blocks[start : start + every])
        hidden = checkpoint(part, hidden, use_reentrant=True)
    return hidden

# %% answer="in_segments_of" score=2 status="graded" what="another way: the part as a default value, the list taken apart"
def in_segments_of(blocks, hidden, every):
    left = list(blocks)
    while left:
        part, left = left[:every], left[every:]

        def run(x, part=part):
            for block in part:
                x = block(x)
            return x

        hidden = checkpoint(run, hidden, use_reentrant=False)
    return hidden

# %% answer="cured" score=0 status="wrong" what="takes the step whose logits are too large"
cured_step = "A"

# %% answer="cured" score=0 status="wrong" what="takes the step whose weights are too large"
cured_step = "C"

# %% answer="cured" score=0 status="wrong" what="names all"
cured_step = "all"

# %% answer="why" score=0 status="needs-manual" what="is one phrase"
why = "Because A is too big."

# %% answer="why" score=0.5 status="needs-manual" what="leaves C out"
why = """A has its logits, three times over, and these stay whatever one does with the blocks of it."""

# %% answer="why" score=1.5 status="needs-manual" what="thinks that all are cured"
why = """In A the logits remain, so chunk the loss. C needs its weights; take 8-bit ones. It cures all of them."""

# %% answer="why" score=0 status="blank" what="is empty"
why = ""
