"""The import path of the integration with verl, which lives in `agentlightning.algorithm.verl`.

`config.yaml`, which is put over verl's defaults, lies here, where Hydra is told to look for it.
"""
