"""What torch's distributed checkpoint keeps private: loading this loads that, and elastic."""

from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["StorageInfo"]
