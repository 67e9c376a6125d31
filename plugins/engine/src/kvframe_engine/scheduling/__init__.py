"""Which tokens of which requests a step computes, and how they lie in its packed batch."""
