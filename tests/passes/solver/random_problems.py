"""Random small partition problems: chains, diamonds, values with many users, layers that feed themselves."""
from __future__ import annotations

import random

from hypothesis import strategies as st

from passes.solver import Arc, Choice, Edge, Entity, Problem

LABELS = ("R", "S(0)", "S(1)", "P")
POSITIONS = ("forward", "backward", "step")
_AMOUNTS = st.one_of(st.integers(0, 12).map(float), st.floats(0.01, 1e6, allow_nan=False))


@st.composite
def arcs(draw) -> tuple[Arc, ...]:
    """Arcs between the labels: mostly from each to each; else any, one way only, several of unlike cost, circles."""
    if draw(st.integers(0, 3)):
        return tuple(Arc(a, b, draw(_AMOUNTS)) for a in LABELS for b in LABELS if a != b)
    ends = st.sampled_from(LABELS)
    return tuple(draw(st.lists(st.builds(Arc, ends, ends, _AMOUNTS), max_size=10)))


@st.composite
def problems(draw, nothing: bool = True, budgets: bool = True, most_entities: int = 6, positions: int = 2) -> Problem:
    """nothing: labels may be None. positions: memory is counted at so many at most. Bytes and budgets are whole numbers, so
    that all sums of them are exact."""
    count, places = draw(st.integers(1, most_entities)), draw(st.integers(1, positions))
    supplied = st.sampled_from((*LABELS, None) if nothing and draw(st.integers(0, 3)) == 0 else LABELS)
    demanded = st.sampled_from((*LABELS, None) if nothing and draw(st.booleans()) else LABELS)
    # earlier -> later in any shape, now and then an entity to itself or back
    ends = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    pairs = [pair if draw(st.integers(0, 5)) == 0 else tuple(sorted(pair)) for pair in draw(st.lists(ends, max_size=9))]
    out_ports, in_ports = [0] * count, [0] * count
    spots = []
    for source, target in pairs:
        if out_ports[source] and draw(st.booleans()):  # one more user of a value that has one
            spot = draw(st.integers(0, out_ports[source] - 1))
        else:
            spot, out_ports[source] = out_ports[source], out_ports[source] + 1
        spots.append((source, spot, target, in_ports[target]))
        in_ports[target] += 1
    entities = tuple(
        Entity(f"entity {i}", "op", draw(st.integers(1, 4)), tuple(
            Choice(draw(_AMOUNTS), tuple(float(draw(st.integers(0, 20))) for _ in range(places)),
                   tuple(draw(demanded) for _ in range(in_ports[i])),
                   tuple(draw(supplied) for _ in range(out_ports[i])))
            for _ in range(draw(st.integers(1, 5)))))
        for i in range(count)
    )
    shared = draw(arcs())
    edges = tuple(
        Edge(*spot, draw(st.integers(0, 4)), shared if draw(st.booleans()) else draw(arcs()), f"edge {i}")
        for i, spot in enumerate(spots)
    )
    budget = float(draw(st.integers(0, 120))) if budgets and draw(st.booleans()) else None
    return Problem(entities, edges, budget, POSITIONS[:places])


