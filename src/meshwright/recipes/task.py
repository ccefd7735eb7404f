"""The task of a run: its model, data, loss and optimizer, ours or the user's.

::

    byte model, [model] factory, hugging_face (+ peft) ──┐
    text, [data] tokens, [data] factory ─────────────────┼──> Task ──> loop, parity check
    cross entropy, the model's own loss, [loss] factory ─┤
    AdamW, [optimizer] factory ──────────────────────────┘
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import math
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional
from torch.optim import Optimizer
from torch.utils.data import default_collate

from meshwright import checkpoint
from meshwright.checkpoint.exchange.weights import weights_of
from meshwright.comm import Communicator
from meshwright.composition import Loss
from meshwright.composition.checks import DROPOUTS, recomputed
from meshwright.context_parallel import positions
from meshwright.data import IGNORED
from meshwright.errors import MeshwrightError, PlanError
from meshwright.gradients.optimizer_list import OptimizerFactory
from meshwright.integrations import pretrained
from meshwright.losses import cross_entropy
from meshwright.planner.rehearsed import RankBytes, rehearse
from meshwright.planner.shapes import ModelShape
from meshwright.planner.traced import ModelTrace, trace_model
from meshwright.planner.utilization import StepWork, work_of
from meshwright.recipes.config import TrainConfig
from meshwright.recipes.language_model import VOCABULARY, LanguageModel, adamw, initialize
from meshwright.recipes.text import Data, Windows, open_text, open_tokens, unigram_loss
from meshwright.settings import nearest
from meshwright.torch_internals.trees import tree_map

_log = logging.getLogger(__name__)

_EXAMPLES = 2
"""Samples of the example that a model is tried with."""


@dataclass(frozen=True, slots=True)
class Factory:
    """A function, and the key that names it."""

    key: str
    """As messages call it, such as ``[model] factory = "my_models:build"``."""
    function: Callable[..., Any]

    def __call__(self, *args: object, **options: object) -> Any:  # noqa: ANN401 - what it returns
        """Call it. Raises ``PlanError`` with its signature and the line where it failed."""
        try:
            return self.function(*args, **options)
        except MeshwrightError:
            raise
        except Exception as error:
            raise PlanError(f"{self.key}: it raised {told(error)}{self._signature()}") from error

    def fail(self, expected: str, found: object) -> PlanError:
        """Make the error for a result that is not ``expected``."""
        return PlanError(
            f"{self.key}: expected it to return {expected}, found "
            f"{type(found).__name__}{self._signature()}"
        )

    def _signature(self) -> str:
        with contextlib.suppress(TypeError, ValueError):  # one written in C has none
            return f"; it is {self.function.__name__}{inspect.signature(self.function)}"
        return ""


def factory(table: str, key: str, name: str, home: Path) -> Factory:
    """Find the function ``package.module:name``, on ``sys.path`` or in the folder ``home``.

    Nothing is imported but that module. Raises ``PlanError`` in one line.
    """
    label = f'[{table}] {key} = "{name}"'
    module_name, colon, attribute = name.partition(":")
    if not colon or not attribute:
        raise PlanError(f"{label}: expected package.module:function")
    if str(home) not in sys.path:
        sys.path.append(str(home))  # last, so that it hides no other module
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise PlanError(f"{label}: the module cannot be imported: {told(error)}") from error
        raise PlanError(
            f"{label}: found no module '{error.name}' on sys.path, nor in {home}"
        ) from error
    except Exception as error:
        raise PlanError(f"{label}: the module cannot be imported: {told(error)}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        what = "nothing of this name" if found is None else f"a {type(found).__name__}"
        close = nearest(attribute, [n for n in vars(module) if callable(getattr(module, n))])
        hint = f"; did you mean '{close}'?" if close else ""
        raise PlanError(f"{label}: expected a function, found {what} in {module_name}{hint}")
    return Factory(label, found)


def told(error: BaseException) -> str:
    """Format ``error`` in one line, with the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames[1:] else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


