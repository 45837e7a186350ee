"""All that ``offdiff run`` imports, for the process that others are forked from."""

import diffusers

import offline_diffusion.cli.run
import offline_diffusion.job
import offline_diffusion.models.loader
import offline_diffusion.models.tiny  # noqa: F401

diffusers.QwenImagePipeline  # imports what a model is loaded with  # noqa: B018
