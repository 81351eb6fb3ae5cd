"""Put on PYTHONPATH of SGLang's processes on a CPU: its kernels, and packages for GPUs without a build for a CPU, are stood in for. What a
server calls then is SGLang's own code in torch."""

from importlib import import_module

tracer = "reshard.plugins.loader_tracer"
import_module(f"{tracer}.stand_ins").stand_in(import_module(f"{tracer}.sglang_ranks").STAND_INS)
