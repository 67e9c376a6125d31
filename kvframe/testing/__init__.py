"""The conformance kit: whether a cache spec keeps the laws, and whether a backend computes attention.

``laws`` checks a spec, ``grid`` makes a backend's cases from what it declares, alone and after wrapper chains,
``conformance`` runs one of them and holds it against ``reference``, ``composition`` does so for everything that is
installed, ``staging`` counts what a step copies to the device. ``runs`` makes two steps of two layers at the sizes of
real models, and ``serving`` computes them. ``wrappers`` checks a wrapper, on ``metadata`` of its own and with the
tensors of ``guard``, and compares what queries attend to (``attended``). ``batches`` has what the checks of both are
run on. The kit needs no test framework: what breaks the contract raises ``ConformanceError``.
"""
