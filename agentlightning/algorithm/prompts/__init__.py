"""Better prompts: APO and GEPA, and what they share.

`budget` and `journal` keep what a run may spend and has done, `model` calls the optimiser's model, `templates` checks
what it wrote, `evaluation` runs prompts on tasks, and `results` has what a run leaves. The public paths
are `algorithm.apo` and `algorithm.gepa`.
"""
