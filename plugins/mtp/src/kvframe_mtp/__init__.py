"""The proposer ``mtp``: the served model's own prediction heads guess the next tokens of requests."""
