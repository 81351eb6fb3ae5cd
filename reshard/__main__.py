"""`python -m reshard` is the `reshard` command."""

import sys
from importlib import import_module

if __name__ == "__main__":
    try:
        main = import_module("reshard.cli.main").main
    except ModuleNotFoundError:  # a library that an installation brings
        sys.stderr.write(
            "reshard: this is a folder of a checkout, not an installed package. Run `pip install -e .` here, or leave it. [usage]\n"
        )
        sys.exit(2)
    main()
