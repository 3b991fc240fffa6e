"""Tree operations of speculative decoding: one file each, a Triton kernel beside its PyTorch reference.

See ``docs/kernels.md``. Importing this package does not import Triton.
"""

from modelopt_eagle.kernels.build_tree import DraftTree, build_tree
from modelopt_eagle.kernels.pack_mask import pack_mask, unpack_mask
from modelopt_eagle.kernels.verify_greedy import Accepted, verify_greedy

__all__ = ["Accepted", "DraftTree", "build_tree", "pack_mask", "unpack_mask", "verify_greedy"]
