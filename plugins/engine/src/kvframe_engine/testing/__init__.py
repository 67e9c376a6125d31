"""The part of the conformance kit that serves models: ``adapter_checks``, and ``suites`` that make tests of them."""
