"""Qwen-Image: a double-stream transformer over packed sequences of unlike shape.

The arithmetic follows diffusers' ``QwenImageTransformer2DModel`` and ``QwenImagePipeline`` (0.42),
row by row; what differs is that the rows of many requests lie in two flat streams, image and text,
and that both guidance branches are sequences of the same forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offline_diffusion.attention.backends import AttentionFunction, load_backend
from offline_diffusion.errors import ModelError, UnsupportedModelError
from offline_diffusion.kernels.linear import MIN_ROWS, PackedLinear, pad_rows
from offline_diffusion.kernels.packed_ops import gate_residual, norm_modulate, scatter_qkv
from offline_diffusion.models.base import GuidanceRule, PackedInput, RotaryTable, TokenizedPrompt
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.models.qwen_image_text import BATCH_TOKENS, PromptEncoder
from offline_diffusion.models.qwen_image_vae import ImageDecoder
from offline_diffusion.request import Request

LAYER_NORM_EPS = 1e-6


Modulation = tuple[Tensor, ...]
"""Shift, scale and gate of attention, then of the feed-forward: ``[R, H]`` each."""


class _Stream:
    """One stream's weights in a block: image or text."""

    def __init__(self, mod: Any, to_qkv: list[nn.Linear], norms: list[Any], to_out: Any, mlp: Any) -> None:
        self.modulation = PackedLinear(mod[1])
        self.to_qkv = PackedLinear(*to_qkv)
        self.norm_q, self.norm_k = norms
        self.to_out = PackedLinear(to_out)
        self.mlp_in, self.mlp_out = PackedLinear(mlp.net[0].proj), PackedLinear(mlp.net[2])

    def qkv_into(
        self,
        out: tuple[Tensor, Tensor, Tensor],
        x: Tensor,
        modulation: Modulation,
        index: Tensor,
        to_joint: Tensor,
        rotary: RotaryTable,
    ) -> None:
        """Writes the stream's q, k, v, normed and rotated, to their rows of ``out`` ``[T_joint, A, D]``."""
        num_heads = out[0].shape[1]
        qkv = self.to_qkv.of_modulated(x, modulation[0], modulation[1], index, LAYER_NORM_EPS)
        qkv = qkv.unflatten(-1, (3, num_heads, -1))
        weights, eps = (self.norm_q.weight, self.norm_k.weight), self.norm_q.eps
        scatter_qkv(qkv, *weights, eps, to_joint, rotary.cos, rotary.sin, out)

    def finish(self, x: Tensor, attn: Tensor, modulation: Modulation, index: Tensor) -> Tensor:
        """The residuals after attention: its output, then the feed-forward's."""
        x = gate_residual(x, self.to_out(attn), modulation[2], index)
        _, _, _, shift, scale, gate = modulation
        update = self.mlp_in.feed_forward(self.mlp_out, x, shift, scale, index, LAYER_NORM_EPS)
        return gate_residual(x, update, gate, index)


