"""What a host needs. A host serves models through kvframe's layers: kvframe's own engine is one, vLLM is another.

``setup`` says what a stack does with a model, and makes its layers over a pool of pages. ``models``
loads, ``drafts`` says what drafts for a model, ``hosted_model`` serves on the pages of another engine.
A host imports these from ``kvframe``, whose names are its whole world beside the contract.
"""
