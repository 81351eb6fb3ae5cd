"""LoRA adapters as one value: low-rank updates of canonical weights, however a library stores them.

updates.py   the value: an Update of a matrix, and the Adapter that holds all of them
base.py      the weights of the base that an adapter changes, by the names that adapters have for them
reading.py   from the tensors of any form to the value
forms.py     the forms of the adapters of experts: a table, and from the value to the tensors of a form
"""
