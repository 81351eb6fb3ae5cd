"""The program that traces a serving engine's own weight loader. It runs inside the engine's Python, as a folder:
`python loader_tracer ENGINE REQUESTS ANSWER`.

    __main__.py        the requests and the answer, as files of JSON
    trace.py           every rank of a request, each in a forked process, two at a time
    ranks.py           one rank of an engine in one process: what is the same for every engine
    vllm_ranks.py      vLLM: fake process groups, the model class, the loader
    sglang_ranks.py    SGLang: the same, and what it does with weights after loading
    stand_ins.py       packages that an engine's modules import, and of which loading calls nothing
    recorder.py        every operation between tensors while the model is built and loaded
    origins.py         where the elements of a tensor come from: boxes of checkpoint tensors, constants, or nothing
    strided.py         arithmetic on strided sections of arrays

It imports torch and the engine, nothing of reshard, which the engine's Python need not have. It reads config.json and the headers of
safetensors files; no weight, no GPU and no second process is needed. reshard/serving/learned/ makes a layout file of the answer.
"""
