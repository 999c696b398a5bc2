"""A sharded tensor in eager code: each line gives one device's result."""
from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hpml_compiler.runtime.dtensor.placed_tensor import GatheredView, PlacedTensor, place
from hpml_compiler.runtime.placements.shard_and_gather import to_full_tensor
from hpml_compiler.runtime.placements.single_rank_placement import SingleRank
from passes import compat
from passes.errors import HpmlError
from tests.helpers.frozen import in_turn
from tests.hpml_compiler.runtime.common import assert_close, full

PLACEMENTS = (Shard(0), Replicate(), SingleRank(1))
EDITS = {
    "an item": "w[0] = 0.5",
    "a column": "w[:, 1] += 1",
    "an element": "w[3, 2] = 7",
    "a mask": "w[w > 0] = -1",
    "copy_": "b.copy_(torch.arange(8.0))",
    "a plain operand": "v.mul_(torch.arange(8.0))",
    "data": "v.data.clamp_(-0.1, 0.1)",
    "new data": "w.data = w.data * 2",
    "plain data": "w.data = torch.ones(8, 6)",
    "new data under a view": "r = w[0]; w.data = w.data * 2; r.add_(1)",
    "a row of data": "w.data[3].zero_()",
    "a column of data": "w.data[:, 2].zero_()",
    "a slice": "w.data[2:5].mul_(3)",
    "a slice of a slice": "w[2:7][1:3].fill_(9)",
    "a view under a row": "r = w[0]; w.T.mul_(2); r.add_(1)",
    "a view of data under a row": "r = w[0]; w.data.view(-1).mul_(2); r.add_(1)",
    "a detached tensor under a row": "r = w[0]; w.detach()[1:].T.mul_(2); w.detach().T[:, 0].add_(3); r.add_(1)",
    "narrow": "w.narrow(0, 1, 2).fill_(7)",
    "chunks": "[c.add_(i) for i, c in enumerate(w.chunk(4))]",
    "rows": "[row.mul_(i) for i, row in enumerate(w)]",
    "view": "w.view(-1)[3] = 1",
    "view in place": "w.view(-1).mul_(2)",
    "transpose": "w.T.mul_(2)",
    "normal_": "nn.init.normal_(b)",
    "xavier_uniform_": "nn.init.xavier_uniform_(v)",
    "kaiming_normal_": "nn.init.kaiming_normal_(w)",
    "trunc_normal_": "nn.init.trunc_normal_(w)",
    "orthogonal_": "nn.init.orthogonal_(w)",
    "eye_": "nn.init.eye_(v)",
    "constant_": "nn.init.constant_(v, 3)",
    "noise": "w.add_(torch.randn_like(w), alpha=0.1)",
    "bernoulli_": "w.bernoulli_(0.5)",
    "a vector of all": "nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([w, b, v]) * 1.5, [w, b, v])",
    "out": "torch.add(w, 1, out=w.data)",
    "foreach": "torch._foreach_mul_([w, b, v], [2.0, 3.0, 4.0])",
    "foreach with plain": "torch._foreach_lerp_([w, b], [torch.ones(8, 6), torch.ones(8)], 0.5)",
    "lerp_ to plain": "w.lerp_(torch.ones(8, 6), 0.5)",
    "a sum": "b.copy_(w.sum(0).square_().repeat(2)[:8])",
    "a norm": "b.copy_(torch.norm(v, dim=0).mul_(-2).add_(1))",
    "a gradient": "w.grad = torch.ones(8, 6); w.add_(w.grad)",
}

