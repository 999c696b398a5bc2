"""Every function of lists in torch's database, on lists that hold placed tensors, too -> one device's values."""
from __future__ import annotations

import itertools
import os
import random

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from hpml_compiler.runtime.placements.inner_shard import InnerShard
from hpml_compiler.runtime.placements.single_rank_placement import SingleRank
from tests.hpml_compiler.runtime.test_same_as_plain import placed, same
from tests.operators import database

LENGTH = 4
ALL, SOME = tuple(range(LENGTH)), (0, 2)
PLACEMENTS = (Shard(0), Shard(1), Replicate(), Partial(), SingleRank(1), InnerShard(0, 2))


def calls():
    """Functions and their arguments; those of one function are a list, a scalar, a list of scalars, or a tensor."""
    for entry in database.foreach_entries():
        samples = entry.sample_inputs("cpu", torch.float64, num_input_tensors=[LENGTH], same_size=True)
        given = [dict(enumerate([sample.input, *sample.args])) | sample.kwargs for sample in samples]
        for call in given:
            call.pop("disable_fastpath", None)
        given += [call | {"scalars": torch.tensor(call["scalars"], dtype=torch.float64)} for call in given if "scalars" in call]
        for call in {tuple(map(kind_of, call.items())): call for call in given}.values():
            for function in functions(entry.name):
                yield function, call


def functions(name):
    """`torch._foreach_add`, `torch._foreach_add_`, and those of `torch.foreach`, which torch 2.15 has."""
    public = getattr(torch, "foreach", None)
    for each in (name, name + "_"):
        yield from filter(None, (getattr(torch, each, None), getattr(public, each.removeprefix("_foreach_"), None)))


def kind_of(argument):
    key, value = argument
    if key in ("ord", "dtype"):
        return value
    first = value[0] if isinstance(value, (list, tuple)) else value
    kind = type(value) if isinstance(value, (list, tuple, torch.Tensor)) else "number"
    return key, kind, isinstance(first, (complex, torch.Tensor))


def by_name(function, call):
    """The call with all but its first argument given by name."""
    packet = getattr(torch.ops.aten, function.__name__, None)
    for name in () if packet is None or function.__module__ == "torch.foreach" else packet.overloads():
        names = [argument.name for argument in getattr(packet, name)._schema.arguments]
        renamed = {key if key == 0 or isinstance(key, str) or key >= len(names) else names[key]: value
                   for key, value in call.items()}
        if not isinstance(outcome(function, copied(renamed)), Exception):
            return renamed
    return call


def forms(call):
    """The call as it is, and with operands that are broadcast or have no dims, as norms."""
    yield call
    for number, value in call.items():
        if number != 0 and is_list(value):
            yield call | {number: [t[:, :1] for t in value]}
            yield call | {number: [t[0, 0] for t in value]}


def patterns(call):
    """Which tensors are placed: for each argument the indices at which it is."""
    tensors = [number for number, value in call.items() if is_list(value) or isinstance(value, torch.Tensor)]
    found = [dict.fromkeys(tensors, ALL), dict.fromkeys(tensors, SOME)]
    for number in tensors:
        found += [{number: ALL}, {number: SOME}, dict.fromkeys(tensors, ALL) | {number: SOME}]
    return [pattern for index, pattern in enumerate(found) if pattern not in found[:index]]


def is_list(value):
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], torch.Tensor)


def mapped(function, call):
    """The call with each tensor changed; the function also gets the name of the argument and the index in its list."""
    return {key: [function(t, key, index) for index, t in enumerate(value)] if is_list(value)
            else function(value, key, 0) if isinstance(value, torch.Tensor) else value for key, value in call.items()}


def copied(call):
    return mapped(lambda t, *_: t.clone(), call)


def put(call, pattern, mesh, placements):
    """The call with the tensors of the pattern placed, the placements in turn."""
    turn = itertools.cycle(placements)

    def one(tensor, key, index):
        if index not in pattern.get(key, ()):
            return tensor.clone()
        placement = next(turn)
        if (tensor.dim() < 2 or tensor.shape[1] == 1) and type(placement) not in (Replicate, Partial, SingleRank):
            placement = Replicate()  # nothing to split in a tensor of one column, or of no dims
        return placed(tensor.clone(), mesh, placement if tensor.dim() else Partial())

    return mapped(one, call)


def outcome(function, call):
    try:
        return function(*(value for key, value in call.items() if isinstance(key, int)),
                        **{key: value for key, value in call.items() if isinstance(key, str)})
    except Exception as error:
        return error


def wrong(function, call, ours):
    """What is not as on one device, in words."""
    theirs = copied(call)
    expected, kinds = outcome(function, theirs), mapped(lambda t, *_: type(t), ours)
    actual = outcome(function, ours)
    if not isinstance(expected, Exception) and (type(actual) is not type(expected) or (expected is theirs.get(0)) != (
            actual is ours.get(0))):
        return f"{actual!r:.300} is another container than {expected!r:.100}"
    if isinstance(expected, Exception) or isinstance(actual, Exception):
        both = isinstance(expected, Exception) and isinstance(actual, Exception)
        return None if both else f"{actual!r:.300} is not {expected!r:.100}"
    try:
        for mine, plain in ((actual, expected), *zip(ours.values(), theirs.values(), strict=True)):
            same(mine, plain)
        assert kinds == mapped(lambda t, *_: type(t), ours)
    except Exception as error:
        return f"{type(error).__name__} {str(error)[:300]}"
    return None


def cases():
    arrangements = itertools.cycle(itertools.chain.from_iterable(
        ([PLACEMENTS[n]], [*PLACEMENTS[n:], *PLACEMENTS[:n]]) for n in range(len(PLACEMENTS))))
    for function, call in calls():
        for form in forms(call):
            named = by_name(function, form)
            for pattern in patterns(form):
                yield function, form, pattern, next(arrangements)
                if named.keys() != form.keys():
                    names = dict(zip(form, named, strict=True))
                    yield function, named, {names[key]: at for key, at in pattern.items()}, next(arrangements)


def run_all(rank, everything):
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    random.seed(0)
    found = []
    for function, call, pattern, placements in itertools.islice(cases(), 0, None, 1 if everything else 11):
        words = wrong(function, call, put(call, pattern, mesh, placements))
        if words:
            shapes = {key: list(value[0].shape) if is_list(value) else type(value).__name__ for key, value in call.items()}
            found.append(f"{function.__name__} {shapes} {pattern} {placements}: {words}")
    assert not found, "\n".join(found[:30])


def test_each_function_gives_what_it_gives_on_one_device(launch):
    """A part of the cases; HPML_TEST_EVERYTHING=1 takes all."""
    everything = os.environ.get("HPML_TEST_EVERYTHING") == "1"
    launch(run_all, world_size=2, args=(everything,), timeout_s=600 if everything else 60)
