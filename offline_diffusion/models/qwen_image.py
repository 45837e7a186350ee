"""Qwen-Image: a double-stream transformer over packed sequences of unlike shape.

The arithmetic follows diffusers' ``QwenImageTransformer2DModel`` and ``QwenImagePipeline`` (0.42),
row by row; what differs is that the rows of many requests lie in two flat streams, image and text,
and that both guidance branches are sequences of the same forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offline_diffusion.attention.backends import AttentionFunction, load_backend
from offline_diffusion.errors import ModelError, UnsupportedModelError
from offline_diffusion.kernels.linear import MIN_ROWS, PackedLinear, pad_rows
from offline_diffusion.kernels.packed_ops import (
    QuantFormat,
    Quantized,
    gate_residual_norm,
    norm_modulate,
    scatter_qkv,
)
from offline_diffusion.models.base import GuidanceRule, PackedInput, RotaryTable, TokenizedPrompt
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.models.modulation import ModulationTable
from offline_diffusion.models.qwen_image_text import BATCH_TOKENS, PromptEncoder
from offline_diffusion.models.qwen_image_vae import ImageDecoder
from offline_diffusion.request import Request

EPS = 1e-6
"""Of all layer norms."""

Rows = Tensor | Quantized
"""A stream's rows as the next product takes them."""


Modulation = tuple[Tensor, ...]
"""Shift, scale and gate of attention, then of the feed-forward, for every timestep: ``[slots, H]`` each."""


class _Stream:
    """One stream's weights in a block: image or text."""

    def __init__(self, mod: Any, to_qkv: list[nn.Linear], norms: list[Any], to_out: Any, mlp: Any) -> None:
        self.modulation = PackedLinear(mod[1])
        self.to_qkv = PackedLinear(*to_qkv)
        self.norm_q, self.norm_k = norms
        self.to_out = PackedLinear(to_out)
        self.mlp_in, self.mlp_out = PackedLinear(mlp.net[0].proj), PackedLinear(mlp.net[2])

    def begin(self, x: Tensor, own: Modulation, index: Tensor) -> Rows:
        """The stream ``x`` ``[T, H]`` as the first block's attention reads it; ``index`` ``[T]``: slots."""
        return norm_modulate(x, own[0], own[1], index, EPS, self.to_qkv.takes)

    def qkv_into(self, k: Tensor, v: Tensor, h: Rows, to_joint: Tensor, rotary: RotaryTable) -> Tensor:
        """The stream's q ``[T, A, D]``; k and v go to their rows of ``k``, ``v`` ``[T_joint, A, D]``."""
        qkv = self.to_qkv(h).unflatten(-1, (3, *k.shape[1:]))
        q = k.new_empty(qkv.shape[0], *k.shape[1:])
        weights, eps = (self.norm_q.weight, self.norm_k.weight), self.norm_q.eps
        scatter_qkv(qkv, *weights, eps, to_joint, rotary.cos, rotary.sin, (q, k, v))
        return q

    def finish(
        self,
        x: Tensor,
        attn: Tensor,
        own: Modulation,
        following: tuple[Tensor, ...],
        takes: QuantFormat | None,
        index: Tensor,
    ) -> tuple[Tensor, Rows]:
        """From attention to the next block: both residuals and the feed-forward between.

        Args:
            x: ``[T, H]``.
            attn: ``[T, H]``, what attention gave.
            own: This block's modulation.
            following: Shift and scale of what reads the stream next.
            takes: The format in which that wants it.
            index: ``[T]``, slot of each token.
        """
        _, _, gate, shift, scale, last_gate = own
        update = self.to_out(attn)
        x, h = gate_residual_norm(x, update, gate, shift, scale, index, EPS, self.mlp_in.takes)
        update = self.mlp_in.feed_forward(self.mlp_out, h)
        shift, scale = following
        return gate_residual_norm(x, update, last_gate, shift, scale, index, EPS, takes)