VALUES = {
    "linear": "F.linear(x, w, b)",
    "two placed": "F.linear(F.linear(x, w, b).tanh(), v)",
    "embedding": "F.embedding(torch.tensor([1, 7, 1]), w)",
    "norm": "w.norm()",
    "std": "w.std()",
    "einsum": "torch.einsum('bi,oi->bo', x, w)",
    "stack": "torch.stack([b, torch.ones(8)])",
    "cat": "torch.cat([w, torch.ones(1, 6)])",
    "where": "torch.where(w > 0, w, torch.zeros(8, 6))",
    "sort": "w.sort(0)[0]",
    "svd": "torch.linalg.svdvals(w)",
    "item": "w.sum().item()",
    "float": "float(w.mean())",
    "numpy": "torch.from_numpy(w.detach().numpy())",
    "asarray": "torch.from_numpy(np.asarray(w.detach()))",
    "tolist": "torch.tensor(w.tolist())",
    "format": "torch.tensor(float(f'{b.sum():.3f}'))",
    "comparison": "torch.tensor(bool((w == w.clone()).all()))",
    "allclose": "torch.tensor(torch.allclose(w, torch.zeros(8, 6), atol=10))",
    "random": "torch.rand_like(w)",
    "dropout": "F.dropout(w, 0.5)",
    "float64": "w.double().sum()",
    "penalty": "sum(p.pow(2).sum() for p in (w, b, v))",
    "weight norm": "torch._weight_norm(w, torch.ones(8, 1), 0)",
    "shapes": "torch.tensor([*w.shape, w.size(0), w.dim(), w.numel(), len(w), w.element_size(), w.stride(0)])",
    "foreach norm": "torch.stack(torch._foreach_norm([w, b, torch.ones(3)]))",
    "max norm": "torch.stack(torch._foreach_norm([w, b], float('inf')))",
    "total norm": "nn.utils.get_total_norm([w, b, v, torch.ones(3)])",
    "advanced index": "w[torch.tensor([0, 7])] * 2",
}


def tensors(mesh=None, placements=None):
    torch.manual_seed(0)
    result = [nn.Parameter(torch.randn(shape)) for shape in ((8, 6), (8,), (8, 8))]
    if mesh is not None:
        result = [place(t, mesh, placements).requires_grad_() for t in result]
        for t in result:
            t._is_param = True
    return dict(zip("wbv", result, strict=True))


def names(values):
    return {**values, "x": torch.linspace(-1, 1, 12).view(2, 6), "torch": torch, "nn": nn, "F": F, "np": np}


def run_edits(rank):
    mesh = init_device_mesh("cpu", (2,))
    for label, edit in EDITS.items():
        for placement in PLACEMENTS:
            ours, theirs = tensors(mesh, [placement]), tensors()
            for values in (ours, theirs):
                torch.manual_seed(1)
                with torch.set_grad_enabled(edit.startswith(("w.data", "v.data"))):
                    exec(edit, names(values))
            for name in ours:
                assert ours[name].placements == (placement,), label
                try:
                    assert_close(ours[name], theirs[name])
                except AssertionError as error:
                    raise AssertionError(f"{label}, {placement}: {edit}") from error


def run_values(rank):
    mesh = init_device_mesh("cpu", (2,))
    for label, expression in VALUES.items():
        for placement in PLACEMENTS:
            ours, theirs = tensors(mesh, [placement]), tensors()
            results = []
            for values in (ours, theirs):
                torch.manual_seed(1)
                value = eval(expression, names(values))
                results.append(value)
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    value.pow(2).sum().backward()
            try:
                torch.testing.assert_close(*[full(v).detach() if isinstance(v, torch.Tensor) else v for v in results],
                                           rtol=1e-5, atol=1e-5)
                for name in ours:
                    assert (ours[name].grad is None) == (theirs[name].grad is None), name
                    if theirs[name].grad is not None:
                        assert isinstance(ours[name].grad, PlacedTensor)
                        assert_close(ours[name].grad, theirs[name].grad, atol=1e-4)
            except AssertionError as error:
                raise AssertionError(f"{label}, {placement}: {expression}") from error


def run_copies(rank):
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(0), SingleRank(1)):
        check_copies(tensors(mesh, [placement]), placement)


