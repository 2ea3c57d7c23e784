"""The DreamerV3 algorithm on top of the embodied framework."""
