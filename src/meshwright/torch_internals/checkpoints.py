"""Private parts of torch's distributed checkpoint: loading this loads that, and elastic."""

from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["StorageInfo"]
