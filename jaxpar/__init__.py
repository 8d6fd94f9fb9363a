"""jaxpar."""
