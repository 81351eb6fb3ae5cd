"""Put on PYTHONPATH of vLLM's processes: on a CPU with AMX, bf16 attention uses tile registers, which Linux hands out only to a
process that has asked for them. vLLM 0.32 does not ask, and its workers die by SIGILL."""

import ctypes
import importlib.abc
import importlib.util
import os
import sys

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
# Without AMX the kernel refuses, which is fine.
ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)

if "KEEP_REPACKED_WEIGHTS" in os.environ:
    # Linear layers keep their weights when a CPU repacks them, as they do on a GPU, so that the weight checker sees them.
    class _Keeping(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name != "vllm.model_executor.layers.utils":
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            execute = spec.loader.exec_module

            def exec_and_keep(module):
                execute(module)
                repack = module.dispatch_cpu_unquantized_gemm
                module.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: repack(layer, remove_weight=False)

            spec.loader.exec_module = exec_and_keep
            return spec

    sys.meta_path.insert(0, _Keeping())
