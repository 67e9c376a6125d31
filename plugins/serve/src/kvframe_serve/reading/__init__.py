"""From the bytes of a body to tokens and sampling parameters, in processes of their own."""
