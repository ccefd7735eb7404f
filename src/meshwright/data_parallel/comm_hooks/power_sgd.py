"""PowerSGD: gradients sent as two thin matrices (Vogels, Karimireddy, Jaggi, arXiv 1905.13727).

Each gradient M of rank i is an n x m matrix; P and Q have r columns::

    1. M_i  <- M_i + error_i                      error feedback
    2. P    <- sum_i M_i Q,  made orthonormal     all-reduce of n * r numbers
    3. Q    <- mean_i M_i^T P                     all-reduce of m * r numbers
    4. result P Q^T,  error_i <- M_i - P Q^T      Q is kept for the next pass: warm start
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.comm import Communicator
from meshwright.data_parallel.comm_hooks.sums import allreduce_hook
from meshwright.data_parallel.replicas.gradient_bucket import Deferred, GradBucket, reduction_axis

_log = logging.getLogger("meshwright")

Future = torch.futures.Future[torch.Tensor]


@dataclass(eq=False, repr=False)
class PowerSGDState:
    """Settings of PowerSGD and the state that it keeps between passes, with torch's names.

    The first ``start_powerSGD_iter`` backward passes average gradients uncompressed. A gradient is
    compressed if that saves more than a factor of ``min_compression_rate``. Columns are made
    orthonormal by a QR decomposition, which a column of zeros does not disturb; with an
    ``orthogonalization_epsilon`` above 0 one by one, each divided by its length plus epsilon. With
    ``batch_tensors_with_same_shape`` matrices of one shape are multiplied together. After each
    ``compression_stats_logging_frequency`` compressed passes `compression_stats` is logged.

    Raises ValueError for a ``start_powerSGD_iter`` below 2 with error feedback or a warm start.
    """

    process_group: Any = None
    matrix_approximation_rank: int = 1
    start_powerSGD_iter: int = 1000  # noqa: N815 - torch's name
    min_compression_rate: float = 2
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 0
    random_seed: int = 0
    compression_stats_logging_frequency: int = 10_000
    batch_tensors_with_same_shape: bool = False
    iter: int = field(default=0, init=False)
    """Backward passes so far."""
    error_dict: dict[int, torch.Tensor] = field(default_factory=dict, init=False)
    """The part of each bucket that compression has lost, by its index."""
    q_memory_dict: dict[int, list[torch.Tensor]] = field(default_factory=dict, init=False)
    """The last Q of each matrix of a bucket."""
    total_numel_before_compression: int = field(default=0, init=False)
    total_numel_after_compression: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if (self.use_error_feedback or self.warm_start) and self.start_powerSGD_iter <= 1:
            raise ValueError(
                "Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is "
                f"enabled, because the first passes set both up. Found {self.start_powerSGD_iter}"
            )
        self._next_log = 0
        self._generator = torch.Generator().manual_seed(self.random_seed)

    def compression_stats(self) -> tuple[float, int, int]:
        """The compression rate, and the number of elements before and after compression."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0.0), before, after

    def starts(self, bucket: GradBucket) -> bool:
        """Check whether ``bucket`` is to be compressed; the last of a pass increments ``iter``."""
        is_started = self.iter >= self.start_powerSGD_iter
        if bucket.is_last():
            self.iter += 1
            if is_started and self.iter >= self._next_log:
                self._next_log = self.iter + self.compression_stats_logging_frequency
                rate, before, after = self.compression_stats()
                _log.info(
                    "PowerSGD after %d passes: %d numbers sent as %d, a rate of %.2f",
                    self.iter,
                    before,
                    after,
                    rate,
                )
        return is_started

    def is_worthwhile(self, rows: int, columns: int) -> bool:
        """Whether a matrix is worth compressing; counts what it saves."""
        size = rows * columns
        rank = min(rows, columns, self.matrix_approximation_rank)
        thin = (rows + columns) * rank
        is_worthwhile = thin * self.min_compression_rate < size
        self.total_numel_before_compression += size
        self.total_numel_after_compression += thin if is_worthwhile else size
        return is_worthwhile

    def correct(self, bucket: GradBucket, numbers: torch.Tensor) -> torch.Tensor | None:
        """Add the previous error to ``numbers``; returns a copy, to compute the new error from."""
        if not self.use_error_feedback:
            return None
        error = self.error_dict.get(bucket.index())
        if error is not None:
            numbers.add_(error)
        return numbers.clone()

    def start_matrices(self, index: int, matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return Q of each matrix, orthonormal: the last one, or random and equal on all ranks."""
        found = self.q_memory_dict.get(index) if self.warm_start else None
        if found is None:
            found = []
            for matrix in matrices:
                shape = (matrix.shape[1], min(*matrix.shape, self.matrix_approximation_rank))
                random = torch.randn(
                    shape, generator=self._generator, dtype=torch.float32, device="cpu"
                )
                found.append(random.to(matrix))
        return [self.orthonormal(q) for q in found]

    def orthonormal(self, matrix: torch.Tensor) -> torch.Tensor:
        """Make columns of length 1 that span the same space; QR has no half precision."""
        wide = matrix if matrix.dtype.itemsize >= 4 else matrix.float()
        if self.orthogonalization_epsilon <= 0:
            return torch.linalg.qr(wide).Q.to(matrix.dtype)
        # Gram and Schmidt: each column loses its part along those before it.
        columns: list[torch.Tensor] = []
        for column in wide.unbind(1):
            for other in columns:
                column = column - torch.dot(other, column) * other
            columns.append(column / (column.norm() + self.orthogonalization_epsilon))
        return torch.stack(columns, 1).to(matrix.dtype)

    def products(
        self, left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Multiply ``left`` by ``right`` pairwise, batching equal shapes if so configured."""
        if not self.batch_tensors_with_same_shape:
            return [a @ b for a, b in zip(left, right, strict=True)]
        places: dict[tuple[torch.Size, torch.Size], list[int]] = {}
        for place, (a, b) in enumerate(zip(left, right, strict=True)):
            places.setdefault((a.shape, b.shape), []).append(place)
        found: dict[int, torch.Tensor] = {}
        for group in places.values():
            both = torch.stack([left[p] for p in group]), torch.stack([right[p] for p in group])
            found.update(zip(group, torch.bmm(*both).unbind(), strict=True))
        return [found[place] for place in range(len(left))]


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future:  # noqa: N802
    """Compress each gradient that is worth it, and average the others uncompressed."""
    if not state.starts(bucket):
        return allreduce_hook(state.process_group, bucket)
    buffer = bucket.buffer()
    corrected = state.correct(bucket, buffer)
    matrices: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for gradient in bucket.gradients():
        matrix = gradient.view(gradient.shape[0] if gradient.ndim else 1, -1)
        if gradient.ndim > 1 and state.is_worthwhile(*matrix.shape):
            matrices.append(matrix)
        else:
            others.append(gradient)
    return _compressed(state, bucket, buffer, matrices, others=others, corrected=corrected)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future:  # noqa: N802
    """Compress the whole bucket as one square matrix: faster, and less exact."""
    if not state.starts(bucket):
        return allreduce_hook(state.process_group, bucket)
    buffer = bucket.buffer()
    side = math.ceil(math.sqrt(len(buffer)))
    square = torch.nn.functional.pad(buffer, (0, side * side - len(buffer)))
    corrected = state.correct(bucket, square)
    matrices = [square.view(side, side)]
    inner = _compressed(state, bucket, square, matrices, others=[], corrected=corrected)
    return inner.then(lambda _: buffer.copy_(square[: len(buffer)]))


for _hook in (powerSGD_hook, batched_powerSGD_hook):
    _hook.__dict__["is_for_dense"] = True


def _compressed(
    state: PowerSGDState,
    bucket: GradBucket,
    numbers: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    *,
    others: Sequence[torch.Tensor],
    corrected: torch.Tensor | None,
) -> Deferred[torch.Tensor]:
    """Replace matrices by P Q^T and other gradients by means; all are views of ``numbers``.

    Steps 2 to 4 of the algorithm above.
    """
    axis, index = reduction_axis(state.process_group, bucket.communicator), bucket.index()
    plain = _sums(axis, others, f"{bucket.label}: not compressed")
    starts = state.start_matrices(index, matrices)
    thin = _sums(axis, state.products(matrices, starts), f"{bucket.label}: P")

    def finish() -> torch.Tensor:
        for other, summed in zip(others, plain.wait(), strict=True):
            other.copy_(summed / axis.size)
        ps = [state.orthonormal(p) for p in thin.wait()]
        products_t = state.products([matrix.t() for matrix in matrices], ps)
        qs = [q / axis.size for q in _sums(axis, products_t, f"{bucket.label}: Q").wait()]
        found = state.products(ps, [q.t() for q in qs])
        for matrix, product in zip(matrices, found, strict=True):
            matrix.copy_(product)
        state.q_memory_dict[index] = qs
        if corrected is not None:
            state.error_dict[index] = corrected.sub_(numbers)
        return numbers

    return Deferred(finish)


def _sums(
    axis: Communicator, tensors: Sequence[torch.Tensor], label: str
) -> Deferred[list[torch.Tensor]]:
    """Start to sum ``tensors`` over the axis in one call; the value has their shapes."""
    if not tensors:
        return Deferred(list)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    pending = axis.all_reduce(flat, label=label)

    def finish() -> list[torch.Tensor]:
        pending.wait()
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    return Deferred(finish)
