"""The operator's choices: the model's folder; the stack file, its tables and keys, and the values that keys accept."""
