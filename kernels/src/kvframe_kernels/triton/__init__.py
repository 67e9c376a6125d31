"""Triton kernels over paged caches. They run on CUDA, or under Triton's interpreter on host tensors."""
