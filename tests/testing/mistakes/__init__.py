"""Backends, wrappers and specs with one mistake each, by the kind of mistake, and whether ``kvframe check`` finds it.

``python -m tests.testing.mistakes`` runs the checks of each, and prints the one that finds it.
"""
