"""One engine over several processes: rank 0 serves requests, and the other ranks compute the steps that it sends."""
