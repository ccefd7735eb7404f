"""Ways to say where a model is cut besides `pipeline`: torch's wrappers, and modules by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from meshwright.pipelining.splitting.module_hooks import CALLED, refuse_hooks
from meshwright.pipelining.splitting.split_points import pipe_split


class PipeSequential(nn.Sequential):
    """An ``nn.Sequential`` that is cut between all of its modules."""

    @staticmethod
    def from_sequential(sequential_instance: nn.Sequential) -> PipeSequential:
        """Find the modules of ``sequential_instance`` with cuts between them."""
        return PipeSequential(*(module for module in sequential_instance))

    def forward(self, input: Any) -> Any:  # noqa: ANN401
        """The modules in turn."""
        for number, module in enumerate(self):
            if number:
                pipe_split()
            input = module(input)
        return input


class LossWrapper(nn.Module):
    """A model and its loss as one module, whose ``forward`` a subclass has to give."""

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Raises ``NotImplementedError``: how model and loss go together is up to the subclass."""
        raise NotImplementedError(
            f"{type(self).__name__} has no forward: override it to call self.module and "
            "self.loss_fn and return the loss, or use TrivialLossWrapper"
        )


class TrivialLossWrapper(LossWrapper):
    """``loss_fn(module(x), targets)``."""

    loss_spec = True

    # pyrefly: ignore[bad-override]
    def forward(self, x: Any, targets: Any) -> Any:  # noqa: ANN401
        """The loss of one microbatch."""
        return self.loss_fn(self.module(x), targets)


class _Named(nn.Module):
    """Some modules of a model, called in turn, under the names that they have there."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self._names = tuple(names)
        for name in names:
            path, _, leaf = name.rpartition(".")
            owner: nn.Module = self
            for part in path.split(".") if path else ():
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.add_module(leaf, model.get_submodule(name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Each module gets what the one before has returned."""
        first, *rest = (self.get_submodule(name) for name in self._names)
        value = first(*args, **kwargs)
        for module in rest:
            value = module(*value) if isinstance(value, tuple) else module(value)
        return value


def stages_by_name(model: nn.Module, names: Sequence[Sequence[str]]) -> list[nn.Module]:
    """Modules for `PipelineStage` without tracing: one for each list of names of ``model``.

    The model must be a chain: its forward calls the named modules in this order, and each with the
    outputs of the one before. Parameters stay those of the model, with its names.

    Raises ``AttributeError`` for a name that is no module; ``ValueError`` when a stage has none, a
    module or one within it is named twice, parameters of the model belong to no stage, or modules
    that no stage calls have hooks.
    """
    listed = [name for stage in names for name in stage]
    if not all(names):
        raise ValueError(f"stage {[bool(stage) for stage in names].index(False)} has no modules")
    for number, name in enumerate(listed):
        for other in listed[:number]:
            if name == other or f"{name}.".startswith(f"{other}.") or other.startswith(f"{name}."):
                raise ValueError(f"module {name!r} is named twice (within {other!r})")
    stages: list[nn.Module] = [_Named(model, stage) for stage in names]
    inside = {part for stage in stages for part in stage.modules()}
    refuse_hooks(
        ((name, part) for name, part in model.named_modules() if part not in inside),
        "Only the modules that are named are called: name those that have hooks",
        *CALLED,
    )
    held = {id(parameter) for stage in stages for parameter in stage.parameters()}
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in held]
    if missing:
        raise ValueError(
            f"the parameters {missing} of the model belong to no stage: name their modules as well"
        )
    return stages