class Built(NamedTuple):
    """A model, its loss, and how batches are passed to it."""

    model: nn.Module
    loss: Loss
    read: Callable[[object], tuple[object, object]]
    """Splits a batch of `Samples` into the model's input and the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Everything that the loop needs to know about what it trains."""

    config: TrainConfig
    data: Data
    make: Callable[[], nn.Module]
    """Builds the model, initialized from the run's seed or from its weights."""
    optimizer: OptimizerFactory
    loss: Factory | None

    def build(self, *, drops: bool = True) -> Built:
        """Build the model; without dropout if not ``drops``."""
        torch.manual_seed(self.config.plan.train.seed)
        model = self.make()
        if not drops:
            without_dropout(model)
        return Built(model, self.loss or cross_entropy, self._reader(model))

    def _reader(self, model: nn.Module) -> Callable[[object], tuple[object, object]]:
        base = getattr(model, "get_base_model", lambda: model)()
        is_causal = self.loss is None and type(base).__name__.endswith(
            ("ForCausalLM", "LMHeadModel")
        )
        takes_labels = "labels" in inspect.signature(base.forward).parameters and not is_causal
        return partial(_read, takes_labels=takes_labels, shifts=is_causal)

    def example(self, model: nn.Module) -> object:
        """Make a small batch of inputs, for layouts that trace or run the model once."""
        indices = [min(index, len(self.data.training) - 1) for index in range(_EXAMPLES)]
        batch = self._reader(model)(self.data.training.batch(indices))[0]
        return (batch,) if isinstance(batch, Tensor) else batch

    def problems(self, model: nn.Module) -> Iterator[str]:
        """Find contradictions between the data and ``model`` or the batch size."""
        count, wanted = len(self.data.training), self.config.data.batch_size
        if count < wanted:
            of = f"windows of [model] context = {self.data.size}"
            yield (
                f"[data] batch_size: expected at least {wanted} "
                f"{'items' if self.data.unit == 'sample' else of} of the training data, found "
                f"{count}; give more data, or a smaller batch_size or context"
            )
        words = getattr(getattr(model, "config", None), "vocab_size", None)
        if isinstance(self.data.training, Windows) and isinstance(words, int):
            most = int(self.data.training.data.numpy().max())  # torch has no max of uint16
            if most >= words:
                yield (
                    f"[data]: expected numbers below the model's vocab_size = {words}, found {most}"
                )

    def baseline(self) -> float | None:
        """Compute the loss of byte frequencies on held-out windows; None for other data."""
        data, options = self.data, self.config.data
        if data.unit != "byte" or not isinstance(data.validation, Windows):
            return None
        _, targets = data.validation.batch(data.validation_sample(options.validation_windows))
        return unigram_loss(cast(Windows, data.training).data, targets)

    def _batch(self, model: nn.Module, samples: int) -> tuple[Any, Any]:
        dtype: torch.dtype = getattr(torch, self.config.plan.precision.parameters)
        items = [index % len(self.data.training) for index in range(samples)]
        batch = self._reader(model)(self.data.training.batch(items))
        return to_device(batch, torch.device("cpu"), dtype)

    def rehearse(self, rank: int) -> RankBytes:
        """Count the bytes of ``rank`` in a step without the others; raises ``PlanError``."""
        plan, built = self.config.plan, self.build()
        shares = math.prod(map(plan.axes.size, ("replicate", "shard", "expert")))
        batch = self._batch(built.model, self.config.data.batch_size // shares)
        how = {"loss": built.loss, "optimizer": self.optimizer}
        return rehearse(rank, lambda: built.model, plan, *batch, **how)

    def trace(self, samples: int = _EXAMPLES) -> ModelTrace:
        """Run the model and its loss on ``samples`` without memory; raises ``PlanError``."""
        precision, model = self.config.plan.precision, sketch(self.config)
        dtype: torch.dtype = getattr(torch, precision.parameters)
        if dtype != torch.float32:
            model = model.to(dtype)
        inputs, target = self._batch(model, samples)
        return trace_model(
            partial(_emptied, model),
            inputs,
            target=target,
            loss=self.loss or cross_entropy,
            compute=precision.compute if precision.is_mixed else None,
        )

    def work(self) -> StepWork:
        """Count the operations of a step; 0 where they are not known, as of other experts."""
        plan, model = self.config.plan, self.config.model
        if self.config.is_byte_model and model.experts:  # whose forward needs values
            hidden = model.hidden or 4 * model.dim
            shape = ModelShape(
                layers=model.layers,
                hidden=model.dim,
                heads=model.heads,
                ffn=hidden,
                glu=model.activation == "swiglu",
                vocab=VOCABULARY,
                seq=model.context,
                experts=model.experts,
                topk=model.top_k,
                moe_ffn=hidden,
            )
            layers = dict.fromkeys((f"layers.{n}" for n in range(shape.layers)), shape.layer_flops)
            found: Mapping[str, float] = {"": shape.flops, **layers}
            count = self.config.data.batch_size * float(model.context)
        else:
            try:
                found, count = self.trace().flops, self.config.data.batch_size / _EXAMPLES
            except PlanError as error:
                _log.info("MFU and HFU are not known: %s", error)
                return StepWork(0.0)
        return work_of(found, recomputed(sketch(self.config), plan)).times(count)

    def export(self, path: Path, world: Communicator) -> None:
        """Write the weights of the checkpoint ``path`` to [run] export; all ranks call it."""
        config, target = self.config, Path(self.config.run.export)
        model = sketch(self.config) if config.model.peft or not config.is_byte_model else None
        if config.model.peft:
            if world.rank == 0:
                _export_adapter(cast(nn.Module, model), config, path, target)
            world.barrier(label="export").wait()
            return
        folder = config.find(config.model.hugging_face) if config.model.hugging_face else None
        about = pretrained.read_description(folder) if folder else getattr(model, "config", None)
        text = None
        if model is not None and hasattr(about, "to_dict"):
            dtype = config.plan.precision.parameters
            text = pretrained.exported_description(about, model, dtype)
        checkpoint.export_weights(path, target, to="hf", config=text, communicator=world)
        if world.rank == 0 and folder is not None and folder.is_dir():
            pretrained.copy_beside(folder, target)


def _emptied(model: nn.Module) -> nn.Module:
    """Give ``model``, which may be on meta, new tensors of the CPU; tied ones stay so."""
    made: dict[Tensor, Tensor] = {}
    for part in model.modules():
        own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        for name, tensor in own:
            empty = torch.empty_like(tensor, device="cpu")
            if isinstance(tensor, Parameter):
                empty = Parameter(empty, requires_grad=tensor.requires_grad)
            setattr(part, name, made.setdefault(tensor, empty))
    return model


def sketch(config: TrainConfig) -> nn.Module:
    """Build the model on the meta device, or with memory if its factory fails there."""
    make = _open_model(config)
    try:
        with torch.device("meta"):
            return make()
    except PlanError:
        return make()


def open_task(config: TrainConfig) -> Task:
    """Open the model, data, loss and optimizer of ``config``.

    Raises one ``PlanError`` with a line for each that cannot be opened; no model is built.
    """
    problems: list[str] = []

    def attempt(open_one: Callable[[TrainConfig], Any]) -> Any:  # noqa: ANN401 - what it opens
        try:
            return open_one(config)
        except PlanError as error:
            problems.extend(error.problems)

    data, make, loss, optimizer = (
        attempt(each) for each in (_open_data, _open_model, _open_loss, _open_optimizer)
    )
    if problems:
        raise PlanError(problems)
    return Task(config=config, data=data, make=make, loss=loss, optimizer=optimizer)


def _open_data(config: TrainConfig) -> Data:
    """Open what [data] names: text as bytes, a row of tokens, or a data set."""
    if config.data.factory:
        return _open_items(config)
    context = config.model.context
    if config.data.tokens:
        return open_tokens(config.find(config.data.tokens), config.data, context)
    return open_text(config.data, context)


# ------------------------------------------------------------------------------------ data sets


@dataclass(frozen=True, slots=True)
class Items:
    """A dataset whose items are ``(input, target)`` or mappings."""

    dataset: Any
    collate: Callable[[list[object]], object]

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Sequence[int]) -> object:
        """Make the batch of these items."""
        return self.collate([self.dataset[index] for index in indices])


