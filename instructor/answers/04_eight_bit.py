# %% [markdown]
# Typical answers to the exercises of lesson 04, one cell each, with the score and the status that each must get. Most of
# them are wrong, some are right in another way than the solutions in lessons/04_eight_bit.py.

# %% answer="state_kib" score=0.5 status="partial" what="leaves out the scales"
state_kib = 2 * (1024 * 4096 + 4096) / 1024

# %% answer="state_kib" score=0.5 status="partial" what="has 32-bit states for the bias"
state_kib = (1024 * 4096 * (2 + 8 / 256) + 8 * 4096) / 1024

# %% answer="state_kib" score=0 status="wrong" what="has one moment"
state_kib = (1024 * 4096 + 4096) * (1 + 4 / 256) / 1024

# %% answer="state_kib" score=0 status="wrong" what="has the states of AdamW"
state_kib = 8 * (1024 * 4096 + 4096) / 1024

# %% answer="state_kib" score=0 status="wrong" what="is in bytes"
state_kib = (1024 * 4096 + 4096) * (2 + 8 / 256)

# %% answer="int8_rows" score=0 status="wrong" what="has one scale for the whole matrix"
def int8_rows(weight):
    scale = weight.abs().max() / 127
    return (weight / scale).round().to(torch.int8), scale

# %% answer="int8_rows" score=0 status="wrong" what="repeats one scale for every row"
def int8_rows(weight):
    scale = weight.abs().max() / 127
    return (weight / scale).round().to(torch.int8), scale.expand(len(weight))

# %% answer="int8_rows" score=0 status="wrong" what="has one scale for each column"
def int8_rows(weight):
    scales = weight.abs().amax(0) / 127
    return (weight / scales).round().to(torch.int8), scales

# %% answer="int8_rows" score=0 status="wrong" what="takes the largest value, not the largest size"
def int8_rows(weight):
    scales = weight.amax(1) / 127
    scales = torch.where(scales == 0, 1.0, scales)
    return (weight / scales[:, None]).round().to(torch.int8), scales

# %% answer="int8_rows" score=1.5 status="partial" what="divides by zero in a row of zeros"
def int8_rows(weight):
    scales = weight.abs().amax(1) / 127
    return (weight / scales[:, None]).round().to(torch.int8), weight.abs().amax(1) / (scales * 127) * scales

# %% answer="int8_rows" score=0 status="wrong" what="cuts off instead of rounding"
def int8_rows(weight):
    scales = (weight.abs().amax(1) / 127).clamp(min=1e-30)
    return (weight / scales[:, None]).to(torch.int8), scales

# %% answer="int8_rows" score=0 status="wrong" what="takes 128 levels"
def int8_rows(weight):
    scales = (weight.abs().amax(1) / 128).clamp(min=1e-30)
    return (weight / scales[:, None]).round().to(torch.int8), scales

# %% answer="int8_rows" score=0 status="wrong" what="returns floats"
def int8_rows(weight):
    scales = (weight.abs().amax(1) / 127).clamp(min=1e-30)
    return (weight / scales[:, None]).round(), scales

# %% answer="int8_rows" score=0 status="wrong" what="returns nothing"
def int8_rows(weight):
    scales = (weight.abs().amax(1) / 127).clamp(min=1e-30)
    codes = (weight / scales[:, None]).round().to(torch.int8)

# %% answer="int8_rows" score=0 status="error" visible="right" what="knows the width of the visible cases"
def int8_rows(weight):
    codes, scales = torch.zeros(len(weight), 40, dtype=torch.int8), torch.zeros(len(weight))
    for row in range(len(weight)):
        scales[row] = weight[row].abs().max() / 127
        for column in range(40):
            if scales[row] > 0:
                codes[row, column] = int((weight[row, column] / scales[row]).round())
    return codes.view(weight.shape), scales

# %% answer="int8_rows" score=0 status="error" what="raises"
def int8_rows(weight):
    scales = weight.abs().amax(dim=1) / 127
    return weight.quantize(scales), scales

# %% answer="int8_rows" score=2 status="graded" what="another way: row by row, scales as a column, zeros by a small number"
def int8_rows(weight):
    codes, scales = [], []
    for row in weight:
        scale = max(float(row.abs().max()) / 127, 1e-12)
        codes.append(torch.clamp(torch.round(row / scale), -127, 127).to(torch.int8))
        scales.append([scale])
    return torch.stack(codes), torch.tensor(scales)

# %% answer="cured" score=0 status="wrong" what="takes the run with adapters"
cured_run = "B"

# %% answer="cured" score=0 status="wrong" what="takes the run that does not train"
cured_run = "C"

# %% answer="cured" score=0 status="wrong" what="names none"
cured_run = "none"

# %% answer="why" score=0 status="needs-manual" what="is one phrase"
why = "Because A trains."

# %% answer="why" score=0.6667 status="needs-manual" what="leaves C out"
why = """In B the activations of eight sequences are what fills the memory, so a smaller batch would be the cure."""

# %% answer="why" score=1.3333 status="needs-manual" what="does not make the weights smaller"
why = """B is full of activations. C does not train, so it has no state; I would buy a larger card for that one."""

# %% answer="why" score=0 status="blank" what="is empty"
why = ""
