"""Put on PYTHONPATH of vLLM's processes: on a CPU with AMX, bf16 attention uses tile registers, which Linux hands out only to a
process that has asked for them. vLLM 0.32 does not ask, and its workers die by SIGILL."""

import ctypes

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
# Without AMX the kernel refuses, which is fine.
ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
