# ---
# jupyter:
#   labkit:
#     title: How heavy is a list?
#     question: How many bytes does one row of numbers take?
#     after: say how many bytes a row of numbers takes
#     minutes: {gpu: 0.2, cpu: 0.2}
#     memory: 1 GiB budget
#     needs: []
#     fetch: []
# ---

# %%
from array import array

import labkit as lab

lesson = lab.begin("00_sample", budget="1GiB")

# %% [markdown]
# ## Claims
# What is said about arrays of numbers.

# %%
lab.claim("linear", "bytes grow linearly with the length", said_by="textbooks")
lab.claim("float", "a number takes 8 bytes", said_by="documentation")
lab.claims()

# %% [markdown]
# ## Experiment
# One row, in plain Python.

# %%
lab.guess("row_bytes", None, "How many bytes does `array('f', range(1024))` hold?", unit="bytes")


# %% name="row"
def row(length):
    return array("f", range(length))


sizes = [len(row(n)) * row(n).itemsize for n in (256, 512, 1024)]
print(sizes)

# %%
lab.answer("row_bytes", measured=sizes[-1], formula=1024 * 4, source="cpu")

# %% [markdown]
# ## Account
# Four bytes each, times the length.

# %% [markdown]
# ## Equivalence
# A list holds the same numbers.

# %%
assert list(row(4)) == [0.0, 1.0, 2.0, 3.0]

# %% [markdown]
# ## Negative control
# Sorting changes no byte.

# %%
assert len(sorted(row(8))) == 8

# %% [markdown]
# ## Pitfalls
# A list of Python floats is not an array.

# %% [markdown]
# ## Exercise 1
# *Number · 2 min · easy.* How many bytes do 3,000 of these numbers take?
#
# <details><summary>Hint</summary>One takes as many as `row(1).itemsize` says.</details>

# %% answer="bytes_of_3000"
bytes_of_3000 = ...
### BEGIN SOLUTION
bytes_of_3000 = 3000 * row(1).itemsize
### END SOLUTION

# %% check="bytes_of_3000" points=1
lab.check.number(
    "bytes_of_3000",
    bytes_of_3000,
    12_000,
    unit="bytes",
    mistakes={
        24_000: "That would be 8 bytes each: look at the type code of the array.",
        3_000: "A number is not a byte.",
    },
)

# %% [markdown]
# ## Exercise 2
# *Code · 5 min · medium.* Write `largest(budget)`: how many of these numbers fit `budget` bytes.
#
# <details><summary>Hint</summary>Whole numbers only.</details>


# %% answer="largest"
def largest(budget):
    """The most numbers that fit `budget` bytes."""
    ### BEGIN SOLUTION
    return budget // row(1).itemsize
    ### END SOLUTION


# %% check="largest" points=2
lab.check.code(
    "largest",
    largest,
    [
        lab.check.case(16, expect=4, because="Four bytes each."),
        lab.check.case(7, expect=1, because="A number that does not fit whole does not fit."),
    ],
    points=2,
)

# %% [markdown]
# ## Exercise 3
# *Words · 5 min · easy.* Why is a list of floats heavier than the array?
#
# <details><summary>Hint</summary>What does an element of a list point to?</details>

# %% answer="why_heavier" points=2
why_heavier = ...
### BEGIN SOLUTION
why_heavier = """Each element of a list is a pointer to a whole Python object with a type and a reference count,
while the array stores the bare bytes of every number one after the other."""
### END SOLUTION

# %% check="why_heavier"
lab.check.words(
    "why_heavier",
    why_heavier,
    {
        r"pointer|reference|object": "What does each element of a list hold?",
        r"bytes|bare|raw": "What does the array hold?",
    },
    points=2,
)

# %% [markdown]
# ## Take-away
# 1. Count the bytes of one element.
# 2. Multiply.
# 3. Check against the machine.

# %%
linear = sizes[2] / sizes[0]
lab.settle(
    "linear",
    measured=f"{linear:g} times for 4 times the length",
    verdict="holds" if linear == 4 else "does not hold",
    source="cpu",
)
lab.settle("float", measured=f"{row(1).itemsize} bytes", verdict="holds when the type code is 'd'", source="cpu")
lab.finish("Count bytes before you allocate.")
