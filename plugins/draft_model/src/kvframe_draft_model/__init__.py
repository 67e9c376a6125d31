"""The proposer ``draft_model``: a smaller model beside the served one guesses the next tokens of requests."""
