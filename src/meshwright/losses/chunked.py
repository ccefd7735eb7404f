"""Models whose head computes their loss, chunk by chunk, in place of logits.

A forward in training mode that has labels::

    model ──> ... ──> head(hidden) ──> linear_cross_entropy: (sum, count), kept aside
                          └──> logits without rows ──> rest of the forward ──> output

What the model returns has the sum and the count in ``loss_terms``, and None in ``logits``. The
first such forward sends a row of known numbers through the rest: a model that changes its logits
after the head in a way that is not known here is refused.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn import functional

from meshwright.comm.dtensors.local_leaves import local_part_of
from meshwright.comm.graphs.untraced import inlined
from meshwright.errors import PlanError
from meshwright.gradients import IGNORED
from meshwright.layout import Replicate
from meshwright.losses.linear import LossOptions, Vocabulary, local_parts, sum_and_count
from meshwright.tensor_parallel.layers import ColumnLinear
from meshwright.torch_internals.tracing import not_traced

M = TypeVar("M", bound=nn.Module)
Terms = tuple[torch.Tensor, torch.Tensor]
"""A sum of losses, and the count of its labels."""
_CHUNKED = "_meshwright_chunked"
_HEADS = ("lm_head", "head", "embed_out")
_FORWARDS = (nn.Linear.forward, ColumnLinear.forward)
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Keys of configs of Hugging Face that say how logits are bounded."""
_LARGE = 100.0
"""The largest number of the row that shows what a model does with its logits."""


class ChunkedOutput(NamedTuple):
    """What a model in chunks returns in training where it returned a tensor of logits."""

    loss_terms: Terms
    """The sum of the losses, and the count of labels."""
    logits: None = None


