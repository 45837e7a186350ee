"""Stable Diffusion 3 and 3.5: double-stream blocks without rotary angles, some with a second attention.

The arithmetic follows diffusers' ``SD3Transformer2DModel`` and ``StableDiffusion3Pipeline`` (0.42). Positions
are rows of a table that the checkpoint brings; an image takes the part in the middle that has its own size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offline_diffusion.attention.backends import load_backend
from offline_diffusion.errors import UnsupportedModelError
from offline_diffusion.kernels.linear import PackedLinear
from offline_diffusion.models.autoencoder_kl import ImageDecoder
from offline_diffusion.models.base import (
    GuidanceRule,
    PackedInput,
    PromptEmbeds,
    SequenceInputs,
    TokenizedPrompt,
)
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.models.conditioning import SequenceModulation, TimeTextEmbedding
from offline_diffusion.models.double_stream import (
    DoubleBlock,
    ReadStream,
    SelfAttention,
    Stream,
    run_blocks,
)
from offline_diffusion.models.flow_match import (
    draw_patches,
    flow_tables,
    patches_to_latents,
    refuse_noise_scheduler,
)
from offline_diffusion.models.padded_prompts import PaddedEncoder, PaddedPrompts
from offline_diffusion.request import Request
from offline_diffusion.upload import upload


class StableDiffusion3:
    """The family's model. Offers `models.base.PackedModel`.

    Args:
        pipeline: A loaded diffusers ``StableDiffusion3Pipeline``, its modules on ``device``.
        capabilities: Of this checkpoint.
        device: Where the modules are.
        attention_backend: A name of `attention.backends`, or ``auto``.

    Raises:
        UnsupportedModelError: The config turns on what is not built here; names it.
        BackendError: The attention backend does not work here.
    """

    guidance_rule: GuidanceRule = "plain"

    def __init__(
        self, pipeline: Any, capabilities: Capabilities, device: torch.device, attention_backend: str = "auto"
    ) -> None:
        transformer = pipeline.transformer
        refuse_noise_scheduler(pipeline.scheduler, "Stable Diffusion 3")
        refuse_unsupported(transformer.config)
        self.capabilities, self.device, self.dtype = capabilities, device, transformer.dtype
        self.num_latent_channels: int = 4 * transformer.config.in_channels
        self.attention_backend, self._attend = load_backend(attention_backend, device, self.dtype)
        self._pipeline = pipeline
        self._prompts = _prompt_encoders(pipeline, capabilities, device)
        self._text_width: int = transformer.config.joint_attention_dim
        self._img_in = PackedLinear(_patch_layer(transformer.pos_embed.proj))
        self._txt_in = PackedLinear(transformer.context_embedder)
        self._positions: Tensor = transformer.pos_embed.pos_embed[0]  # [side · side, H]
        self._side: int = transformer.pos_embed.pos_embed_max_size
        self._embedding = TimeTextEmbedding(transformer.time_text_embed, self.dtype)
        self._blocks = [_double_block(block) for block in transformer.transformer_blocks]
        self._modulation = SequenceModulation(
            [own for block in self._blocks for own in _modulation_layers(block)]
            + [(PackedLinear(transformer.norm_out.linear), 2)]
        )
        self._proj_out = PackedLinear(_reordered(transformer.proj_out, transformer.config.out_channels))
        self._image_decoder = ImageDecoder(pipeline.vae)

    def quantizable(self) -> Iterator[tuple[object, str]]:
        """The blocks' large products, for ``accel.quantize``."""
        for block in self._blocks:
            yield from block.quantizable()

    def batch_key(self, request: Request) -> None:
        """Everything packs with everything."""

    # --- before the first step -------------------------------------------------------------

    def tokenize(self, prompt: str) -> TokenizedPrompt:
        """Ids of both CLIPs, then T5's."""
        return self._prompts.tokenize(prompt)

    def encode_shape(self, prompt: TokenizedPrompt) -> tuple[int, int]:  # noqa: ARG002
        """One for all."""
        return self._prompts.shape

    def prepare_encode(self, prompts: Sequence[TokenizedPrompt]) -> list[PromptEmbeds]:
        """Both CLIPs' states side by side, then T5's, as one text stream; the pooled outputs beside it."""
        return [self._embeds(*outputs) for outputs in self._prompts.encode(prompts)]

    def _embeds(
        self, clip: Tensor, pooled: Tensor, clip_2: Tensor, pooled_2: Tensor, t5: Tensor
    ) -> PromptEmbeds:
        both = torch.cat((clip, clip_2), dim=1).to(self.dtype)
        both = F.pad(both, (0, self._text_width - both.shape[1]))
        states = torch.cat((both, t5.to(self.dtype)))
        return PromptEmbeds(self._txt_in(states), torch.cat((pooled, pooled_2)))

    def prepare_latents(self, request: Request) -> Tensor:
        """Drawn on the CPU in the model's dtype by the request's own generator, then patchified 2×2."""
        grid = self._grid(request.height, request.width)
        return draw_patches(request.seed, grid, self.num_latent_channels // 4, self.dtype)

    def prepare_timesteps(self, request: Request) -> tuple[Tensor, Tensor]:
        """The noise scheduler's own tables, with its own sigmas."""
        num_image_tokens = self.capabilities.num_image_tokens(request.height, request.width)
        steps = request.num_inference_steps
        return flow_tables(self._pipeline.scheduler, steps, num_image_tokens, own_sigmas=False)

    def prepare_sequence(self, request: Request, prompt: PromptEmbeds) -> SequenceInputs:
        """The middle of the table of positions, cut to the request's own size; its vector from the prompt."""
        assert prompt.pooled is not None
        rows, columns = self._grid(request.height, request.width)
        top, left = (self._side - rows) // 2, (self._side - columns) // 2
        places = torch.arange(self._side**2).view(self._side, self._side)
        places = places[top : top + rows, left : left + columns].flatten()
        return SequenceInputs(
            img_positions=upload(places, self.device), vector=self._embedding.vector(prompt.pooled, None)
        )

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        patch = self.capabilities.patch_pixels
        return height // patch, width // patch

    # --- every step --------------------------------------------------------------------------

    def prepare_step(self, timesteps: Sequence[float], later: Iterable[float]) -> Tensor:  # noqa: ARG002
        """``[N]`` float32, the timesteps themselves."""
        return upload(torch.tensor(timesteps, dtype=torch.float32), self.device)

    def denoise_step(self, batch: PackedInput) -> Tensor:
        """One forward over all sequences, ``[T_img, C]``."""
        assert batch.vectors is not None
        assert batch.img_positions is not None
        *modulations, (scale, shift) = self._modulation(self._embedding(batch.conditioning, batch.vectors))
        txt_scale, txt_shift = modulations.pop()  # the last block only reads its text
        modulations.append((txt_shift, txt_scale))
        img = self._img_in(batch.latents.to(self.dtype))
        img = (img + self._positions.index_select(0, batch.img_positions)).to(self.dtype)
        slots = batch.img_sequence, batch.txt_sequence
        img, _, img_attn, _ = run_blocks(
            self._blocks, img, batch.prompt_embeds, modulations, slots, batch, self._attend
        )
        last = self._blocks[-1].img
        _, img_h = last.finish(img, img_attn, modulations[-2], (shift, scale), self._proj_out.takes, slots[0])
        return self._proj_out(img_h)

    # --- after the last step -----------------------------------------------------------------

    def post_decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        """VAE decode of one request alone, float32 ``[height, width, 3]``, 0 … 1."""
        return self._image_decoder(patches_to_latents(latents, self._grid(height, width)))


def _double_block(block: Any) -> DoubleBlock:
    """The last block's text is only read: what it would become nobody wants."""
    attn = block.attn
    img = Stream(
        block.norm1.linear,
        [attn.to_q, attn.to_k, attn.to_v],
        (attn.norm_q, attn.norm_k),
        attn.to_out[0],
        block.ff,
        attn.heads,
    )
    txt_qkv = [attn.add_q_proj, attn.add_k_proj, attn.add_v_proj]
    norms = attn.norm_added_q, attn.norm_added_k
    modulation = block.norm1_context.linear
    if block.context_pre_only:
        return DoubleBlock(img, ReadStream(modulation, txt_qkv, norms, attn.heads), _second_attention(block))
    txt = Stream(modulation, txt_qkv, norms, attn.to_add_out, block.ff_context, attn.heads)
    return DoubleBlock(img, txt, _second_attention(block))


def _second_attention(block: Any) -> SelfAttention | None:
    attn = block.attn2
    if attn is None:
        return None
    return SelfAttention(
        [attn.to_q, attn.to_k, attn.to_v], (attn.norm_q, attn.norm_k), attn.to_out[0], attn.heads
    )


def _modulation_layers(block: DoubleBlock) -> list[tuple[PackedLinear, int]]:
    """Three parts more for a second attention, two in all for a text that is only read."""
    return [
        (block.img.modulation, 6 if block.img_own is None else 9),
        (block.txt.modulation, 6 if isinstance(block.txt, Stream) else 2),
    ]


def _patch_layer(conv: nn.Conv2d) -> nn.Linear:
    """A convolution over patches that do not overlap, as a product over flat patches."""
    assert conv.bias is not None
    return _linear(conv.weight.detach().flatten(1), conv.bias.detach())


def _reordered(layer: nn.Linear, channels: int) -> nn.Linear:
    """The last product with its columns in the order of `draw_patches`: channel, then row and column."""
    weight, bias = layer.weight.detach(), layer.bias.detach()
    return _linear(
        weight.view(2, 2, channels, -1).permute(2, 0, 1, 3).flatten(0, 2).contiguous(),
        bias.view(2, 2, channels).permute(2, 0, 1).flatten().contiguous(),
    )


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight, layer.bias = nn.Parameter(weight, False), nn.Parameter(bias, False)
    return layer


def _prompt_encoders(pipeline: Any, capabilities: Capabilities, device: torch.device) -> PaddedPrompts:
    limits = capabilities.prompt_limits
    clip, clip_2, t5 = pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3
    encoders = [
        PaddedEncoder(pipeline.tokenizer, clip, limits["clip"], _clip(clip)),
        PaddedEncoder(pipeline.tokenizer_2, clip_2, limits["clip_2"], _clip(clip_2)),
        PaddedEncoder(pipeline.tokenizer_3, t5, limits["t5"], lambda ids: (t5(ids)[0],)),
    ]
    assert capabilities.padded_text_tokens is not None
    return PaddedPrompts(encoders, capabilities.padded_text_tokens, device)


def _clip(encoder: Any) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """States before the last layer, and the projected vector of the whole prompt."""

    def encode(ids: Tensor) -> tuple[Tensor, ...]:
        output = encoder(ids, output_hidden_states=True)
        return output.hidden_states[-2], output.text_embeds

    return encode


def refuse_unsupported(config: Any) -> None:
    """Names what a checkpoint has and this family lacks.

    Raises:
        UnsupportedModelError: With the name of the key and what is supported.
    """
    for key, supported in (("patch_size", (2,)), ("qk_norm", (None, "rms_norm"))):
        if config.get(key) not in supported:
            raise UnsupportedModelError(
                f"transformer config has {key}={config.get(key)!r}, supported for Stable Diffusion 3: "
                f"{', '.join(map(repr, supported))}"
            )
