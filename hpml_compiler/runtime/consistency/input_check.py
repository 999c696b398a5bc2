"""Compare the inputs of compiled graphs across ranks, on the first calls and periodically."""
from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from hpml_compiler.runtime.consistency.checksums import differs, fingerprint, tolerance
from hpml_compiler.runtime.consistency.initial_sync import generator_states, sync_rng
from hpml_compiler.runtime.process.compute_device import device_type
from hpml_compiler.runtime.process.world_group import check_group
from passes.errors import HpmlError
from passes.graph.graph_signature import GraphInput
from passes.session_state import state_of

FIRST_CALLS, EVERY = 32, 64  # calls 1, 2, 4 ... up to the first number, then every EVERY calls
SLOTS, HEADER = 60, 4
SEEDS = ("torch.manual_seed does not seed numpy and random: call numpy.random.seed(0) and "
         "random.seed(0), too; torch.seed() uses a different seed on each rank")
REMEDY = ("all ranks must pass the same batch, of which each computes its share: remove the DistributedSampler and seed the "
          "loader equally on all ranks; or wrap it, loader = hpml_compiler.distribute(loader), which also takes a loader that "
          f"gives each rank its own rows, as under DDP; {SEEDS}")


class _CheckedHalves(list[str]):
    """Checked halves of graphs, by the number that ranks exchange."""


class RanksDiffer(HpmlError):
    """Values differ between ranks that must be the same."""


@dataclass(frozen=True)
class CheckedArgument:
    """An argument that must be the same on all ranks: its position, name and dtype."""

    position: int
    name: str
    dtype: torch.dtype


