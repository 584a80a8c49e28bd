"""The cheapest set of values that separates a backward pass from the forward pass before it: a minimum cut."""

from __future__ import annotations

from dataclasses import dataclass

_MUCH = 1 << 60


@dataclass(frozen=True)
class Graph:
    """Values 0, 1, ...: what each costs to keep; how each is made (value, whether it cannot be made again, from what);
    what backward wants; what is there before the graph runs."""

    weights: tuple[int, ...]
    makers: tuple[tuple[int, bool, tuple[int, ...]], ...]
    wanted: tuple[int, ...]
    inputs: tuple[int, ...]


def keep(graph: Graph) -> frozenset[int]:
    """The values to keep so that everything wanted can be made from them at the least cost."""
    import networkx  # type: ignore[import-untyped]  # comes with torch

    if not graph.wanted:
        return frozenset()
    network = networkx.DiGraph()
    for value, weight in enumerate(graph.weights):
        network.add_edge((value, 0), (value, 1), capacity=weight)
    for value in graph.inputs:
        network.add_edge("source", (value, 0), capacity=_MUCH)
    for value, fixed, parents in graph.makers:
        if fixed:
            network.add_edge("source", (value, 0), capacity=_MUCH)
        for parent in parents:
            network.add_edge((parent, 1), (value, 0), capacity=_MUCH)
    for value in graph.wanted:
        network.add_edge((value, 1), "sink", capacity=_MUCH)
    if "source" not in network:
        return frozenset()
    _, (reached, _) = networkx.minimum_cut(network, "source", "sink")
    return frozenset(v for v in range(len(graph.weights)) if (v, 0) in reached and (v, 1) not in reached)
