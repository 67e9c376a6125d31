"""What an operator says: the stack file, its tables and keys, and what each may hold."""
