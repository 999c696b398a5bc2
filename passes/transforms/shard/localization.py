"""Turn the arguments of a whole call into those of the call on local tensors.

Most operators need nothing: the local call on local operands gives the local result. Ops with size arguments (`view`,
`full`) get local sizes, positions start at the rank's range, and indices into a split dim are
shifted into that range and masked (`passes.transforms.shard.sharded_indexing`).
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from passes.op_rules.base import Rule
from passes.op_rules.rule_table import name_of
from passes.transforms.rewriting.call_inserter import CallInserter
from passes.transforms.shard.local_call import LocalCall, ShardRange
from passes.transforms.shard.rank_coordinate import times
from passes.transforms.shard.redistributor import reshape
from passes.transforms.shard.sharded_indexing import INDEXED
from passes.transforms.shard.stride_sensitive_ops import FACTORS, factorization, scaled_mm

aten, prims = torch.ops.aten, torch.ops.prims


SIZES_AT = {
    aten.expand.default: 1, aten.full.default: 0, aten.empty.memory_format: 0, aten.zeros.default: 0,
    aten.ones.default: 0, aten.new_full.default: 1, aten.new_zeros.default: 1, aten.new_ones.default: 1,
    aten.new_empty.default: 1, aten.unfold_backward.default: 1,
    **{op: 2 for op in (
        aten.upsample_nearest1d_backward.default, aten.upsample_nearest2d_backward.default,
        aten.upsample_nearest3d_backward.default, aten._upsample_nearest_exact1d_backward.default,
        aten._upsample_nearest_exact2d_backward.default, aten._upsample_nearest_exact3d_backward.default,
        aten.upsample_linear1d_backward.default, aten.upsample_bilinear2d_backward.default,
        aten.upsample_trilinear3d_backward.default, aten.upsample_bicubic2d_backward.default,
        aten._upsample_bilinear2d_aa_backward.default, aten._upsample_bicubic2d_aa_backward.default,
        *((aten._upsample_lanczos2d_aa_backward.default,) if hasattr(aten, "_upsample_lanczos2d_aa_backward") else ()),
    )},
}
"""Operator -> position of the argument that is the shape of the (first) result."""
RESHAPES = {
    **{op: 0 for op in (
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.squeeze.default, aten.squeeze.dim,
        aten.squeeze.dims, aten.as_strided.default,
    )},
    aten.as_strided_scatter.default: 1,
}
"""Operator -> position of the operand that is reshaped. A dim that is split down to size 1 must not be squeezed."""


def _last_dim_packed(value: torch.Tensor) -> bool:
    return value.dim() == 0 or value.shape[-1] == 1 or value.stride(-1) == 1


def _last_stride_is_one(value: torch.Tensor) -> bool:
    """True even if the last dim has one element."""
    return value.dim() == 0 or value.stride(-1) == 1


def _strictly_packed(value: torch.Tensor) -> bool:
    return value.is_contiguous() and _last_stride_is_one(value)


def _matrices_packed(value: torch.Tensor) -> bool:
    """True if rows or columns are contiguous and 16-byte aligned."""
    if value.dim() < 2:
        return True
    unit = 16 // value.element_size()
    (rows, columns), (by_row, by_column) = value.shape[-2:], value.stride()[-2:]
    return (by_column == 1 and by_row >= columns and by_row % unit == 0) or (
        by_row == 1 and by_column >= rows and by_column % unit == 0
    )


PACKED: dict[str, Callable[[torch.Tensor], bool]] = {
    **{
        f"aten::_scaled_dot_product_{kind}{direction}": _last_dim_packed
        for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
        for direction in ("", "_backward")
    },
    "aten::view.dtype": _last_stride_is_one,
    "aten::view_as_complex": _last_dim_packed,
    "aten::_weight_norm_interface": torch.Tensor.is_contiguous,
    "aten::_weight_norm_interface_backward": torch.Tensor.is_contiguous,
    "aten::adaptive_max_pool3d_backward": torch.Tensor.is_contiguous,
    "aten::_grouped_mm": _matrices_packed,
    "aten::linalg_matrix_exp": torch.Tensor.is_contiguous,
    # The strides decide which of its results are filled.
    **dict.fromkeys(("aten::_embedding_bag", "aten::_embedding_bag_forward_only"), _strictly_packed),
}
"""Operator by name -> layout that its kernel assumes of its operands, in part without checking."""


def localize(call: LocalCall, insert: CallInserter) -> Node:
    """Emit the local call; returns its node."""
    if name_of(call.target) in PACKED:
        call = _packed(call, insert)
    if call.target in RESHAPES and call.rule is not None:
        return reshape(insert, call.args[RESHAPES[call.target]], call.local_shapes[0])
    if call.ranges:
        if call.target not in INDEXED:
            raise AssertionError(f"{call.target}: its rule splits an indexed dim, but nothing here shifts its indices")
        return INDEXED[call.target](call, insert)
    if call.ordered and call.target not in SPECIAL:
        raise AssertionError(f"{call.target}: its rule splits a dim of positions, but nothing here shifts them")
    if call.target in SPECIAL:
        return SPECIAL[call.target](call, insert)
    args = list(call.args)
    if call.target in SIZES_AT:
        args[SIZES_AT[call.target]] = list(call.local_shapes[0])
    return insert(call.target, *args, **call.kwargs)


def _packed(call: LocalCall, insert: CallInserter) -> LocalCall:
    """Pack operands: collectives leave values in strides that the whole graph never had."""
    packed = PACKED[name_of(call.target)]

    def pack(x: Any) -> Any:
        if isinstance(x, Node) and isinstance(x.meta.get("val"), torch.Tensor) and not packed(x.meta["val"]):
            return insert(aten.clone.default, x, memory_format=torch.contiguous_format)
        return x

    return replace(call, args=tuple(map(pack, call.args)), kwargs={k: pack(x) for k, x in call.kwargs.items()})


def _window(call: LocalCall, insert: CallInserter, first: int) -> Node:
    """slice and slice_scatter; `first` is the position of dim among the arguments."""
    dim = call.argument(first, "dim", 0) % len(call.global_shapes[0])
    ratio = call.ratio(dim)
    if ratio <= 1:
        return insert(call.target, *call.args, **call.kwargs)
    size = int(call.args[0].meta["val"].shape[dim])
    step = call.argument(first + 3, "step", 1)
    start, stop, _ = slice(call.argument(first + 1, "start"), call.argument(first + 2, "end"), step).indices(size * ratio)
    # Of every `step` elements one: the same one. Of a run of blocks: the same blocks, each a part of the whole one.
    bounds = (start, size) if step > 1 else (start // ratio, stop // ratio)
    return insert(call.target, *call.args[:first], dim, *bounds, step)


def _split(call: LocalCall, insert: CallInserter) -> Node:
    dim = call.argument(2, "dim", 0) % len(call.global_shapes[0])
    ratio = call.ratio(dim)
    sizes = call.args[1]
    return insert(call.target, call.args[0], sizes // ratio if isinstance(sizes, int) else [s // ratio for s in sizes], dim)


def _repeat(call: LocalCall, insert: CallInserter) -> Node:
    """Repetitions per dim are the ratio of result to operand, and so are local ones."""
    own = [1] * (len(call.local_shapes[0]) - call.args[0].meta["val"].dim()) + list(call.args[0].meta["val"].shape)
    sizes = [n // size if size else t for n, size, t in zip(call.local_shapes[0], own, call.args[1])]
    return insert(call.target, call.args[0], sizes)


def _convolution(call: LocalCall, insert: CallInserter) -> Node:
    args = list(call.args)
    args[8] = _groups(args[1], call.local_shapes[0][1] if args[6] else args[0].meta["val"].shape[1])
    return insert(call.target, *args, **call.kwargs)


def _groups(weight: Node, channels: int) -> int:
    """Number of groups, from the channels that the weight has per group (output channels if transposed)."""
    return int(channels) // int(weight.meta["val"].shape[1])


def _convolution_backward(call: LocalCall, insert: CallInserter) -> Node:
    args = list(call.args)
    channels = int(args[0].meta["val"].shape[1])
    if args[3] is not None:  # sizes of the bias: output channels, as grad_output has them locally
        args[3] = [channels]
    args[9] = _groups(args[2], channels if args[7] else args[1].meta["val"].shape[1])
    return insert(call.target, *args, **call.kwargs)


def _iota(call: LocalCall, insert: CallInserter) -> Node:
    """args: length; start, step, …"""
    if not call.ordered:
        return insert(call.target, *call.args, **call.kwargs)
    own, start, step = call.ordered[0], call.kwargs["start"], call.kwargs["step"]
    if call.at_run_time:
        return _from_asked(call, insert, insert(call.target, own.count, **call.kwargs), step)
    return own.marked(insert(call.target, own.count, **{**call.kwargs, "start": start + own.first * step}))


def _from_asked(call: LocalCall, insert: CallInserter, positions: Node, step: int) -> Node:
    """Shift positions of the first rank to this rank's."""
    begin = call.ordered[0].start_node(insert, positions.meta["val"].device)
    return positions if isinstance(begin, int) else insert(aten.add.Tensor, positions, times(insert, begin, step))


