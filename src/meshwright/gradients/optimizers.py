"""Refuses optimizers that compute other numbers from parts of parameters than from whole ones.

What each class depends on, and the parameters for which it gives the results of one process::

    depends on        whole   DTensor   part, or several in one flat   stage of a pipeline
    elements          yes     yes       yes                            yes
    each parameter    yes     torch's   refused                        yes
    the same, OWNED   yes     yes       refused                        yes
    all parameters    yes     torch's   refused, unless it is whole    refused
    unknown           yes     torch's   a warning                      a warning

Operators on DTensors compute as on whole tensors, or torch refuses them. Each optimizer is checked
before its first step, and when it gets more parameters.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from meshwright.comm import Communicator
from meshwright.comm.dtensors.operators.mixed_lists import are_lists_taken_apart
from meshwright.comm.dtensors.sharded_axes import (
    is_distributed,
    is_line,
    is_marked_spread,
    local_part,
    singles_of,
)
from meshwright.comm.graphs.untraced import apart
from meshwright.errors import LayoutError, warn

Class = TypeVar("Class", bound=type)


class _Looks(StrEnum):
    """The values that an optimizer uses to update one element."""

    ELEMENTS = "that element of parameter, gradient and state"
    PARAMETER = "the whole parameter: its norm, rows, columns or shape"
    ALL = "all parameters together"
    UNKNOWN = "nobody knows what"


_KNOWN = MappingProxyType(
    {
        **dict.fromkeys(
            (
                torch.optim.ASGD,
                torch.optim.Adadelta,
                torch.optim.Adagrad,
                torch.optim.Adam,
                torch.optim.AdamW,
                torch.optim.Adamax,
                torch.optim.NAdam,
                torch.optim.RAdam,
                torch.optim.RMSprop,
                torch.optim.Rprop,
                torch.optim.SGD,
                torch.optim.SparseAdam,
            ),
            _Looks.ELEMENTS,
        ),
        torch.optim.Adafactor: _Looks.PARAMETER,
        torch.optim.Muon: _Looks.PARAMETER,
        torch.optim.LBFGS: _Looks.ALL,
    }
)

_NOT_FOR_DTENSORS: MappingProxyType[type, str] = MappingProxyType(
    {
        torch.optim.Adafactor: "Call meshwright.own_matrices(optimizer, model), or use AdamW, or "
        "replicate, where parameters are whole",
        torch.optim.Rprop: "Give it flat_groups(model), which are plain tensors",
    }
)
"""Classes of torch whose operators DTensors do not have."""

_BY_LOSS = (torch.optim.LBFGS,)
"""Classes whose steps depend on the loss: ranks with losses of their own would diverge."""

_DECLARED = "_meshwright_looks_at_elements"
_STAGE = "_meshwright_stage"
_MEAN = "_meshwright_mean"
_ZEROS = "_meshwright_zeros"
OWNED = "_meshwright_owned"
"""The attribute of an optimizer that `own_matrices` gives whole parameters in its steps."""


class _Mark:
    """The axes that a parameter is marked with. Copies are not marked."""

    __slots__ = ("axes",)

    def __init__(self, axes: Sequence[Communicator]) -> None:
        self.axes = tuple(axes)

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def declare_element_wise(cls: Class) -> Class:
    """Declare that the optimizer ``cls`` updates each element from its own history alone.

    So it may step parts of parameters: those of `FullyShardedDataParallel` and `flat_groups`. SGD,
    Adam and torch's other element-wise ones are known. It applies to subclasses with the same
    ``step``. Returns ``cls``, for use as a decorator. Raises TypeError for anything but a class
    with a ``step``, and for classes of torch that are known not to be element-wise.

    >>> @meshwright.declare_element_wise
    ... class Lion(torch.optim.Optimizer): ...
    """
    if not isinstance(cls, type) or not callable(getattr(cls, "step", None)):
        raise TypeError(f"expected a class of optimizers with a method step, found {cls!r}")
    looks = _looks(cls)
    if looks in (_Looks.PARAMETER, _Looks.ALL):
        raise TypeError(f"{cls.__name__} is not element-wise: it looks at {looks}")
    setattr(cls, _DECLARED, True)
    return cls


def looks_at_parameters(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` is of a class known to look at each parameter as a whole."""
    return _looks(type(optimizer)) is _Looks.PARAMETER


