"""The canonical room: from the names that a checkpoint stores to the model's published names.

Nouns: Content (the chosen tensors under canonical names), Selection (which tensors are chosen), Drop (a tensor that is left out, and why),
NAME_VARIANTS (other names of weights). Verbs: remove the names of wrappers, rename to canonical names, name the parameters of an optimizer,
attach scales to quantized weights.

This room renames, chooses and combines tensors of an Index. It reads no weight and knows no format, target or plan.
"""
