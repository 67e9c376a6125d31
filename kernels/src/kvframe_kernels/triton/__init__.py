"""Triton kernels over paged caches. They run on CUDA, and under Triton's interpreter on tensors of the host."""