class InputCheck:
    """Compares the arguments of one half of a graph (forward or backward) across ranks.

    The first call waits for the other ranks. Later ones do not: fingerprints of one call are sent asynchronously and
    compared in the next call of the same half. On CUDA they are sent in the next call and compared in the one after it, so
    that the host never waits for a kernel.
    """

    def __init__(self, graph: str, half: str, watched: Sequence[CheckedArgument], draws: bool) -> None:
        self.graph, self.half, self.watched, self.draws = graph, half, tuple(watched), draws
        halves = state_of(_CheckedHalves)
        self.number = len(halves)
        halves.append(f"{graph} ({half})")
        self.calls, self.next_call = 0, 1
        self.found: _PendingFingerprints | None = None
        self.sent: tuple[Any, _PendingFingerprints, list[torch.Tensor]] | None = None
        self.windows = max(1, -(-len(watched) // SLOTS))

    def before(self, arguments: Sequence[Any]) -> None:
        """Check the arguments of a call before it runs. Raises RanksDiffer on all ranks."""
        self.calls += 1
        if self.calls == self.next_call:
            self._act(arguments)

    def _act(self, arguments: Sequence[Any]) -> None:
        looks = self.calls == 1 or self.sent is not None
        self.next_call = self._due() if looks else self.calls + 1
        if self.calls == 1:
            if self.half == "forward":
                sync_rng()
            for window in range(self.windows):
                self._send(self._find(arguments, window))
                self._look()
        elif looks:
            self._look()
        elif self.found is not None:
            self._send(self.found)
        else:
            self.found = self._find(arguments, self.calls.bit_length() % self.windows)
            if device_type() != "cuda":
                self._send(self.found)

    def _due(self) -> int:
        """Number of the next call whose arguments are compared."""
        power = 1 << self.calls.bit_length()
        return power if power <= FIRST_CALLS else (self.calls // EVERY + 1) * EVERY

    def _find(self, arguments: Sequence[Any], window: int) -> _PendingFingerprints:
        chosen = self.watched[window * SLOTS:(window + 1) * SLOTS]
        drawn = zlib.crc32(b"".join(bytes(state.numpy()) for state in generator_states())) if self.draws else 0
        with torch.no_grad():
            prints = [fingerprint(arguments[w.position]) for w in chosen]
        return _PendingFingerprints([self.number, self.calls, drawn, window], chosen, prints)

    def _send(self, found: _PendingFingerprints) -> None:
        mine = found.message()
        others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        self.sent = dist.all_gather(others, mine, group=check_group(), async_op=True), found, others
        self.found = None

    def _look(self) -> None:
        assert self.sent is not None
        (work, found, others), self.sent = self.sent, None
        work.wait()
        try:
            self._compare(found, torch.stack(others))
        except RanksDiffer:
            self.calls, self.next_call = 0, 1  # a script that catches this and goes on is compared again at once
            raise

    def _compare(self, found: _PendingFingerprints, all_ranks: torch.Tensor) -> None:
        headers = all_ranks[:, :HEADER].long().tolist()
        where = f"{self.graph}, {self.half}, call {found.header[1]}"
        for rank, header in enumerate(headers):
            if header[:2] != headers[0][:2]:
                raise RanksDiffer(f"rank {rank} is at {_place(header)} while rank 0 is at {_place(headers[0])}", where,
                                  "all ranks must call compiled models in the same order: look for code that "
                                  "depends on the rank, such as an evaluation on rank 0 alone")
        for rank, header in enumerate(headers):
            if header[2] != headers[0][2]:
                raise RanksDiffer(f"the random number generators of rank {rank} and rank 0 differ, so dropout masks would "
                                  "differ",
                                  where, "draw the same numbers on all ranks, or use a separate torch.Generator for draws on "
                                         "one rank "
                                  f"alone; {SEEDS}")
        prints = all_ranks[:, HEADER:].view(len(headers), SLOTS, 2)[:, :len(found.watched)]
        tolerances = torch.tensor([tolerance(w.dtype) for w in found.watched], dtype=torch.float64)
        other = [differs(prints[0], mine, tolerances).tolist() for mine in prints]
        for place, watched in enumerate(found.watched):
            ranks = [rank for rank in range(len(headers)) if other[rank][place]]
            if ranks:
                raise RanksDiffer(f"{watched.name} is not the same on all ranks: {_ranks(ranks)} from rank 0",
                                  where, REMEDY)


class _PendingFingerprints:
    """Fingerprints of one call that are being copied from the devices."""

    def __init__(self, header: list[int], watched: Sequence[CheckedArgument], prints: list[torch.Tensor]) -> None:
        self.header, self.watched = header, watched
        self.places: list[tuple[list[int], torch.Tensor]] = []
        self.events: list[Any] = []
        for device in dict.fromkeys(value.device for value in prints):
            places = [i for i, value in enumerate(prints) if value.device == device]
            values = torch.stack([prints[i] for i in places])
            if device.type == "cuda":
                values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
                self.events.append(torch.cuda.current_stream(device).record_event())
            self.places.append((places, values))

    def message(self) -> torch.Tensor:
        for event in self.events:
            event.synchronize()
        prints = torch.zeros(SLOTS, 2, dtype=torch.float64)
        for places, values in self.places:
            prints[places] = values
        return torch.cat([torch.tensor(self.header, dtype=torch.float64), prints.flatten()])


def _place(header: list[int]) -> str:
    number, calls = header[:2]
    halves = state_of(_CheckedHalves)
    return f"call {calls} of {halves[number]}" if number < len(halves) else "a graph that this rank has not compiled"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} differs" if len(ranks) == 1 else f"ranks {ranks} differ"


def draws_random_numbers(gm: GraphModule) -> bool:
    """True if a graph of aten operations uses random numbers."""
    return any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in gm.graph.nodes)


def forward_check(graph: str, inputs: Sequence[GraphInput], arguments: Sequence[Any], draws: bool) -> InputCheck:
    """Check of the inputs that are neither parameters nor buffers, nor sharded already."""
    watched = [CheckedArgument(i, _script_name(described.name), value.dtype) for i,
               (described, value) in enumerate(zip(inputs, arguments))
               if described.kind in ("batch", "constant") and _can_be_compared(value)]
    return InputCheck(graph, "forward", watched, draws)


def backward_check(graph: str, gm: GraphModule, in_parts: Collection[str] = ()) -> InputCheck | None:
    """Check of the gradients that backward receives, computed by the script outside of compiled graphs. in_parts: those
    that are sharded."""
    watched = []
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = node.meta.get("val")
        # Skips the tokens that order effects in backward (`tangents_token`), which are None.
        if re.fullmatch(r"tangents_\d+", node.name) and isinstance(value, torch.Tensor) and node.name not in in_parts:
            watched.append(CheckedArgument(i, _gradient(node.name.removeprefix("tangents_")), value.dtype))
    return InputCheck(graph, "backward", watched, draws=False) if watched else None


def gradient_check(graph: str, output: int, like: torch.Tensor) -> InputCheck:
    """Check of the gradient of one output that stays sharded; it is unsharded if the script has used the output."""
    return InputCheck(graph, "backward", [CheckedArgument(0, _gradient(str(output + 1)), like.dtype)], draws=False)


def _gradient(output: str) -> str:
    return (f"the gradient of output {output} in backward (from a loss outside of the graph, with different targets?)")


def _can_be_compared(value: Any) -> bool:
    return (isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.layout is torch.strided
            and value.numel() > 0 and not value.is_quantized)


def _script_name(expression: str) -> str:
    """`L['x']` as in the script: `x`."""
    return "`" + re.sub(r"^L\[(.)(\w+)\1\]", r"\2", expression) + "`"
