"""Custom autograd Functions in the forms that scripts give them, for `tests/scripts/uses/functions.py`."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

WIDTH = 16
Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows, a parameter of one row) -> rows."""
FORMS: dict[str, Call] = {}


def form(call: Call) -> Call:
    FORMS[call.__name__] = call
    return call


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
        ctx.save_for_backward(x, w)
        return x * w + 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


@form
def plain(x, w):
    return Scale.apply(x, w)


@form
def twice(x, w):
    return Scale.apply(Scale.apply(x, w).tanh(), w)


class Outer(Scale):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return Scale.apply(x, w)


@form
def within_another(x, w):
    return Outer.apply(x, w)


class InPlace(Scale):
    @staticmethod
    def forward(ctx, x, w):
        y = x.clone()
        y *= w
        y += 1
        ctx.save_for_backward(x, w)
        return y


@form
def in_place_forward(x, w):
    return InPlace.apply(x, w)


class InPlaceBackward(Scale):
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        of_w = (g * x).sum(0)
        g = g.clone()
        g.mul_(w)
        return g, of_w


@form
def in_place_backward(x, w):
    return InPlaceBackward.apply(x, w)


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x.clone(), w)
        x.mul_(w)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


@form
def mark_dirty(x, w):
    return Dirty.apply(x * 1.5, w)


class Several(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx, g, h):
        x, w = ctx.saved_tensors
        return g * w + h, (g * x + h).sum(0)


@form
def several_outputs(x, w):
    one, two = Several.apply(x, w)
    return one.tanh() + two


@form
def one_of_several_outputs(x, w):
    return Several.apply(x, w)[1]


class Unmaterialized(Several):
    @staticmethod
    def forward(ctx, x, w):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx, g, h):
        x, w = ctx.saved_tensors
        assert h is None
        return g * w, (g * x).sum(0)


@form
def gradients_not_materialized(x, w):
    return Unmaterialized.apply(x, w)[0]


class NonDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        mask = x * w > 0
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(x, w, mask)
        return torch.where(mask, x * w, 0.1 * x), mask

    @staticmethod
    def backward(ctx, g, _):
        x, w, mask = ctx.saved_tensors
        return torch.where(mask, g * w, 0.1 * g), (g * x * mask).sum(0)


@form
def a_mask_without_gradient(x, w):
    y, mask = NonDifferentiable.apply(x, w)
    return y + mask.to(y.dtype)


class Constants(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor, w, mode, nothing, flags):
        ctx.factor, ctx.mode, ctx.flag = factor, mode, flags[0]
        ctx.save_for_backward(x, w)
        return x * w * factor if mode == "product" else x

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        assert ctx.mode == "product" and ctx.flag
        return g * w * ctx.factor, None, (g * x).sum(0) * ctx.factor, None, None, None


@form
def arguments_that_are_no_tensors(x, w):
    return Constants.apply(x, 1.5, w, "product", None, (True, 2))


class SavesOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        y = torch.sigmoid(x * w)
        ctx.save_for_backward(x, w, y)
        return y

    @staticmethod
    def backward(ctx, g):
        x, w, y = ctx.saved_tensors
        g = g * y * (1 - y)
        return g * w, (g * x).sum(0)


@form
def saves_its_output(x, w):
    return SavesOutput.apply(x, w)


class Once(Scale):
    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


@form
def differentiable_once(x, w):
    return Once.apply(x, w)


class SetupContext(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x * w + 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.rows = output.shape[0]

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


@form
def setup_context(x, w):
    return SetupContext.apply(x, w)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


@form
def straight_through(x, w):
    return Straight.apply(x * 4 * w) / 4


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.factor * g, None


@form
def reversed_gradient(x, w):
    return Reversed.apply(x, 0.5) * w


class FromWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w.sigmoid()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        gate = w.sigmoid()  # before anything reads the gradient
        slope = gate * (1 - gate)
        return g * gate, (g * x).sum(0) * slope


@form
def backward_begins_without_gradient(x, w):
    return FromWeights.apply(x, w)


class NeedsInputGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, frozen):
        ctx.save_for_backward(x, w, frozen)
        return x * w * frozen

    @staticmethod
    def backward(ctx, g):
        x, w, frozen = ctx.saved_tensors
        return (g * w * frozen if ctx.needs_input_grad[0] else None,
                (g * x * frozen).sum(0) if ctx.needs_input_grad[1] else None,
                (g * x * w).sum(0) if ctx.needs_input_grad[2] else None)