def _open_items(config: TrainConfig) -> Data:
    make = factory("data", "factory", config.data.factory, config.home)
    collate: Callable[[list[object]], object] = default_collate
    if config.data.collate:
        collate = factory("data", "collate", config.data.collate, config.home)
    found = make()
    parts = found if isinstance(found, tuple) else (found,)
    if len(parts) not in (1, 2) or not all(
        hasattr(part, "__len__") and hasattr(part, "__getitem__") for part in parts
    ):
        raise make.fail("a Dataset with __len__ and __getitem__, or (training, validation)", found)
    training, *held_out = (Items(part, collate) for part in parts)
    try:
        batch = training.batch([0, min(1, len(training) - 1)])
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            f"{make.key}: a batch of its items cannot be made: {told(error)}"
        ) from error
    if not isinstance(batch, Mapping) and not (isinstance(batch, Sequence) and len(batch) == 2):
        raise PlanError(
            f"{make.key}: expected items that are (input, target) or a dict, found a batch that is "
            f"a {type(batch).__name__}"
        )
    counts = f"{len(training):,} items" + "".join(f", {len(p):,} held out" for p in held_out)
    validation = held_out[0] if held_out else None
    return Data(training, validation, f"data: {config.data.factory}, {counts}", "sample", 1)


def _read(batch: object, *, takes_labels: bool, shifts: bool) -> tuple[object, object]:
    if not isinstance(batch, Mapping):
        inputs, target = cast(Sequence[object], batch)
        return inputs, target
    inputs = dict(batch)
    target = inputs.get("labels")
    if not takes_labels:
        inputs.pop("labels", None)
    elif isinstance(target, Tensor) and not target.is_floating_point() and IGNORED in target:
        # Each share's loss is a mean over its own labels, whose number differs between shares.
        raise PlanError(
            f"[loss]: the model's own loss is a mean over labels other than {IGNORED}, so shares "
            "with fewer labels would count as much as others: give [loss] factory, a function of "
            "output and target that returns (sum, count)"
        )
    if shifts and isinstance(target, Tensor):  # each position predicts the next token
        target = functional.pad(target[..., 1:], (0, 1), value=IGNORED)
    return inputs, target


