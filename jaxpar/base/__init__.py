"""What everything stands on: errors, the console, configs, meshes, sharding rules, hardware, private JAX."""
