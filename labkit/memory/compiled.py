"""Estimates for compiled steps: an eager run's events, rewritten as Inductor would let the memory live.

Whatever `torch.compile` wraps becomes a region. Its operators run uncompiled, and afterwards each run of a region is
read as one joint graph: pointwise operators and reductions fuse, so that only what matrix products and other library
kernels read or write (and what leaves the region) is made; for backward the cheapest set of values that separates it
from the forward pass is kept, and the rest computed again. That is the rule of AOTAutograd's partitioner
(``torch/_functorch/partitioners.py``, min_cut_rematerialization_partition), here on the operators as they ran. What a
compiler does beyond it (which kernels it fuses, in which order they run) is not modelled: hence a band.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from .partition import Graph, keep
from .regions import Regions


def rewrite(regions: Regions, marks: list[int]) -> list[int]:
    """Rewrite the recorder's events as if the regions had been compiled; returns where `marks` (positions) are now."""
    return _Rewriting(regions).events(marks)


class _Rewriting:
    def __init__(self, regions: Regions):
        self.recorder, self.ops = regions.recorder, regions.ops
        self.sizes = self.recorder.sizes
        self.born: dict[int, int] = {}
        self.died: dict[int, int] = {}
        for position, event in enumerate(self.recorder.events):
            if event >= 0:
                self.born[event] = position
            else:
                self.died[~event] = position
        self.uses: dict[int, list[int]] = {}  # by value: operators that read it, or write to it later
        self.maker: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            for value in op.ins:
                self.uses.setdefault(value, []).append(index)
            for value in op.outs:
                if value not in self.maker and self.born.get(value, -1) >= op.start:
                    self.maker[value] = index
        self.starts = [op.start for op in self.ops]
        self.gone: set[int] = set()  # fused: never in memory
        self.last: dict[int, int] = {}  # by value: the operator after which it can go
        self.again: list[tuple[int, int, int]] = []  # value, first and last operator: computed again in backward
        self.held: set[int] = set()
        self.touched: set[int] = set()
        self.made_from: dict[int, set[int]] = {}  # of values made by fused kernels: what these read
        self._plans: dict[Any, Any] = {}

    def events(self, marks: list[int]) -> list[int]:
        members: dict[int, tuple[list[int], list[int]]] = {}
        for index, op in enumerate(self.ops):
            if op.region:
                members.setdefault(op.region, ([], []))[op.backward].append(index)
        for forward, backward in members.values():
            self._region(forward, backward)
        return self._write(marks)

    # one region -----------------------------------------------------------------------------------------------------

    def _region(self, forward: list[int], backward: list[int]) -> None:
        ops, uses, maker = self.ops, self.uses, self.maker
        here, there = set(forward), set(backward)
        made_f = [v for i in forward for v in ops[i].outs if maker.get(v) == i]
        made_b = [v for i in backward for v in ops[i].outs if maker.get(v) == i]
        inputs = {v for i in (*forward, *backward) for v in ops[i].ins if maker.get(v) not in here | there}
        # without a backward pass (an optimizer's step) arguments live as long as the program holds them
        self.touched |= (inputs if backward else set()) | set(made_f) | set(made_b)
        end = max(forward, default=-1)
        wanted = [v for v in made_f if any(u in there for u in uses.get(v, ()))]
        wanted += [v for v in inputs if v in self.died and any(u in there for u in uses.get(v, ()))]
        outside = {v for v in (*made_f, *made_b) if self._leaves(v, here, there, end)}
        kept = self._kept(forward, made_f, inputs, wanted, outside, here, there) if backward else set()
        real = self._real(forward, made_f, here, outside) | kept
        real_b = self._real(backward, made_b, there, outside)
        last: dict[int, int] = {}  # of this region: the last operator of it for which a value must be there
        sources = self._sources(forward, kept | (inputs & set(wanted)), inputs)
        for value in reversed(made_b):
            self._effective(value, there, real_b, last)
        need = dict(last)
        for i in backward:
            op = ops[i]
            until = i if op.alone else max([i] + [need[o] for o in op.outs if o in need and o not in real_b])
            for v in op.ins:
                if v in kept or v in inputs or maker.get(v) in there:
                    last[v] = max(last.get(v, -1), until)
                elif maker.get(v) in here:
                    for source in sources.get(v, ()):
                        last[source] = max(last.get(source, -1), until)
                    if op.alone:
                        self._compute_again(v, i)
        for value in reversed(made_f):
            self._effective(value, here, real, last)
        for v in inputs:
            self._effective(v, here, real, last)
        for v, index in last.items():
            self.last[v] = max(self.last.get(v, -1), index)
        self.gone |= {v for v in made_f if v not in real} | {v for v in made_b if v not in real_b}
        self.held |= {v for v in outside if not self._read_outside(v, here, there)}
        for group, made, solid in ((forward, made_f, real), (backward, made_b, real_b)):
            self._read_by_kernels(group, made, solid)

    def _leaves(self, v: int, here: set[int], there: set[int], end: int) -> bool:
        """Whether `v` is a result of the region: read by others, or held by the program."""
        if self._read_outside(v, here, there):
            return True
        died, uses = self.died.get(v), self.uses.get(v, [])
        if died is None:
            return True
        after = bisect_right(self.starts, died) - 1  # the operator that ran last when it died
        late = [u for u in uses if u in there]
        if not late:
            return self.maker[v] in here and after > end
        return after > max(late) + 3

    def _read_outside(self, v: int, here: set[int], there: set[int]) -> bool:
        return any(u not in here and u not in there for u in self.uses.get(v, ()))

    def _real(self, group: list[int], made: list[int], members: set[int], outside: set[int]) -> set[int]:
        """What a compiled `group` writes to memory: all that library kernels read or write, results, small sums."""
        ops, sizes, real = self.ops, self.sizes, set()
        alone = [i for i in group if ops[i].alone]
        for v in made:
            maker = ops[self.maker[v]]
            readers = [u for u in self.uses.get(v, ()) if u in members]
            largest = max((sizes[x] for x in maker.ins), default=0)
            if maker.alone or v in outside or 8 * sizes[v] <= largest or any(ops[u].alone for u in readers):
                real.add(v)
            elif len(readers) > 1:
                parted = bisect_right(alone, max(readers)) > bisect_right(alone, min(readers))
                if parted and sum(8 * sizes[x] > sizes[v] for x in maker.ins) > 1:
                    real.add(v)  # read by several kernels: cheaper to store than to compute from its parts each time
        return real

    def _effective(self, v: int, members: set[int], real: set[int], last: dict[int, int]) -> None:
        """The last operator of `members` that needs `v` in memory: where what is fused with it writes."""
        until = last.get(v, -1)
        for u in self.uses.get(v, ()):
            if u in members:
                op = self.ops[u]
                until = max(until, u)
                if not op.alone:
                    until = max([until] + [last.get(o, u) for o in op.outs if o not in real and o != v])
        if until >= 0:
            last[v] = until

    def _kept(
        self,
        forward: list[int],
        made: list[int],
        inputs: set[int],
        wanted: list[int],
        outside: set[int],
        here: set[int],
        there: set[int],
    ) -> set[int]:
        """What the forward pass keeps for backward: the cheapest cut."""
        ops, sizes = self.ops, self.sizes
        number: dict[int, int] = {}
        for v in (*sorted(inputs, key=lambda v: self._order(v, forward)), *made):
            number.setdefault(v, len(number))
        edges = []
        for i in forward:
            op = ops[i]
            for o in op.outs:
                small = 8 * sizes[o] <= max((sizes[x] for x in op.ins), default=0)
                # what a library kernel reads in backward would have to be written again: it is kept
                fixed = (
                    op.alone or small or o in op.drawn or any(ops[u].alone for u in self.uses.get(o, ()) if u in there)
                )
                parents = () if fixed else tuple(number[x] for x in (*op.ins, *op.drawn) if x in number and x != o)
                edges.append((number[o], fixed, parents))
        weights = []
        real = self._real(forward, made, here, outside)
        for v in number:
            free = v in inputs and v not in self.died
            weights.append(0 if free else sizes[v] * (1 if v in real or v in inputs else 2))
        graph = Graph(tuple(weights), tuple(edges), tuple(sorted(number[v] for v in wanted)),
                      tuple(number[v] for v in inputs))  # fmt: skip
        if graph not in self._plans:
            self._plans[graph] = keep(graph)
        chosen = self._plans[graph]
        return {v for v, n in number.items() if n in chosen and v not in inputs}

    def _order(self, v: int, forward: list[int]) -> tuple[int, int]:
        first = next((u for u in self.uses[v] if u >= forward[0]), 1 << 60) if forward else 0
        return first, self.ops[first].ins.index(v) if first < len(self.ops) and v in self.ops[first].ins else 0

    def _sources(self, forward: list[int], kept: set[int], inputs: set[int]) -> dict[int, frozenset[int]]:
        """What each forward value is computed again from."""
        found: dict[int, frozenset[int]] = {v: frozenset((v,)) for v in kept | inputs}
        for i in forward:
            op = self.ops[i]
            if op.alone:
                continue
            parents = frozenset().union(*(found.get(x, frozenset()) for x in op.ins))
            for o in op.outs:
                if o not in kept and o not in inputs:
                    found[o] = found.get(o, frozenset()) | parents
        return found

    def _compute_again(self, v: int, index: int) -> None:
        for n, (value, first, last) in enumerate(self.again):
            if value == v and first <= index and index - last < 40:  # of one stretch of the backward pass
                self.again[n] = (v, first, max(last, index))
                return
        self.again.append((v, index, index))

    def _read_by_kernels(self, group: list[int], made: list[int], real: set[int]) -> None:
        reads: dict[int, set[int]] = {}
        for i in group:
            op = self.ops[i]
            if op.alone:
                continue
            parents = set().union(*(reads.get(x, {x}) for x in op.ins))
            for o in op.outs:
                if o in real:
                    self.made_from[o] = parents
                else:
                    reads[o] = parents

    # the new events ---------------------------------------------------------------------------------------------------

    def _write(self, marks: list[int]) -> list[int]:
        recorder, ops = self.recorder, self.ops
        line: list[tuple[float, int, int]] = []  # position, event, place
        ends: dict[int, float] = {}
        for v in self.touched - self.gone:
            died = self.died.get(v)
            if died is None or v in self.held or recorder.kinds.get(v) == "gradient":
                continue  # the program holds it: gradients until zero_grad
            others = [u for u in self.uses.get(v, ()) if not ops[u].region]
            until = max([self.last.get(v, -1), self.maker.get(v, -1), *others])
            ends[v] = ops[until].end + 0.25 if until >= 0 else died
            if until < 0 or (v not in self.last and v not in self.maker):
                ends[v] = died
        taken: set[int] = set()
        for v, parents in self.made_from.items():  # a kernel may write its result over an input that it reads last
            for parent in sorted(parents):
                end = ops[self.maker[v]].end + 0.25
                if parent not in taken and ends.get(parent) == end and self.sizes[parent] == self.sizes[v]:
                    ends[parent] = self.born[v] - 0.25
                    taken.add(parent)
                    break
        for position, event in enumerate(recorder.events):
            identity = event if event >= 0 else ~event
            if identity in self.gone or (event < 0 and identity in ends):
                continue
            inner = self._inner(position, identity)
            if not inner:
                line.append((position, event, recorder.where[position]))
        for v, end in ends.items():
            line.append((end, ~v, self._place(end)))
        for v, first, until in self.again:
            place = self._place(ops[first].start)
            identity = len(recorder.sizes)
            recorder.sizes.append(recorder.sizes[v])
            recorder.births.append(place)
            line.append((ops[first].start - 0.5, identity, place))
            line.append((ops[until].end + 0.25, ~identity, place))
        for op in ops:
            for v in op.padded:
                maker = self.maker.get(v, -1)
                if maker < 0 or not op.backward or not ops[maker].backward or ops[maker].region != op.region:
                    continue  # what the forward pass makes it makes with aligned sizes
                place = recorder.births[v]
                identity = len(recorder.sizes)
                recorder.sizes.append(recorder.sizes[v])
                recorder.births.append(place)
                line += [(self.born[v] + 0.1, identity, place), (op.end - 0.4, ~identity, place)]
        line.sort(key=lambda entry: entry[0])
        recorder.events[:] = [event for _, event, _ in line]
        recorder.where[:] = [place for _, _, place in line]
        positions = [position for position, _, _ in line]
        return [bisect_right(positions, mark - 0.6) for mark in marks]

    def _inner(self, position: int, identity: int) -> bool:
        """Whether the block is one that a fused operator's own kernel would have taken meanwhile."""
        index = bisect_right(self.starts, self.born[identity]) - 1
        if index < 0:
            return False
        op = self.ops[index]
        inside = op.start <= self.born[identity] < op.end and identity not in op.outs
        return inside and bool(op.region) and not op.alone and identity not in self.uses

    def _place(self, position: float) -> int:
        where = self.recorder.where
        return where[min(int(position), len(where) - 1)] if where else 0
