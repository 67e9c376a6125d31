"""Kernels over paged caches, each beside a plain-torch reference. Importing this loads none of them."""
