"""Styles: by columns, by rows, on a shard of the sequence, and those that convert layouts alone.

A style is applied to one module: its parameters become DTensors, and its new class has a forward
that converts activations and computes on local tensors. Styles without parameters convert a
module's inputs and outputs to a layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import partial, partialmethod
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from meshwright.comm.dtensors.after_hooks import has_hooks
from meshwright.comm.dtensors.dtensor import (
    AnyPlacement,
    Became,
    dtensor_at_rest,
    is_dtensor,
    known_at_rest,
    note_became,
    our_placement,
    torch_placements,
    what_became,
)
from meshwright.comm.dtensors.edges import (
    distribute_module,
    distribute_parameters,
    enter,
    enter_sequence,
    leave,
    leave_sequence,
)
from meshwright.comm.dtensors.gather_dtensor import part, side_by_side
from meshwright.comm.dtensors.local_leaves import PartialGradient, local_leaf
from meshwright.comm.dtensors.subclasses import has_calls
from meshwright.comm.dtensors.unreadable import retire
from meshwright.layout import Placement, Replicate, Shard
from meshwright.mesh import DeviceMesh
from meshwright.tensor_parallel.layers import (
    ColumnConv1D,
    ColumnEmbedding,
    ColumnLinear,
    RowConv1D,
    RowEmbedding,
    RowLinear,
    Sequence,
    SequencePart,
    Settings,
    check_embedding,
    is_conv1d,
)
from meshwright.tensor_parallel.layouts import Site, check_mesh, untraced


@torch.no_grad()
def distribute(
    module: nn.Module,
    key: str,
    placement: AnyPlacement,
    site: Site,
    source: int | None,
    *,
    is_partial: bool = False,
) -> None:
    """Make parameter ``key`` of ``module`` a DTensor with ``placement`` on the axis of ``site``.

    Its values are those of rank ``source`` of the axis (one broadcast), or each rank's own if that
    is None. Parameters on the meta device stay there. None stays None. ``is_partial``: each rank
    computes a summand of its gradient.

    Raises ValueError for a parameter that is tied to one with another placement, that has been
    distributed before, that has hooks, or whose class overrides torch's calls.
    """
    given = module._parameters[key]
    if given is None:
        return
    name = f"{site.labels.name}.{key}" if site.labels.name else key
    if known_at_rest(given) is not None:
        raise ValueError(
            f"{name} is a DTensor already, placed {list(given.placements)} on "  # pyrefly: ignore[missing-attribute]
            f"{given.device_mesh}: parallelize each module once"  # pyrefly: ignore[missing-attribute]
        )
    became = what_became(given)
    if became is None:
        _check_given(given, name)
        became = Became(
            _distributed(given, name, placement, site, source),
            placement,
            name,
            is_partial=is_partial,
        )
        note_became(given, became)
        retire(given, name, "parallelize_module")
    elif became.placement != placement or became.is_partial is not is_partial:
        raise ValueError(
            f"{name} and {became.name} are one tied parameter, which cannot be placed {placement} "
            f"and {became.placement} at once: give both modules styles that place it alike "
            "(RowwiseParallel on an embedding, ColwiseParallel on its output layer), or untie them"
        )
    module._parameters[key] = became.parameter
    local_leaf(became.parameter)  # registers it, so that later writes to .data are seen


def guard_loading(module: nn.Module) -> None:
    """Reject unsharded tensors for DTensors of ``module`` in `load_state_dict(assign=True)`."""
    module.register_load_state_dict_pre_hook(_refuse_whole)


def _check_given(given: nn.Parameter, name: str) -> None:
    """Raise ValueError for hooks and overridden calls, which the DTensor would not have."""
    if has_calls(given):
        raise ValueError(
            f"{name} is a {type(given).__name__}, a tensor subclass with calls of its own, which "
            "the DTensor that takes its place would not make: leave the layer out of the plan"
        )
    if has_hooks(given):
        raise ValueError(
            f"{name} has hooks for its gradient, which the DTensor that takes its place would not "
            "have: register hooks, and optimizers in the backward, after parallelize_module, and "
            "call it before replicate, DistributedDataParallel or fully_shard"
        )


def _refuse_whole(
    module: nn.Module,
    state: Mapping[str, object],
    prefix: str,
    metadata: Mapping[str, object],
    *rest: object,
) -> None:
    """Load pre-hook: raises ValueError if loading would replace DTensors by plain tensors."""
    if not metadata.get("assign_to_params_buffers", False):
        return
    for key, parameter in module._parameters.items():
        given = state.get(prefix + key)
        if is_dtensor(parameter) and isinstance(given, torch.Tensor) and not is_dtensor(given):
            raise ValueError(
                f"{prefix}{key} is a DTensor, and load_state_dict(assign=True) was given a plain "
                f"tensor of shape {tuple(given.shape)} to put in its place: load whole tensors "
                "with set_model_state_dict and StateDictOptions(full_state_dict=True)"
            )


def _distributed(
    given: nn.Parameter, name: str, placement: AnyPlacement, site: Site, source: int | None
) -> nn.Parameter:
    axis, data = site.axis, given.detach()
    if data.device.type != "meta":
        data = data.to(axis.device).contiguous()
        if source is not None and not axis.is_alone:
            axis.broadcast(data, source=source, label=f"{name} from rank {source}").wait()
    strides = torch.empty(given.shape, device="meta").stride()
    if isinstance(placement, Replicate) or axis.size == 1:
        whole = dtensor_at_rest(data, site.mesh, [placement], tuple(given.shape), strides)
    else:
        whole = part(data, site.mesh, [placement], strides)
    return nn.Parameter(whole, requires_grad=given.requires_grad)


class ParallelStyle(ABC):
    """How one module runs over the ranks of an axis. Derive your own styles from it.

    `parallelize_module` sets ``src_data_rank`` and ``module_name`` and calls ``_apply``, which
    changes the module in place and returns it.
    """

    src_data_rank: int | None = 0
    """The rank of the axis whose values parameters get; None to keep each rank's values."""
    module_name: str = ""
    """The name of the module that the style is being applied to."""

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module: ...

    def _has_own(self, *parts: str) -> bool:
        """Whether a subclass overrides any of ``parts``, methods of one of our styles.

        Then all of these parts run on DTensors, as in torch's style.
        """
        kinds = type(self).__mro__
        owners = [next((c for c in kinds if p in vars(c)), ParallelStyle) for p in parts]
        return not all(map(_is_ours, owners))

    def apply_to(
        self, module: nn.Module, device_mesh: DeviceMesh, *, name: str, src_data_rank: int | None
    ) -> nn.Module:
        """Apply the style to ``module``, called ``name``; returns the module or its replacement."""
        self.src_data_rank = src_data_rank
        self.module_name = name
        return self._apply(module, device_mesh)

    def finish(self, root: nn.Module) -> None:  # noqa: B027
        """Called with the whole module once all styles of a plan are applied."""

    def site_of(self, module: nn.Module, device_mesh: DeviceMesh) -> Site:
        """Return the site of ``module``: the mesh, its axis, and labels.

        Raises ValueError unless the mesh has one dim, and TypeError if a subclass overrides a part
        of torch's style that ours does not call.
        """
        check_mesh(device_mesh)
        home = next(c for c in type(self).__mro__ if _is_ours(c) and "_apply" in vars(c))
        changed = [part for part in _PARTS if part not in vars(home) and self._has_own(part)]
        if changed and home is not ParallelStyle:
            raise TypeError(
                f"{type(self).__name__} changes {', '.join(changed)}, which {home.__name__} of "
                "meshwright does not call: derive from the style of this name in "
                "torch.distributed.tensor.parallel, which runs as it is, or implement _apply"
            )
        return Site.of(device_mesh, self.module_name or type(module).__name__)


