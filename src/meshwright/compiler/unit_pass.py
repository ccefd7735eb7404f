"""The passes that place gathers of sharded units in a graph.

Before a joint graph is partitioned, `keep_apart` tags unsharded parameters, and values computed
from them alone, for recomputation in the backward, so none is saved. Then, in each part::

    unshard 1 ─ a ─ b      start 1, wait 1, start 2, a, b, free 1
    unshard 2 ─ c      ->  wait 2, start 3, c, free 2
    unshard 3 ─ d          wait 3, d, free 3
    reduce 3, 2, 1         send each after its last gradient

So at most two units are unsharded at a time, besides those of enclosing modules. Every graph is
checked afterwards.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import fx

from meshwright.comm.graphs.units import (
    BEGIN,
    BEGIN_BACKWARD,
    DRIVE,
    FREE,
    FREE_BACKWARD,
    HOLD,
    NEEDED,
    NO_UNIT,
    REDUCE,
    SEND,
    START,
    START_BACKWARD,
    UNSHARD,
    WHOLE,
    UnitForm,
)
from meshwright.compiler.bucket_pass import Writer
from meshwright.errors import InternalError
from meshwright.torch_internals.compile import recompute_always, recompute_never
from meshwright.torch_internals.tensors import storage_id
from meshwright.torch_internals.trees import tree_leaves

_ATEN = torch.ops.aten

MOST = 2
"""Units that may be unsharded at a time, besides those of enclosing modules."""


@dataclass(slots=True, eq=False)
class Gather:
    """The gather of one unit in a graph, and its readers."""

    number: int
    form: UnitForm
    mark: fx.Node
    readers: list[fx.Node] = field(default_factory=list)
    """The nodes that read it, in graph order."""
    computed: dict[fx.Node, None] = field(default_factory=dict)
    """Nodes that depend on it, among those placed so far."""
    lines: list[fx.Node] = field(default_factory=list)
    """Nodes of its gathered buffers, once it has arrived; the pass frees them."""

    def note(self, node: fx.Node) -> None:
        """Note that ``node`` has been placed."""
        if node in self.readers or not self.computed.keys().isdisjoint(node.all_input_nodes):
            self.computed[node] = None


def keep_apart(graph: fx.Graph) -> bool:
    """Tag values computed from unsharded parameters alone for recomputation in the backward.

    Outputs that alias their memory become copies. False if the graph gathers nothing.
    """
    alone: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        is_of_them = bool(inputs) and all(each in alone for each in inputs)
        if node.target is UNSHARD or (is_of_them and not _is_random(node)):
            alone.add(node)
    *_, output = graph.nodes
    alone.discard(output)
    if not alone:
        return False
    for node in alone:
        recompute_always(node)
    lent = _lent(graph)
    for node in _handed_on(graph, alone, lent):
        recompute_never(node)
    for node in output.all_input_nodes:
        if lent[node]:
            output.replace_input_with(node, _copy(graph, node))
    return True


def _handed_on(
    graph: fx.Graph, alone: set[fx.Node], lent: Mapping[fx.Node, set[tuple[str, int]]]
) -> list[fx.Node]:
    """List values that the forward computes with one unit and uses while it is at another.

    Recomputing them would need the first unit while the backward is at the other.
    """
    *_, output = graph.nodes
    late = {node for node in graph.nodes if _is_tangent(node)}
    for node in graph.nodes:
        if late.intersection(node.all_input_nodes):
            late.add(node)
    forward: set[fx.Node] = {node for node in output.all_input_nodes if node not in late}
    for node in reversed(graph.nodes):
        if node in forward:
            forward.update(node.all_input_nodes)
    at: dict[fx.Node, int] = {}
    now: set[tuple[str, int]] = set()
    count = 0
    for node in graph.nodes:
        if node not in forward or node in alone:
            continue
        read = {unit for each in node.all_input_nodes for unit in lent[each]}
        if read and read != now:
            now, count = read, count + 1
        at[node] = count
    return [n for n in at if at[n] and any(at.get(user, at[n]) != at[n] for user in n.users)]


def place_units(graph: fx.Graph) -> int:
    """Replace the marks of units in ``graph``, check it, and return the number of UNSHARD marks."""
    marks = [node for node in graph.nodes if node.target in (UNSHARD, REDUCE)]
    for model in dict.fromkeys(_model_of(mark) for mark in marks):
        placing = _Placing(graph, model)
        placing.run()
        check_units(graph, model, {gather.number: gather.form for gather in placing.gathers})
    return sum(mark.target is UNSHARD for mark in marks)


class _Placing:
    """Reorders the nodes of a graph, with gathers and frees of the units of one model."""

    def __init__(self, graph: fx.Graph, model: str) -> None:
        self._graph = graph
        *self._body, self._output = graph.nodes
        marks = [n for n in self._body if n.target in (UNSHARD, REDUCE) and _model_of(n) == model]
        self._model, self._token = model, _args(marks[0])[0]
        self._reductions = [mark for mark in marks if mark.target is REDUCE]
        self._gone = {*marks, *(user for m in marks if m.target is UNSHARD for user in m.users)}
        self.gathers = _gathers(self._body, marks)
        """The gathers in the order of their first use."""
        self._is_backward = any(_is_tangent(node) for node in self._body)
        if self._reductions and not self._is_backward:
            raise RuntimeError(
                "a graph holds the whole of a backward pass through sharded modules, which is not "
                "supported: call backward outside of compiled_autograd"
            )
        self._writer = Writer(graph, self._output)
        self._order: list[fx.Node] = []
        self._waiting = list(self.gathers)
        """Gathers that have not been started."""
        self._alive: list[Gather] = []
        self._is_ahead = False
        """True while the last of `_alive` has been started and has not arrived."""
        self._sent: list[fx.Node] = []
        """The gradients that were sent last."""
        self._seen: set[fx.Node] = set()
        self._lent = _lent(graph)

    def run(self) -> None:
        first = {gather.readers[0]: gather for gather in reversed(self.gathers)}
        body = [node for node in self._body if node not in self._gone]
        is_begun = False
        for node in body:
            if node.op != "placeholder" and not is_begun:
                is_begun = True
                self._drive(BEGIN, NO_UNIT, self._described())
                self._start_next()
            for gather in self.gathers if node in first else ():
                if gather.readers[0] is node:
                    self._arrive(gather)
            self._order.append(node)
            self._seen.add(node)
            for gather in self._alive:
                gather.note(node)
            for gather in [each for each in self._alive if each.readers[-1] is node]:
                self._free(gather)
            # Sending ends a unit's backward, so it must not be read afterwards.
            still = {gather.number for gather in (*self._alive, *self._waiting)}
            for reduction in list(self._reductions):
                is_there = self._seen.issuperset(_gradients(reduction))
                if is_there and _args(reduction)[4] not in still:
                    self._send(reduction)
        held = [line for gather in self.gathers for line in gather.lines]
        # A last use of these, so that generated code does not reuse their memory.
        self._drive(HOLD, NO_UNIT, "", [*held, *self._sent])
        for node in self._order:
            self._output.prepend(node)
        for node in reversed([node for node in self._body if node in self._gone]):
            self._graph.erase_node(node)

    def _arrive(self, gather: Gather) -> None:
        if gather in self._waiting:
            self._start(gather)
        self._is_ahead = False
        text = _args(gather.mark)[3]
        for line in range(len(gather.form.lines)):
            there = self._call(WHOLE, self._token, self._model, gather.number, line, text)
            gather.lines.append(there)
        wholes = []
        for part, value in zip(gather.form.parts, gather.mark.meta["val"], strict=True):
            place = [*part.shape], [*value.stride()], part.start
            wholes.append(self._call(_ATEN.as_strided.default, gather.lines[part.line], *place))
            # Views in the trace alias the storage of the traced value, so keep that.
            wholes[-1].meta["val"] = value
        for user in gather.mark.users:
            user.replace_all_uses_with(wholes[_args(user)[1]])
        self._start_next()

    def _start_next(self) -> None:
        """Start the next gather ahead of its use, if there is room."""
        if self._waiting and not self._is_ahead:
            held = [*self._alive, self._waiting[0]]
            if len(_innermost({each.number: each.form for each in held})) <= MOST:
                self._start(self._waiting[0])
                self._is_ahead = True

    def _start(self, gather: Gather) -> None:
        self._waiting.remove(gather)
        self._alive.append(gather)
        self._drive(START, gather.number)

    def _free(self, gather: Gather) -> None:
        self._alive.remove(gather)
        # The compiler may defer a computation to its use, which would read the freed buffers.
        late = [n for n in gather.computed if not (self._lent[n] or self._seen.issuperset(n.users))]
        after = [node for node in late if isinstance(node.meta.get("val"), torch.Tensor)]
        said = NEEDED if gather.form.has_backward else ""
        self._drive(FREE, gather.number, said, gather.lines, after)
        self._start_next()

    def _send(self, reduction: fx.Node) -> None:
        self._reductions.remove(reduction)
        gradients = _gradients(reduction)
        indices, _, number = _args(reduction)[2:]
        self._call(SEND, self._token, gradients, indices, self._sent, self._model, number)
        self._sent = gradients
        like = reduction.meta["val"]
        zero = self._call(_ATEN.full.default, [], 0.0, dtype=like.dtype, device=like.device)
        reduction.replace_all_uses_with(zero)

    def _drive(
        self,
        what: str,
        number: int,
        said: str = "",
        held: Sequence[fx.Node] = (),
        after: Sequence[fx.Node] = (),
    ) -> None:
        if self._is_backward:
            what = _IN_BACKWARD.get(what, what)
        held, after = list(held), list(after)
        self._call(DRIVE, self._token, held, after, self._model, what, number, said)

    def _call(self, target: Callable[..., Any], *args: Any, **constants: Any) -> fx.Node:
        node = self._writer.call(target, *args, **constants)
        self._order.append(node)
        return node

    def _described(self) -> str:
        """Name the units and digest the order, for comparison between ranks."""
        gathers = [[gather.number, _args(gather.mark)[3]] for gather in self.gathers]
        sums = [[_args(mark)[4], list(_args(mark)[2])] for mark in self._reductions]
        digest = hashlib.blake2b(json.dumps([gathers, sums]).encode(), digest_size=4).hexdigest()
        gradients = f"{sum(len(indices) for _, indices in sums)} gradients, " if sums else ""
        return f"{_named(self.gathers)}; {gradients}{digest}"


def _named(gathers: Sequence[Gather]) -> str:
    """Name the units of ``gathers``; for adjacent ones only the first and the last."""
    runs: list[list[Gather]] = []
    for gather in gathers:
        if runs and abs(gather.number - runs[-1][-1].number) == 1:
            runs[-1].append(gather)
        else:
            runs.append([gather])
    ends = [[run[0].form.name, run[-1].form.name][: len(run)] for run in runs]
    return ", ".join(" to ".join(names) for names in ends) or "no units"


_IN_BACKWARD = MappingProxyType({BEGIN: BEGIN_BACKWARD, START: START_BACKWARD, FREE: FREE_BACKWARD})


def check_units(graph: fx.Graph, model: str, forms: Mapping[int, UnitForm]) -> None:
    """Check ``graph`` after the marks of ``model`` have become gathers of the units in ``forms``.

    The graph is well formed; each unit is gathered once, read only while unsharded and in no
    output; its gradients are sent once, after its free; at most two are unsharded at a time,
    besides those of enclosing modules.

    Raises InternalError, naming the unit and the violation.
    """
    graph.lint()
    lent = _lent(graph)
    whole: dict[int, UnitForm] = {}
    seen = {START: [], WHOLE: [], FREE: [], SEND: []}
    for node in graph.nodes:
        what, number = _act_of(node, model)
        if what in seen:
            seen[what].append(number)
        if what == START:
            whole[number] = forms[number]
            held = _innermost(whole)
            if len(held) > MOST:
                names = [form.name for form in held]
                raise InternalError(
                    f"a graph holds {len(held)} units of {model} whole at a time, {names}, where "
                    f"{MOST} are allowed"
                )
        elif what == FREE:
            del whole[number]
        elif what == SEND and number in whole:
            raise InternalError(
                f"a graph of {model} sends gradients of unit {forms[number].name!r} before it is "
                "freed, which ends its backward"
            )
        elif what != HOLD:
            _check_reads(node, model, lent, whole, forms)
    expected = sorted(forms)
    for what in (START, WHOLE, FREE):
        if sorted(seen[what]) != expected:
            raise InternalError(f"a graph of {model} has {what} of {seen[what]}, not of {expected}")
    if len(set(seen[SEND])) < len(seen[SEND]):
        raise InternalError(f"a graph of {model} sends gradients twice: of {seen[SEND]}")


def _check_reads(
    node: fx.Node,
    model: str,
    lent: Mapping[fx.Node, set[tuple[str, int]]],
    whole: Mapping[int, UnitForm],
    forms: Mapping[int, UnitForm],
) -> None:
    read = {unit for each in node.all_input_nodes for unit in lent[each]}
    for its_model, number in read:
        if its_model == model and (node.op == "output" or number not in whole):
            place = "an output" if node.op == "output" else f"{node.name}, where it is not whole"
            raise InternalError(
                f"a graph of {model} has unit {forms[number].name!r} in {place}: expected to read "
                "it between its gather and its end"
            )


def _act_of(node: fx.Node, model: str) -> tuple[object, int]:
    """What ``node`` does to a unit of ``model``, and the unit's number; mostly (None, NO_UNIT)."""
    if node.target is DRIVE and _args(node)[3] == model:
        what = next((k for k, v in _IN_BACKWARD.items() if v == _args(node)[4]), _args(node)[4])
        return what, int(_args(node)[5])
    if node.target is WHOLE and _args(node)[1] == model and not _args(node)[3]:
        return WHOLE, int(_args(node)[2])
    if node.target is SEND and _args(node)[4] == model:
        return SEND, int(_args(node)[5])
    return None, NO_UNIT


