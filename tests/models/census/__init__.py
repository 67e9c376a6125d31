"""Compares a tiny random model of every type that transformers has with transformers' own results."""
