"""DistributedDataParallel around a model compiled with hpml: each rank's batch is its rows of the global batch."""
from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hpml_compiler.integrations.accelerate import watch_saves
from hpml_compiler.integrations.comm_hooks import compressing, compression_of
from hpml_compiler.runtime.batch.batch_pytree import map_named_tensors, named_tensors
from hpml_compiler.runtime.batch.per_rank_batch import PerRankBatches
from hpml_compiler.runtime.process.world_group import control_group
from passes.errors import BadInput

WHERE = "DistributedDataParallel around a model compiled with backend='hpml'"


class SplitDDP(DistributedDataParallel):
    """DDP shim that does not reduce gradients, since the compiled graphs do.

    DDP's interface stays: `module`, `no_sync()`, the prefix "module." in the state dict, rank 0's weights at the start, and
    plain tensor inputs that are each rank's own rows. A 0-dim output of the model (a loss) is that of the global batch; of an
    output with a row per row of the global batch, each rank gets its own rows. Gradients are those of the mean over ranks of
    the tensors on which each rank calls backward, as in DDP. Inputs from `hpml_compiler.distribute` are the global batch
    already, and outputs are then global too.
    """

    def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0,
                 process_group: Any = None, device_mesh: Any = None, **options: Any) -> None:
        group = device_mesh.get_group() if device_mesh is not None else process_group
        if group is not None and dist.get_world_size(group) != dist.get_world_size():
            raise BadInput("the model is split over all ranks, and this DDP is for some of them", WHERE,
                           "leave process_group and device_mesh out; options={'mesh': ...} of torch.compile has the axes")
        nn.Module.__init__(self)
        self.module = module
        self._become(device_ids, output_device, dim, options)

    @classmethod
    def adopt(cls, ddp: DistributedDataParallel) -> None:
        """Convert a DDP object that was made before its model was compiled."""
        if dist.get_world_size(ddp.process_group) != dist.get_world_size():
            raise BadInput("the model is to be split over all ranks, and its DDP is for some of them", WHERE,
                           "leave process_group and device_mesh out")
        held = {name: getattr(ddp, name) for name in ("device_ids", "output_device", "dim")}
        for name in ("process_group", "reducer", "logger", "device_mesh"):  # deleting the reducer removes its hooks
            vars(ddp).pop(name, None)
        ddp.__class__ = cls
        assert isinstance(ddp, cls)
        ddp._become(**held, options={})
        for hook, state in vars(ddp).pop("_comm_hooks", ()):
            ddp.register_comm_hook(state, hook)

    def _become(self, device_ids: Any, output_device: Any, dim: int, options: dict[str, Any]) -> None:
        if dim != 0:
            raise BadInput(f"rows are in dim 0 of a batch here, and dim={dim} was given", WHERE, "put the batch first")
        self.dim, self.device_ids, self.output_device = dim, device_ids, output_device
        self.find_unused_parameters = bool(options.get("find_unused_parameters"))
        self.broadcast_buffers = False
        self.gradient_as_bucket_view = self.static_graph = False
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.mixed_precision = options.get("mixed_precision")
        if self.mixed_precision is not None:
            raise BadInput("DDP's own mixed_precision is not done here", WHERE, "use torch.autocast in the script")
        self._rows, self._compress = PerRankBatches(), dict[str, str]()
        if "accelerate" in sys.modules:  # it wraps models in DDP, and writes on rank 0
            watch_saves()
        with torch.no_grad():
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                if not isinstance(tensor, DTensor):
                    dist.broadcast(tensor.data, 0)

    @property
    def process_group(self) -> Any:
        return dist.group.WORLD

    @torch.compiler.disable(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs, own = self._joined(inputs, kwargs)  # pyright: ignore[reportCallIssue]
        with compressing(self._compress):
            output = self.module(*inputs, **kwargs)
        return output if own is None else self._own_part(output, *own)  # pyright: ignore[reportCallIssue]

    @torch.compiler.disable
    def _joined(self, inputs: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any], tuple[int, int] | None]:
        """The arguments with the global batch in place of this rank's rows, and (own, global) numbers of rows, if any."""
        if kwargs.get("num_items_in_batch") is not None:
            raise BadInput("a Trainer of transformers has put this DDP around its model, and it multiplies a loss by the "
                           "number of ranks that is the global batch's already", WHERE,
                           "call hpml_compiler.one_device() before TrainingArguments are made: see docs/integrations.md")
        if self.device_ids and len(self.device_ids) == 1 and torch.cuda.is_available():
            inputs, kwargs = map_named_tensors(lambda _, t: t.to(self._device(), non_blocking=True), (inputs, kwargs))
        given = [t for t in named_tensors((inputs, kwargs)).values() if t.dim()]
        plain = [t for t in given if not isinstance(t, DTensor)]
        if not plain:
            return inputs, kwargs, None
        if len(plain) < len(given):
            raise BadInput("some inputs are rows of the global batch already, others are plain", WHERE,
                           "distribute the loader, or leave it to DDP, for all inputs")
        (inputs, kwargs) = joined = self._rows.join((inputs, kwargs))
        total = next(t.shape[0] for t in named_tensors(joined).values() if t.dim())
        return inputs, kwargs, (plain[0].shape[0], total)

    def _device(self) -> torch.device:
        device = self.device_ids[0]
        return device if isinstance(device, torch.device) else torch.device("cuda", device)

    @torch.compiler.disable
    def _own_part(self, output: Any, rows: int, total: int) -> Any:
        found = {name: t for name, t in named_tensors(output).items() if t.dim() or t.requires_grad}
        start = 0
        if any(t.dim() for t in found.values()):
            counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
            dist.all_gather(counts, torch.tensor([rows]), group=control_group())
            start = sum(int(count) for count in counts[:dist.get_rank()])
        for name, tensor in found.items():
            if tensor.dim() and tensor.shape[0] != total:
                raise BadInput(
                    f"the model returns `{name or 'a tensor'}` of shape {list(tensor.shape)}, and the global batch has {total} "
                    "rows: which part belongs to this rank's own rows cannot be told", WHERE,
                    "return a tensor with the batch in dim 0, or the loss; or leave DDP out, and let all ranks have the "
                    "global batch: hpml_compiler.distribute(loader)")
        parts = _OwnPart.apply((start, rows), *found.values()) if found else ()
        new = dict(zip(found, parts, strict=True))
        return map_named_tensors(lambda name, tensor: new.get(name, tensor), output)

    def train(self, mode: bool = True) -> SplitDDP:
        nn.Module.train(self, mode)
        return self

    def join(self, *_args: Any, **_kwargs: Any) -> Any:
        raise BadInput("DDP.join has no meaning here", WHERE,
                       "leave it out and use hpml_compiler.distribute(loader): it goes on while any rank has rows")

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self._compress = compression_of(hook, state, self.module)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self.register_comm_hook(None, comm_hook_type)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)


class _OwnPart(torch.autograd.Function):
    """Takes this rank's rows (`own` = start, rows) of global outputs that are equal on all ranks; copies 0-dim outputs.

    Backward sums the ranks' tangents into the whole tangent and divides it by the number of ranks, as in DDP's mean.
    """

    @staticmethod
    def forward(ctx: Any, own: tuple[int, int], *whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.own, ctx.shapes = own, [tensor.shape for tensor in whole]
        ctx.set_materialize_grads(False)
        parts = tuple(tensor.narrow(0, *own).clone() if tensor.dim() else tensor.clone() for tensor in whole)
        ctx.mark_non_differentiable(*(t for t in parts if not (t.is_floating_point() or t.is_complex())))
        return parts

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        world = dist.get_world_size()
        result: list[torch.Tensor | None] = []
        for shape, tangent in zip(ctx.shapes, tangents, strict=True):
            if tangent is None:
                result.append(None)
                continue
            whole = tangent.new_zeros(shape)
            (whole.narrow(0, *ctx.own) if shape else whole).copy_(tangent)
            dist.all_reduce(whole)
            result.append(whole.div_(world))
        return (None, *result)
