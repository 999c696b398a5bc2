"""The only package that uses private modules of torch, and handles differences between releases 2.11 to 2.15.

Modules that take long to load, such as `torch._inductor` and `torch._dynamo`, are imported on first use.
"""
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree as pytree  # arguments and results of ops are nested; torch has no public name for this

from passes.compat.aot.aot_epilogue import *
from passes.compat.aot.aot_tracing import *
from passes.compat.aot.custom_ops import *
from passes.compat.aot.decomposition_tables import *
from passes.compat.aot.lazy_graphs import *
from passes.compat.capture.backend_inputs import *
from passes.compat.capture.compilations import *
from passes.compat.capture.dynamo import *
from passes.compat.capture.dynamo_sources import *
from passes.compat.capture.fake_calls import *
from passes.compat.capture.function_outputs import *
from passes.compat.capture.symint import *
from passes.compat.codegen.batch_cpp_kernels import *
from passes.compat.codegen.cpp_warmup import *
from passes.compat.codegen.inductor import *
from passes.compat.codegen.random_at import *
from passes.compat.execution.collective_waits import *
from passes.compat.execution.dtensor_internals import *
from passes.compat.execution.eager_internals import *
from passes.compat.execution.process_groups import *
from passes.compat.patching.patches import NEW_PROCESS_GROUP_METHODS, PROCESS_GROUP_METHODS, replace_for_good, wrapping
from passes.compat.patching.torch_releases import *
