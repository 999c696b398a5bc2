"""Classes of work, under which predicted and measured time are compared, and the class of a profiler's event."""
from __future__ import annotations

import functools
import re

HEAVY = ("matmul", "attention", "convolution")
CLASSES = (*HEAVY, "pointwise", "collective", "optimizer", "overhead")
"""`pointwise`: all other kernels, which inductor fuses with one another, reductions and lookups included. `overhead`: time
in which none of the others runs, such as Python, the data loader and what the script does outside compiled graphs."""

# Tried in this order: attention kernels are also called cutlass, those of convolutions gemm.
_PATTERNS = {
    "optimizer": r"^Optimizer\.step#",
    "collective": r"^(_c10d_functional(_autograd)?|c10d|gloo|nccl):|^nccl(Dev)?Kernel",
    "attention": r"scaled_dot_product|flash_?(attention|attn|fwd|bwd)|_efficient_attention|fmha|mha_(fwd|bwd|varlen)|"
                 r"triton_tem_fused_flex|cudnn.*sdpa",
    "convolution": r"convolution|conv\dd|(^|_)conv_|fprop|dgrad|wgrad|winograd|implicit_gemm|convolve|"
                   r"s\d*cudnn_",
    "matmul": r"^(aten|mkl|mkldnn|inductor|quantized)::_?(mm|bmm|addmm|baddbmm|addbmm|mv|addmv|dot|vdot|matmul|linear|"
              r"scaled_mm|int_mm|mkl_linear|linear_pointwise|addmm_activation|grouped_mm|weight_int8pack_mm)(\.\w+)?$|"
              r"gemm|gemv|cutlass|cublas|nvjet|splitK|triton_(tem|mm)|"
              r"^extern_kernels\.(mm|bmm|addmm)",
    "pointwise": r"^(aten|prims|inductor|mkldnn|fbgemm)::|^triton_|^cpp_|^graph_\d+_cpp_|at::native::|at_cuda_detail|cub::|"
                 r"^Mem(cpy|set) |^## Call CompiledFxGraph",
}
_COMPILED = {name: re.compile(pattern) for name, pattern in _PATTERNS.items()}


@functools.lru_cache(maxsize=4096)
def class_of_event(name: str) -> str | None:
    """The class of an operation, a kernel or a range by the name that torch's profiler gives it; None for what is none,
    such as a range of Python.

    `## Call CompiledFxGraph` is a whole graph as inductor lowered it: on a CPU its own time, without that of what it
    calls, is that of fused C++ kernels, which have no events of their own.
    """
    return next((found for found, pattern in _COMPILED.items() if pattern.search(name)), None)


def class_of_kind(kind: str) -> str:
    """The class of a plan's operation of that kind (`passes.cost_model.COMPUTE_KINDS`)."""
    return kind if kind in HEAVY else "pointwise"
