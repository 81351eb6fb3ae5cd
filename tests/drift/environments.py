"""Prints the Python of the environment of a framework, which is made where there is none: python tests/drift/environments.py FRAMEWORK"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from declared.check import ENVIRONMENT
from megatron.fsdp import MEGATRON

ENVIRONMENTS = {"transformers": ENVIRONMENT, "megatron-core": MEGATRON}

if __name__ == "__main__":
    with redirect_stdout(sys.stderr):
        python = ENVIRONMENTS[sys.argv[1]].python()
    print(python)