@dataclass(eq=False)  # no slots: a compiler reads its attributes
class ChunkedHead:
    """The head of one model, and its state during a forward."""

    options: LossOptions
    scale: float
    """What the model multiplies its logits by."""
    labels: torch.Tensor | None = None
    """Those of the current forward; None for one that returns logits."""
    terms: Terms | None = None
    """The loss that the head has computed from them."""
    is_checked: bool = False

    @contextlib.contextmanager
    def expecting(self, labels: object) -> Iterator[None]:
        """Compute the loss of ``labels``, one for each row of logits, in a forward in the block."""
        before, self.terms = self.labels, None
        self.labels = labels if isinstance(labels, torch.Tensor) else None
        try:
            yield
        except BaseException:  # such as the end of a forward that a checkpoint repeats
            self.terms = None
            raise
        finally:
            self.labels = before

    @not_traced
    def compute_loss(self, head: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the loss of this rank's rows, and return logits without rows."""
        if self.labels is None or self.terms is not None:
            raise RuntimeError(
                "the head of a model in chunks was called twice in one forward, with labels for "
                "one call: train this model without in_chunks ([train] loss_chunk)"
            )
        rows = hidden if self.scale == 1.0 else hidden * self.scale
        if isinstance(head, ColumnLinear):
            settings = head._meshwright_style
            site = settings.site
            given = site.arrive(rows, settings.input, features=head.in_features)
            rows = site.move(given, Replicate()).local
            weight, bias = local_part_of(head.weight), head.bias
            vocabulary = Vocabulary(head.out_features, site.axis, site.labels.name)
            bias = None if bias is None else local_part_of(bias)
        else:
            axis, weight, bias = local_parts(head.weight, head.bias)
            vocabulary = Vocabulary(head.out_features, axis)
        self.terms = sum_and_count(rows, weight, self.labels, bias, vocabulary, self.options)
        total = self.terms[0]
        # A path from the logits back to the loss: hooks of the head's and the model's outputs, as
        # `fully_shard` has them, run before the backward of the head.
        path = (total * total.new_empty(0)).sum()
        shape = [*rows.shape[:-2], 0, head.out_features]
        return (total.new_empty(shape) if self.is_checked else self._row(shape, total)) + path

    def finished(self, output: Any, model: nn.Module | None = None) -> Any:  # noqa: ANN401
        """Return what the model returns: ``output``, with ``loss_terms`` in place of logits.

        ``model`` adds its own auxiliary loss, as it does to the loss that it computes itself.
        """
        logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
        if self.terms is None or not isinstance(logits, torch.Tensor):
            what = "its head was not called" if self.terms is None else "it returned none"
            raise TypeError(
                "a model in chunks computes its loss where its head computes logits, and returns "
                f"logits, or an output of Hugging Face's with them: {what}, but a "
                f"{type(output).__name__}"
            )
        if not self.is_checked:
            self._check(logits)
        (total, count), self.terms = self.terms, None
        total = total + logits[..., :0].sum().to(total.dtype)
        auxiliary = getattr(output, "aux_loss", None)
        if model is not None and isinstance(auxiliary, torch.Tensor):
            total = total + model.config.router_aux_loss_coef * auxiliary * count  # pyrefly: ignore
        if not isinstance(output, Mapping):
            return ChunkedOutput((total, count))
        return _with_terms(type(output))(**{**output, "logits": None, "loss_terms": (total, count)})

    def _row(self, shape: list[int], like: torch.Tensor) -> torch.Tensor:
        row = torch.linspace(-_LARGE, _LARGE, shape[-1], dtype=like.dtype, device=like.device)
        return row.view([1] * (len(shape) - 1) + [-1])

    def _check(self, logits: torch.Tensor) -> None:
        """Raise ValueError if the model has changed logits by more than its scale and softcap."""
        expected = self._row(list(logits.shape), logits) * self.scale
        cap = self.options.softcap
        if cap is not None:
            expected = (expected / cap).tanh() * cap
        error = (logits.detach() - expected).abs().max()
        if not error <= 16 * torch.finfo(logits.dtype).eps * expected.abs().max():
            raise ValueError(
                "in_chunks: after the head, the model changes its logits by more than "
                f"scale = {self.scale:g} and softcap = {cap}, which a loss in chunks would miss. "
                "Pass its softcap to in_chunks, or train without in_chunks ([train] loss_chunk)"
            )
        self.is_checked = True


def in_chunks(
    model: M,
    head: str = "lm_head",
    *,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk: int = 1024,
) -> M:
    """Have ``model`` compute its loss in chunks where it is given labels, in place; returns it.

    ``head`` is the name of its last layer, a `torch.nn.Linear`. In training mode the model's
    output has ``.loss_terms``, the sum of the losses and the count of labels, and ``.logits`` is
    None. In evaluation mode, and without labels, it returns logits as before. The other arguments
    are those of `linear_cross_entropy`; a model of Hugging Face says its own ``softcap``.

    A causal model of Hugging Face takes ``labels``, which are shifted as it does, or
    ``shift_labels``. A model that has no argument ``labels`` takes ``shift_labels``: labels of the
    shape of the logits without the last dim. `parallelize` gives the target of a batch.

    Raises ValueError for a head that is no Linear or is in chunks, and for a model that computes
    another loss from its labels; in the first forward, for one that changes its logits after the
    head by more than a scale or softcap of its config.

    >>> model = in_chunks(LlamaForCausalLM(config)).train()
    >>> total, count = model(input_ids=tokens, labels=tokens).loss_terms
    >>> (total / count).backward()
    """
    layer = dict(model.named_modules()).get(head)
    if not isinstance(layer, nn.Linear) or type(layer).forward not in _FORWARDS:
        found = "no module" if layer is None else f"a {type(layer).__name__}"
        raise ValueError(
            f"in_chunks: expected head={head!r} to name a torch.nn.Linear, found {found}; the "
            f"model has {head_of(model)!r}"
        )
    if _CHUNKED in vars(layer):
        raise ValueError(f"in_chunks: {head!r} is in chunks: call it once for each model")
    forward = model.forward
    takes_labels = "labels" in inspect.signature(forward).parameters
    plain = getattr(model, "get_base_model", lambda: model)()
    if takes_labels and not type(plain).__name__.endswith(_CAUSAL):
        raise ValueError(
            f"in_chunks: {type(plain).__name__} computes another loss from its labels than a "
            "causal model: take linear_cross_entropy in its forward"
        )
    about = getattr(model, "config", None)
    caps = (softcap, *(getattr(about, key, None) for key in _CAPS))
    state = ChunkedHead(
        LossOptions(
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=next((cap for cap in caps if cap is not None), None),
            chunk=chunk,
        ),
        scale=_number(about, "logit_scale") / _number(about, "logits_scaling"),
    )
    vars(layer)[_CHUNKED] = state
    # On the instances: names, state dict and classes do not change, and copies have their own.
    vars(layer)["forward"] = functools.partial(_head, layer, state)
    own = functools.partial(_model, model, forward, state, takes_labels)
    vars(model)["forward"] = functools.update_wrapper(own, forward)
    return model


def head_of(model: nn.Module) -> str | None:
    """Return the name of the layer that computes the model's logits; None if it is not found."""
    given = getattr(model, "get_output_embeddings", lambda: None)()
    named = [
        name
        for name, part in model.named_modules()
        if part is given or (given is None and name.rpartition(".")[2] in _HEADS)
    ]
    return named[0] if len(named) == 1 else None


def _number(about: object, key: str) -> float:
    return getattr(about, key, None) or 1.0


def chunked_heads(module: nn.Module) -> dict[str, ChunkedHead]:
    """Return the head of ``module``, a model or a stage, by its name; none if it has none."""
    named = module.named_modules()
    return {name: vars(part)[_CHUNKED] for name, part in named if _CHUNKED in vars(part)}


def _head(head: nn.Linear, state: ChunkedHead, input: torch.Tensor) -> torch.Tensor:
    if state.labels is None:
        return type(head).forward(head, input)  # of its class now: a style may have changed it
    return state.compute_loss(head, input)


@inlined
def _model(
    model: nn.Module,
    forward: Callable[..., Any],
    state: ChunkedHead,
    takes_labels: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:  # noqa: ANN401 - what the model returns
    if takes_labels and not model.training:
        return forward(*args, **kwargs)
    own = kwargs.pop("shift_labels", None)
    labels = kwargs.pop("labels", None) if takes_labels else None
    if own is None and labels is not None:
        own = functional.pad(labels[..., 1:], (0, 1), value=state.options.ignore_index)
    if not model.training or (own is None and state.labels is None):
        return forward(*args, **kwargs)
    with state.expecting(state.labels if own is None else own):
        return state.finished(forward(*args, **kwargs), None if own is None else model)


@functools.cache
def _with_terms(kind: type) -> type:
    """The dataclass ``kind``, an output of Hugging Face's, with the field ``loss_terms``."""
    return make_dataclass(kind.__name__, [("loss_terms", Any, field(default=None))], bases=(kind,))


def cross_entropy(
    output: object, target: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return ``output.loss_terms``, or ``output.loss``, or the cross entropy of logits.

    That is a sum in nats and the count of its terms. Logits are ``output.logits``, or the output.
    The class dim is the last one where the other dims are those of ``target``, else the second
    one. Labels of -100 are ignored. Raises PlanError for an output without any of these.
    """
    terms, own = getattr(output, "loss_terms", None), getattr(output, "loss", None)
    logits = getattr(output, "logits", output)
    if terms is not None:
        return terms
    if isinstance(own, torch.Tensor):
        return own
    if not isinstance(logits, torch.Tensor) or not isinstance(target, torch.Tensor):
        found = type(output if target is not None else target).__name__
        raise PlanError(
            "[loss]: expected a model that returns its loss, or logits and a target for cross "
            f"entropy, found {found}; give [loss] factory"
        )
    if target.is_floating_point():
        count = torch.tensor(logits.numel() // logits.shape[1], device=logits.device)
    else:
        if logits.shape[:-1] == target.shape:
            logits, target = logits.flatten(0, -2), target.flatten()
        count = (target != IGNORED).sum()
    return functional.cross_entropy(logits, target, reduction="sum"), count
