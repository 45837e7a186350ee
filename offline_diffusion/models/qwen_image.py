"""Qwen-Image: a double-stream transformer over packed sequences of unlike shape.

The arithmetic follows diffusers' ``QwenImageTransformer2DModel`` and ``QwenImagePipeline`` (0.42),
row by row; what differs is that the rows of many requests lie in two flat streams, image and text,
and that both guidance branches are sequences of the same forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from offline_diffusion.attention.backends import load_backend
from offline_diffusion.errors import ModelError, UnsupportedModelError
from offline_diffusion.kernels.linear import MIN_ROWS, PackedLinear, pad_rows
from offline_diffusion.models.base import (
    GuidanceRule,
    PackedInput,
    PromptEmbeds,
    RotaryTable,
    SequenceInputs,
    TokenizedPrompt,
)
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.models.double_stream import (
    DoubleBlock,
    Modulation,
    Stream,
    run_blocks,
    split_modulation,
)
from offline_diffusion.models.flow_match import (
    draw_patches,
    flow_tables,
    patches_to_latents,
    refuse_noise_scheduler,
)
from offline_diffusion.models.modulation import ModulationTable
from offline_diffusion.models.qwen_image_text import BATCH_TOKENS, PromptEncoder
from offline_diffusion.models.qwen_image_vae import ImageDecoder
from offline_diffusion.request import Request


class QwenImage:
    """The family's model. Offers `models.base.PackedModel`.

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
        self._blocks = [_double_block(block) for block in transformer.transformer_blocks]
        self._norm_out = PackedLinear(transformer.norm_out.linear)
        self._proj_out = PackedLinear(transformer.proj_out)
        embedder = transformer.time_text_embed.timestep_embedder
        self._time_in, self._time_out = PackedLinear(embedder.linear_1), PackedLinear(embedder.linear_2)
        self._table = ModulationTable(
            (12 * len(self._blocks) + 2) * transformer.inner_dim, self._modulation_rows, self.dtype, device
        )
        self._views: tuple[Tensor, list[Modulation]] | None = None
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
            yield from block.quantizable()

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

    def prepare_encode(self, prompts: Sequence[TokenizedPrompt]) -> list[PromptEmbeds]:
        """In fixed shapes, so no prompt's bits depend on the others."""
        hidden = self._prompt_encoder([prompt.input_ids for prompt in prompts])
        return [PromptEmbeds(self._text_stream(states[self._num_head_tokens :])) for states in hidden]

    def _text_stream(self, hidden: Tensor) -> Tensor:
        """A copy of its own: the product's rows are padded, and the stream is kept for long."""
        return self._txt_in(self._transformer.txt_norm(hidden.to(self.dtype))).clone()

    def prepare_latents(self, request: Request) -> Tensor:
        """Drawn on the CPU in the model's dtype by the request's own generator, then patchified 2×2."""
        grid = self._grid(request.height, request.width)
        return draw_patches(request.seed, grid, self.num_latent_channels // 4, self.dtype)

    def prepare_timesteps(self, request: Request) -> tuple[Tensor, Tensor]:
        """The noise scheduler's own tables for this size and step count."""
        num_image_tokens = self.capabilities.num_image_tokens(request.height, request.width)
        return flow_tables(self._pipeline.scheduler, request.num_inference_steps, num_image_tokens)

    def prepare_sequence(self, request: Request, prompt: PromptEmbeds) -> SequenceInputs:
        """Angles alone."""
        return SequenceInputs(rotary=self.rotary_table(request.height, request.width, prompt.num_tokens))

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
        """``[N]`` int64: each sequence's row in the table of modulations."""
        if self._table.must_move(len(timesteps)):
            self._views = None  # or the old table would stay
        return self._table.slots(timesteps, later)

    def denoise_step(self, batch: PackedInput) -> Tensor:
        """One forward over all sequences, ``[T_img, C]``."""
        img_slot = batch.conditioning.index_select(0, batch.img_sequence)
        txt_slot = batch.conditioning.index_select(0, batch.txt_sequence)
        *modulations, (scale, shift) = self._modulations()
        img = self._img_in(batch.latents.to(self.dtype))
        # after the last attention nobody reads the text any more
        img, _, img_attn, _ = run_blocks(
            self._blocks, img, batch.prompt_embeds, modulations, (img_slot, txt_slot), batch, self._attend
        )
        last = self._blocks[-1].img
        _, img_h = last.finish(img, img_attn, modulations[-2], (shift, scale), self._proj_out.takes, img_slot)
        return self._proj_out(img_h)

    def _modulations(self) -> list[Modulation]:
        """Views of the table: each block's image and text modulation; scale and shift of the last norm."""
        rows = self._table.rows
        if self._views is None or self._views[0] is not rows:
            counts = [6] * (2 * len(self._blocks)) + [2]
            self._views = rows, split_modulation(rows, counts)
        return self._views[1]

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
        grid = patches_to_latents(latents, self._grid(height, width)).to(self._latents_std.dtype)
        return self._image_decoder(grid * self._latents_std + self._latents_mean)


def _double_block(block: Any) -> DoubleBlock:
    attn = block.attn
    img = Stream(
        block.img_mod[1],
        [attn.to_q, attn.to_k, attn.to_v],
        (attn.norm_q, attn.norm_k),
        attn.to_out[0],
        block.img_mlp,
        attn.heads,
    )
    txt = Stream(
        block.txt_mod[1],
        [attn.add_q_proj, attn.add_k_proj, attn.add_v_proj],
        (attn.norm_added_q, attn.norm_added_k),
        attn.to_add_out,
        block.txt_mlp,
        attn.heads,
    )
    return DoubleBlock(img, txt)


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
    refuse_noise_scheduler(noise_scheduler, "Qwen-Image")
