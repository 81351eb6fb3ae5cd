"""The program that traces vLLM's own weight loader. It runs inside vLLM's Python, as a folder: `python vllm_tracer REQUESTS ANSWER`.

    __main__.py    the requests and the answer, as files of JSON
    trace.py       every rank of a request, each in a forked process, two at a time
    ranks.py       one rank of vLLM in one process: fake process groups, the model class, the loader
    stand_ins.py   packages that vLLM's model classes import, and of which loading calls nothing
    recorder.py    every operation between tensors while the model is built and loaded
    contents.py    what a tensor holds in the end: boxes of checkpoint tensors, constants, or nothing
    strided.py     arithmetic on strided sections of arrays

It imports torch and vLLM, nothing of reshard, which vLLM's Python need not have. It reads config.json and the headers of safetensors
files; no weight, no GPU and no second process is needed. reshard/serving/learned/ makes a layout file of the answer.

Measured with vLLM 0.32.0 (build for CPUs) and torch 2.13.
"""
