"""One engine over several processes: rank 0 serves requests, and the other ranks compute what it tells them."""
