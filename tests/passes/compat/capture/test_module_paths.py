"""A model whose forward is reached in a roundabout way -> the paths of its modules, which are those of its parameters."""
from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from passes.graph.module_blocks import assign_blocks, assign_modules
from tests.passes.traced import trace_joint


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.up(self.norm(x))


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.head = Body(), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.model(x)).square().mean()


class Decorated(Model):
    forward = decorated(Model.forward)


class Twice(Model):
    forward = decorated(decorated(Model.forward))


class Within(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def patched():
    """Each layer's forward is an attribute of the layer that calls its old one, as offloading and quantizing libraries do."""
    model = Model()
    for layer in model.model.layers:
        layer.old = layer.forward
        layer.forward = functools.partial(lambda self, x: self.old(x), layer)
    return model


def closed_over():
    model = Model()
    inner = model.model.forward
    model.model.forward = lambda x: inner(x)
    return model


def partial():
    model = Model()
    model.forward = functools.partial(model.forward)
    return model


def layers_decorated():
    model = Model()
    for layer in model.model.layers:
        layer.forward = decorated(layer.forward)
    return model


def in_a_function():
    model = Decorated()
    return lambda x: model(x)


@pytest.mark.parametrize(("make", "prefix"), [
    (Model, ""), (Decorated, ""), (Twice, ""), (partial, ""), (patched, ""), (closed_over, ""), (layers_decorated, ""),
    (in_a_function, ""), (lambda: Within(Decorated()), "module."), (lambda: nn.DataParallel(Decorated()), "module."),
    (lambda: torch.compile(Decorated()), "")])
def test_modules_have_the_names_of_their_parameters(make, prefix):
    gm = trace_joint(make(), torch.randn(2, 8)).gm
    assert set(assign_blocks(gm).values()) - {""} == {f"{prefix}model.layers.{k}" for k in range(3)}
    modules = set(assign_modules(gm).values())
    assert {f"{prefix}head", *(f"{prefix}model.layers.{k}.{part}" for k in range(3) for part in ("norm", "up"))} <= modules


def test_layers_in_a_list_stay_apart():
    layers = [Layer() for _ in range(3)]

    def step(layers, x):
        for layer in layers:
            x = layer(x)
        return x.square().mean()

    gm = trace_joint(step, layers, torch.randn(2, 8)).gm
    assert set(assign_blocks(gm).values()) - {""} == {"0", "1", "2"}
