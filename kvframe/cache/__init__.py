"""The cache: pages and who owns them, and the bytes that they are."""
