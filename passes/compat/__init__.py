"""The only place that touches private modules of torch, and where releases 2.11 to 2.15 differ.

What takes long to load, such as `torch._inductor` and `torch._dynamo`, is imported when it is used.
"""
from torch._ops import OpOverload
from torch.utils import _pytree as pytree  # arguments and results of ops are nested; torch has no public name for this

from passes.compat.dtensor import (
    as_interned,
    dtensor_spec,
    forget_interned_specs,
    interned_spec,
    local_shape_and_offset,
    make_dtensor,
    norm_partial,
    plain_torch_functions,
)
from passes.compat.dynamo import (
    backend_of,
    break_graph,
    compiled_module_type,
    duplicated_inputs,
    dynamo_tried_in_vain,
    frame_being_compiled,
    function_being_compiled,
    guard_on_placement,
    input_sources,
    on_recompile_limit,
    quiet_dynamo,
    source_name,
    trace_as,
    untraced,
)
from passes.compat.eager import (
    adopt_foreach_type,
    convert_before_differentiating,
    inside_transform,
    outside_transforms,
    profiler_is_on,
    set_cpp_log_level,
    use_count,
    will_accumulate,
)
from passes.compat.groups import collectives_through_host, group_timeout, side_store, through_host
from passes.compat.inductor import (
    compile_with_inductor,
    default_partition,
    eager_decompositions,
    inductor_decompositions,
    inductor_joint_passes,
    inductor_whole,
    is_fused_kernel,
    min_cut_partition,
    visible_kernels,
    warm_cpp_compiler,
)
from passes.compat.sizes import depends_on_data, ints_of_sizes, size_hint, static_int
from passes.compat.tracing import (
    aot_autograd,
    fake_mode,
    fake_mode_of,
    inputs_written,
    is_effect_token,
    is_fake,
    outside_tracing,
    tracing_fake_mode,
)
