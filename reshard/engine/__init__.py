"""The engine walks a plan block by block: gather -> cast -> digest -> scatter. It decides nothing and prints nothing."""
