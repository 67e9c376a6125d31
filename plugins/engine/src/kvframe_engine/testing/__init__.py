"""The kit's part for what only an engine serves by: model adapters and the parts of its own contract.

``adapter_checks``, ``proposer_checks``, ``logits_processor_checks`` and ``scheduling_checks`` return the checks of a
part; ``suites`` makes tests of them.
"""
