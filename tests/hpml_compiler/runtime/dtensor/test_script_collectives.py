"""torch.distributed collectives on sharded tensors -> their result on replicated ones, or an error."""
from __future__ import annotations

import logging
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed import P2POp, ReduceOp, all_reduce  # before anything is watched, as scripts do
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils import _pytree as pytree

from hpml_compiler.runtime.batch.batch_shard import shard_batch
from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor, place
from hpml_compiler.runtime.dtensor.script_collectives import watch_collectives
from hpml_compiler.runtime.outputs.output_wrapper import OutputWrapper, ShardedOutput
from hpml_compiler.runtime.placements.inner_shard import InnerShard
from hpml_compiler.runtime.placements.shard_and_gather import to_full_tensor
from hpml_compiler.runtime.placements.single_rank_placement import SingleRank
from passes.errors import HpmlError
from tests.hpml_compiler.runtime.test_same_as_plain import placed

PLACEMENTS = (Shard(0), Shard(1), Replicate(), Partial(), SingleRank(1), InnerShard(0, 2))


def _lines(text):
    return [line.strip() for line in text.strip().splitlines()]


RIGHT = _lines("""
    all_reduce(w); w.div_(2)
    all_reduce(tensor=w, op=ReduceOp.MAX)
    dist.all_reduce(w, ReduceOp.SUM, group); w /= 2
    [dist.all_reduce(w, op) for op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)]
    [dist.all_reduce(i, op) for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.SUM)]
    dist.all_reduce(z); z.mul_(1j)
    dist.all_reduce(w.data)
    dist.all_reduce(w[1])
    dist.all_reduce(w.view(-1))
    dist.all_reduce(p); p.grad = p.detach() * 3; dist.all_reduce(p.grad); p.grad.div_(2)
    dist.all_reduce_coalesced([w, u, r]); w.div_(2)
    work = all_reduce(w, async_op=True); assert isinstance(work, dist.Work); work.wait(); w.div_(2)
    works = [dist.all_reduce(t, async_op=True) for t in (w, u, r)]; [work.wait() for work in works]; w.mul_(u)
    work = dist.all_reduce(w, async_op=True); work.get_future().wait(); w.div_(2)
    work = dist.all_reduce(w, async_op=True); poll(work); w.div_(2)
    dist.broadcast(w, 0)
    dist.broadcast(w.data, src=1); w.mul_(2)
    dist.broadcast(r, 0); w.copy_(r)
    dist.broadcast(p, 0)
    dist.broadcast(w, 1, async_op=True).wait()
    parts = two(8); dist.all_gather(parts, w); x = parts
    dist.all_gather([w, u], r + 1)
    dist.all_gather([w, u], w + 1)
    parts = two(8); dist.all_gather(parts, w, async_op=True).wait(); x = parts
    box = new(16); dist.all_gather_into_tensor(box, w); x = box
    box = new(16); dist.all_gather_into_tensor(box, w, async_op=True).wait(); x = box
    dist.all_gather_into_tensor(w, r[:4].contiguous())
    dist.all_gather_into_tensor(w, r[:4].contiguous(), async_op=True).wait()
    parts = two(8); dist.gather(w, parts if rank == 0 else None); x = parts
    own = new(8); dist.reduce_scatter(own, [w, u]); x = own
    own = new(4); dist.reduce_scatter_tensor(own, w); x = own
    own = new(4); dist.reduce_scatter_tensor(own, w, async_op=True).wait(); x = own
    own = new(8); dist.all_to_all_single(own, w); x = own
    group.allreduce([w]).wait(); w.div_(2)
    group.broadcast([w], dist.BroadcastOptions()).wait(); w.div_(2)
    group.allgather([[w, u]], [r]).wait()
    x = functional.all_reduce(w, 'sum', group) + 0
    x = functional.all_gather_tensor(w, 0, group) + 0
    dist.all_reduce(rows); x = rows * 1
    parts = two(4); dist.all_gather(parts, rows); x = parts
    dist.reduce(w, 0) -> dist.all_reduce(w)
    dist.reduce(w, dst=1, op=ReduceOp.MAX, async_op=True).wait() -> dist.all_reduce(w, op=ReduceOp.MAX)
    group.reduce([w], dist.ReduceOptions()).wait() -> dist.all_reduce(w)
""")
"""After an arrow, what gives the same on plain tensors: torch promises the result of `reduce` to one rank."""

EVERYWHERE = _lines("""
    dist.send(w, 1) if rank == 0 else dist.recv(w, 0)
    works = [dist.irecv(w, 1 - rank), dist.isend(u.clone(), 1 - rank)]; [work.wait() for work in works]
    ops = [P2POp(dist.isend, u, 1 - rank), P2POp(dist.irecv, w, 1 - rank)]; [x.wait() for x in dist.batch_isend_irecv(ops)]
    own = new(8); dist.scatter(own, [w, u] if rank == 0 else None) if rank == 0 or everywhere else refuse(); x = own
    dist.all_reduce(w, group=mine)
    mine.allreduce([w]).wait()
""")
"""As on plain tensors where every rank has all of w and u; refused where they are stored in parts."""

REFUSED = _lines("""
    dist.scatter(w, [r, r] if rank == 0 else None)
    dist.gather(r, [w, u] if rank == 0 else None) if rank == 0 else refuse()
    dist.reduce_scatter(w, [r, r])
    dist.reduce_scatter_tensor(w, torch.cat([r, r]))
    dist.all_to_all_single(w, r)
    dist.all_to_all([w, u], [r, r])
""")