class _Block:
    """A double-stream block: joint attention, then each stream's feed-forward."""

    def __init__(self, block: Any) -> None:
        attn = block.attn
        self.num_heads = attn.heads
        self.img = _Stream(
            block.img_mod,
            [attn.to_q, attn.to_k, attn.to_v],
            [attn.norm_q, attn.norm_k],
            attn.to_out[0],
            block.img_mlp,
        )
        self.txt = _Stream(
            block.txt_mod,
            [attn.add_q_proj, attn.add_k_proj, attn.add_v_proj],
            [attn.norm_added_q, attn.norm_added_k],
            attn.to_add_out,
            block.txt_mlp,
        )

    def __call__(
        self, img: Tensor, txt: Tensor, temb: Tensor, batch: PackedInput, attend: AttentionFunction
    ) -> tuple[Tensor, Tensor]:
        """``img`` ``[T_img, H]``, ``txt`` ``[T_txt, H]``, ``temb`` ``[R, H]`` after its SiLU."""
        img_mod = self.img.modulation(temb).chunk(6, dim=-1)
        txt_mod = self.txt.modulation(temb).chunk(6, dim=-1)
        shape = (img.shape[0] + txt.shape[0], self.num_heads, img.shape[1] // self.num_heads)
        qkv = (img.new_empty(shape), img.new_empty(shape), img.new_empty(shape))
        self.img.qkv_into(qkv, img, img_mod, batch.img_request, batch.img_to_joint, batch.rotary)
        self.txt.qkv_into(qkv, txt, txt_mod, batch.txt_request, batch.txt_to_joint, batch.rotary)
        joint = attend(*qkv, batch.attention).flatten(1)  # [T_joint, H]
        img_attn = joint.index_select(0, batch.img_to_joint)
        txt_attn = joint.index_select(0, batch.txt_to_joint)
        return (
            self.img.finish(img, img_attn, img_mod, batch.img_request),
            self.txt.finish(txt, txt_attn, txt_mod, batch.txt_request),
        )


class QwenImage:
    """The family's model. Offers `models.base.DiffusionModel`.

    Args:
        pipeline: A loaded diffusers ``QwenImagePipeline``, its modules on ``device``.
        capabilities: Of this checkpoint.
        device: Where the modules are.
        attention_backend: A name of `attention.backends`, or ``auto``.

    Raises:
        UnsupportedModelError: The config turns on what is not built here; names it.
        ModelError: The tokenizer does not fit the pipeline.
        BackendError: The attention backend does not work here.
    """

    guidance_rule: GuidanceRule = "norm_rescale"

    def __init__(
        self, pipeline: Any, capabilities: Capabilities, device: torch.device, attention_backend: str = "auto"
    ) -> None:
        transformer = pipeline.transformer
        refuse_unsupported(transformer.config, pipeline.scheduler)
        self.capabilities, self.device, self.dtype = capabilities, device, transformer.dtype
        self.num_latent_channels: int = transformer.config.in_channels
        self.attention_backend, self._attend = load_backend(attention_backend, device, self.dtype)
        self._pipeline, self._transformer = pipeline, transformer
        self._num_head_tokens, self._num_tail_tokens = self._measure_template()
        self._img_in, self._txt_in = PackedLinear(transformer.img_in), PackedLinear(transformer.txt_in)
        self._blocks = [_Block(block) for block in transformer.transformer_blocks]
        self._norm_out = PackedLinear(transformer.norm_out.linear)
        self._proj_out = PackedLinear(transformer.proj_out)
        embedder = transformer.time_text_embed.timestep_embedder
        self._time_in, self._time_out = PackedLinear(embedder.linear_1), PackedLinear(embedder.linear_2)
        # Without the language head, whose logits nobody reads. A CPU gains nothing from company.
        self._prompt_encoder = PromptEncoder(
            pipeline.text_encoder.model.language_model, device, BATCH_TOKENS if device.type == "cuda" else 1
        )
        vae = pipeline.vae
        self._image_decoder = ImageDecoder(vae)
        self._latents_mean, self._latents_std = (
            torch.tensor(values, dtype=vae.dtype, device=device).view(1, -1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )

    def quantizable(self) -> Iterator[tuple[object, str]]:
        """The blocks' large products, for ``accel.quantize``."""
        for block in self._blocks:
            for stream in (block.img, block.txt):
                for name in ("to_qkv", "to_out", "mlp_in", "mlp_out"):
                    yield stream, name

    def batch_key(self, request: Request) -> None:
        """Everything packs with everything."""

    # --- before the first step -------------------------------------------------------------

    def tokenize(self, prompt: str) -> TokenizedPrompt:
        """Template, prompt and limit as in the pipeline; what the template adds is never counted as cut."""
        input_ids = self._token_ids(self._pipeline.prompt_template_encode.format(prompt))
        limit = self.capabilities.max_prompt_tokens
        num_tokens = min(len(input_ids) - self._num_head_tokens, limit)
        num_own = len(input_ids) - self._num_head_tokens - self._num_tail_tokens
        cut = max(0, num_own - limit)
        return TokenizedPrompt(tuple(input_ids[: self._num_head_tokens + num_tokens]), num_tokens, cut)

    def _token_ids(self, text: str) -> list[int]:
        ids: list[int] = self._pipeline.tokenizer(text)["input_ids"]
        return ids

    def _measure_template(self) -> tuple[int, int]:
        """Tokens of the template before and after the prompt; the pipeline drops those before it.

        Raises:
            ModelError: The tokenizer is not the one the pipeline was made for.
        """
        head, tail = self._pipeline.prompt_template_encode.split("{}")
        expected: int = self._pipeline.prompt_template_encode_start_idx
        if (found := len(self._token_ids(head))) != expected:
            raise ModelError(
                f"the tokenizer makes {found} tokens of the prompt template's head, not {expected}",
                hint="the checkpoint's tokenizer folder is damaged or belongs to another model",
            )
        return expected, len(self._token_ids(tail))

    def encode_shape(self, prompt: TokenizedPrompt) -> tuple[int, int]:
        """By the prompt's own length, see `qwen_image_text`."""
        return self._prompt_encoder.shape(len(prompt.input_ids))

    def prepare_encode(self, prompts: Sequence[TokenizedPrompt]) -> list[Tensor]:
        """``[num_tokens, H]`` each. In fixed shapes, so no prompt's bits depend on the others."""
        hidden = self._prompt_encoder([prompt.input_ids for prompt in prompts])
        return [self._text_stream(states[self._num_head_tokens :]) for states in hidden]

    def _text_stream(self, hidden: Tensor) -> Tensor:
        return self._txt_in(self._transformer.txt_norm(hidden.to(self.dtype)))

    def prepare_latents(self, request: Request) -> Tensor:
        """Drawn on the CPU in the model's dtype by the request's own generator, then patchified 2×2."""
        rows, columns = self._grid(request.height, request.width)
        generator = torch.Generator("cpu").manual_seed(request.seed)
        channels = self.num_latent_channels // 4
        noise = torch.randn((channels, 2 * rows, 2 * columns), generator=generator, dtype=self.dtype)
        patches = noise.view(channels, rows, 2, columns, 2).permute(1, 3, 0, 2, 4)
        return patches.reshape(rows * columns, self.num_latent_channels)

    def prepare_timesteps(self, request: Request) -> tuple[Tensor, Tensor]:
        """The noise scheduler's own tables for this size and step count.

        One step: the schedule's only sigma is 1, which the stretch to ``shift_terminal`` turns into
        0/0; there is nothing to stretch then, so it stays 1.
        """
        noise_scheduler = self._pipeline.scheduler
        steps = request.num_inference_steps
        sigmas = np.linspace(1.0, 1 / steps, steps)
        mu = dynamic_shift(
            self.capabilities.num_image_tokens(request.height, request.width), noise_scheduler.config
        )
        if steps == 1 and noise_scheduler.config.shift_terminal:
            return torch.tensor([1.0, 0.0]), torch.tensor([float(noise_scheduler.config.num_train_timesteps)])
        noise_scheduler.set_timesteps(sigmas=sigmas, mu=mu, device="cpu")
        return noise_scheduler.sigmas.clone(), noise_scheduler.timesteps.clone()

    def rotary_table(self, height: int, width: int, num_text_tokens: int) -> RotaryTable:
        """From the transformer's own position tables; text positions start beyond the image's."""
        rows, columns = self._grid(height, width)
        img, txt = self._transformer.pos_embed(
            [(1, rows, columns)], max_txt_seq_len=num_text_tokens, device=self.device
        )
        angles = torch.cat((txt, img))
        return RotaryTable(angles.real.contiguous(), angles.imag.contiguous())

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        patch = self.capabilities.patch_pixels
        return height // patch, width // patch

    # --- every step --------------------------------------------------------------------------

    def denoise_step(self, batch: PackedInput) -> Tensor:
        """One forward over all sequences, ``[T_img, C]``."""
        temb = F.silu(self._time_embedding(pad_rows(batch.timesteps, MIN_ROWS)))  # padded once for all blocks
        img = self._img_in(batch.latents.to(self.dtype))
        txt = batch.prompt_embeds
        for block in self._blocks:
            img, txt = block(img, txt, temb, batch, self._attend)
        scale, shift = self._norm_out(temb).chunk(2, dim=-1)
        return self._proj_out(norm_modulate(img, shift, scale, batch.img_request, LAYER_NORM_EPS))

    def _time_embedding(self, timesteps: Tensor) -> Tensor:
        """``[R]`` → ``[R, H]``; the model takes timesteps from 0 to 1, rounded to its dtype."""
        projected = self._transformer.time_text_embed.time_proj(timesteps.to(self.dtype) / 1000)
        return self._time_out(F.silu(self._time_in(projected.to(self.dtype))))

    # --- after the last step -----------------------------------------------------------------

    def post_decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        """VAE decode of one request alone, float32 ``[height, width, 3]``, 0 … 1."""
        rows, columns = self._grid(height, width)
        channels = self.num_latent_channels // 4
        grid = latents.view(rows, columns, channels, 2, 2).permute(2, 0, 3, 1, 4)
        grid = grid.reshape(1, channels, 2 * rows, 2 * columns).to(self._latents_std.dtype)
        return self._image_decoder(grid * self._latents_std + self._latents_mean)


def dynamic_shift(num_image_tokens: int, config: Any) -> float:
    """The timestep shift ``mu``: linear in the image's tokens, from ``base_shift`` to ``max_shift``."""
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base, top = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (top - base) / (high - low)
    return float(num_image_tokens * slope + (base - slope * low))


def refuse_unsupported(config: Any, noise_scheduler: Any) -> None:
    """Names what a checkpoint turns on and this family lacks.

    ``zero_cond_t`` and ``use_layer3d_rope`` need nothing here: without condition images the first
    changes no value, and positions come from the transformer's own table.

    Raises:
        UnsupportedModelError: With the name of the key.
    """
    for key in ("guidance_embeds", "use_additional_t_cond"):
        if config.get(key):
            raise UnsupportedModelError(
                f"transformer config has {key}=true, which is not supported for Qwen-Image",
                hint="use a text-to-image checkpoint such as Qwen/Qwen-Image",
            )
    name = type(noise_scheduler).__name__
    if name != "FlowMatchEulerDiscreteScheduler":
        raise UnsupportedModelError(
            f"noise scheduler {name} is not supported for Qwen-Image",
            hint="allowed: FlowMatchEulerDiscreteScheduler",
        )
    for key in ("stochastic_sampling", "invert_sigmas"):
        if noise_scheduler.config.get(key):
            raise UnsupportedModelError(
                f"scheduler config has {key}=true, which is not supported for Qwen-Image"
            )
