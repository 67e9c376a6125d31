"""FlexAttention for kvframe: a backend for every attention type that a mask function says."""
