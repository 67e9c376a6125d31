"""The kit's part for what only an engine uses: model adapters, proposers of draft tokens and logits processors.

``adapter_checks``, ``proposer_checks`` and ``logits_processor_checks`` return the checks of a part; ``suites`` makes
tests of them.
"""
