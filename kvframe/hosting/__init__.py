"""What a host needs. A host serves models through kvframe's layers: kvframe's own engine is one, vLLM is another.

``setup`` says what a stack does with a model, ``models`` and ``draft_models`` load, ``layers`` makes a model's layers
over a pool of pages, ``hosted_layers`` and ``hosted_model`` compute on the pages of another engine. A host imports
these from ``kvframe``, whose names are its whole world beside the contract.
"""
