"""What ships with the core: full attention and the torch backends, registered by the public hooks only."""