VIEWS = _lines("""
    w[0]
    w[1:3]
    w[:, 1]
    w.T
    w.t()[0]
    w.reshape(-1)
    w.view(-1)[2:9]
    w.detach()[0]
    w[0].detach()
    w.data[0]
    w[0].data
    w.unbind(0)[1]
    w.chunk(2)[1]
    next(iter(w))[2]
    w.diagonal()
    w.view(torch.int64).view(torch.float64)[0]
    w.as_strided((3,), (1,), 2)
    w.unflatten(1, (2, 3))[:, 0]
    w[0].to(torch.float64).cpu().contiguous()
""")
TO_VIEWS = _lines("""
    all_reduce(v.data, async_op=True).wait(); v.div_(4)
    parts = [v, v.clone()]; dist.all_gather(parts, torch.full(v.shape, rank + 2.0, dtype=v.dtype))
""")


class Contiguously:
    """Collectives on plain tensors, also on those that are not contiguous in memory: there, gloo writes to other elements."""

    @staticmethod
    def all_reduce(tensor, async_op=False):
        value = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(value)
        tensor.copy_(value)
        return Contiguously

    @staticmethod
    def all_gather(parts, tensor):
        values = [part.clone(memory_format=torch.contiguous_format) for part in parts]
        dist.all_gather(values, tensor)
        for part, value in zip(parts, values):
            part.copy_(value)

    @staticmethod
    def wait():
        pass


def environment(rank, mine, mesh=None, placement=None):
    torch.manual_seed(0)
    names = {name: torch.randn(8, 6, dtype=torch.float64) for name in "wur"}
    names["p"] = torch.randn(4, dtype=torch.float64)
    names["i"], names["z"] = torch.arange(8), torch.randn(8, 6, dtype=torch.complex128)
    names["rows"] = torch.randn(4, 6, dtype=torch.float64)
    if mesh is not None:
        names.update({name: placed(names[name], mesh, placement) for name in "wuz"})
        names.update({name: place(names[name], mesh, [Shard(0)]) for name in "pi"})
        names["rows"] = shard_batch(names["rows"], mesh)
    names["p"].requires_grad_()
    new = lambda rows: torch.zeros(rows, 6, dtype=torch.float64)  # noqa: E731
    return {**NAMES, **names, "rank": rank, "mine": mine, "group": dist.group.WORLD, "new": new,
            "two": lambda rows: [new(rows), new(rows)], "x": None, "everywhere": placement is None or placement.is_replicate()}


def refuse():
    """For ranks that cannot know that another is refused."""
    raise HpmlError("refused elsewhere", "there", "none")


def poll(work):
    while not work.is_completed():
        pass


def values(space):
    """Whole values of all tensors in the environment."""
    tensors = {name: value for name, value in space.items() if isinstance(value, (torch.Tensor, list))}
    tensors["grad"] = space["p"].grad
    return pytree.tree_map_only(DTensor, lambda tensor: to_full_tensor(tensor).detach().clone(), tensors)


NAMES = {"torch": torch, "dist": dist, "P2POp": P2POp, "ReduceOp": ReduceOp, "all_reduce": all_reduce, "functional": functional,
         "poll": poll, "refuse": refuse}


def judge(line, ours, theirs):
    line, _, plainly = line.partition(" -> ")
    exec(line, ours)
    exec(plainly or line, theirs)
    found = values(ours)
    for name, expected in values(theirs).items():
        if name not in ("works", "ops"):
            torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def run_all(rank):
    mesh = init_device_mesh("cpu", (2,))
    mine = dist.new_subgroups_by_enumeration([[0], [1]])[0]
    watch_collectives(PlacedTensor)
    said, wrong = [], []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("hpml_compiler.runtime.dtensor.script_collectives").addHandler(handler)
    for placement in PLACEMENTS:
        for line in RIGHT + EVERYWHERE + REFUSED:
            ours, theirs = environment(rank, mine, mesh, placement), environment(rank, mine)
            refused = line in REFUSED or (line in EVERYWHERE and not placement.is_replicate())
            try:
                judge(line, ours, theirs)
            except HpmlError as error:
                if not (refused and error.where and error.next_step):
                    wrong.append(f"{placement} {line}: {error}")
            except Exception as error:
                wrong.append(f"{placement} {line}: {type(error).__name__} {str(error)[:300]}")
            else:
                if refused:
                    wrong.append(f"{placement} {line}: is not refused")
    kinds = {str(placement): partial(placed, mesh=mesh, placement=placement) for placement in PLACEMENTS}
    kinds["row of a placed tensor"] = lambda value: placed(torch.stack([value, value]), mesh, Shard(0))[0]
    kinds["rows of a batch"] = lambda value: shard_batch(value, mesh)
    kinds["result"] = lambda value: OutputWrapper("graph_0", mesh, [ShardedOutput(0, (Shard(0),), value, "logits")]).given(
        [value.chunk(2)[rank].clone()])[0]
    for (kind, make), view, line in product(kinds.items(), VIEWS, TO_VIEWS):
        value = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        theirs = {**NAMES, "rank": rank, "w": value.clone(), "dist": Contiguously, "all_reduce": Contiguously.all_reduce}
        ours = {**NAMES, "rank": rank, "w": make(value.clone())}
        plain_view = kind in ("rows of a batch", "result") and not eval(view, dict(theirs)).is_contiguous()
        for space in () if plain_view else (ours, theirs):
            exec(f"v = {view}; {line}; x = w * 1", space)
        for name in () if plain_view else "wvx":
            if not torch.allclose(to_full_tensor(ours[name]), theirs[name], rtol=1e-12, atol=1e-12):
                wrong.append(f"{kind}: v = {view}; {line}: {name} is another")
    assert not wrong, "\n".join(wrong)
    return said


def test_collectives_on_placed_tensors_are_those_of_whole_replicas(launch):
    said, of_the_other = launch(run_all, world_size=2)
    assert len(said) == 1 and "Gradients already are" in said[0] and not of_the_other
