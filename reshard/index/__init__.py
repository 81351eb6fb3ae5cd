"""The index room: which box of which tensor lies in which bytes of which file.

Nouns: Index (one checkpoint), Tensor (a canonical tensor and its pieces), Origin (where a tensor's values come from), Shards (the pieces of
one tensor as columns of numbers), RunFacts (what is known about the training run). Verbs: check coverage, join (which pieces of two tensors
share elements).

Everything here is arithmetic on metadata: no weight is read, and no format, model or plan is known.
"""
