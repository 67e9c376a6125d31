"""The conformance kit: whether a cache spec keeps the laws, and whether a backend computes attention.

``laws`` checks a spec. ``grid`` makes a backend's cases from its declared capabilities, alone and after wrapper chains,
with the ``batches``. ``runner`` computes layers step by step: one step of a case for ``conformance``, which compares it
with ``reference``; the steps of several layers that ``runs`` makes for ``serving``; growing requests for
``definitions``; and steps on a device without memory for ``staging``, which counts the copies to it.
``wrappers`` checks a wrapper on host ``metadata``, and compares the slots that queries attend to (``attended``).
``requests`` runs random requests in a cache manager beside the definition of a cache. ``framework`` has the functions
of the host that plugins' tests call. The kit needs no test framework and no engine: a broken contract raises
``ConformanceError``.

``backend_checks``, ``spec_checks`` and so on return what is checked of one part of a plugin, as ``checks``. ``suites``
has classes that make a test of pytest of each; ``kvframe check`` runs the same ones. The checks of what only an engine
uses are in ``kvframe_engine.testing``: model adapters, proposers, logits processors.
"""
