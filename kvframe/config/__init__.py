"""The operator's choices: the stack file, its tables and keys, and the values that each key accepts."""
