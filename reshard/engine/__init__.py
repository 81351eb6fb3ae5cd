"""The engine room: everything that moves the bytes of weights, block by block: gather -> cast -> digest -> scatter.

Nouns: Conversion (one run of a plan), Journal (the blocks that are on the disk), Worker (the buffers of one thread), Comparison (the
differences of two checkpoints), View and LazyTensor (arrays that are read on demand).

The engine follows a plan: it decides nothing, prints nothing, and knows no format and no model. Its memory does not grow with the model.
"""
