"""What one rank of a serving engine holds, by the engine's rules (models/engine_rules.py).

legality.py    whether the engine serves the model, in a version, and at which parallel sizes
weights.py     the weights that the engine has a slot for, and their element types
ranks.py       the tensors in one rank's state dict
capacity.py    the bytes that ranks hold, and the tokens that fit beside them
learned/       the same for models that are not declared, by a layout learned from the engine's own loader
"""
