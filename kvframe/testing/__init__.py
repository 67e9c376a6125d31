"""The conformance kit: whether a cache spec keeps the laws, and whether a backend computes attention.

``laws`` checks a spec. ``grid`` makes a backend's cases from its declared capabilities, alone and after wrapper chains.
``conformance`` runs a case and compares it with ``reference``. ``composition`` does so for all installed backends and
wrappers. ``staging`` counts the copies of a step to the device. ``runs`` makes two steps of two layers at the sizes of
real models, and ``serving`` computes them. ``wrappers`` checks a wrapper on host metadata (``metadata``), with the
tensors of ``guard``, and compares the slots that queries attend to (``attended``). ``batches`` has the batches for all
checks. ``host`` has the functions of the host that plugins' tests call. The kit needs no test framework: a broken
contract raises ``ConformanceError``.

``backend_checks``, ``spec_checks`` and so on list what is checked of one part of a plugin, as ``checks``. ``suites``
has classes that make a test of pytest of each; ``kvframe check`` runs the same ones.
"""