@form
def needs_input_grad(x, w):
    return NeedsInputGrad.apply(x, w, torch.full_like(w, 0.7).detach())


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ torch.diag(w).t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ torch.diag(w), torch.diagonal(g.t() @ x)


@form
def matmuls(x, w):
    return Linear.apply(x, w)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, w, scale)
        return x * scale * w

    @staticmethod
    def backward(ctx, g):
        x, w, scale = ctx.saved_tensors
        normed = x * scale
        return scale * (g * w - normed * (g * w * normed).mean(-1, keepdim=True)), (g * normed).sum(0)


@form
def norm(x, w):
    return RMSNorm.apply(x, w)


class Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        mask = (torch.rand_like(x) > p).to(x.dtype) / (1 - p)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, g):
        (mask,) = ctx.saved_tensors
        return g * mask, None


@form
def draws_a_mask(x, w):
    return Dropout.apply(x * w, 0.25)


class Amp(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


@form
def custom_fwd_and_bwd(x, w):
    return Amp.apply(x, w)


class Many(torch.autograd.Function):
    @staticmethod
    def forward(ctx, count, *tensors):
        ctx.count = count
        ctx.save_for_backward(*tensors)
        x, *weights = tensors
        for w in weights:
            x = x * w
        return x

    @staticmethod
    def backward(ctx, g):
        x, *weights = ctx.saved_tensors
        of_x, found = g, []
        for w in weights:
            of_x = of_x * w
        for k in range(ctx.count):
            rest = g * x
            for j, w in enumerate(weights):
                rest = rest * w if j != k else rest
            found.append(rest.sum(0))
        return None, of_x, *found


@form
def arguments_in_a_list(x, w):
    return Many.apply(2, x, w, w.tanh())


@form
def checkpointed(x, w):
    return torch.utils.checkpoint.checkpoint(lambda x, w: Scale.apply(x, w).tanh(), x, w, use_reentrant=False)


class Unsaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.x, ctx.w = x, w
        return x * w

    @staticmethod
    def backward(ctx, g):
        return g * ctx.w, (g * ctx.x).sum(0)


@form
def tensors_kept_as_attributes(x, w):
    return Unsaved.apply(x, w)


class Functional(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return F.gelu(x * w)

    @staticmethod
    def backward(ctx, g):
        x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = F.gelu(x * w)
        return torch.autograd.grad(y, (x, w), g)


@form
def recomputes_by_autograd(x, w):
    return Functional.apply(x, w)


@torch.compiler.disable
def _apart(x, w):
    return Scale.apply(x, w)


@form
def not_compiled(x, w):
    return _apart(x, w)


class Block(nn.Module):
    def __init__(self, call: Call | None = None, last: bool = False):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)) if call else None
        self.call, self.last = call, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.call and not self.last:
            x = self.call(x, self.scale)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.call(x, self.scale) if self.call and self.last else x


class Net(nn.Module):
    """Two blocks and a head, with the loss. The Function is at `place`: before the blocks (of the batch itself), in both, at
    the end of both, between them, or after the head."""

    def __init__(self, name: str, place: str):
        super().__init__()
        self.call, self.place = FORMS[name], place
        inside = self.call if place in ("in_blocks", "ends_blocks") else None
        self.blocks = nn.ModuleList([Block(inside, place == "ends_blocks") for _ in range(2)])
        self.head = nn.Linear(WIDTH, WIDTH)
        if inside is None:
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.call(x, self.scale) if self.place == "start" else x
        x = self.blocks[0](x)
        x = self.call(x, self.scale) if self.place == "between" else x
        x = self.head(self.blocks[1](x))
        return F.mse_loss(self.call(x, self.scale) if self.place == "end" else x, y)


PLACES = ("start", "in_blocks", "between", "ends_blocks", "end")
