"""Building blocks of agents in JAX; importing it imports JAX, so only agents do."""
