"""Private parts of torch's distributed checkpoint, which importing this imports, with elastic."""

from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["StorageInfo"]
