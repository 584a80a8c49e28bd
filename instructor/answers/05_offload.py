# %% [markdown]
# Typical answers to the exercises of lesson 05, one cell each, with the score and the status that each must get. Most of
# them are wrong, some are right in another way than the solutions in lessons/05_offload.py.

# %% answer="bus_ms" score=0 status="wrong" what="counts one direction"
bus_ms = 1557.6e6 * 2 / 25e9 * 1000

# %% answer="bus_ms" score=0 status="wrong" what="counts four bytes for bf16"
bus_ms = 2 * 1557.6e6 * 4 / 25e9 * 1000

# %% answer="bus_ms" score=0 status="wrong" what="is in seconds"
bus_ms = 2 * 1557.6e6 * 2 / 25e9

# %% answer="bus_ms" score=0 status="wrong" what="moves the state, too"
bus_ms = 16 * 1557.6e6 / 25e9 * 1000

# %% answer="bus_ms" score=0 status="wrong" what="is text"
bus_ms = "249 ms"

# %% answer="halves" score=0.4 status="partial" what="changes nothing"
def pack(tensor):
    return tensor


def unpack(kept):
    return kept

# %% answer="halves" score=0.4 status="partial" what="does not go back"
def pack(tensor):
    return tensor.bfloat16()


def unpack(kept):
    return kept

# %% answer="halves" score=1.6 status="partial" what="makes everything float32"
def pack(tensor):
    return tensor.bfloat16()


def unpack(kept):
    return kept.float()

# %% answer="halves" score=1.2 status="partial" what="keeps halves of another format"
def pack(tensor):
    if tensor.dtype == torch.float32:
        return tensor.half(), tensor.dtype
    return tensor, tensor.dtype


def unpack(kept):
    tensor, dtype = kept
    return tensor.to(dtype)

# %% answer="halves" score=0.4 status="partial" what="keeps the tensor as well"
def pack(tensor):
    if tensor.dtype == torch.float32:
        return tensor.bfloat16(), tensor
    return tensor, tensor


def unpack(kept):
    return kept[1]

# %% answer="halves" score=0 status="wrong" what="loses the shape"
def pack(tensor):
    if tensor.dtype == torch.float32:
        return tensor.bfloat16().flatten(), tensor.dtype
    return tensor.flatten(), tensor.dtype


def unpack(kept):
    tensor, dtype = kept
    return tensor.to(dtype)

# %% answer="halves" score=1.6 status="partial" visible="right" what="knows the dtypes of the visible cases"
def pack(tensor):
    if tensor.dtype in (torch.bool, torch.bfloat16):
        return tensor, tensor.dtype
    return tensor.bfloat16(), tensor.dtype


def unpack(kept):
    tensor, dtype = kept
    return tensor.to(dtype)

# %% answer="halves" score=0 status="wrong" what="returns nothing"
def pack(tensor):
    if tensor.dtype == torch.float32:
        return tensor.bfloat16(), tensor.dtype
    return tensor, tensor.dtype


def unpack(kept):
    tensor, dtype = kept
    tensor = tensor.to(dtype)

# %% answer="halves" score=0 status="error" what="raises"
def pack(tensor):
    return tensor.to_bfloat16(), tensor.dtype


def unpack(kept):
    tensor, dtype = kept
    return tensor.to(dtype)

# %% answer="halves" score=2 status="graded" what="another way: a dictionary for what was changed"
def pack(tensor):
    return {"small": tensor.bfloat16()} if tensor.dtype is torch.float32 else tensor


def unpack(kept):
    return kept["small"].float() if isinstance(kept, dict) else kept

# %% answer="halves" score=0.4 status="partial" what="keeps eight bits"
def pack(tensor):
    if tensor.dtype == torch.float32:
        scale = float(tensor.abs().max()) / 127 if tensor.device.type == "cpu" else 1.0
        return (tensor / scale).round().to(torch.int8), scale
    return tensor, None


def unpack(kept):
    tensor, scale = kept
    return tensor if scale is None else tensor.float() * scale

# %% answer="cured" score=0 status="wrong" what="takes the run without a state"
cured_run = "A"

# %% answer="cured" score=0 status="wrong" what="takes the run with adapters"
cured_run = "C"

# %% answer="cured" score=0 status="wrong" what="names all"
cured_run = "all"

# %% answer="why" score=0 status="needs-manual" what="is one phrase"
why = "Because B is large."

# %% answer="why" score=0 status="needs-manual" what="speaks of B only"
why = """In B the state of AdamW is larger than the whole card, and on the host it has room, so the step can run."""

# %% answer="why" score=1.3333 status="needs-manual" what="thinks that all are cured"
why = """SGD has no state and LoRA trains few parameters, whose state is small; activations move, so it cures all of them
in the end."""

# %% answer="why" score=0 status="blank" what="is empty"
why = ""
