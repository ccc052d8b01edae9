"""M2b's claims, checked on the owner's own server by running the real programs."""
