"""Put on PYTHONPATH of SGLang's processes on a CPU: its kernels, and packages for GPUs without a build for a CPU, are stood in for. What a
server calls then is SGLang's own code in torch."""

from importlib import import_module

tracer = "reshard.plugins.loader_tracer"
import_module(f"{tracer}.stand_ins").stand_in(import_module(f"{tracer}.sglang_ranks").STAND_INS)

# Memory of a CPU alone cannot be pinned, which SGLang's layers with adapters ask for.
torch = import_module("torch")
torch.Tensor.pin_memory = lambda tensor, *_: tensor


def without_pinning(make):
    return lambda *args, pin_memory=False, **names: make(*args, **names)


for name in ("arange", "empty", "ones", "tensor", "zeros"):
    setattr(torch, name, without_pinning(getattr(torch, name)))