def check_copies(ours, placement):
    theirs = tensors()
    copied = copy.deepcopy({"a": ours["w"], "b": ours["w"]})
    assert copied["a"] is copied["b"] is not ours["w"]
    assert isinstance(copied["a"], nn.Parameter) and copied["a"].placements == (placement,)
    assert not ours["w"].is_shared() and ours["w"].share_memory_() is ours["w"] and ours["w"].is_shared()
    assert_close(ours["w"], theirs["w"])
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    loaded = torch.load(file)
    for name in theirs:
        assert type(loaded[name]) is nn.Parameter
        assert_close(loaded[name], theirs[name])
    with pytest.raises(RuntimeError, match="leaves"):
        copy.deepcopy(ours["w"] * 2)
    with pytest.raises(RuntimeError, match="requires a gradient"):
        ours["w"][0] = 1
    with pytest.raises(ValueError, match="keeps its shape"):
        ours["w"].data = torch.ones(2)
    storage = ours["w"].untyped_storage()
    assert storage.nbytes() == theirs["w"].untyped_storage().nbytes()
    for line in ("storage.resize_(0)", "storage.fill_(0)", "storage.tolist()", "w.storage()", "w.set_()", "w.set_(x[:2])",
                 "w.set_(x.untyped_storage())", "x.set_(w)"):
        with pytest.raises(HpmlError if line != "x.set_(w)" else RuntimeError), torch.no_grad():
            eval(line, {"storage": storage, "w": ours["w"], "x": torch.ones(8, 6)})
    assert_close(ours["w"], theirs["w"])
    with pytest.raises(RuntimeError):  # an error of the script's own is what one device says
        ours["w"] @ torch.ones(5, 5)
    assert ours["w"].new_zeros(8, 6).placements == (placement,)
    state, update = ours["w"].new_zeros(8, 1), DTensor.from_local(torch.ones(8, 1), ours["w"].device_mesh, [Replicate()])
    with torch.no_grad():  # an optimizer that knows DTensors makes some of them itself
        torch._foreach_lerp_([state], [update], weight=0.5)
    assert_close(state, torch.full((8, 1), 0.5))
    row = ours["w"].data[7]
    assert isinstance(row, GatheredView) and row.shape == (6,)
    assert repr(ours["b"]).startswith("DTensor(local_tensor=tensor([")  # never communicates


def run_whole(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    compat.use_single_gloo_allgather()  # as `ensure_process_group` does
    value = torch.arange(64.0).view(8, 8)
    for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)], [Replicate(), Replicate()],
                       [SingleRank(1), Shard(1)], [Shard(0), SingleRank(0)], [SingleRank(0), SingleRank(1)]):
        placed = place(value.clone(), mesh, placements).requires_grad_()
        result = to_full_tensor(placed)
        assert type(result) is torch.Tensor
        assert_close(result, value)
        (result * value).sum().backward()
        assert placed.grad.placements == tuple(placements)
        assert_close(placed.grad, value)
        assert placed.grad.to_local().untyped_storage().nbytes() == placed.to_local().numel() * 4
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.bool):  # of which gloo knows none
            low = (value % 4).to(dtype)
            assert torch.equal(to_full_tensor(place(low, mesh, placements)).double(), low.double())
    part = DTensor.from_local(value.clone(), mesh, [Partial(), Replicate()]).requires_grad_()
    to_full_tensor(part).sum().backward()
    assert_close(to_full_tensor(part), 2 * value)
    assert part.grad.placements == (Replicate(), Replicate())
    plain = torch.ones(2)
    assert to_full_tensor(plain) is plain


def test_whole_and_back(launch):
    launch(run_whole, world_size=4)


def run_fake(rank):
    """While Dynamo traces, a placed tensor is whole in every op, without communication."""
    mesh = init_device_mesh("cpu", (2,))
    placed = place(torch.ones(8, 6), mesh, [Shard(0)]).requires_grad_()
    seen = []

    def backend(gm, example_inputs):
        seen.extend((node.op, str(node.target), type(node.meta.get("example_value")).__name__)
                    for node in gm.graph.nodes if node.op.startswith("call"))
        assert compat.fake_mode() is not None
        return gm.forward

    torch.compile(lambda p: p.T.pow(2).sum() + p.view(-1)[0], backend=backend)(placed)
    assert [kind for _, _, kind in seen] == ["FakeTensor"] * len(seen) and len(seen) >= 5, seen
    run_fake_with_gradient(placed)


def run_fake_with_gradient(placed):
    """A gradient that is a view, as of a bucket -> no fake of it is made with its parameter; a function reads its values."""
    compat.trace_as(type(placed))
    placed.grad = held = compat.make_dtensor(type(placed), torch.ones(100)[:24].view(4, 6), placed._spec)
    seen = []

    def backend(gm, example_inputs):
        seen.extend(node.meta["example_value"].grad for node in gm.graph.nodes if node.op == "placeholder")
        return gm.forward

    compiled = torch.compile(lambda p: (p.detach() + p.grad).sum(), backend=backend)
    assert held._local_tensor._is_view() and compiled(placed) == 96
    assert placed.grad is held and seen == [None, None]
    held.mul_(2)
    assert compiled(placed) == 144 and len(seen) <= 2


def test_placed_tensors_as_plain_ones(launch):
    launch(in_turn, args=(run_edits, run_values, run_copies, run_fake))