# ------------------------------------------------------------------------------ models and losses


def _open_model(config: TrainConfig) -> Callable[[], nn.Module]:
    model = config.model
    if config.is_byte_model:
        # Asking for the positions of a part would break the graphs of all other plans.
        places = positions if config.plan.axes.size("context") > 1 else torch.arange
        return lambda: initialize(LanguageModel(model, places), config.plan.train.seed)
    if model.factory:
        named = factory("model", "factory", model.factory, config.home)

        def make() -> nn.Module:
            made = named(**model.options)
            if not isinstance(made, nn.Module):
                raise named.fail("a torch.nn.Module", made)
            return made

    else:
        weights = config.find(model.weights) if model.weights else None
        if weights is not None and not weights.is_dir():
            raise PlanError(
                f"[model] weights: expected a folder of weights, found none at {weights}"
            )
        pretrained.read_description(config.find(model.hugging_face))

        def make() -> nn.Module:
            # Training needs no cache of keys and values.
            about = pretrained.read_description(config.find(model.hugging_face), use_cache=False)
            on_meta = torch.get_default_device().type == "meta"
            return pretrained.build_model(about, None if on_meta else weights)

    if not model.peft:
        return make
    return lambda: pretrained.add_adapter(make(), model.peft)


def _open_loss(config: TrainConfig) -> Factory | None:
    name = config.loss.factory
    return factory("loss", "factory", name, config.home) if name else None


def _open_optimizer(config: TrainConfig) -> OptimizerFactory:
    options = config.optimizer
    if not options.factory:
        return adamw(options)
    named = factory("optimizer", "factory", options.factory, config.home)

    def build(parameters: Iterable[Parameter]) -> Optimizer:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        made = named(trained, **options.options)
        for each in made if isinstance(made, list) else [made]:
            if not isinstance(each, Optimizer):
                raise named.fail("a torch.optim.Optimizer", made)
        return made

    # So that wrong options raise now; a list may have one for matrices, and one for the rest.
    build([Parameter(torch.zeros(size, device="cpu")) for size in ((2, 2), (2,))])
    return build


def without_dropout(model: nn.Module) -> None:
    """Set every dropout probability of ``model`` to zero: in modules, and floats named "*drop*"."""
    for module in model.modules():
        if isinstance(module, (*DROPOUTS, nn.FeatureAlphaDropout)):
            vars(module)["p"] = 0.0
        about = getattr(module, "config", None)
        for holder in (module, about if hasattr(about, "to_dict") else None):
            values = () if holder is None else vars(holder).items()
            for name in [n for n, v in values if "drop" in n and type(v) is float]:
                setattr(holder, name, 0.0)


def to_device(values: object, device: torch.device, dtype: torch.dtype) -> Any:  # noqa: ANN401
    """Move all tensors in ``values``; floating-point ones become ``dtype``."""

    def moved(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype if leaf.is_floating_point() else None)

    return tree_map(moved, values)


def model_text(config: TrainConfig) -> str:
    """Return a checksum of the model's configuration file, for `describe_run`; "" without one."""
    if not config.model.hugging_face:
        return ""
    about = pretrained.read_description(config.find(config.model.hugging_face))
    return f"crc32 {zlib.crc32(about.to_json_string().encode()):08x}"


def _export_adapter(model: nn.Module, config: TrainConfig, path: Path, target: Path) -> None:
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    with checkpoint.Reader(path) as reader:
        weights = weights_of(reader)
        state = {name: weights.read(name) for name in weights.entries if name in trained}
    base = config.model.weights or config.model.hugging_face
    pretrained.save_adapter(model, state, str(config.find(base)) if base else "", target)
