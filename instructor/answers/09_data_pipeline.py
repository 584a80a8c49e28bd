# %% [markdown]
# Typical answers to the exercises of lesson 09, one cell each, with the score and the status that each must get. Most of
# them are wrong, some are right in another way than the solutions in lessons/09_data_pipeline.py.

# %% answer="least_workers" score=0 status="wrong" what="rounds down"
least_workers = 260 // 60

# %% answer="least_workers" score=0.5 status="partial" what="has a part of a worker"
least_workers = 260 / 60

# %% answer="least_workers" score=0 status="wrong" what="takes one for each core"
least_workers = 32

# %% answer="least_workers" score=0 status="wrong" what="is upside down"
least_workers = 60 / 260

# %% answer="least_workers" score=0 status="wrong" what="is text"
least_workers = "five"

# %% answer="batches_of" score=0.5 status="partial" what="takes the texts as they come"
def batches_of(lengths, most):
    batches = [[]]
    for index in range(len(lengths)):
        longest = max([lengths[i] for i in batches[-1]] + [lengths[index]])
        if longest * (len(batches[-1]) + 1) > most:
            batches.append([])
        batches[-1].append(index)
    return [batch for batch in batches if batch]

# %% answer="batches_of" score=1 status="partial" what="does not count the padding"
def batches_of(lengths, most):
    batches, tokens = [[]], 0
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if tokens + lengths[index] > most:
            batches.append([])
            tokens = 0
        batches[-1].append(index)
        tokens += lengths[index]
    return [batch for batch in batches if batch]

# %% answer="batches_of" score=0 status="wrong" what="loses the last batch"
def batches_of(lengths, most):
    batches, batch = [], []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if lengths[index] * (len(batch) + 1) > most:
            batches.append(batch)
            batch = []
        batch.append(index)
    return batches

# %% answer="batches_of" score=0 status="wrong" what="returns lengths"
def batches_of(lengths, most):
    batches = [[]]
    for length in sorted(lengths):
        if length * (len(batches[-1]) + 1) > most:
            batches.append([])
        batches[-1].append(length)
    return batches

# %% answer="batches_of" score=0 status="wrong" what="has one text in each batch"
def batches_of(lengths, most):
    return [[index] for index in range(len(lengths))]

# %% answer="batches_of" score=0.5 status="partial" what="has the same number of rows in each batch"
def batches_of(lengths, most):
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    rows = most // max(lengths)
    return [order[start : start + rows] for start in range(0, len(order), rows)]

# %% answer="batches_of" score=1 status="partial" visible="right" what="knows how long the texts of the visible cases are"
def batches_of(lengths, most):
    batches = [[]]
    for length in range(1, 61):
        for index in range(len(lengths)):
            if lengths[index] == length:
                if length * (len(batches[-1]) + 1) > most:
                    batches.append([])
                batches[-1].append(index)
    return [batch for batch in batches if batch]

# %% answer="batches_of" score=0 status="wrong" what="returns nothing"
def batches_of(lengths, most):
    batches = [[]]
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if lengths[index] * (len(batches[-1]) + 1) > most:
            batches.append([])
        batches[-1].append(index)

# %% answer="batches_of" score=0 status="error" what="raises"
def batches_of(lengths, most):
    batches = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if lengths[index] * (len(batches[-1]) + 1) > most:
            batches.append([])
        batches[-1].append(index)
    return batches

# %% answer="batches_of" score=2 status="graded" what="another way: from the longest down"
def batches_of(lengths, most):
    left = sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True)
    batches = []
    while left:
        rows = most // lengths[left[0]]
        batches.append(left[:rows])
        left = left[rows:]
    return batches

# %% answer="starved_run" score=0 status="wrong" what="takes the run of tiny steps"
starved_run = "B"

# %% answer="starved_run" score=0 status="wrong" what="takes the run of padding"
starved_run = "C"

# %% answer="starved_run" score=0 status="wrong" what="names none"
starved_run = "none"

# %% answer="slow_why" score=0 status="needs-manual" what="is one phrase"
slow_why = "Because A waits."

# %% answer="slow_why" score=1 status="needs-manual" what="leaves B out"
slow_why = """C does a lot of work on padding all of the time; one should sort by length so that this does not happen."""

# %% answer="slow_why" score=1.5 status="needs-manual" what="gives B more workers"
slow_why = """B launches tiny kernels, so a larger batch is better, and more workers help there. C computes padding: pack the
texts."""

# %% answer="slow_why" score=0 status="blank" what="is empty"
slow_why = ""
