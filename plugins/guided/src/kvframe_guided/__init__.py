"""The logits processor ``guided``: answers that follow a JSON schema, a regular expression or a grammar."""
