"""The built-in plugin: full attention and the reference backend, registered by the public hooks only."""
