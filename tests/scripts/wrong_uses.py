"""Uses that fail on purpose, for the tests of the harness."""
from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from tests.scripts.models import inputs, mlp, train
from tests.scripts.use import use


@use
def right(hp):
    return train(hp, mlp(), steps=1)


@use
def differs(hp):
    model = mlp()
    loss = hp.compile(model)(inputs()).sum()
    loss.backward()
    return loss * (1 if hp.mesh is None else 1 + 1e-6), model


@use
def ranks_differ(hp):
    model = mlp()
    hp.compile(model)(inputs()).sum().backward()
    return torch.tensor(1.0 + (hp.mesh is not None) * hp.rank * 1e-14), model


@use
def never_compiled(hp):
    return mlp()(inputs())


@use
def draws_another_number(hp):
    model = mlp()
    hp.compile(model)(inputs()).sum().backward()
    if hp.mesh is not None:
        torch.rand(())
    return model


@use
def raises(hp):
    if hp.mesh is not None:
        raise KeyError("nobody expects this")


@use
def is_refused(hp):
    hp.compile(mlp(), mesh={"dp": 3})(inputs())


@use(limit_s=6)
def hangs_on_one_rank(hp):
    if hp.mesh is not None and hp.rank == 1:
        time.sleep(60)
    if hp.mesh is not None:
        dist.barrier()


@use
def dies_on_one_rank(hp):
    if hp.mesh is not None:
        if hp.rank == 0:
            os._exit(7)
        dist.barrier()


@use
def works_again(hp):
    return train(hp, mlp(), steps=1)
