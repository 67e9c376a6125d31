"""A small plugin of each kind, written for version 1.0 of the contract. It is never edited."""
