"""The proposer ``ngram``: it proposes the tokens that followed a request's last tokens earlier in its text."""
