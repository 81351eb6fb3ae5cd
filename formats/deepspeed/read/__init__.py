"""From the files of a tag to its index. `index` lists the steps in order; each step has a file of its own.

index.py             the steps of a tag; `universal.py` those of a universal checkpoint
run_states.py        the pickles of every rank, layer and expert
one_save.py          the run's parallel sizes, and whether the files are from one save
parts.py             `Parts`: what the files of all ranks hold; whole tensors from the parts of tensor-parallel ranks
flat_buffers.py      the pieces of a parameter in the tensors of the files
weights.py           the weights, in modules, layers, fragments and experts
zero_optimizer.py    masters and states in ZeRO's flat groups
plain_optimizer.py   masters and states of a run without ZeRO
pipeline_layers.py   the layers of a PipelineModule: tied ones, and those that are left over
"""