def _arange(call: LocalCall, insert: CallInserter) -> Node:
    """args: (end), (start, end) or (start, end, step); the result's type follows from theirs."""
    if not call.ordered:
        return insert(call.target, *call.args, **call.kwargs)
    own = call.ordered[0]
    number = int if all(isinstance(x, int) for x in call.args) else float
    start = number(call.args[0] if len(call.args) > 1 else 0)
    step = number(call.args[2] if len(call.args) > 2 else 1)
    exact = call.kwargs.get("dtype") in (None, torch.int64)  # others would be rounded otherwise
    if call.at_run_time and number is int and exact:
        positions = insert(aten.arange.start_step, start, start + own.count * step, step, **call.kwargs)
        return _from_asked(call, insert, positions, int(step))
    # Half a step before the next position: rounding must not make one more or one less.
    end = start + (own.first + own.count) * step - (0 if number is int else step / 2)
    return own.marked(insert(aten.arange.start_step, start + own.first * step, end, step, **call.kwargs))


def _empty_strided(call: LocalCall, insert: CallInserter, position: int) -> Node:
    """args from `position`: size, stride. The local tensor is packed in the whole one's order of dims."""
    strides = list(call.args[position + 1])
    if call.local_shapes != call.global_shapes:
        step = 1
        for d in sorted(range(len(strides)), key=lambda d: strides[d]):
            strides[d], step = step, step * max(call.local_shapes[0][d], 1)
    return insert(call.target, *call.args[:position], list(call.local_shapes[0]), strides, **call.kwargs)


