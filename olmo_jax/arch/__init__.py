"""The model as data, without jax: layers, parameters, activations, FLOPs, sizes of tiles.

Modules are built from it, specs are derived from it, the plan counts it and `interop` reads it.
"""
