# %% [markdown]
# Typical answers to the exercises of lesson 00, one cell each, with the score and the status that each must get. Most of
# them are wrong, some are right in another way than the solutions in lessons/00_environment.py.

# %% answer="product_rate" score=0.5 status="partial" what="counts a multiply and an add as one operation"
product_rate = 4096 * 1024 * 8192 / 0.8e-3

# %% answer="product_rate" score=0.5 status="partial" what="takes a millisecond for a second"
product_rate = 2 * 4096 * 1024 * 8192 / 0.8

# %% answer="product_rate" score=0.5 status="partial" what="is in TFLOP/s"
product_rate = 2 * 4096 * 1024 * 8192 / 0.8e-3 / 1e12

# %% answer="product_rate" score=0 status="wrong" what="divides by the cold call"
product_rate = 2 * 4096 * 1024 * 8192 / 38e-3

# %% answer="product_rate" score=0 status="wrong" what="does not divide by the time"
product_rate = 2 * 4096 * 1024 * 8192

# %% answer="product_rate" score=0 status="wrong" what="is text"
product_rate = "85.9e12 FLOP/s"

# %% answer="product_rate" score=0 status="error" what="raises"
product_rate = 2 * m * k * n / 0.8e-3

# %% answer="copy_rate" score=0.5 status="partial" what="counts each byte once"
copy_rate = 256 * 2**20 / 0.5e-3

# %% answer="copy_rate" score=0.5 status="partial" what="takes a MiB for a million bytes"
copy_rate = 2 * 256e6 / 0.5e-3

# %% answer="copy_rate" score=0 status="wrong" what="divides by the cold call"
copy_rate = 2 * 256 * 2**20 / 2e-3

# %% answer="copy_rate" score=0 status="wrong" what="is upside down"
copy_rate = 0.5e-3 / (2 * 256 * 2**20)

# %% answer="copy_rate" score=0 status="wrong" what="is no finite number"
copy_rate = float("nan")

# %% answer="honest_timer" score=0 status="wrong" what="never waits"
def honest_timer(call, wait, repeats=9):
    call()
    wait()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)

# %% answer="honest_timer" score=3 status="partial" what="has no warm-up"
def honest_timer(call, wait, repeats=9):
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)

# %% answer="honest_timer" score=3 status="partial" what="does not wait for the warm-up"
def honest_timer(call, wait, repeats=9):
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)

# %% answer="honest_timer" score=2 status="partial" what="takes the mean"
def honest_timer(call, wait, repeats=9):
    call()
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
        wait()
    return (time.perf_counter() - start) / repeats

# %% answer="honest_timer" score=3 status="partial" what="takes the fastest"
def honest_timer(call, wait, repeats=9):
    call()
    wait()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start)
    return min(seconds)

# %% answer="honest_timer" score=1 status="partial" what="times one call"
def honest_timer(call, wait, repeats=9):
    call()
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start

# %% answer="honest_timer" score=0 status="wrong" what="returns milliseconds"
def honest_timer(call, wait, repeats=9):
    call()
    wait()
    milliseconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        wait()
        milliseconds.append(1000 * (time.perf_counter() - start))
    return statistics.median(milliseconds)

# %% answer="honest_timer" score=0 status="wrong" what="returns nothing"
def honest_timer(call, wait, repeats=9):
    call()
    wait()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start)
    print(statistics.median(seconds))

# %% answer="honest_timer" score=0 status="wrong" what="returns all timings"
def honest_timer(call, wait, repeats=9):
    call()
    wait()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start)
    return seconds

# %% answer="honest_timer" score=0 status="wrong" visible="right" what="knows the visible cases"
def honest_timer(call, wait, repeats=9):
    for _ in range(repeats):
        call()
    return 0.02

# %% answer="honest_timer" score=0 status="error" what="raises"
def honest_timer(call, wait, repeats=9):
    call()
    wait()
    return statistics.median([perf_counter() for _ in range(repeats)])

# %% answer="honest_timer" score=0 status="error" what="takes other arguments"
def honest_timer(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start

# %% answer="honest_timer" score=4 status="graded" what="another way: sorted, with two warm-up calls"
def honest_timer(call, wait, repeats=9):
    for _ in range(2):
        call()
    wait()
    times = []
    while len(times) < repeats:
        wait()
        begin = time.monotonic()
        call()
        wait()
        times.append(time.monotonic() - begin)
    return sorted(times)[len(times) // 2]

# %% answer="slow_print" score=0 status="needs-manual" what="is one phrase"
slow_print = "The print is slow."

# %% answer="slow_print" score=0 status="needs-manual" what="believes that the print is slow"
slow_print = """
The print itself is slow because a terminal is slow, so I remove the line and my training becomes quick, and I use
time.time() around the whole loop as before.
"""

# %% answer="slow_print" score=1 status="needs-manual" what="thinks that the time is gained, and times nothing"
slow_print = """
Kernels are only queued by backward, it is asynchronous, and item waits for the card. So I remove the line and
everything is quick again and the problem is gone for good.
"""

# %% answer="slow_print" score=1.5 status="needs-manual" what="does not say how to time"
slow_print = """
The kernels are launched asynchronously, so the clock stops too early; item waits until the card is done. Without the
line the same time is spent elsewhere. I would time it better, with more care, over a day.
"""

# %% answer="slow_print" score=0 status="blank" what="is empty"
slow_print = ""
