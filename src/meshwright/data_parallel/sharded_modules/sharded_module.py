"""The methods and properties that `fully_shard` adds to the class of a module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from meshwright.data_parallel.comm_hooks.shard_hooks import register_bucket_hook
from meshwright.data_parallel.modules.of_this_process import OfThisProcess
from meshwright.data_parallel.residency import ShardedResidency, sharded_residency
from meshwright.data_parallel.sharded_modules.module_hooks import Driver, driver_of
from meshwright.data_parallel.sharded_modules.sharded_join import JoinsUnevenInputs
from meshwright.data_parallel.shards.buffer import CustomCollective
from meshwright.data_parallel.shards.unit import Phase, Unit, zero_kept


class UnshardHandle:
    """A gather in flight. ``wait`` makes the full parameters visible."""

    def __init__(self, unit: Unit | None) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait until the parameters are whole; a second call does nothing."""
        unit, self._unit = self._unit, None
        if unit is not None:
            unit.wait_unshard()


class FSDPModule(OfThisProcess, JoinsUnevenInputs):
    """A module whose parameters `fully_shard` has sharded.

    Settings apply from the next forward or backward pass on, to this module and, with ``recurse``,
    to the sharded modules below it.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Make an instance of the unsharded class: a slice of a sharded container has no unit."""
        return cls.__bases__[1](*args, **kwargs)

    # ------------------------------------------------------------------------ parameters

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """List parameters as any module does; between a backward and a step the sharded ones.

        A forward for logging, or an evaluation with gradients, leaves whole parameters in place,
        which have no gradients: clipping would find none.
        """
        show_gradients(self)
        return super().named_parameters(*args, **kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters now; with ``async_op`` wait for them by the handle."""
        unit = _driver(self).unit
        if unit is not None:
            if unit.phase is Phase.SHARDED:
                unit.exposure.refresh(unit)
            unit.unshard()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's whole parameters now."""
        unit = _driver(self).unit
        if unit is not None:
            unit.reshard()

    def reset_iter_state(self) -> None:
        """Abandon an iteration that raised. The next forward pass of the root does it too."""
        iteration = _driver(self).iteration
        if iteration is not None:
            iteration.reset()

    # ---------------------------------------------------------------------- accumulation

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero gradients as any module does, also while whole parameters are in place.

        Whole gradients that wait for a reduction are dropped, too. An optimizer's ``zero_grad``
        does not see those.
        """
        driver = _driver(self)
        root = driver.iteration if driver.is_root else None
        units = _units(self, recurse=True) if root is None else root.units
        zero_kept(units, set_to_none=set_to_none)
        super().zero_grad(set_to_none)  # without gradients, what is whole stays so
        for unit in units:
            unit.forget_gradients()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward passes reduce. If not, full gradients add up on this rank."""
        self._set(recurse, synchronize=requires_gradient_sync)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Skip reductions in backward passes in the block; the next one outside reduces the sum."""
        before = {unit: unit.settings.synchronize for unit in _units(self, recurse=True)}
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, synchronize in before.items():
                unit.change(synchronize=synchronize)

    def pipeline_residency(self) -> ShardedResidency:
        """The object by which a pipeline's schedule drives the units of this module and below."""
        return sharded_residency(self)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether reductions also run over the replicating axis of a 2-D mesh."""
        self._set(recurse, all_reduce=requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward passes are the last of a step, for the whole root.

        A backward that is not the last leaves its reductions in flight. The summed gradients are
        set in ``.grad`` at the end of the next backward that is the last; step after that.
        """
        driver = _driver(self)
        root = driver if driver.iteration is None else driver.iteration.drivers[0]
        root.is_last_backward = is_last_backward

    # --------------------------------------------------------------------------- freeing

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether parameters are freed between forward and backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                "reshard_after_forward should be a bool, got "
                f"{type(reshard_after_forward).__name__}. A group size goes to fully_shard"
            )
        for driver in _drivers(self, recurse=recurse):
            driver.keeps_as_root = False
        self._set(recurse, keep_full_after_forward=not reshard_after_forward, block=None)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether parameters are freed after the backward pass.

        Kept parameters are gathered again once ``.grad`` has been set, since an optimizer may have
        stepped: keeping them pays while gradients accumulate without a reduction.
        """
        self._set(recurse, keep_full_after_backward=not reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether this module's backward pass needs its parameters; an embedding's does not."""
        self._set(False, unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Prefetch the parameters of ``modules`` when this module's forward pass begins."""
        _driver(self).forward_ahead = _prefetched(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Prefetch the parameters of ``modules`` when this module's backward pass begins."""
        _driver(self).backward_ahead = _prefetched(modules)

    # ------------------------------------------------------------------------- reduction

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor`` instead of by the number of ranks."""
        self._set(False, divide_factor=factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Have ``hook(state, bucket)`` reduce the gradients of these units, see `comm_hooks`.

        On a 2-D mesh it runs on this rank's shards over the replicating dim, see `shard_hooks`.
        Raises TypeError or ValueError for an invalid hook, RuntimeError for a second hook.
        """
        units = _units(self, recurse=True)
        for group in (group for unit in units for group in unit.groups):
            if group.axes.exchange is not None:
                raise ValueError(
                    f"register_comm_hook: {group.slots[0].name!r} is a parameter of experts, whose "
                    "gradient is a sum over other ranks already, and a hook would divide it by the "
                    "ranks that it sees. Register hooks on modules without experts"
                )
        register_bucket_hook(units, state, hook)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: object = None
    ) -> None:
        """Call ``hook`` with each reduced gradient shard; it may change it in place.

        Raises ValueError for a hook that is not callable, for parameters on several meshes, and for
        a ``stream`` where the mesh has a replicating axis, whose own stream is used.
        """
        if not callable(hook):
            raise ValueError(f"expected a callable hook, got {type(hook).__name__}")
        unit = _unit_on_one_mesh(self, "set_all_reduce_hook")
        if stream is not None and unit is not None and unit.groups[0].axes.replicate is not None:
            raise ValueError("stream cannot be set when using native HSDP")
        self._set(False, shard_hook=hook)

    def set_custom_all_gather(self, comm: CustomCollective) -> None:
        """Gather this module's parameters by ``comm``, which follows torch's protocol.

        ``comm.allocate(size, dtype=, device=)`` allocates memory, and ``comm(output_tensor=,
        input_tensor=, group=, async_op=)`` gathers; a returned work is waited for. Raises
        ValueError when the module's parameters are on several meshes.
        """
        _unit_on_one_mesh(self, "set_custom_all_gather")
        self._set(False, all_gather=comm)

    def set_custom_reduce_scatter(self, comm: CustomCollective) -> None:
        """Sum this module's gradients by ``comm``, which follows torch's protocol.

        As in `set_custom_all_gather`, with ``op`` in place of ``async_op``. The sums are scaled
        afterwards, so ``op`` is always a sum.
        """
        _unit_on_one_mesh(self, "set_custom_reduce_scatter")
        self._set(False, reduce_scatter=comm)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Bound the reductions in flight; each holds its gradients in memory.

        The largest number in the tree of the root applies. Raises TypeError or ValueError unless
        the number is a positive int.
        """
        if not isinstance(max_input_buffers, int) or isinstance(max_input_buffers, bool):
            raise TypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be at least 1, got {max_input_buffers}")
        for driver in _drivers(self, recurse=recurse):
            driver.most_in_flight = max_input_buffers
            if driver.iteration is not None:
                driver.iteration.limit_in_flight()

    # ------------------ accepted and recorded in `fully_shard.state(module).without_effect`

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Record the setting; gradients are always summed, then scaled."""
        self._record(False, "force_sum_reduction_for_comms", enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Record the setting; unused parameters of a module that ran always count as zeros."""
        self._record(recurse, "reduce_scatter_unused_params", reduce_scatter_unused_params)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Record the setting; gathers and reductions of one axis share its group."""
        self._record(recurse, "separate_reduce_scatter_group", enable)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Record the setting; buffers come from torch's allocator."""
        self._record(False, "allocate_memory_from_process_group_for_comm", enable)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Record the setting; buffers come from torch's allocator."""
        self._record(False, "symm_mem_for_comm", backend)

    def set_post_optim_event(self, event: object) -> None:
        """Record the event; on a CPU the optimizer has finished when the next forward begins."""
        self._record(False, "post_optim_event", event)

    # --------------------------------------------------------------------------- private

    def _get_fsdp_state(self) -> NoReturn:
        """Raise AttributeError: programs use this to read private parts of torch's own state."""
        raise AttributeError(
            f"{type(self).__name__} has no _get_fsdp_state(), which is private in torch. Call "
            "set_reshard_after_forward(...) of the module to keep or free whole parameters, and "
            "unshard() and reshard() to gather and free them now"
        )

    def _set(self, recurse: bool, **changes: Any) -> None:
        for unit in _units(self, recurse=recurse):
            unit.change(**changes)

    def _record(self, recurse: bool, name: str, value: object) -> None:
        for driver in _drivers(self, recurse=recurse):
            driver.without_effect[name] = value

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:  # noqa: ANN401
        """Convert as any module; whole parameters are freed first.

        The shard follows when its unit is used next: its other modules may be converted later.
        """
        for unit in _units(self, recurse=True):
            unit.reshard()
            unit.exposure.let_go(unit)
            unit.has_changed()
        return super()._apply(fn, recurse)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the forward pass in place; gathering and freeing parameters stay outside of it.

        Arguments are those of `torch.compile`. With ``fullgraph=True`` no module below may be
        sharded by itself.
        """
        # As an attribute of the instance: hooks of the module would end the graph at its edges.
        self.forward = torch.compile(self.forward, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise AssertionError(
            "FSDP does not support deepcopy. Please use state dict for serialization. Copy the "
            "module first, then call fully_shard on the copy"
        )


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Accept several roots that would share streams in torch; nothing is shared here.

    Raises ValueError for a module that is not sharded.
    """
    _prefetched(modules)


def show_gradients(module: nn.Module) -> None:
    """Put sharded parameters into modules that forwards left with whole ones, if gradients exist.

    Nothing is sent: one rank may do it alone, and the backward uses what is kept.
    """
    if torch.compiler.is_compiling():
        return
    own = driver_of(module)
    # Before it has run itself, parts of it may have, each as a root.
    has_begun = own is not None and own.iteration is not None
    drivers = [own] if own is not None and has_begun else _drivers(module, recurse=True)
    for iteration in dict.fromkeys(driver.iteration for driver in drivers):
        if iteration is None or iteration.is_in_forward or iteration.is_in_backward:
            continue
        left = (each.unit for each in iteration.drivers if each.has_run or iteration.keeps_graph)
        whole = [unit for unit in left if unit is not None and unit.phase is Phase.FULL]
        if not whole or any(each.loans for each in iteration.drivers):  # a part runs by itself
            continue
        held = (p for unit in iteration.units for p in unit.exposure.parameters(unit))
        if any(parameter.grad is not None for parameter in held):
            for unit in whole:
                unit.show_at_rest(True)


def _driver(module: nn.Module) -> Driver:
    driver = driver_of(module)
    if driver is None:
        raise ValueError(f"fully_shard was not applied to this {type(module).__name__}")
    return driver


def _drivers(module: nn.Module, *, recurse: bool) -> Iterable[Driver]:
    if not recurse:
        return [_driver(module)]
    found = (driver_of(part) for part in module.modules())
    return list(dict.fromkeys(driver for driver in found if driver is not None))


def _units(module: nn.Module, *, recurse: bool) -> list[Unit]:
    units = (driver.unit for driver in _drivers(module, recurse=recurse))
    return [unit for unit in units if unit is not None]


def _unit_on_one_mesh(module: nn.Module, method: str) -> Unit | None:
    unit = _driver(module).unit
    if unit is not None and len({group.axes for group in unit.groups}) > 1:
        raise ValueError(
            f"{method} is not supported with multiple meshes in one module: unit {unit.name!r} has "
            "parameters that its shard_placement_fn, or an exchange of samples, put on other ranks "
            "than the rest"
        )
    return unit


def _prefetched(modules: Iterable[nn.Module]) -> list[Driver]:
    drivers: list[Driver] = []
    for module in modules:
        driver = driver_of(module)
        if driver is None:
            raise ValueError(
                f"Expects FSDPModule but got {type(module).__name__}. Call fully_shard on it first"
            )
        drivers.append(driver)
    return drivers
