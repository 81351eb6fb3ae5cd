"""Layouts that were learned from a serving engine's own loader.

numbers.py     a number that depends on the tensor-parallel rank, as a rule
layout.py      LearnedLayout: the tensors of every rank, as templates; the stored tensors of one rank follow
document.py    the layout as a JSON document, and its check
trace.py       what a tracer says about one rank, with runs of experts folded
fold.py        from traced ranks to templates: ranks, layers and experts fold
learn.py       from the tracer's answer to a layout; a withheld degree is predicted
tracer.py      the program that traces, run in the Python of the engine
library.py     a folder of layouts, and the one that fits
fit.py         whether a layout fits a checkpoint, the sizes, and the platform
"""
