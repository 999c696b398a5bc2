"""Dispatch table of `PlacedTensor`: the names of the torch functions that take each route."""
from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())



METADATA = _words(
    """dim ndimension size stride numel nelement element_size storage_offset get_device data_ptr is_contiguous
    is_floating_point is_complex is_signed is_inference is_same_size is_pinned is_conj is_neg
    is_coalesced has_names _is_view _is_zerotensor _nnz dense_dim sparse_dim
    requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook backward __len__ __hash__ __dir__
    __delete__ detach_
    """
)
"""Functions that the wrapper answers itself: shapes are those of the full tensor."""

MEMORY = _words("untyped_storage storage _typed_storage is_set_to")
"""Functions on a tensor's memory, see `storage_access`. Not `data_ptr`: 0 tells torch's stager of asynchronous checkpoints
that a tensor only wraps others."""

COMPUTED_ATTRIBUTES = frozenset(["T", "mT", "H", "mH", "real", "imag", "data"])
"""Attributes that are ops. All others are metadata."""

_POINTWISE = """add sub mul div true_divide addcmul addcdiv lerp pow sqrt rsqrt reciprocal square neg abs sign exp log
    clamp clamp_min clamp_max minimum maximum copy zero fill conj positive"""
_OPERATORS = """__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__
    __itruediv__ __div__ __rdiv__ __idiv__ __pow__ __ipow__ __neg__ __abs__ __pos__ detach detach_ clone zeros_like
    ones_like empty_like full_like rsub"""
_FUSED = "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_"
ON_LOCALS = frozenset(
    [variant for name in _POINTWISE.split() for variant in (name, f"{name}_", f"_foreach_{name}", f"_foreach_{name}_")]
    + _OPERATORS.split()
    + _FUSED.split()
    + ["_foreach_norm", "to"]
)
"""Pointwise ops, used by optimizers, and ops of `clip_grad_norm_`: operands of one placement need only their local
parts."""

VIEWS = _words(
    """__getitem__ select narrow chunk split split_with_sizes tensor_split hsplit vsplit dsplit unbind view view_as
    transpose permute t squeeze unsqueeze expand expand_as diagonal unflatten movedim swapaxes swapdims as_strided
    unfold"""
)
"""Ops whose result shares storage with their first argument."""

NO_BACKWARD = _words("chunk split split_with_sizes tensor_split hsplit vsplit dsplit unbind diagonal")
"""Views whose backward DTensor lacks: with several views, it mixes in plain zeros; torch 2.11 has none of a diagonal."""

CASTS = _words("to cpu cuda xpu type float double half bfloat16 long int short char byte bool contiguous clone detach")

DIFFERENTIABLE = (ON_LOCALS - {"_foreach_norm"}) | VIEWS | CASTS | _words("sum mean __get__ __iter__")
"""Ops run by DTensor if a gradient flows: enough for penalties on parameters. DTensor's backward of others can be
wrong (that of a maximum norm gives NaN)."""

NEW = _words("new_zeros new_ones new_full")

NORMS = _words("norm vector_norm linalg_vector_norm")

ON_DTENSORS = DIFFERENTIABLE | NORMS | _words("_foreach_norm stack new_empty")
"""Ops run by DTensor if all operands are placed: those of optimizers, clipping and moving a model. Each is tested
against plain tensors. All others run on full tensors, since DTensor computes some of them for one rank only, draws
random numbers that differ from one device's, or raises after it has written."""

OF_SOME_RANKS = _words("send recv isend irecv recv_anysource scatter")
"""Collectives that not all ranks call, or in which one rank alone provides the input."""

REDUCTIONS = _words("all_reduce allreduce all_reduce_coalesced allreduce_coalesced reduce")

UNLIKE_RESULTS = _words(
    """gather scatter reduce_scatter reduce_scatter_single reduce_scatter_tensor _reduce_scatter_base all_to_all
    all_to_all_single alltoall alltoall_base reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced"""
)
"""Collectives whose result differs between ranks, or goes to one rank. (Not `reduce`: torch promises its result to one rank
and leaves the others undefined.)"""

COALESCED = _words("""all_gather_single_coalesced allgather_into_tensor_coalesced reduce_scatter_single_coalesced
    reduce_scatter_tensor_coalesced""")
"""Methods of a process group that only the end of torch's `_coalescing_manager` calls."""

WRITES_UNSEEN = _words("batch_norm instance_norm native_batch_norm _native_batch_norm_legit fused_moving_avg_obs_fake_quant")
"""Ops that write running statistics without incrementing the tensor's version counter."""

KEEPS_ROWS = _words(
    """to cpu cuda xpu type float double half bfloat16 long int short bool contiguous clone detach pin_memory"""
)
"""Ops on one tensor that keep every element in its row."""


def in_place(name: str) -> bool:
    """True if a torch function of that name writes to its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name[3:] in _IN_PLACE_OPERATORS)
    return name.endswith("_")


_IN_PLACE_OPERATORS = _words(
    """add__ sub__ mul__ div__ truediv__ floordiv__ pow__ mod__ and__ or__ xor__ lshift__ rshift__ matmul__"""
)
