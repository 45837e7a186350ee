"""FLUX.1: double-stream blocks, then single-stream ones over text and image joined.

The arithmetic follows diffusers' ``FluxTransformer2DModel`` and ``FluxPipeline`` (0.42). The dev model is
distilled with a guidance scale that it takes as an input; schnell has none. Both take true CFG besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from offline_diffusion.attention.backends import AttentionFunction, load_backend
from offline_diffusion.attention.metadata import AttentionMetadata
from offline_diffusion.errors import UnsupportedModelError
from offline_diffusion.kernels.linear import PackedLinear
from offline_diffusion.kernels.packed_ops import QuantFormat, gate_residual_norm
from offline_diffusion.models.autoencoder_kl import ImageDecoder
from offline_diffusion.models.base import (
    GuidanceRule,
    PackedInput,
    PromptEmbeds,
    RotaryTable,
    SequenceInputs,
    TokenizedPrompt,
)
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.models.conditioning import SequenceModulation, TimeTextEmbedding
from offline_diffusion.models.double_stream import (
    EPS,
    DoubleBlock,
    Modulation,
    Projections,
    Rows,
    Stream,
    read_stream,
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


class _SingleBlock(Projections):
    """Attention and feed-forward side by side over the joint stream, with one residual for both."""

    large = ("to_qkv", "mlp_in", "out")

    def __init__(self, block: Any) -> None:
        attn = block.attn
        super().__init__([attn.to_q, attn.to_k, attn.to_v], (attn.norm_q, attn.norm_k), attn.heads)
        self.modulation = PackedLinear(block.norm.linear)
        self.mlp_in, self.out = PackedLinear(block.proj_mlp), PackedLinear(block.proj_out)

    def __call__(
        self,
        x: Tensor,
        h: Rows,
        own: Modulation,
        following: Modulation,
        takes: QuantFormat | None,
        index: Tensor,
        batch: PackedInput,
        attend: AttentionFunction,
    ) -> tuple[Tensor, Rows]:
        """As `Stream.finish`, attention included; ``h`` is what the block before left for this one."""
        keys = batch.img_attention.keys
        attn = self.attend_alone(h, AttentionMetadata(keys, keys), batch.rotary, attend)
        update = self.out(torch.cat((attn, self.mlp_in.gelu(h)), dim=1))
        shift, scale = following
        return gate_residual_norm(x, update, own[2], shift, scale, index, EPS, takes)


class Flux:
    """The family's model. Offers `models.base.PackedModel`.

    Args:
        pipeline: A loaded diffusers ``FluxPipeline``, its modules on ``device``.
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
        refuse_noise_scheduler(pipeline.scheduler, "FLUX.1")
        if transformer.config.patch_size != 1:
            raise UnsupportedModelError(
                f"transformer config has patch_size={transformer.config.patch_size}, supported for FLUX.1: 1"
            )
        self.capabilities, self.device, self.dtype = capabilities, device, transformer.dtype
        self.num_latent_channels: int = transformer.config.in_channels
        self.attention_backend, self._attend = load_backend(attention_backend, device, self.dtype)
        self._pipeline, self._pos_embed = pipeline, transformer.pos_embed
        self._prompts = _prompt_encoders(pipeline, capabilities, device)
        self._img_in, self._txt_in = (
            PackedLinear(transformer.x_embedder),
            PackedLinear(transformer.context_embedder),
        )
        self._embedding = TimeTextEmbedding(transformer.time_text_embed, self.dtype)
        self._blocks = [_double_block(block) for block in transformer.transformer_blocks]
        self._singles = [_SingleBlock(block) for block in transformer.single_transformer_blocks]
        self._modulation = SequenceModulation(
            [(stream.modulation, 6) for block in self._blocks for stream in (block.img, block.txt)]
            + [(block.modulation, 3) for block in self._singles]
            + [(PackedLinear(transformer.norm_out.linear), 2)]
        )
        self._proj_out = PackedLinear(transformer.proj_out)
        self._image_decoder = ImageDecoder(pipeline.vae)

    def quantizable(self) -> Iterator[tuple[object, str]]:
        """The blocks' large products, for ``accel.quantize``."""
        for block in self._blocks:
            yield from block.quantizable()
        for single in self._singles:
            yield from ((single, name) for name in single.large)

    def batch_key(self, request: Request) -> None:
        """Everything packs with everything."""

    # --- before the first step -------------------------------------------------------------

    def tokenize(self, prompt: str) -> TokenizedPrompt:
        """CLIP's ids, then T5's."""
        return self._prompts.tokenize(prompt)

    def encode_shape(self, prompt: TokenizedPrompt) -> tuple[int, int]:  # noqa: ARG002
        """One for all."""
        return self._prompts.shape

    def prepare_encode(self, prompts: Sequence[TokenizedPrompt]) -> list[PromptEmbeds]:
        """T5's states as the text stream, CLIP's pooled output beside it."""
        return [
            PromptEmbeds(self._txt_in(states.to(self.dtype)), pooled)
            for pooled, states in self._prompts.encode(prompts)
        ]

    def prepare_latents(self, request: Request) -> Tensor:
        """Drawn on the CPU in the model's dtype by the request's own generator, then patchified 2×2."""
        grid = self._grid(request.height, request.width)
        return draw_patches(request.seed, grid, self.num_latent_channels // 4, self.dtype)

    def prepare_timesteps(self, request: Request) -> tuple[Tensor, Tensor]:
        """The noise scheduler's own tables; the shift follows the size where the checkpoint says so."""
        num_image_tokens = self.capabilities.num_image_tokens(request.height, request.width)
        return flow_tables(self._pipeline.scheduler, request.num_inference_steps, num_image_tokens)

    def prepare_sequence(self, request: Request, prompt: PromptEmbeds) -> SequenceInputs:
        """Angles from the request's rows and columns; its vector from prompt and embedded guidance."""
        assert prompt.pooled is not None
        return SequenceInputs(
            rotary=self._rotary_table(*self._grid(request.height, request.width), prompt.num_tokens),
            vector=self._embedding.vector(prompt.pooled, request.guidance_scale),
        )

    def _rotary_table(self, rows: int, columns: int, num_text_tokens: int) -> RotaryTable:
        """Text has position 0; an image token its row and column. Cosines come doubled, one for a channel."""
        ids = torch.zeros(num_text_tokens + rows * columns, 3)
        grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        ids[num_text_tokens:, 1:] = grid.view(-1, 2).float()
        cos, sin = self._pos_embed(upload(ids, self.device))
        return RotaryTable(cos[:, ::2].contiguous(), sin[:, ::2].contiguous())

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
        timesteps = batch.conditioning.to(self.dtype) / 1000 * 1000  # rounded as diffusers rounds them
        modulations = self._modulation(self._embedding(timesteps, batch.vectors))
        num_double = 2 * len(self._blocks)
        double, single = modulations[:num_double], modulations[num_double:-1]
        x, slot = self._through_double(double, single[0][:2], batch)
        h = read_stream(self._singles[0], x, single[0], slot)
        scale, shift = modulations[-1]
        following = [(own[:2], block.to_qkv.takes) for own, block in zip(single, self._singles, strict=True)]
        following.append(((shift, scale), self._proj_out.takes))
        for block, own, (next_own, takes) in zip(self._singles, single, following[1:], strict=True):
            x, h = block(x, h, own, next_own, takes, slot, batch, self._attend)
        assert isinstance(h, Tensor)
        return self._proj_out(h.index_select(0, batch.img_to_joint))

    def _through_double(
        self, modulations: Sequence[Modulation], following: Modulation, batch: PackedInput
    ) -> tuple[Tensor, Tensor]:
        """Past the double-stream blocks: ``[T_joint, H]`` in joint order, and each token's sequence."""
        img_slot, txt_slot = batch.img_sequence, batch.txt_sequence
        img, txt, img_attn, txt_attn = run_blocks(
            self._blocks,
            self._img_in(batch.latents.to(self.dtype)),
            batch.prompt_embeds,
            modulations,
            (img_slot, txt_slot),
            batch,
            self._attend,
        )
        last, (own_img, own_txt) = self._blocks[-1], modulations[-2:]
        assert isinstance(last.txt, Stream)
        img, _ = last.img.finish(img, img_attn, own_img, following, None, img_slot)
        txt, _ = last.txt.finish(txt, txt_attn, own_txt, following, None, txt_slot)
        return _joined(img, txt, batch), _joined(img_slot, txt_slot, batch)

    # --- after the last step -----------------------------------------------------------------

    def post_decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        """VAE decode of one request alone, float32 ``[height, width, 3]``, 0 … 1."""
        return self._image_decoder(patches_to_latents(latents, self._grid(height, width)))


def _joined(img: Tensor, txt: Tensor, batch: PackedInput) -> Tensor:
    """Rows of both streams in joint order."""
    joint = img.new_empty(img.shape[0] + txt.shape[0], *img.shape[1:])
    return joint.index_copy_(0, batch.img_to_joint, img).index_copy_(0, batch.txt_to_joint, txt)


def _double_block(block: Any) -> DoubleBlock:
    attn = block.attn
    img = Stream(
        block.norm1.linear,
        [attn.to_q, attn.to_k, attn.to_v],
        (attn.norm_q, attn.norm_k),
        attn.to_out[0],
        block.ff,
        attn.heads,
    )
    txt = Stream(
        block.norm1_context.linear,
        [attn.add_q_proj, attn.add_k_proj, attn.add_v_proj],
        (attn.norm_added_q, attn.norm_added_k),
        attn.to_add_out,
        block.ff_context,
        attn.heads,
    )
    return DoubleBlock(img, txt)


def _prompt_encoders(pipeline: Any, capabilities: Capabilities, device: torch.device) -> PaddedPrompts:
    clip, t5 = pipeline.text_encoder, pipeline.text_encoder_2
    limits = capabilities.prompt_limits
    encoders = [
        PaddedEncoder(pipeline.tokenizer, clip, limits["clip"], lambda ids: (clip(ids).pooler_output,)),
        PaddedEncoder(pipeline.tokenizer_2, t5, limits["t5"], lambda ids: (t5(ids)[0],)),
    ]
    return PaddedPrompts(encoders, limits["t5"], device)
