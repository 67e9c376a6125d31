"""The proposer ``ngram``: it guesses that a request goes on as it did after the same tokens before."""
