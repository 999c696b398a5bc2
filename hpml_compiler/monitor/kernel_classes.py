"""Classes of work, by which predicted and measured times are compared, and the class of a profiler event."""
from __future__ import annotations

import functools
import re

HEAVY = ("matmul", "attention", "convolution")
CLASSES = (*HEAVY, "pointwise", "collective", "optimizer", "overhead")
"""`pointwise`: all other kernels, which inductor fuses with one another, reductions and lookups included. `overhead`: time
in which none of the others runs, such as Python, the data loader and the script's code outside compiled graphs."""

# Tried in this order, since names of attention kernels may contain cutlass, and those of convolution kernels gemm.
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
    """The class of an operation, kernel or range by its name in torch's profiler; None for other events, such as a Python
    range.

    `## Call CompiledFxGraph` is a whole graph as inductor lowered it. On a CPU its self time, without that of its
    children, is the time of fused C++ kernels, which have no events of their own.
    """
    return next((found for found, pattern in _COMPILED.items() if pattern.search(name)), None)


def class_of_kind(kind: str) -> str:
    """The class of a plan's operation, by its kind (`passes.cost_model.COMPUTE_KINDS`)."""
    return kind if kind in HEAVY else "pointwise"
