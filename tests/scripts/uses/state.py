"""Saving, loading, copying, moving and casting."""
from __future__ import annotations

import copy
import io
import pickle

import torch
from torch import nn

from tests.scripts.models import adamw, inputs, mlp, sgd, step, targets, train
from tests.scripts.use import use


def _steps(call, optimizer, count=2):
    return [step(call, optimizer, inputs(), targets()) for _ in range(count)]


def _through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@use
def assigns_weights(hp):
    """load_state_dict(assign=True): other tensors take the parameters' place."""
    model, other = mlp(), mlp()
    call = hp.compile(model)
    losses = _steps(call, sgd(model))
    model.load_state_dict(other.state_dict(), assign=True)
    return losses, _steps(call, sgd(model)), model


@use
def resumes_from_a_file(hp):
    model = mlp()
    call, optimizer = hp.compile(model), adamw(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = _steps(call, optimizer)
    schedule.step()
    kept = {"model": model, "optimizer": optimizer, "schedule": schedule}
    saved = _through_a_file({name: thing.state_dict() for name, thing in kept.items()})
    losses += _steps(call, optimizer)
    again = mlp()
    call, optimizer = hp.compile(again), adamw(again)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loaded = copy.deepcopy(saved)  # on one device the optimizer goes on in the tensors it is given; split ones are its own
    again.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    schedule.load_state_dict(loaded["schedule"])
    more = _steps(call, optimizer)
    return losses, more, saved, model, again, optimizer


@use
def rolls_back_model_and_optimizer(hp):
    model = mlp()
    call, optimizer = hp.compile(model), adamw(model)
    losses = _steps(call, optimizer)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    losses += _steps(call, optimizer)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    return losses, _steps(call, optimizer), model, optimizer


@use
def state_of_the_compiled_module(hp):
    """state_dict of what torch.compile returned, loaded into a plain module."""
    model = mlp()
    call = hp.compile(model)
    _steps(call, sgd(model))
    state = {k.removeprefix("_orig_mod."): v for k, v in call.state_dict().items()}
    other = mlp()
    other.load_state_dict(state)
    return state, other, [name.removeprefix("_orig_mod.") for name, _ in call.named_parameters()]


@use
def copies_model_and_optimizer_together(hp):
    model = mlp()
    call, optimizer = hp.compile(model), adamw(model)
    losses = _steps(call, optimizer)
    twin, its = copy.deepcopy((model, optimizer))
    return losses, _steps(hp.compile(twin), its), _steps(call, optimizer, 1), model, twin, its


@use
def pickles_parameters(hp):
    model = mlp()
    call = hp.compile(model)
    _steps(call, sgd(model))
    return pickle.loads(pickle.dumps(model.state_dict())), pickle.loads(pickle.dumps(model)), model


@use
def saves_the_module_whole(hp):
    model = mlp()
    _steps(hp.compile(model), sgd(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    return again, again(inputs()), train(hp, again)


@use(tolerance=2e-2)
def trains_on_in_bfloat16(hp):
    model = mlp()
    call = hp.compile(model)
    losses = _steps(call, sgd(model))
    model.bfloat16()
    out = call(inputs().bfloat16())
    out.float().square().mean().backward()
    return losses, out, [p.dtype for p in model.parameters()], model


@use
def casts_to_and_fro(hp):
    model = mlp().float()
    model.double()
    losses, *_ = train(hp, model)
    model.to(torch.float32).to(torch.float64)
    return losses, train(hp, model, steps=1)


@use
def swaps_weights_for_evaluation(hp):
    """EMA weights in, evaluation, the others back."""
    model = mlp()
    call, optimizer = hp.compile(model), adamw(model)
    ema = {k: v.clone() for k, v in model.state_dict().items()}
    seen = []
    for _ in range(2):
        seen += _steps(call, optimizer, 1)
        for k, v in model.state_dict().items():
            ema[k].lerp_(v, 0.5)
        kept = {k: v.clone() for k, v in model.state_dict().items()}
        model.load_state_dict(ema)
        with torch.no_grad():
            seen.append(call(inputs()))
        model.load_state_dict(kept)
    return seen, ema, model


@use
def swaps_data(hp):
    """The same by `.data`."""
    model = mlp()
    call, optimizer = hp.compile(model), adamw(model)
    _steps(call, optimizer)
    kept = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data * 0.5
    halved = call(inputs())
    for p, data in zip(model.parameters(), kept):
        p.data = data
    return halved, _steps(call, optimizer), model


@use
def flattens_parameters_into_a_vector(hp):
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    _steps(call, optimizer)
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, model.parameters())
    return vector, _steps(call, optimizer), model


@use
def weights_of_numpy(hp):
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    _steps(call, optimizer)
    arrays = {k: v.detach().numpy().copy() for k, v in model.state_dict().items()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(arrays[name] * 0.5))
    return _steps(call, optimizer), [a.sum().item() for a in arrays.values()], model


@use
def optimizer_made_after_some_steps(hp):
    model = mlp()
    call = hp.compile(model)
    losses = _steps(call, sgd(model))
    optimizer = adamw(model)
    return losses, _steps(call, optimizer), model, optimizer


@use
def changes_the_optimizer(hp):
    model = mlp()
    call, losses = hp.compile(model), []
    for make in (adamw, sgd, lambda m: torch.optim.RMSprop(m.parameters(), 0.01, eps=1e-4)):
        optimizer = make(model)
        losses += _steps(call, optimizer)
    return losses, model, optimizer


@use
def edits_the_optimizers_state(hp):
    model = mlp()
    call, optimizer = hp.compile(model), adamw(model)
    _steps(call, optimizer)
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)
        state["exp_avg_sq"].zero_()
        state["step"].zero_()
    return _steps(call, optimizer), model, optimizer


@use
def strict_and_partial_loading(hp):
    model = mlp()
    call, optimizer = hp.compile(model), sgd(model)
    _steps(call, optimizer)
    state = {k: v * 0 for k, v in model.state_dict().items() if k.startswith("0.")}
    missing = model.load_state_dict(state, strict=False)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        words = "Missing key" in str(error)
    return missing.missing_keys, words, _steps(call, optimizer), model


@use
def reads_pickled_random_state(hp):
    """The generators' state is saved and set again, as for an exact resume."""
    model = mlp()
    call, optimizer, seen = hp.compile(model), sgd(model), []
    state = torch.get_rng_state()
    for _ in range(2):
        torch.set_rng_state(state)
        seen.append(step(call, optimizer, torch.randn(8, 16), targets()))
    return seen, torch.rand(3), model
