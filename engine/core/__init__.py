"""The engine core: requests in, tokens out, one plain record of every step.

The modules of this package itself (`events`, `sampling_params`, `sequence`, `scheduler/`,
`cache/`) are torch-free; `model/` and `sampler/` are not.
"""
