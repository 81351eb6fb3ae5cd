"""Put on PYTHONPATH of vLLM's processes: on a CPU with AMX, bf16 attention uses tile registers, which Linux hands out only to a
process that has asked for them. vLLM 0.32 does not ask, and its workers die by SIGILL.

KEEP_REPACKED_WEIGHTS   linear layers keep their weights when a CPU repacks them, as they do on a GPU, so that the weight checker sees them
COMPUTE_FP8_BLOCKS      FP8 in blocks of 128 x 128 is computed by plain torch: vLLM's own kernel for it needs AMX, also to start
"""

import ctypes
import importlib.abc
import importlib.util
import os
import sys

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
# Without AMX the kernel refuses, which is fine.
ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)


def _after_import(module, change):
    """Call `change` with a module once it was imported."""

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name != module:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            execute = spec.loader.exec_module

            def exec_and_change(found):
                execute(found)
                change(found)

            spec.loader.exec_module = exec_and_change
            return spec

    sys.meta_path.insert(0, Finder())


def _keep(module):
    repack = module.dispatch_cpu_unquantized_gemm
    module.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: repack(layer, remove_weight=False)


def _compute(module):
    import torch

    def apply_weights(self, layer, x, bias=None, **_):
        found = self._get_layer_params(layer)
        scales = found.block_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        rows, columns = found.weight.shape
        weight = found.weight.float() * scales[:rows, :columns]
        return torch.nn.functional.linear(x, weight.to(x.dtype), bias)

    kernel = module.CPUFp8BlockScaledMMKernel
    kernel.is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
    kernel.process_weights_after_loading = lambda self, layer: None
    kernel.apply_weights = apply_weights


if "KEEP_REPACKED_WEIGHTS" in os.environ:
    _after_import("vllm.model_executor.layers.utils", _keep)
if "COMPUTE_FP8_BLOCKS" in os.environ:
    _after_import("vllm.model_executor.kernels.linear.scaled_mm.cpu", _compute)
