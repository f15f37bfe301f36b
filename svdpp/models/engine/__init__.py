"""Engine that runs diffusers' video pipelines in parts, such as a range of denoising steps."""

import logging

# diffusers imports torchao if it is installed. The import logs warnings about CUDA kernels and
# pickles. Hide the warnings, because svdpp uses neither of these: it loads int8 weights from
# safetensors files.
for _name in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao"):
    logging.getLogger(_name).setLevel(logging.ERROR)
