"""Complete experiments, TOML data: `jaxpar configs` lists them."""
