"""Styles without parameters: they convert a module's inputs and outputs to a layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from meshwright.comm.dtensors.dtensor import (
    AnyPlacement,
    is_dtensor,
    our_placement,
    torch_placements,
)
from meshwright.mesh import DeviceMesh
from meshwright.tensor_parallel.layouts import Site, untraced
from meshwright.tensor_parallel.styles import ParallelStyle, shown

Layouts = AnyPlacement | tuple[AnyPlacement | None, ...]


class PrepareModuleInput(ParallelStyle):
    """A style that converts inputs from ``input_layouts`` to ``desired_input_layouts``.

    One layout for each positional input, None for one that is not changed; keyword inputs by name.
    A DTensor has its own layout. The module gets DTensors, or local tensors with
    ``use_local_output=True``. The gradients of local tensors are assumed to be complete; a layer of
    ColwiseParallel sums its own.

    Raises AssertionError when layouts and desired layouts do not match in number, and in the
    forward for an input with a layout that is not a tensor, such as a dataclass.
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