def check_ownable(optimizer: Optimizer) -> None:
    """Raise TypeError if `own_matrices` cannot give ``optimizer`` what it looks at."""
    looks, name = _looks(type(optimizer)), type(optimizer).__name__
    held = [p for group in optimizer.param_groups for p in group["params"]]
    found = f"looks at {looks}" if looks is _Looks.ALL else ""
    if any(is_marked_spread(each) or is_line(each) for each in held):
        found = "has parts, or lines of several, of FullyShardedDataParallel or flat_groups"
    if found:
        raise TypeError(
            f"own_matrices gives each parameter to one rank, and {name} {found}: shard with "
            "fully_shard, leave flat = true out of [train], and take an optimizer of single ones"
        )


def mark_stage(parameters: Iterable[torch.Tensor], pipeline: Communicator) -> None:
    """Mark ``parameters`` as those of stages: other ranks of ``pipeline`` hold the rest."""
    _mark(parameters, _STAGE, (pipeline,))


def refuse_stages(parameters: Iterable[torch.Tensor]) -> None:
    """Raise LayoutError for a norm over ``parameters`` of a rank's stages."""
    for pipeline in _marked(parameters, _STAGE):
        raise LayoutError(
            "expected the gradients of a whole model, found parameters of this rank's stages: "
            f"other ranks of axis {pipeline.axis!r} hold the others, and each would clip by "
            "another norm. Use meshwright.pipelining.clip_grad_norm_(stages, max_norm), which is "
            "over all of them, or [train] clip_norm"
        )


def mark_mean(parameters: Iterable[torch.Tensor], axes: Sequence[Communicator]) -> None:
    """Mark ``parameters``, for optimizers, as ones whose gradients are means over ``axes``.

    LBFGS depends on the loss, too: it gets the mean of its closure's result over all ranks.
    """
    _mark(parameters, _MEAN, axes)


def mean_axes(parameters: Iterable[torch.Tensor]) -> tuple[Communicator, ...]:
    """Return the axes, of several ranks, that `mark_mean` has marked ``parameters`` with."""
    return _marked(parameters, _MEAN)


def _mark(parameters: Iterable[torch.Tensor], name: str, axes: Sequence[Communicator]) -> None:
    wide = [axis for axis in axes if not axis.is_alone]
    if wide:
        look_at_optimizers()
        mark = _Mark(wide)
        for parameter in parameters:
            vars(parameter)[name] = mark


def _marked(parameters: Iterable[torch.Tensor], name: str) -> tuple[Communicator, ...]:
    marks = (vars(parameter).get(name) for parameter in parameters)
    return next((mark.axes for mark in marks if isinstance(mark, _Mark)), ())


@functools.cache
def look_at_optimizers() -> None:
    """Check every optimizer of this process before its first step, from now on."""
    register_optimizer_step_pre_hook(_OptimizerWatch())


