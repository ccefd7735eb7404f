"""Attention calls of a model whose sequences are split: caught, and computed over all ranks.

Inside of `attending` calls of ``torch.nn.functional.scaled_dot_product_attention`` and of the
attention functions of transformers see the keys of all ranks. Where transformers would make a mask
from the sizes of this rank's part it gets a `HeldMask`, which keeps the words of the mask instead.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from meshwright.comm import Communicator, LateNumbers
from meshwright.comm.streams import moved
from meshwright.context_parallel.heads import attention_by_heads, heads_divide
from meshwright.context_parallel.masks import MaskWords
from meshwright.context_parallel.ring import ring_attention
from meshwright.context_parallel.split import ContextSplit
from meshwright.errors import InternalError
from meshwright.torch_internals.tensors import storage_id
from meshwright.torch_internals.tracing import not_traced

Method = Literal["auto", "all-to-all", "ring"]
POSITIONS = "positions of axis context"
"""The key of numbers on a device that say whether a model counts positions itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForm:
    """What one call of attention computes, whatever the batch."""

    words: MaskWords
    attend: Callable[..., Tensor]
    """Computes it of whole sequences, for `heads.Attend`: an `Attending`, ``sinks`` and the form
    come first."""
    label: str
    in_words: str = ""
    """What of it the ring cannot do; "" where it can."""
    scale: float | None = None
    module: nn.Module | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Those of the function of attention."""
    mask: HeldMask | None = None


@dataclass(slots=True)
class Attending:
    """How attention is computed now."""

    axis: Communicator
    split: ContextSplit
    method: Method = "auto"
    padding: Tensor | None = None
    """False for padding: (rows, length) of the whole, on the host, where rings are planned."""
    parts: list[Tensor] = field(default_factory=list)
    """This rank's parts of the batch: positions among them are true."""
    is_weighed: bool = False
    """True once `global_mean` has weighed a loss."""
    trains: bool = False
    """True once attention was computed with gradients enabled."""
    traced: list[AttentionForm] | None = None
    """In a trace, its calls of attention so far: the graph has an operator with their numbers."""
    masks: dict[HeldMask, Any] = field(default_factory=dict)
    """Masks of the whole that have been made."""

    def attention(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        form: AttentionForm,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention by heads, on whole sequences, or in a ring.

        Raises ValueError for what the ring cannot do, and where heads do not divide.
        """
        if self.traced is not None:
            self.traced.append(form)
            return ATTENTION(*qkv, sinks, len(self.traced) - 1)
        self.trains |= torch.is_grad_enabled()
        by_heads, label = self.method == "all-to-all", form.label
        if self.method == "auto":
            by_heads = heads_divide(qkv[0].shape[1], qkv[1].shape[1], self.axis.size)
        if by_heads:
            attend = functools.partial(form.attend, self, sinks, form)
            return attention_by_heads(*qkv, self.split, self.axis, attend, label=label)
        if form.in_words:
            raise ValueError(
                f"axis {self.axis.axis}: attention of {label} has {form.in_words}, which method "
                '"ring" cannot compute in parts. Set method = "all-to-all", with heads that '
                f"{self.axis.size} divides"
            )
        words = form.words
        if words.padding is not None:  # of this batch, whichever the form was found with
            words = replace(words, padding=self.padding)
        return ring_attention(
            *qkv, self.split, self.axis, words, scale=form.scale, sinks=sinks, label=label
        )

    def is_own(self, query: Tensor, key: Tensor) -> bool:
        """Whether queries and keys are this rank's part of the sequence."""
        own = sum(stop - start for start, stop in self.split.rows[0].parts[self.axis.rank])
        return query.shape[-2] == own == key.shape[-2]

    def check_positions(self, given: Tensor | None, label: str) -> None:
        """Raise ValueError where the model has counted this rank's part from 0 itself.

        On a device at the next `settle`: no host waits.
        """
        late = LateNumbers.known(POSITIONS)
        if given is None or given.ndim != 2 or self.traced is not None or late.coming:
            return
        if storage_id(given) in map(storage_id, self.parts):
            return
        rank, length = self.axis.rank, given.shape[1]
        counted = torch.arange(length, device="cpu")
        known = (self.split.positions(rank)[0], self.split.part(self.split.places(), rank)[0])
        if any(torch.equal(x, counted) for x in known):
            return

        def judge(numbers: list[float]) -> None:
            if numbers[0]:
                raise ValueError(
                    f"axis {self.axis.axis}: {label} got positions 0 to {length - 1}, which the "
                    "model has counted itself: give it position_ids, as a buffer that is split"
                )

        is_counted = (given[0] == torch.arange(length, device=given.device)).all()
        late.look(is_counted.reshape(1), judge)

    def check_documents(self, jumps: Tensor | None) -> None:
        """Raise ValueError where transformers keeps other documents apart than the split has.

        ``jumps``: how often positions have jumped so far, (rows, n), where it looks at these. A
        device's are judged at the next `settle`.
        """
        split, late = self.split, LateNumbers.known(POSITIONS)
        own = split.part(split.places(), self.axis.rank).diff(dim=1) != 1
        if jumps is None and max(map(len, _ends_of(split))) > 1 and bool(own.any()):
            raise ValueError(
                f"axis {self.axis.axis}: documents are packed, which transformers keeps apart only "
                "without attention_mask and with use_cache=False. Give it no mask and no cache, or "
                'leave the documents together: documents = "none" in [context]'
            )
        if jumps is None or late.coming:
            return

        def judge(numbers: list[float]) -> None:
            if numbers[0]:
                raise ValueError(
                    f"axis {self.axis.axis}: position_ids begin anew where the split knows no "
                    "document: give context_parallel(documents=position_ids)"
                )

        late.look((jumps.diff(dim=1).bool() != moved(own, jumps.device)).any().reshape(1), judge)

    def refuse_dropout(self, p: float, label: str) -> None:
        """Raise ValueError for dropout inside of attention."""
        if p:
            raise ValueError(
                f"axis {self.axis.axis}: attention of {label} uses attention dropout (p = {p}), "
                "which cannot match one process. Set it to 0"
            )

    def refuse_mask(self, mask: Any, label: str) -> ValueError:  # noqa: ANN401 - of the user
        """Make the error for a mask of this rank's positions."""
        shape = tuple(getattr(mask, "shape", ()))
        if self.traced is not None:
            return ValueError(
                f"axis {self.axis.axis}: attention of {label} got a mask that is a tensor, in a "
                "stage that is traced. Describe it by position_ids and documents"
            )
        return ValueError(
            f"axis {self.axis.axis}: attention of {label} got a {len(shape)}-D mask of shape "
            f"{shape} that covers only this rank's positions. Describe it by position_ids and "
            'documents, or use method = "all-to-all" with a mask of the whole sequence'
        )


class _Now:
    """Of the process, not of one thread: autograd recomputes in threads of its own."""

    stack: tuple[Attending, ...] = ()


@functools.cache
def _now() -> _Now:
    return _Now()


def now_attending() -> Attending | None:
    """Return how attention is computed now, None where sequences are not split."""
    return _now().stack[-1] if _now().stack else None


@contextlib.contextmanager
def attending(state: Attending) -> Iterator[None]:
    """Catch attention, in the block, of models on this rank's part."""
    before = _now().stack
    with contextlib.ExitStack() as stack:
        if not before:
            stack.enter_context(_patched_torch())
            stack.enter_context(_patched_transformers())
        stack.enter_context(_Caught())
        _now().stack = (*before, state)
        try:
            yield
        finally:
            _now().stack = before


# ------------------------------------------------------------------------------------- torch

_SDPA = functional.scaled_dot_product_attention


class _Caught(TorchFunctionMode):
    """Catches attention wherever a model keeps it, but not in a backward, which sees no modes."""

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func is functional.multi_head_attention_forward:
            _refuse_weights(args, kwargs or {})
        return (sdpa if func is _SDPA else func)(*args, **(kwargs or {}))


def _refuse_weights(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError where torch would compute weights of attention from this rank's keys."""
    state = now_attending()
    if state is None or not kwargs.get("need_weights", True):
        return
    if state.is_own(*(x.movedim(0, -2) if x.ndim > 1 else x for x in args[:2])):
        raise ValueError(
            f"axis {state.axis.axis}: attention weights of a MultiheadAttention would be those of "
            "this rank's keys alone. Call it with need_weights=False"
        )


@contextlib.contextmanager
def _patched_torch() -> Iterator[None]:
    """Catch attention in what imports it, also when a backward computes it again."""
    found = _importers(len(sys.modules))
    for module, name in found:
        setattr(module, name, sdpa)
    try:
        yield
    finally:
        for module, name in found:
            setattr(module, name, _SDPA)


@functools.lru_cache(maxsize=1)
def _importers(count: int) -> list[tuple[ModuleType, str]]:
    """List which of the ``count`` modules have attention, and by which name."""
    return [
        (module, key)
        for module in (*sys.modules.values(),)
        if isinstance(module, ModuleType) and module.__name__ != __name__
        for key, value in (*vars(module).items(),)
        if value is _SDPA
    ]


@not_traced
def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` of whole sequences, given this rank's part of them."""
    state = now_attending()
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if state is None or not state.is_own(query, key):
        if state is not None and (is_causal or state.is_own(key, key)):
            raise ValueError(
                f"axis {state.axis.axis}: {'causal ' if is_causal else ''}attention got "
                f"{query.shape[-2]} queries and {key.shape[-2]} keys: expected this rank's part of "
                "the sequence for both"
            )
        return _SDPA(query, key, value, attn_mask, dropout_p, is_causal, **options)
    label = "scaled_dot_product_attention"
    state.refuse_dropout(dropout_p, label)
    length, is_flat = state.split.length, query.ndim == 3
    is_whole = attn_mask is None or attn_mask.shape[-2:] == (length, length)
    is_packed = max(map(len, _ends_of(state.split))) > 1
    if attn_mask is not None and (not is_whole or is_packed or state.traced is not None):
        raise state.refuse_mask(attn_mask, label)
    form = AttentionForm(
        words=MaskWords(causal=is_causal),
        attend=_attend_plainly,
        label=label,
        in_words="" if attn_mask is None else "a mask that is a tensor",
        scale=scale,
        options={**options, "attn_mask": attn_mask, "is_causal": is_causal},
    )
    q, k, v = (x.unsqueeze(0) if is_flat else x for x in (query, key, value))
    found = state.attention((q, k, v), form)
    return found.squeeze(0) if is_flat else found


def _attend_plainly(
    state: Attending,
    sinks: None,
    form: AttentionForm,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: range,
) -> Tensor:
    """Compute torch's attention of whole sequences, document by document."""
    ends, mask = _ends_of(state.split), form.options["attn_mask"]
    if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
        mask = mask[..., heads.start : heads.stop, :, :]
    options: dict[str, Any] = {**form.options, "attn_mask": mask}
    options["enable_gqa"] = q.shape[-3] != k.shape[-3]
    rows = []
    for row, own in enumerate(ends):
        here = [x if len(ends) == 1 else x[row : row + 1] for x in (q, k, v)]
        with _outside():
            pieces = [
                _SDPA(*(x[..., a:b, :] for x in here), **options)
                for a, b in itertools.pairwise((0, *own))
            ]
        rows.append(torch.cat(pieces, -2) if len(pieces) > 1 else pieces[0])
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def _ends_of(split: ContextSplit) -> list[tuple[int, ...]]:
    """Where documents end, of each row; once where all rows are alike."""
    ends = [row.ends for row in split.rows]
    return ends[:1] if len({*ends}) == 1 else ends


# ------------------------------------------------------------------------------ transformers


class HeldMask:
    """What attention gets in place of a mask of transformers."""

    def __init__(self, words: MaskWords, make: Callable[..., Any], given: dict[str, Any]) -> None:
        self.words = words
        self._make, self._given = make, given

    def whole(self, state: Attending, rows: int) -> Any:  # noqa: ANN401 - as that has it
        """Return the mask of ``rows`` whole sequences, as one process has it."""
        if self not in state.masks:
            given: dict[str, Any] = {**self._given, "batch_size": rows}
            length = state.split.length
            bounds = self.words.seen_from(torch.arange(length, device="cpu"), *state.split.bounds())
            first, stop = (moved(x, given["device"]).expand(rows, -1) for x in bounds)

            def function(b: Any, h: Any, q: Any, k: Any) -> Tensor:  # noqa: ANN401
                return (first[b, q] <= k) & (k < stop[b, q])

            if max(map(len, _ends_of(state.split))) > 1:
                given = {**given, "allow_is_causal_skip": False}
            sizes = {"q_length": length, "kv_length": length, "q_offset": 0, "kv_offset": 0}
            padding = None if state.padding is None else moved(state.padding, given["device"])
            given = {**given, **sizes, "mask_function": function, "attention_mask": padding}
            state.masks[self] = self._make(**given)
        return state.masks[self]


def _no_mask(**given: object) -> None:
    """Make no mask, where the model has made none."""


def _jumps_of(function: Callable[..., Any]) -> Tensor | None:
    """Find in a mask function of transformers how often positions have jumped, if it looks."""
    inside = inspect.getclosurevars(function).nonlocals
    if isinstance(found := inside.get("packed_sequence_mask"), Tensor):
        return found
    parts = (*inside.get("mask_functions", ()), inside.get("mask_function"))
    return next((found for f in parts if f and (found := _jumps_of(f)) is not None), None)


def words_of(function: Callable[..., Any]) -> MaskWords | None:
    """Read a mask function of transformers; None for one that is not known.

    What it says of packed documents is left out: it was found in the positions of this rank's part.
    """
    name = getattr(function, "__name__", "")
    inside = inspect.getclosurevars(function).nonlocals if name else {}
    if name in ("causal_mask_function", "bidirectional_mask_function"):
        return MaskWords(causal=name.startswith("causal"))
    if "packed_sequence_mask" in inside and "mask_function" not in inside:
        return MaskWords(causal=False)
    if "mask_function" in inside and {*inside} <= {"mask_function", "position_ids"}:
        return words_of(inside["mask_function"])
    if {*inside} == {"sliding_window"}:
        width = inside["sliding_window"]
        is_both = "abs" in function.__code__.co_names
        return MaskWords(causal=False, window=width + is_both)
    if {*inside} == {"chunk_size", "left_padding"} and not bool(inside["left_padding"].any()):
        return MaskWords(causal=False, chunk=inside["chunk_size"])
    if {*inside} != {"mask_functions"} or name != "and_mask":
        return None
    parts = [words_of(each) for each in inside["mask_functions"]]
    known = [part for part in parts if part is not None]
    windows = [part.window for part in known if part.window is not None]
    chunks = [part.chunk for part in known if part.chunk is not None]
    if len(known) != len(parts) or len(windows) > 1 or len(chunks) > 1:
        return None
    causal = any(part.causal for part in known)
    return MaskWords(causal, windows[0] if windows else None, chunks[0] if chunks else None)


@contextlib.contextmanager
def _patched_transformers() -> Iterator[None]:
    """Register our functions over those of transformers, if that is loaded, in the block."""
    masking = sys.modules.get("transformers.masking_utils")
    modeling = sys.modules.get("transformers.modeling_utils")
    if masking is None or modeling is None:
        yield
        return
    attention, masks = modeling.AttentionInterface, masking.AttentionMaskInterface
    losses, shifting = modeling.LOSS_MAPPING, modeling.LOSS_MAPPING["ForCausalLM"]
    known = {k: f for k, f in modeling.ALL_ATTENTION_FUNCTIONS.items() if k != "eager"}
    made = {**masking.ALL_MASK_ATTENTION_FUNCTIONS}
    for name in ("eager", *known):
        attention.register(name, _attention_like(known.get(name)))
    for name, make in made.items():
        masks.register(name, _mask_like(make))
    losses["ForCausalLM"] = functools.partial(_loss_of_part, shifting)
    try:
        yield
    finally:
        losses["ForCausalLM"] = shifting
        for name in ("eager", *known):
            attention.register(name, known.get(name, _eager))
        for name, make in made.items():
            masks.register(name, make)


def _loss_of_part(own: Callable[..., Tensor], *given: Any, **options: Any) -> Tensor:
    """Compute a loss of transformers from labels that were shifted before the split."""
    state = now_attending()
    if state is not None and options.get("shift_labels") is None:
        raise ValueError(
            f"axis {state.axis.axis}: the model shifts labels, and the last label of a part is on "
            "another rank. Give it shift_labels, which were shifted before the split"
        )
    return own(*given, **options)


def _eager(module: nn.Module, *given: Any, **options: Any) -> Any:  # noqa: ANN401
    return _eager_of(module)(module, *given, **options)


def _eager_of(module: object) -> Callable[..., Any]:
    """Find the function beside the class of ``module``, which transformers registers nowhere."""
    return sys.modules[type(module).__module__].eager_attention_forward


def _mask_like(make: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that makes masks as ``make`` does, in words."""

    @not_traced
    def held(**given: Any) -> Any:  # noqa: ANN401
        state = now_attending()
        if state is None:
            return make(**given)
        words = words_of(given["mask_function"])
        if words is None:
            raise ValueError(
                f"axis {state.axis.axis}: a {type(given.get('config')).__name__} asks for a mask "
                "that is not known: expected a product of causal, sliding window, chunks, packed "
                "documents and padding"
            )
        if state.traced is None:
            state.check_documents(_jumps_of(given["mask_function"]))
        padding = given.get("attention_mask")
        if padding is not None and state.padding is None and not bool(padding.all()):
            raise ValueError(
                f"axis {state.axis.axis}: the model got an attention_mask of shape "
                f"{tuple(padding.shape)}, this rank's part of padding: give the whole one to "
                "context_parallel(attention_mask=...)"
            )
        return HeldMask(replace(words, padding=state.padding), make, given)

    return held


class _Heads:
    """A module of attention with some of its heads."""

    def __init__(self, module: nn.Module | None, groups: int, sinks: Tensor | None) -> None:
        self.module, self.num_key_value_groups = module, groups
        if sinks is not None:
            self.sinks = sinks

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self.module, name)


def _attention_like(own: Callable[..., Any] | None) -> Callable[..., Any]:
    """Make an attention function of transformers that computes as ``own`` does, over all ranks."""

    @not_traced
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,  # noqa: ANN401
        **options: Any,
    ) -> tuple[Tensor, Any]:
        state = now_attending()
        if state is None or not state.is_own(query, key):
            if state is not None and getattr(module, "is_causal", False):
                raise ValueError(
                    f"generate() under axis {state.axis.axis}: key and value caches would be split "
                    "by position. Export the weights, or load them without the axis"
                )
            compute = own or _eager_of(module)
            return compute(module, query, key, value, attention_mask, **options)
        index = getattr(module, "layer_idx", None)
        label = f"{type(module).__name__}{'' if index is None else f' of layer {index}'}"
        state.refuse_dropout(options.get("dropout") or 0.0, label)
        state.check_positions(options.get("position_ids"), label)
        held = attention_mask
        if held is None:
            causal = options.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            held = HeldMask(MaskWords(causal=causal), _no_mask, {})
        if not isinstance(held, HeldMask):
            raise state.refuse_mask(held, label)
        sinks = options.get("s_aux")
        beyond = [key for key in ("softcap", "position_bias") if options.get(key) is not None]
        bias = options.get("position_bias")
        if isinstance(bias, Tensor) and bias.shape[-1] != state.split.length:
            raise state.refuse_mask(bias, label)
        if state.traced is not None:
            if isinstance(options.get("position_bias"), Tensor):
                raise state.refuse_mask(held, label)
            options = {k: v for k, v in options.items() if not isinstance(v, Tensor)}
        form = AttentionForm(
            words=held.words,
            attend=functools.partial(_attend_as, own),
            label=label,
            in_words=" and ".join(beyond),
            scale=options.get("scaling"),
            module=module,
            options=options,
            mask=held,
        )
        found = state.attention((query, key, value), form, sinks)
        return found.transpose(1, 2).contiguous(), None

    return attention


def _attend_as(
    own: Callable[..., Any] | None,
    state: Attending,
    sinks: Tensor | None,
    form: AttentionForm,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: range,
) -> Tensor:
    """Compute attention of whole sequences as ``own`` of transformers does, or its eager one."""
    mine = dict(form.options)
    if sinks is not None:
        mine["s_aux"] = sinks = sinks[heads.start : heads.stop]
    module: Any = _Heads(form.module, q.shape[1] // k.shape[1], sinks)
    compute = own or _eager_of(form.module)
    mask = None if form.mask is None else form.mask.whole(state, len(q))
    with _outside():
        found = compute(module, q, k, v, mask, **mine)
    return found[0].transpose(1, 2)


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    """Let attention be what it is in one process, in the block."""
    before, _now().stack = _now().stack, ()
    try:
        yield
    finally:
        _now().stack = before


# ------------------------------------------------------------------------------- in a trace


@torch.library.custom_op("meshwright::attention", mutates_args=())
def _traced_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, number: int) -> Tensor:
    """What a graph has in place of attention until a `TracedAttention` replaces it: never run."""
    raise InternalError("attention of a graph is traced, and not run")


@_traced_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, number: int) -> Tensor:
    rows, heads, length, _ = q.shape
    return q.new_empty((rows, length, heads, v.shape[-1])).transpose(1, 2)


ATTENTION: Any = torch.ops.meshwright.attention.default


class TracedAttention(nn.Module):
    """Attention in a stage that is a graph."""

    form: AttentionForm

    def __init__(self, form: AttentionForm) -> None:
        super().__init__()
        vars(self)["form"] = form  # whose module is no part of this one

    @not_traced
    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Compute attention of the microbatch that runs now."""
        state, form = now_attending(), vars(self)["form"]
        if state is None:
            raise RuntimeError(
                f"attention of {form.label} is called outside of a step, where axis context "
                "splits no batch: call step, forward_backward or eval of the Trainable"
            )
        found = state.attention((q, k, v), form, sinks)
        return found.transpose(1, 2).contiguous().transpose(1, 2)  # as it was traced