_PARTS = (
    *("_partition_linear_fn", "_partition_embedding_fn", "_replicate_module_fn"),
    *("_prepare_input_fn", "_prepare_input_arg", "_prepare_input_kwarg_fn"),
    *("_prepare_output_fn", "_prepare_out_fn"),
)
"""The overridable methods of torch's styles; each of ours calls those that it defines."""


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("meshwright.")


def shown(style: object, *names: str) -> str:
    """The repr of ``style``, with the attributes ``names`` as arguments."""
    return f"{type(style).__name__}({', '.join(f'{n}={getattr(style, n)}' for n in names)})"


def _kind_of(module: nn.Module) -> str:
    """The kind of layer that ``module`` is; "" for one that no style supports."""
    if isinstance(module, nn.Linear):
        return "Linear"
    if is_conv1d(module):
        return "Conv1D"
    return "Embedding" if isinstance(module, nn.Embedding) else ""


class _Layered(ParallelStyle):
    """A style with one layout for the input and one for the output."""

    _defaults: tuple[Placement, Placement] = (Replicate(), Shard(-1))
    """The default layouts of input and output."""
    _cuts: Mapping[str, tuple[type[nn.Module], Mapping[str, AnyPlacement]]] = MappingProxyType({})
    """By kind of layer, its new class and the placements of its parameters."""
    _desired: Placement = Replicate()
    """The input layout with which a Linear computes."""

    def __init__(
        self,
        *,
        input_layouts: AnyPlacement | None = None,
        output_layouts: AnyPlacement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = torch_placements([input_layouts or self._defaults[0]])
        self.output_layouts = torch_placements([output_layouts or self._defaults[1]])
        self.desired_input_layouts = torch_placements([self._desired])
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        site = self.site_of(module, device_mesh)
        kind = _kind_of(module)
        if not kind:
            raise NotImplementedError(
                f"{type(self).__name__} currently only support nn.Linear and nn.Embedding! "
                f"{site.labels.name} is a {type(module).__name__}"
            )
        if isinstance(module, nn.Embedding):
            is_by_rows = self._cuts[kind][0] is RowEmbedding
            check_embedding(module, site.labels.name, is_by_rows=is_by_rows)
        is_linear = kind != "Embedding"
        own = "_partition_linear_fn" if is_linear else "_partition_embedding_fn"
        if self._has_own(own, "_prepare_input_fn", "_prepare_output_fn"):
            if kind == "Conv1D":
                raise TypeError(
                    f"{site.labels.name} is a Conv1D, which no parts of torch's styles know: give "
                    f"it meshwright's own style, not a {type(self).__name__} with changed parts"
                )
            desired = self.desired_input_layouts if is_linear else torch_placements([Replicate()])
            prepare: Any = partial(self._prepare_input_fn, self.input_layouts, desired)
            finish: Any = partial(
                self._prepare_output_fn, self.output_layouts, self.use_local_output
            )
            return distribute_module(module, device_mesh, getattr(self, own), prepare, finish)
        return self._become(module, self._settings(module, site), *self._cuts[kind])

    def _partition(self, kind: str, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        distribute_parameters(module, mesh, self._cuts[kind][1], self.src_data_rank)

    # Parts of torch's styles, which subclasses call or override.
    _partition_linear_fn = partialmethod(_partition, "Linear")
    _partition_embedding_fn = partialmethod(_partition, "Embedding")
    _prepare_input_fn = staticmethod(enter)
    _prepare_output_fn = staticmethod(leave)

    def _settings(self, module: nn.Module, site: Site, *, parts: int = 1) -> Settings:
        """Make the settings of ``module``; ValueError for parameters other than weight and bias."""
        known = {"weight"} if isinstance(module, nn.Embedding) else {"weight", "bias"}
        found = set(module._parameters)
        if found != known:
            raise ValueError(
                f"{site.labels.name}: expected a {type(module).__name__} with the parameters "
                f"{sorted(known)}, found {sorted(found)}: others (of a parametrization or of a "
                "subclass) cannot be sharded here"
            )
        return Settings(
            site=site,
            input=our_placement(self.input_layouts[0], site.labels.name),
            output=our_placement(self.output_layouts[0], site.labels.name),
            is_local=self.use_local_output,
            partial_bias=PartialGradient(site.axis) if parts > 1 else None,
            parts=parts,
        )

    def _become(
        self,
        module: nn.Module,
        settings: Settings,
        kind: type[nn.Module],
        placements: Mapping[str, AnyPlacement],
    ) -> nn.Module:
        bases = (kind, type(module)) if is_conv1d(module) else (type(module), kind)
        for key, placement in placements.items():
            is_partial = key == "bias" and settings.partial_bias is not None
            site, source = settings.site, self.src_data_rank
            distribute(module, key, placement, site, source, is_partial=is_partial)
        guard_loading(module)
        vars(module)["_meshwright_style"] = settings
        own = type(module)
        # A subclass's own forward runs; its super().forward() communicates.
        is_plain = own in (nn.Linear, nn.Embedding)
        module.__class__ = kind if is_plain else type(own.__name__, bases, {})
        return module

    def __repr__(self) -> str:
        return shown(self, "input_layouts", "output_layouts", "use_local_output")


class ColwiseParallel(_Layered):
    """Shards the output features of a `torch.nn.Linear` or `torch.nn.Embedding` over ranks.

    A ``Conv1D`` of Hugging Face counts as a Linear whose weight is transposed.

    ``input_layouts``: the layout of a local input (Replicate). ``output_layouts``: the layout of
    the output (``Shard(-1)``). A DTensor has its own layout. With ``use_local_output=False`` the
    output is a DTensor.

    Weight and bias of a Linear are ``Shard(0)``, the weight of an Embedding ``Shard(1)``. The
    gradient of the input is summed over ranks while that of the weight is computed.
    """

    _cuts = MappingProxyType(
        {
            "Linear": (ColumnLinear, {"weight": Shard(0), "bias": Shard(0)}),
            "Conv1D": (ColumnConv1D, {"weight": Shard(1), "bias": Shard(0)}),
            "Embedding": (ColumnEmbedding, {"weight": Shard(1)}),
        }
    )


class FusedColwiseParallel(_Layered):
    """Shards a layer with ``parts`` matrices of one size side by side, each over ranks.

    For query, key and value in one `torch.nn.Linear` or ``Conv1D``, or gate and up. The module
    returns a local tensor with this rank's shard of each part, one after the other, to be split.
    ``input_layouts``: the layout of a local input (Replicate).

    The weight is sharded with strides along its output features. The bias is Replicate, and its
    gradient is summed over ranks at the end of each backward pass.
    """

    def __init__(self, parts: int, *, input_layouts: AnyPlacement | None = None) -> None:
        if parts < 2:
            raise ValueError(f"expected parts >= 2, found {parts}: ColwiseParallel cuts one matrix")
        super().__init__(input_layouts=input_layouts)
        self.parts = parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        site = self.site_of(module, device_mesh)
        kind, parts = _kind_of(module), self.parts
        if kind not in ("Linear", "Conv1D"):
            raise NotImplementedError(
                "FusedColwiseParallel supports nn.Linear and Conv1D; "
                f"{site.labels.name} is a {type(module).__name__}"
            )
        is_linear = kind == "Linear"
        total = getattr(module, "out_features" if is_linear else "nf")
        if total % (parts * site.axis.size):
            raise ValueError(
                f"{site.labels.name} holds {parts} matrices in {total} output features, of which "
                f"{site.axis.size} ranks of axis {site.axis.axis} cannot have equal parts each: "
                f"expected a multiple of {parts * site.axis.size}"
            )
        settings = self._settings(module, site, parts=parts)
        cut = side_by_side(0 if is_linear else 1, parts)
        column = ColumnLinear if is_linear else ColumnConv1D
        return self._become(module, settings, column, {"weight": cut, "bias": Replicate()})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.parts}, input_layouts={self.input_layouts})"


