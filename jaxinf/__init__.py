"""jaxinf."""
