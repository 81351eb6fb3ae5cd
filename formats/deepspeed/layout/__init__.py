"""How a tag lies on disk: its files, what their pickles hold, and where parameters lie in flat buffers and on tensor-parallel ranks.

Values and arithmetic. Only `tag` looks at files: it lists folders and reads `latest`.

tag.py               which files a tag has; model-parallel ranks
states.py            the model states and the optimizer states of one rank, from a pickle's root object
partitions.py        where a parameter's elements lie in the flat buffers of data-parallel ranks
tensor_parallel.py   how the parts of tensor-parallel ranks make a whole parameter
experts.py           which experts lie on which ranks, and under which names
"""