class _OptimizerWatch:
    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._warned: weakref.WeakSet[type] = weakref.WeakSet()

    @apart
    def __call__(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if torch.compiler.is_compiling():
            return None
        size = sum([len(group["params"]) for group in optimizer.param_groups])
        if self._seen.get(optimizer) != size:
            doubt = check_optimizer(optimizer)
            if doubt and type(optimizer) not in self._warned:
                self._warned.add(type(optimizer))
                warn(doubt)
            self._seen[optimizer] = size
        return _with_mean_loss(optimizer, args, kwargs) if isinstance(optimizer, _BY_LOSS) else None


def warn_without_gradients(optimizer: Optimizer) -> bool:
    """Warn if ``optimizer``, after a forward in training, steps without any gradient.

    For parameters that graphs replace by other tensors. Returns whether it has warned.
    """
    trained = False
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if any(each.grad is not None for each in (parameter, *singles_of(parameter))):
                return False
            trained = trained or (parameter.requires_grad and parameter.numel() > 0)
    if trained:
        warn(
            f"a {type(optimizer).__name__} steps without a gradient, though a forward in training "
            "has run: no backward has come. backward(inputs=...) gives parameters that are sharded "
            "or cut none, since the graph has others in their place: call backward() without, and "
            "requires_grad_(False) of what is not to train"
        )
    return trained


def warn_of_zeros(flat: torch.Tensor, find: Callable[[], Sequence[str]]) -> None:
    """Warn once about parameters of ``flat`` without a gradient on any rank, if others had one.

    ``find`` names them. It reads values, so on a device, where the host would wait, only once.
    """
    names = () if vars(flat).get(_ZEROS) else find()
    if names or not flat.is_cpu:
        vars(flat)[_ZEROS] = True
    if not names:
        return
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    warn(
        f"no rank has a gradient of {', '.join(names[:5])}{rest}, in one flat parameter with "
        "others that have one: its .grad is zero there and not None, so momentum and weight decay "
        "move them, which one process would leave as they are. Freeze them, make them a unit of "
        "their own, or do without flat parameters (use_orig_params=True, [train] flat = false)"
    )


def _with_mean_loss(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a step, with a closure that returns the mean over data ranks."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return None

    def mean() -> torch.Tensor:
        loss = closure()
        place = loss.device if isinstance(loss, torch.Tensor) else "cpu"
        loss = torch.as_tensor(loss, dtype=torch.float64, device=place).detach()
        # Known now: replicas are set up in their first forward pass.
        held = (p for group in optimizer.param_groups for p in group["params"])
        held = (single for parameter in held for single in singles_of(parameter))
        for axis in mean_axes(held):
            loss = loss.to(axis.device) / axis.size
            axis.all_reduce(loss, label="loss of a closure").wait()
        return loss

    if len(args) > 1:
        return (args[0], mean, *args[2:]), kwargs
    return args, {**kwargs, "closure": mean}


def check_optimizer(optimizer: Optimizer, *, has_closure: bool = True) -> str:
    """Raise TypeError if ``optimizer`` would compute other numbers than one process.

    Also if its ``step`` requires arguments that the caller, without ``has_closure``, does not pass.
    Returns a warning about an unknown class or an empty group, "" if there is none.
    """
    looks, name = _looks(type(optimizer)), type(optimizer).__name__
    is_owned = OWNED in vars(optimizer)
    held = [p for group in optimizer.param_groups for p in group["params"] if not is_owned]
    lacks = next(
        (_NOT_FOR_DTENSORS[c] for c in type(optimizer).__mro__ if c in _NOT_FOR_DTENSORS), ""
    )
    if lacks and looks is not _Looks.UNKNOWN and any(map(_is_cut_dtensor, held)):
        raise TypeError(
            f"{name} uses operators that torch lacks for DTensors, which the parameters of "
            f"fully_shard and parallelize_module are. {lacks}"
        )
    _refuse_twice(held, name)
    if looks is not _Looks.UNKNOWN and held:
        _refuse_mixed(optimizer)
    if looks is _Looks.ALL and not _make_a_row(held):
        raise TypeError(
            f"{name} makes one row of all parameters, which torch cannot of DTensors beside plain "
            "tensors, nor of those that ranks hold uneven parts of, or that have no elements. Use "
            "an element-wise optimizer such as AdamW, or replicate, where parameters are whole"
        )
    found, instead = _unlike_one_process(held, looks)
    if found and looks is not _Looks.UNKNOWN:
        raise TypeError(
            f"{name} looks at {looks}, but {found}: it would compute other numbers than one "
            f"process. Use an element-wise optimizer such as AdamW, or {instead}"
        )
    if not has_closure and (wanted := _wanted(optimizer.step)):
        raise TypeError(
            f"the step of {name} needs {wanted}, which a Trainable does not have: it computes the "
            "loss once, before. Use another optimizer, or your own loop with replicate or "
            "fully_shard"
        )
    if not found:
        return _chosen_by_shape(optimizer)
    return (
        f"{name} is not known to look at single elements alone, and {found}. If its step takes a "
        "norm, a mean or a shape of what it is given, it computes other numbers than one process: "
        f"then {instead}. If not, call meshwright.declare_element_wise({name}) before"
    )


def _chosen_by_shape(optimizer: Optimizer) -> str:
    """The warning for an empty group that might have parameters in one process."""
    groups = optimizer.param_groups
    held = [parameter for group in groups for parameter in group["params"]]
    empty = next((i for i, group in enumerate(groups) if not group["params"]), None)
    if empty is None or not any(is_marked_spread(each) or is_line(each) for each in held):
        return ""
    return (
        f"group {empty} of {type(optimizer).__name__} has no parameters. Those of "
        "FullyShardedDataParallel and flat_groups have one dim outside of a forward, and flat ones "
        "other names, so that p.ndim and names choose others than in one process: choose by the "
        "names of parameters, with use_orig_params=True, or shard with fully_shard. A group "
        "that is empty in one process, too, can be left out"
    )


def _refuse_twice(held: Sequence[torch.Tensor], name: str) -> None:
    """Raise TypeError for a parameter inside the memory of a flat one that is passed too."""
    for line in filter(is_line, held):
        start = line.data_ptr()
        end = start + line.numel() * line.element_size()
        for parameter in held:
            if parameter is not line and start <= local_part(parameter).data_ptr() < end:
                raise TypeError(
                    f"{name} has a parameter of shape {tuple(parameter.shape)} beside the flat one "
                    f"of {line.numel()} elements that it is a part of, and would step it twice: "
                    "give it flat_groups(model), or the parameters of the model, and not both"
                )


def _refuse_mixed(optimizer: Optimizer) -> None:
    """Raise TypeError for a group that would pass DTensors and other tensors to one kernel."""
    for group in optimizer.param_groups:
        chosen = next((key for key in ("foreach", "fused") if group.get(key)), None)
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        dtensors = sum(map(is_distributed, trained))
        others = [parameter for parameter in trained if not is_distributed(parameter)]
        # Lists of plain ones are taken apart; a class of the user's answers before they can be.
        own = [type(each) for each in others if _answers_itself(type(each))]
        if not chosen or not dtensors or not others or (are_lists_taken_apart() and not own):
            continue
        beside = f"ones of class {own[0].__name__}" if own else "plain tensors"
        raise TypeError(
            f"{type(optimizer).__name__}({chosen}=True) steps all parameters of a group by one "
            f"operator, and {dtensors} of {len(trained)} are DTensors, which torch's operators do "
            f"not take beside {beside}: leave {chosen} out, or give the DTensors a group of their "
            "own"
        )


def _answers_itself(cls: type[torch.Tensor]) -> bool:
    """Whether a tensor class may answer calls of torch with tensors of its own."""
    silent = torch.nn.Parameter.__torch_function__
    return cls is not torch.Tensor and cls.__torch_function__ is not silent


def _make_a_row(held: Sequence[torch.Tensor]) -> bool:
    """Whether torch can view each of ``held`` as a row and join the rows."""
    if len(set(map(is_distributed, held))) > 1:
        return False
    if any(is_distributed(parameter) and not parameter.numel() for parameter in held):
        return False  # torch would not come back from a view of one
    try:
        for parameter in held:
            parameter.detach().view(-1)
    except RuntimeError:  # what torch says of an operator that DTensors placed so have not
        return False
    return True


def _unlike_one_process(held: Sequence[torch.Tensor], looks: _Looks) -> tuple[str, str]:
    """Describe how an optimizer that ``looks`` so would differ from one process, and the remedy."""
    if looks is _Looks.ELEMENTS:
        return "", ""
    parts, lines = sum(map(is_marked_spread, held)), sum(map(is_line, held))
    if parts or (lines and looks is not _Looks.ALL):
        found = f"{max(parts, lines)} of its {len(held)} parameters are parts, or lines of several"
        return (
            f"{found} (of FullyShardedDataParallel or flat_groups)",
            "shard with fully_shard, whose parameters are DTensors and which own_matrices makes "
            "whole, or use replicate",
        )
    stages = _marked(held, _STAGE)
    if stages and looks is not _Looks.PARAMETER:
        return (
            f"its parameters are those of this rank's stages, and other ranks of axis "
            f"{stages[0].axis!r} hold the others",
            "one that looks at each parameter alone; [train] clip_norm, and clip_grad_norm_ of "
            "meshwright.pipelining, clip by a norm over all stages",
        )
    return "", ""


def _wanted(step: Callable[..., object]) -> str:
    """The arguments that ``step`` requires, such as ``closure``.

    A learning rate scheduler replaces a bound ``step`` by its own function, which shows the
    signature of the unbound one.
    """
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(
        name
        for name, each in inspect.signature(step).parameters.items()
        if each.default is inspect.Parameter.empty and each.kind not in variadic and name != "self"
    )


def _looks(cls: type) -> _Looks:
    """Classify an optimizer by the class whose ``step`` runs: an override may do anything."""
    step = inspect.unwrap(cls.step)
    for base in cls.__mro__:
        if inspect.unwrap(getattr(base, "step", print)) is not step:
            break
        if _DECLARED in vars(base):
            return _Looks.ELEMENTS
        if base in _KNOWN:
            return _KNOWN[base]
    return _Looks.UNKNOWN


def _is_cut_dtensor(parameter: torch.Tensor) -> bool:
    placements = getattr(parameter, "placements", ())
    return is_distributed(parameter) and not all(p.is_replicate() for p in placements)
