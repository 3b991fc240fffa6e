"""Kernels of tree drafting and of training: one file each, a Triton kernel beside its PyTorch reference.

See ``docs/kernels.md``. Importing this package does not import Triton.
"""

from modelopt_eagle.common.trees import history_size
from modelopt_eagle.kernels.build_tree import DraftTree, build_tree, check_num_nodes, history_depth
from modelopt_eagle.kernels.column_attention import column_attention
from modelopt_eagle.kernels.column_reference import column_attention_work
from modelopt_eagle.kernels.distill_rows import distill_rows, distill_rows_work, distillation_work
from modelopt_eagle.kernels.fixed_trees import branches_tree, chain_tree, regular_tree, tree_from_links
from modelopt_eagle.kernels.norm_concat import norm_concat, norm_concat_work
from modelopt_eagle.kernels.pack_mask import pack_mask, unpack_mask
from modelopt_eagle.kernels.reject_target_only import reject_target_only
from modelopt_eagle.kernels.relocate_kv import relocate_kv
from modelopt_eagle.kernels.repack_accepted import repack_accepted
from modelopt_eagle.kernels.repack_mask import repack_mask
from modelopt_eagle.kernels.rotate_heads import rotate_heads, rotate_heads_work
from modelopt_eagle.kernels.sample_and_match import sample_and_match
from modelopt_eagle.kernels.select_nodes import select_nodes
from modelopt_eagle.kernels.topk import stable_topk
from modelopt_eagle.kernels.verify_greedy import Accepted, verify_greedy
from modelopt_eagle.kernels.work import MACHINES, Machine, Work

__all__ = [
    "MACHINES",
    "Accepted",
    "DraftTree",
    "Machine",
    "Work",
    "branches_tree",
    "build_tree",
    "chain_tree",
    "check_num_nodes",
    "column_attention",
    "column_attention_work",
    "distill_rows",
    "distill_rows_work",
    "distillation_work",
    "history_depth",
    "history_size",
    "norm_concat",
    "norm_concat_work",
    "pack_mask",
    "regular_tree",
    "reject_target_only",
    "relocate_kv",
    "repack_accepted",
    "repack_mask",
    "rotate_heads",
    "rotate_heads_work",
    "sample_and_match",
    "select_nodes",
    "stable_topk",
    "tree_from_links",
    "unpack_mask",
    "verify_greedy",
]