def _innermost(units: Mapping[int, UnitForm]) -> list[UnitForm]:
    """List the units without those whose modules enclose others in ``units``."""
    around = {number for form in units.values() for number in form.around}
    return [form for number, form in units.items() if number not in around]


def _gathers(body: Iterable[fx.Node], marks: Iterable[fx.Node]) -> list[Gather]:
    """List the gathers of ``marks`` that have readers, in the order of their first use."""
    found: dict[int, Gather] = {}
    for mark in marks:
        if mark.target is UNSHARD:
            _, _, number, text = _args(mark)
            found[number] = Gather(number, UnitForm.of(text), mark)
    storages = {
        storage_id(whole.untyped_storage()): gather
        for gather in found.values()
        for whole in gather.mark.meta["val"]
    }
    gone = {user for gather in found.values() for user in (gather.mark, *gather.mark.users)}
    ordered: list[Gather] = []
    for node in body:
        if node in gone:
            continue
        for each in node.all_input_nodes:
            for storage in _memory(each):
                gather = storages.get(storage)
                if gather is None or node in gather.readers[-1:]:
                    continue
                if not gather.readers:
                    ordered.append(gather)
                gather.readers.append(node)
    return ordered


def _lent(graph: fx.Graph) -> dict[fx.Node, set[tuple[str, int]]]:
    """Map each node to the units, by model and number, whose memory its value aliases."""
    units: dict[int, tuple[str, int]] = {}
    for node in graph.nodes:
        if node.target in (UNSHARD, WHOLE):
            views = [user for user in node.users if user.target is _ATEN.as_strided.default]
            for each in (node, *views):
                for storage in _memory(each):
                    units[storage] = str(_args(node)[1]), int(_args(node)[2])
    return {node: {units[s] for s in _memory(node) if s in units} for node in graph.nodes}


def _memory(node: fx.Node) -> set[int]:
    leaves = (x for x in tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor))
    return {storage_id(leaf.untyped_storage()) for leaf in leaves}


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    value = node.meta["val"]
    with graph.inserting_after(node):
        copy = graph.call_function(_ATEN.clone.default, (node,))
    with value.fake_mode:
        copy.meta["val"] = value.clone()
    return copy


def _model_of(mark: fx.Node) -> str:
    return str(_args(mark)[1 if mark.target is UNSHARD else 3])


def _gradients(reduction: fx.Node) -> list[fx.Node]:
    return list(_args(reduction)[1])


def _args(node: fx.Node) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", node.args)


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_tangent(node: fx.Node) -> bool:
    """Whether ``node`` is a gradient of an output, an input of a backward graph."""
    return node.op == "placeholder" and "tangents" in str(node.target)
