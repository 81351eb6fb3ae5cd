"""Runs a script that trains with megatron-core on the CPU: python pretended_cuda.py SCRIPT ARGUMENT..."""

import runpy
import sys
from pathlib import Path

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
sys.path[:0] = [str(FIXTURES / "megatron"), str(FIXTURES)]

import cpu  # noqa: E402

cpu.pretend()
import torch.distributed.checkpoint  # noqa: E402, F401

cpu.after_import()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
