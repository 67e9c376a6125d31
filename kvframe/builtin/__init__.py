"""What ships with the core, registered by the public hooks only."""