class RowwiseParallel(_Layered):
    """Shards the input features of a `torch.nn.Linear`, or the rows of a `torch.nn.Embedding`.

    ``input_layouts``: the layout of a local input (``Shard(-1)``; pass Replicate for an Embedding).
    ``output_layouts``: the layout of the output (Replicate). A DTensor has its own layout. With
    ``use_local_output=False`` the output is a DTensor.

    The weight of a Linear is ``Shard(1)`` and its bias Replicate, added once, after the sum; the
    weight of an Embedding is ``Shard(0)``.
    """

    _defaults = (Shard(-1), Replicate())
    _desired = Shard(-1)
    _cuts = MappingProxyType(
        {
            "Linear": (RowLinear, {"weight": Shard(1), "bias": Replicate()}),
            "Conv1D": (RowConv1D, {"weight": Shard(0), "bias": Replicate()}),
            "Embedding": (RowEmbedding, {"weight": Shard(0)}),
        }
    )


class SequenceParallel(ParallelStyle):
    """Runs a module (a norm, dropout) on a shard of dim ``sequence_dim`` of the input.

    A local input is assumed to be that shard; a DTensor is converted to it. The parameters are
    replicated, and one all-reduce at the end of each backward pass sums all their gradients.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = torch_placements([Shard(sequence_dim)])
        self.sequence_dim: int | None = sequence_dim
        self.use_local_output = use_local_output

    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        distribute_parameters(module, device_mesh, {}, self.src_data_rank)

    # With torch's signatures; layouts do not change.
    _prepare_input_fn = staticmethod(enter_sequence)
    _prepare_output_fn = staticmethod(leave_sequence)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        site = self.site_of(module, device_mesh)
        if self._has_own("_replicate_module_fn", "_prepare_input_fn", "_prepare_output_fn"):
            prepare: Any = partial(self._prepare_input_fn, self.sequence_sharding)
            finish: Any = partial(self._prepare_output_fn, self.use_local_output)
            own = self._replicate_module_fn
            return distribute_module(module, device_mesh, own, prepare, finish)
        parameters: list[tuple[str, str, PartialGradient]] = []
        for path, owner in module.named_modules():
            keys = [key for key, parameter in owner._parameters.items() if parameter is not None]
            own = tuple(("", key, PartialGradient(site.axis)) for key in keys)
            for key in keys:
                distribute(owner, key, Replicate(), site, self.src_data_rank, is_partial=True)
            parameters += [(path, key, add) for _, key, add in own]
            guard_loading(owner)
            # Each owner needs its settings: data parallelism may wrap a submodule alone.
            vars(owner)["_meshwright_style"] = Sequence(
                site, self.sequence_dim, self.use_local_output, own
            )
        settings = Sequence(site, self.sequence_dim, self.use_local_output, tuple(parameters))
        vars(module)["_meshwright_style"] = settings
        cls = type(module)
        module.__class__ = type(cls.__name__, (SequencePart, cls), {"__module__": cls.__module__})
        return module

    def __repr__(self) -> str:
        return shown(self, "sequence_dim", "use_local_output")


Layouts = AnyPlacement | tuple[AnyPlacement | None, ...]


class PrepareModuleInput(ParallelStyle):
    """A style that converts inputs from ``input_layouts`` to ``desired_input_layouts``.

    One layout for each positional input, None for one that is not changed; keyword inputs by name.
    A DTensor has its own layout. The module gets DTensors, or local tensors with
    ``use_local_output=True``. The gradients of local tensors are assumed to be complete; a layer of
    ColwiseParallel sums its own.

    Raises AssertionError for unequal numbers of layouts and desired layouts; in the forward, for an
    input with a layout that is not a tensor, and ValueError for another number of inputs.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: dict[str, AnyPlacement] | None = None,
        desired_input_kwarg_layouts: dict[str, AnyPlacement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = None if input_layouts is None else _each(input_layouts)
        desired = desired_input_layouts
        self.desired_input_layouts = None if desired is None else _each(desired)
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
        if self.input_layouts is not None:
            if self.desired_input_layouts is None:
                raise AssertionError("desired module inputs should not be None!")
            _check_pairs(self, "input_layouts")
        _check_pairs(self, "input_kwarg_layouts")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        site = self.site_of(module, device_mesh)
        pairs = None
        if self.input_layouts is not None and self.desired_input_layouts is not None:
            pairs = list(zip(self.input_layouts, self.desired_input_layouts, strict=True))
        named = {
            key: (layout, self.desired_input_kwarg_layouts.get(key))
            for key, layout in self.input_kwarg_layouts.items()
        }
        is_local = self.use_local_output

        def prepare(
            module: nn.Module, inputs: tuple[object, ...], options: dict[str, object]
        ) -> tuple[tuple[object, ...], dict[str, object]]:
            if pairs is not None:
                if len(inputs) != len(pairs):
                    raise ValueError(
                        "module inputs and input_layouts should have same length! "
                        f"{site.labels.name} got {len(inputs)} inputs for {len(pairs)} layouts"
                        f"{_remedy(inputs)}"
                    )
                moved = zip(inputs, pairs, strict=True)
                inputs = tuple(_moved(site, x, pair, is_local=is_local) for x, pair in moved)
            return inputs, {
                key: _moved(site, x, named[key], is_local=is_local) if key in named else x
                for key, x in options.items()
            }

        module.register_forward_pre_hook(prepare, with_kwargs=True)
        return module

    def __repr__(self) -> str:
        kinds = ("input_layouts", "input_kwarg_layouts")
        names = [name for kind in kinds for name in (kind, f"desired_{kind}")]
        return shown(self, *names, "use_local_output")


class PrepareModuleOutput(ParallelStyle):
    """A style that converts outputs from ``output_layouts`` to ``desired_output_layouts``.

    As `PrepareModuleInput`; the caller gets local tensors, or DTensors with
    ``use_local_output=False``.
    """

    def __init__(
        self,
        *,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.output_layouts = _each(output_layouts)
        self.desired_output_layouts = _each(desired_output_layouts)
        self.use_local_output = use_local_output
        _check_pairs(self, "output_layouts")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        site = self.site_of(module, device_mesh)
        pairs = list(zip(self.output_layouts, self.desired_output_layouts, strict=True))
        is_local = self.use_local_output

        def prepare(module: nn.Module, inputs: object, outputs: object) -> object:
            given = outputs if isinstance(outputs, tuple) else (outputs,)
            if len(given) != len(pairs):
                raise ValueError(
                    "module outputs and output_layouts should have same length! "
                    f"{site.labels.name} gave {len(given)} outputs for {len(pairs)} layouts"
                    f"{_remedy(given)}"
                )
            moved = zip(given, pairs, strict=True)
            made = tuple(_moved(site, x, pair, is_local=is_local) for x, pair in moved)
            return made if isinstance(outputs, tuple) else made[0]

        module.register_forward_hook(prepare)
        return module

    def __repr__(self) -> str:
        return shown(self, "output_layouts", "desired_output_layouts", "use_local_output")


class PrepareModuleInputOutput(ParallelStyle):
    """`PrepareModuleInput`, with ``use_local_input``, and `PrepareModuleOutput` in one."""

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: dict[str, AnyPlacement] | None = None,
        desired_input_kwarg_layouts: dict[str, AnyPlacement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for style in (self.prepare_module_input, self.prepare_module_output):
            style.apply_to(
                module, device_mesh, name=self.module_name, src_data_rank=self.src_data_rank
            )
        return module

    def __repr__(self) -> str:
        found = f"{self.prepare_module_input}, {self.prepare_module_output}"
        return f"{type(self).__name__}({found})"


def _each(layouts: Layouts) -> tuple[AnyPlacement | None, ...]:
    """Convert to a tuple of torch's placements; None for a tensor that is not changed."""
    given = layouts if isinstance(layouts, tuple) else (layouts,)
    return tuple(None if each is None else torch_placements([each])[0] for each in given)


def _check_pairs(style: ParallelStyle, kind: str) -> None:
    """Raise AssertionError if layouts of ``kind`` and desired ones differ in number."""
    given, desired = getattr(style, kind), getattr(style, f"desired_{kind}")
    if len(given) != len(desired):
        raise AssertionError(
            f"{kind} and desired_{kind} should have same length! found {given} and {desired}"
        )


def _remedy(values: Iterable[object]) -> str:
    """Advice for containers among ``values``, which have no layout; empty without any."""
    plain = torch.Tensor | int | float | str | None
    kinds = sorted({type(x).__name__ for x in values if not isinstance(x, plain)})
    if not kinds:
        return ""
    return (
        f". Layouts are of tensors, and cannot say which tensor inside of {' and '.join(kinds)} "
        "they mean: pass a tensor or a tuple of tensors there, give None as its layout, or apply "
        "the style to the module inside that has the tensor"
    )


@untraced
def _moved(
    site: Site,
    x: object,
    pair: tuple[AnyPlacement | None, AnyPlacement | None],
    *,
    is_local: bool,
) -> object:
    """Convert ``x`` from the first layout of ``pair`` to the second, unless the first is None."""
    declared, desired = pair
    if declared is None:
        return x
    if not isinstance(x, torch.Tensor):
        raise AssertionError(
            f"expecting input to be a torch.Tensor! {site.labels.name} has a layout for a "
            f"{type(x).__name__}{_remedy([x])}"
        )
    name = site.labels.name
    own = our_placement(declared, name)
    wanted = own if desired is None else our_placement(desired, name)
    if not is_local and is_dtensor(x) and desired is None:
        return x
    return site.leave(site.arrive(x, own), wanted, is_local=is_local)