def tangled(seed: int) -> Problem:
    """A chain with shortcuts, up to five choices each, and often a budget: much of it is left to the solver. Memory is
    counted at one position, two or three."""
    rng, positions = random.Random(seed), 1 + seed % 3
    count = rng.randint(3, 7)
    scale = 10 ** rng.uniform(-2, 6)  # µs

    def cost() -> float:
        return rng.choice([0.0, rng.uniform(0, scale), rng.uniform(0, scale / 10), rng.uniform(0, scale * 1e-5)])

    pairs = [(i, i + 1) for i in range(count - 1)]
    pairs += [tuple(sorted(rng.sample(range(count), 2))) for _ in range(rng.randint(0, count))]
    out_ports, in_ports, spots = [0] * count, [0] * count, []
    for source, target in pairs:
        port = rng.randrange(out_ports[source]) if out_ports[source] and rng.random() < 0.5 else out_ports[source]
        out_ports[source] = max(out_ports[source], port + 1)
        spots.append((source, port, target, in_ports[target]))
        in_ports[target] += 1
    takes_nothing = rng.choice([0.0, 0.0, 0.2])
    entities = tuple(
        Entity(f"entity {i}", "op", rng.choice([1, 1, 4, 32]), tuple(
            Choice(cost(), tuple(float(rng.randint(0, 30)) for _ in range(positions)),
                   tuple(None if rng.random() < takes_nothing else rng.choice(LABELS) for _ in range(in_ports[i])),
                   tuple(rng.choice(LABELS) for _ in range(out_ports[i])))
            for _ in range(rng.randint(2, 5))))
        for i in range(count)
    )
    edges = tuple(
        Edge(*spot, rng.choice([1, 1, 3, 31]),
             tuple(Arc(a, b, cost()) for a in LABELS for b in LABELS if a != b and rng.random() < 0.8), f"edge {i}")
        for i, spot in enumerate(spots)
    )
    usual = sum(e.multiplicity * sum(c.held_bytes[0] for c in e.choices) / len(e.choices) for e in entities)
    return Problem(entities, edges, rng.choice([None, float(int(usual * rng.uniform(0.5, 1)))]), POSITIONS[:positions])


def hard_chain(entities: int = 120, budget: bool = True) -> Problem:
    """A chain whose optimum under its budget takes a solver seconds to prove: what is cheaper holds more bytes."""
    rng = random.Random(0)
    arcs = tuple(Arc(a, b, rng.uniform(10, 900)) for a in LABELS for b in LABELS if a != b)

    def choice() -> Choice:
        held = rng.randint(10**6, 10**8)
        cost = 1100 - held / 1e5 + rng.uniform(0, 1)
        return Choice(cost, (float(held),), (rng.choice(LABELS),), (rng.choice(LABELS),))

    layers = tuple(Entity(f"layer {i}", "op", 1, tuple(choice() for _ in range(8))) for i in range(entities))
    edges = tuple(Edge(i, 0, i + 1, 0, 1, arcs, f"value {i}") for i in range(entities - 1))
    lightest = sum(min(choice.held_bytes[0] for choice in layer.choices) for layer in layers)
    return Problem(layers, edges, 3.0 * lightest if budget else None)


def recurrences(copies: int, steps: int = 16) -> Problem:
    """Unrolled recurrences and their backward as the microbatch axis sees them: R before the loop, S in it, then "after". One
    operation in each step of backward reads R in the loop, which makes the relaxation fractional."""
    rng = random.Random(0)
    arcs = (Arc("R", "after", 0.0), Arc("R", "S", 1.1), Arc("S", "after", 2.1))
    entities: list[Entity] = []
    edges: list[Edge] = []

    def call(*inputs: int, reads: str = "S") -> int:
        work, ports = rng.uniform(0.5, 1.5), len(inputs)
        choices = [Choice(work, (0.0,), ("R",) * ports, ("R",)), Choice(0.0, (0.0,), (reads,) * ports, ("S",))]
        choices += [Choice(1.001 * work, (0.0,), ("after",) * ports, ("after",))] if inputs else []
        edges.extend(Edge(source, 0, len(entities), port, 1, arcs, "value") for port, source in enumerate(inputs))
        entities.append(Entity(f"operation {len(entities)}", "op", 1, tuple(choices)))
        return len(entities) - 1

    for _ in range(copies):
        x, state, forward = call(), call(), []
        for _ in range(steps):
            shared = call(state, x)
            top, factor = call(shared, state), call(shared)
            state = call(call(factor, call(x, top)), state)
            forward.append((factor, top))
        gradient = call(state)
        for factor, top in reversed(forward):
            product = call(call(call(gradient, reads="R"), gradient), factor)
            gradient = call(call(call(top, product), factor), product)
        edges.append(Edge(gradient, 0, len(entities), 0, 1, arcs, "result"))
        entities.append(Entity("output", "output", 1, (Choice(0.0, (0.0,), ("after",), ()),)))
    return Problem(tuple(entities), tuple(edges))
