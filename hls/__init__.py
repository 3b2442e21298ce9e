"""Headers of the card kernels; no Python. See README.md."""
