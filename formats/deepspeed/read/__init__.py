"""From the files of a tag to its index. `index` lists the steps in order; each step has a file of its own.

index.py             the steps
run_states.py        the pickles of every rank, layer and expert
degrees.py           the run's parallel sizes, and whether all ranks have their files
parts.py             `Contents`: what a step found in the files
weights.py           the weights, in modules, layers, fragments and experts
zero_optimizer.py    masters and states in ZeRO's flat groups
plain_optimizer.py   masters and states of a run without ZeRO
flat_buffers.py      the pieces of a parameter in the tensors of the files
tied.py              parameters with several names
join.py              whole tensors from the parts of tensor-parallel ranks
facts.py             what is known about the run
checks.py            whether the files are from one save
"""
