"""The only place that touches private modules of torch, and where releases 2.11 to 2.15 differ.

What takes long to load, such as `torch._inductor` and `torch._dynamo`, is imported when it is used.
"""
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree as pytree  # arguments and results of ops are nested; torch has no public name for this

from passes.compat.around import *
from passes.compat.backends import *
from passes.compat.cpp_compiler import *
from passes.compat.custom_ops import *
from passes.compat.decompositions import *
from passes.compat.dtensor import *
from passes.compat.dynamo import *
from passes.compat.eager import *
from passes.compat.graphs import *
from passes.compat.groups import *
from passes.compat.inductor import *
from passes.compat.kernels import *
from passes.compat.releases import *
from passes.compat.sizes import *
from passes.compat.sources import *
from passes.compat.tracing import *
