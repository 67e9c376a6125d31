"""What a host needs: whatever serves models through kvframe's layers, its own engine and other engines alike.

``setup`` says what a stack does with a model, ``models`` loads one, ``hosted_layers`` and ``hosted_model`` compute on
the pages of another engine.
"""
