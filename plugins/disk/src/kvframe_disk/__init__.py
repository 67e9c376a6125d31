"""The page store ``disk``: a folder of this machine that keeps computed pages for later engines."""
