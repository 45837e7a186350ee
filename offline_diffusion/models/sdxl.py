"""SDXL: a UNet over requests of one latent shape.

The arithmetic is that of ``StableDiffusionXLPipeline`` (0.42), and the UNet diffusers' own with parts
replaced, see ``unet``. What differs is that its rows are many requests' guidance branches, each with its own
timestep, text and micro-conditioning, and that noise schedulers are tables of linear steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from offline_diffusion.attention.backends import load_backend
from offline_diffusion.errors import UnsupportedModelError
from offline_diffusion.models.autoencoder_kl import ImageDecoder
from offline_diffusion.models.base import PromptEmbeds, SequenceInputs, TokenizedPrompt
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.models.linear_steps import StepTables
from offline_diffusion.models.padded_prompts import PaddedEncoder, PaddedPrompts
from offline_diffusion.models.stacked import StackedInput
from offline_diffusion.models.unet import own_unet, own_vae, quantizable_blocks
from offline_diffusion.request import Pair, Request
from offline_diffusion.upload import upload

NUM_TIME_IDS = 6
"""Micro-conditioning: height and width of the original, top and left of its crop, height and width drawn."""


class SDXL:
    """The family's model. Offers `models.stacked.StackedModel`.

    Args:
        pipeline: A loaded diffusers ``StableDiffusionXLPipeline``, its modules on ``device``. Its weights are
            shared: on a GPU they become channels-last, and for float16 the VAE's become float32.
        capabilities: Of this checkpoint.
        device: Where the modules are.
        attention_backend: A name of `attention.backends`, or ``auto``.

    Raises:
        UnsupportedModelError: The config turns on what is not built here; names it.
        BackendError: The attention backend does not work here.
    """

    def __init__(
        self, pipeline: Any, capabilities: Capabilities, device: torch.device, attention_backend: str = "auto"
    ) -> None:
        refuse_unsupported(pipeline)
        config = pipeline.unet.config
        self.capabilities, self.device = capabilities, device
        self.dtype: torch.dtype = pipeline.unet.dtype
        self.attention_backend, attend = load_backend(attention_backend, device, self.dtype)
        self._unet, vae = own_unet(pipeline.unet, attend), own_vae(pipeline.vae)
        if device.type == "cuda":
            for module in (self._unet, vae):
                module.to(memory_format=torch.channels_last)  # as tensor cores take convolutions
        self._steps = StepTables(pipeline.scheduler)
        self.num_sample_channels: int = config.in_channels
        self.num_latent_channels = (1 + self._steps.num_remembered) * self.num_sample_channels
        self._prompts = _prompt_encoders(pipeline, capabilities, device)
        self._text_width: int = config.cross_attention_dim
        self._pooled_width: int = pipeline.text_encoder_2.config.projection_dim
        if self.dtype == torch.float16 and pipeline.vae.config.force_upcast:
            vae.to(torch.float32)  # in float16 it overflows
        self._image_decoder = ImageDecoder(vae)
        self._time_ids = lru_cache(maxsize=1024)(self._upload_time_ids)  # the same for most rows of a job

    def quantizable(self) -> Iterator[tuple[object, str]]:
        """The transformers' large products, for ``accel.quantize``."""
        yield from quantizable_blocks(self._unet)

    def batch_key(self, request: Request) -> tuple[int, int]:
        """A batch has one latent shape; anything else may differ."""
        return request.height, request.width

    # --- before the first step -------------------------------------------------------------

    def tokenize(self, prompt: str) -> TokenizedPrompt:
        """The ids of both encoders."""
        return self._prompts.tokenize(prompt)

    def encode_shape(self, prompt: TokenizedPrompt) -> tuple[int, int]:  # noqa: ARG002
        """One for all."""
        return self._prompts.shape

    def prepare_encode(self, prompts: Sequence[TokenizedPrompt]) -> list[PromptEmbeds]:
        """Both encoders' states side by side, and the second one's pooled output; zeros for no prompt."""
        texts = [prompt for prompt in prompts if prompt.input_ids]
        encoded = iter(self._prompts.encode(texts))
        return [self._embeds(*next(encoded)) if own.input_ids else self._nothing(own) for own in prompts]

    def _embeds(self, first: Tensor, second: Tensor, pooled: Tensor) -> PromptEmbeds:
        return PromptEmbeds(torch.cat((first, second), dim=-1).to(self.dtype), pooled.to(self.dtype))

    def _nothing(self, prompt: TokenizedPrompt) -> PromptEmbeds:
        like: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        stream = torch.zeros(prompt.num_tokens, self._text_width, **like)
        return PromptEmbeds(stream, torch.zeros(self._pooled_width, **like))

    def prepare_latents(self, request: Request) -> Tensor:
        """A state ``[S, K·C]`` with nothing remembered yet; noise drawn on the CPU in the model's dtype."""
        steps = self._steps.table(request.num_inference_steps)
        sample = next(self._draws(request)).float() * steps.init_noise_sigma
        remembered = sample.new_zeros(sample.shape[0], self.num_latent_channels - self.num_sample_channels)
        return torch.cat((sample, remembered), dim=1)

    def prepare_noise(self, request: Request) -> Tensor | None:
        """What comes from the request's generator after its first sample, a draw a step."""
        steps = self._steps.table(request.num_inference_steps)
        if not steps.num_draws:
            return None
        draws = self._draws(request)
        next(draws)
        return torch.stack([next(draws) for _ in range(steps.num_draws)])

    def _draws(self, request: Request) -> Iterator[Tensor]:
        """Noise ``[S, C]`` without end."""
        generator = torch.Generator("cpu").manual_seed(request.seed)
        shape = (self.num_sample_channels, *self._grid(request.height, request.width))
        while True:
            yield torch.randn(shape, generator=generator, dtype=self.dtype).flatten(1).t()

    def prepare_timesteps(self, request: Request) -> tuple[Tensor, Tensor]:
        """The linear steps as ``LinearSteps.columns``, and the timesteps."""
        steps = self._steps.table(request.num_inference_steps)
        return steps.columns, steps.timesteps

    def prepare_sequence(self, request: Request, prompt: PromptEmbeds) -> SequenceInputs:
        """Pooled prompt and micro-conditioning side by side; the same for both branches, as in diffusers."""
        assert prompt.pooled is not None
        size = (request.height, request.width)
        pairs = (
            request.original_size or size,
            request.crops_coords_top_left or (0, 0),
            request.target_size or size,
        )
        return SequenceInputs(vector=torch.cat((prompt.pooled, self._time_ids(pairs))))

    def _upload_time_ids(self, pairs: tuple[Pair, ...]) -> Tensor:
        return upload(torch.tensor(pairs, dtype=torch.float32).flatten().to(self.dtype), self.device)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        patch = self.capabilities.patch_pixels
        return height // patch, width // patch

    # --- every step --------------------------------------------------------------------------

    def denoise_step(self, batch: StackedInput) -> Tensor:
        """One forward over all rows, ``[N, S, C]``."""
        assert batch.vectors is not None
        grid = self._grid(batch.height, batch.width)
        sample = batch.latents.to(self.dtype).unflatten(1, grid).permute(0, 3, 1, 2)
        pooled, time_ids = batch.vectors.split((self._pooled_width, NUM_TIME_IDS), dim=1)
        output: Tensor = self._unet(
            sample if self.device.type == "cuda" else sample.contiguous(),
            batch.timesteps,
            encoder_hidden_states=batch.prompt_embeds,
            added_cond_kwargs={"text_embeds": pooled, "time_ids": time_ids},
            return_dict=False,
        )[0]
        return output.permute(0, 2, 3, 1).flatten(1, 2)

    # --- after the last step -----------------------------------------------------------------

    def post_decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        """VAE decode of one request's final state alone, float32 ``[height, width, 3]``, 0 … 1."""
        sample = latents[:, : self.num_sample_channels].unflatten(0, self._grid(height, width))
        return self._image_decoder(sample.permute(2, 0, 1).unsqueeze(0).contiguous())


