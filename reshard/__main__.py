"""`python -m reshard` is the `reshard` command."""

from importlib import import_module

if __name__ == "__main__":
    import_module("reshard.cli.main").main()