def _reads_memory(call: LocalCall, insert: CallInserter) -> Node:
    """as_strided of a whole operand: a collective or another operator may have changed its strides."""
    x, value = call.args[0], call.args[0].meta["val"]
    wanted = call.strides[0] if call.strides else value.stride()
    if tuple(value.stride()) != tuple(wanted):
        order = sorted(range(value.dim()), key=lambda d: -wanted[d])
        x = insert(aten.clone.default, insert(aten.permute.default, x, order), memory_format=torch.contiguous_format)
        x = insert(aten.permute.default, x, [order.index(d) for d in range(value.dim())])
        sizes = value.shape
        if any(size > 1 and a != b for size, a, b in zip(sizes, x.meta["val"].stride(), wanted)):
            raise AssertionError(f"{call.target}: cannot lay out {tuple(sizes)} with strides {wanted}")
    return insert(call.target, x, *call.args[1:], **call.kwargs)


def _attention_backward(call: LocalCall, insert: CallInserter, lengths: int) -> Node:
    """Backward of attention on GPUs, which is told the lengths of its queries and keys, in this order from `lengths` on."""
    args = list(call.args)
    args[lengths:lengths + 2] = (call.local_shapes[0][2], call.local_shapes[1][2])
    return insert(call.target, *args, **call.kwargs)


SPECIAL: dict[Any, Callable[[LocalCall, CallInserter], Node]] = {
    aten.slice.Tensor: lambda c, i: _window(c, i, 1),
    aten.slice_scatter.default: lambda c, i: _window(c, i, 2),
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.repeat.default: _repeat,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.empty_strided.default: lambda c, i: _empty_strided(c, i, 0),
    aten.new_empty_strided.default: lambda c, i: _empty_strided(c, i, 1),
    aten.as_strided.default: _reads_memory,
    aten.as_strided_scatter.default: _reads_memory,
    aten._scaled_mm.default: scaled_mm,
    aten._scaled_dot_product_flash_attention_backward.default: lambda c, i: _attention_backward(c, i, 8),
    aten._scaled_dot_product_cudnn_attention_backward.default: lambda c, i: _attention_backward(c, i, 11),
    **{op: factorization for op in FACTORS},
    prims.iota.default: _iota,
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
}


def shifted_ranges(
    rule: Rule | None, split: Callable[[bool, int, int], ShardRange | None]
) -> dict[int, ShardRange]:
    """Operand of indices -> this rank's range, for every indexed letter whose dim is split.

    `split(is_input, tensor, dim)` returns the range of a split dim, or None.
    """
    found: dict[int, ShardRange] = {}
    if rule is None:
        return found
    for letter, operand in rule.indexed.items():
        for is_input, tensors in ((True, rule.inputs), (False, rule.outputs)):
            for t, dims in enumerate(tensors):
                for d, row in enumerate(dims):
                    own = split(is_input, t, d) if letter in row else None
                    if own is not None:
                        found[operand] = own
    return found


def ordered_ranges(
    rule: Rule | None, split: Callable[[bool, int, int], ShardRange | None]
) -> dict[int, ShardRange]:
    """Dim of the first result -> this rank's range, for every ordered letter whose dim is split; `split` as above."""
    if rule is None or not rule.ordered:
        return {}
    ranges = {d: split(False, 0, d) for d, row in enumerate(rule.outputs[0]) if rule.ordered.intersection(row)}
    return {d: own for d, own in ranges.items() if own is not None}
