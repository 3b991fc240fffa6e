"""A plugin of vLLM that norms the context keys of a DFlash head layer by layer, on CPUs.

vLLM 0.32.0 norms the keys of all draft layers in one call of `rms_norm` with the weights stacked by layer. Its kernel
for CPUs takes the first layer's weights for all, without a word: heads of several layers accept less there than they
should, while the text stays the target's. `register` is a `vllm.general_plugins` entry point of this package, so it
works wherever the package is installed beside vLLM; the serving check's runner calls it from this file. It imports
nothing of this package.
"""


def register():
    """Norm layer by layer from now on, if this is vLLM on a CPU and its code is that which was read.

    Returns:
        a function that takes it back; None where nothing was changed.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    stacked = getattr(DFlashQwen3Model, "_normalize_context_k", None)
    if stacked is None:
        return None

    def norm_by_layer(self, all_k):
        normed = torch.empty_like(all_k)  # [L,n,hkv,d]
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(normed[layer], all_k[layer], weight, self._rms_norm_eps)
        return normed

    def take_back():
        DFlashQwen3Model._normalize_context_k = stacked

    DFlashQwen3Model._normalize_context_k = norm_by_layer
    return take_back