def _prompt_encoders(pipeline: Any, capabilities: Capabilities, device: torch.device) -> PaddedPrompts:
    """Both CLIPs; of each the last hidden states but one, as SDXL was trained."""
    first, second = pipeline.text_encoder, pipeline.text_encoder_2
    limits = capabilities.prompt_limits

    def encode_first(ids: Tensor) -> tuple[Tensor, ...]:
        return (first(ids, output_hidden_states=True).hidden_states[-2],)

    def encode_second(ids: Tensor) -> tuple[Tensor, ...]:
        output = second(ids, output_hidden_states=True)
        return output.hidden_states[-2], output.text_embeds

    encoders = [
        PaddedEncoder(pipeline.tokenizer, first, limits["clip_l"], encode_first),
        PaddedEncoder(pipeline.tokenizer_2, second, limits["clip_g"], encode_second),
    ]
    return PaddedPrompts(encoders, max(limits.values()), device)


def refuse_unsupported(pipeline: Any) -> None:
    """Names what a checkpoint turns on and this family lacks.

    Raises:
        UnsupportedModelError: With the name of the key or part.
    """
    unet, vae = pipeline.unet.config, pipeline.vae.config
    expected = {
        "addition_embed_type": "text_time",
        "class_embed_type": None,
        "encoder_hid_dim_type": None,
        "num_class_embeds": None,
        "time_cond_proj_dim": None,
        "attention_type": "default",
        "dual_cross_attention": None,
        "only_cross_attention": None,
        "cross_attention_norm": None,
        "use_linear_projection": True,
        "center_input_sample": None,
        "resnet_time_scale_shift": "default",
        "resnet_skip_time_act": None,
        "resnet_out_scale_factor": 1.0,
        "mid_block_only_cross_attention": None,
        "act_fn": "silu",
        "in_channels": vae.latent_channels,
        "out_channels": vae.latent_channels,
    }
    for key, value in expected.items():
        if (unet.get(key) or None) != value:  # configs say null, false or nothing
            raise UnsupportedModelError(
                f"unet config has {key}={unet.get(key)}, supported for SDXL: {value}",
                hint="use a text-to-image checkpoint such as stabilityai/stable-diffusion-xl-base-1.0",
            )
    for key in ("latents_mean", "latents_std", "shift_factor"):
        if vae.get(key) is not None:
            raise UnsupportedModelError(f"vae config has {key}, which is not supported for SDXL")
