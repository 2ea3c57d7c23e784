"""Runs on the nodes of a Ray cluster: `--script ray`.

`ray_driver` places the programs of a run on nodes and starts them again elsewhere when
nodes are lost; `bundle_actor` runs one program; `bundles` works out which resources
each one needs.
Nothing here imports JAX: the driver must not take an accelerator.
"""
