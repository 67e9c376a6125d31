"""What happens in a step: batch metadata, builders, states, copies of pages, and the bytes of pages."""
