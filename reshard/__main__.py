"""`python -m reshard` is the `reshard` command."""

import sys
from importlib import import_module
from importlib.util import find_spec

if __name__ == "__main__":
    if find_spec("reshard.cli") is None:
        # Its other folders lie beside this one in a checkout, and get their places in the package when it is installed.
        sys.stderr.write(
            "reshard: this is a folder of a checkout, not an installed package. Run `pip install -e .` here, or leave it. [usage]\n"
        )
        sys.exit(2)
    import_module("reshard.cli.main").main()
