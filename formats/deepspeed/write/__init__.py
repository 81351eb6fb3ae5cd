"""Writing: ZeRO-3 shards for any number of ranks, and the training state from which DeepSpeed resumes.

training_state.py   groups of parameters with masters and states, the other tensors, the run's counters
zero3.py            the files of every data-parallel rank
universal.py        the files of a universal checkpoint, which ZeRO-1, 2 and 3 load
"""