class _Block:
    """A double-stream block: joint attention, then each stream's feed-forward."""

    def __init__(self, block: Any) -> None:
        attn = block.attn
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

    def attention(
        self, img: Rows, txt: Rows, shape: tuple[int, int, int], batch: PackedInput, attend: AttentionFunction
    ) -> tuple[Tensor, Tensor]:
        """Joint attention over all sequences: image ``[T_img, H]`` and text ``[T_txt, H]``.

        Each stream's queries are a call of their own, so that neither they nor what comes of them change
        their order. ``shape`` is that of k: T_joint, A, D.
        """
        like = self.img.to_qkv.bias
        k, v = (torch.empty(shape, dtype=like.dtype, device=like.device) for _ in range(2))
        img_q = self.img.qkv_into(k, v, img, batch.img_to_joint, batch.rotary)
        txt_q = self.txt.qkv_into(k, v, txt, batch.txt_to_joint, batch.rotary)
        img_attn = attend(img_q, k, v, batch.img_attention).flatten(1)
        return img_attn, attend(txt_q, k, v, batch.txt_attention).flatten(1)


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
        self._num_heads: int = transformer.config.num_attention_heads
        self._table = ModulationTable(
            (12 * len(self._blocks) + 2) * transformer.inner_dim, self._modulation_rows, self.dtype, device
        )
        self._views: tuple[Tensor, list[Modulation], tuple[Tensor, Tensor]] | None = None
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
        """A copy of its own: the product's rows are padded, and the stream is kept for long."""
        return self._txt_in(self._transformer.txt_norm(hidden.to(self.dtype))).clone()

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

    def prepare_step(self, timesteps: Sequence[float], later: Iterable[float]) -> Tensor:
        """``[R]`` int64: each request's row in the table of modulations."""
        if self._table.must_move(len(timesteps)):
            self._views = None  # or the old table would stay
        return self._table.slots(timesteps, later)

    def denoise_step(self, batch: PackedInput) -> Tensor:
        """One forward over all sequences, ``[T_img, C]``."""
        img_slot = batch.conditioning.index_select(0, batch.img_request)
        txt_slot = batch.conditioning.index_select(0, batch.txt_request)
        modulations, last = self._modulations()
        img, txt = self._img_in(batch.latents.to(self.dtype)), batch.prompt_embeds
        img_h = self._blocks[0].img.begin(img, modulations[0], img_slot)
        txt_h = self._blocks[0].txt.begin(txt, modulations[1], txt_slot)
        shape = (img.shape[0] + txt.shape[0], self._num_heads, img.shape[1] // self._num_heads)
        for index, block in enumerate(self._blocks[:-1]):
            own_img, own_txt, next_img, next_txt = modulations[2 * index : 2 * index + 4]
            following = self._blocks[index + 1]
            img_attn, txt_attn = block.attention(img_h, txt_h, shape, batch, self._attend)
            img, img_h = block.img.finish(
                img, img_attn, own_img, next_img[:2], following.img.to_qkv.takes, img_slot
            )
            txt, txt_h = block.txt.finish(
                txt, txt_attn, own_txt, next_txt[:2], following.txt.to_qkv.takes, txt_slot
            )
        block = self._blocks[-1]  # after its attention nobody reads the text any more
        img_attn, _ = block.attention(img_h, txt_h, shape, batch, self._attend)
        _, img_h = block.img.finish(img, img_attn, modulations[-2], last, self._proj_out.takes, img_slot)
        return self._proj_out(img_h)

    def _modulations(self) -> tuple[list[Modulation], tuple[Tensor, Tensor]]:
        """Views of the table: each block's image and text modulation; shift and scale of the last norm."""
        rows = self._table.rows
        if self._views is None or self._views[0] is not rows:
            width = self._transformer.inner_dim
            *parts, scale, shift = rows.split(width, dim=1)
            groups = [tuple(parts[start : start + 6]) for start in range(0, len(parts), 6)]
            self._views = rows, groups, (shift, scale)
        return self._views[1:]

    def _modulation_rows(self, timesteps: Tensor) -> Iterator[Tensor]:
        """The columns of the table, ``[n]`` → ``[n, …]`` each; see `_modulations` for their order."""
        num_rows = timesteps.shape[0]
        temb = F.silu(self._time_embedding(pad_rows(timesteps, MIN_ROWS)))  # padded once for all blocks
        for block in self._blocks:
            yield block.img.modulation(temb)[:num_rows]
            yield block.txt.modulation(temb)[:num_rows]
        yield self._norm_out(temb)[:num_rows]

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
