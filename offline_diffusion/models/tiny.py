"""The model ``tiny``: a small Qwen-Image with random weights, made on the spot and cached.

Classes, folder layout, scheduler and prompt template are those of the full-size checkpoint, so every
line of the real path runs; only the widths are small and the pictures are abstract. Nothing is
downloaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from offline_diffusion.config import cache_folder
from offline_diffusion.errors import ModelError
from offline_diffusion.models import tiny_weights, tiny_words

TEXT_HIDDEN_SIZE = 64
BPE_VOCAB_SIZE = 6144
DEFAULTS = {"height": 256, "width": 256, "num_inference_steps": 12, "true_cfg_scale": 4.0}
"""Written to ``generation_config.json``: what the loader takes for silent rows."""

DIGESTS_FILE = "digests.json"
"""Name of each file in the folder → its sha256; written last."""

CACHE_HINT = "set XDG_CACHE_HOME to a folder that you can write to"

SCHEDULER_CONFIG = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}

TRANSFORMER_CONFIG = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "axes_dims_rope": (8, 12, 12),
    "joint_attention_dim": TEXT_HIDDEN_SIZE,
}

VAE_CONFIG = {
    "base_dim": 8,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "temperal_downsample": [False, True, True],
}

TEXT_CONFIG = {
    "hidden_size": TEXT_HIDDEN_SIZE,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
}

VISION_CONFIG = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": TEXT_HIDDEN_SIZE,
    "fullatt_block_indexes": [0],
}

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

TEMPLATE_PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
"""What diffusers' ``QwenImagePipeline`` puts before a prompt: 34 tokens, dropped after encoding."""


def build_tiny_qwen_image(
    folder: Path,
    *,
    seed: int = 0,
    num_layers: int = 2,
    num_attention_heads: int = 2,
    attention_head_dim: int = 32,
    axes_dims_rope: tuple[int, int, int] = (8, 12, 12),
    **transformer_overrides: Any,
) -> Path:
    """Writes a complete diffusers folder of a small Qwen-Image with random float32 weights.

    The same arguments give the same bytes. The global random state is left as it is. The folder
    appears whole: it is written beside its place and renamed, so processes may race for it.

    Args:
        folder: Where; parents are made. A folder that this function made is overwritten.
        seed: Of the weights.
        num_layers: Transformer blocks.
        num_attention_heads: Heads of a transformer block.
        attention_head_dim: Width of a head.
        axes_dims_rope: Widths of the rotary axes (frame, row, column); their sum is the head's width.
        transformer_overrides: Other arguments of diffusers' ``QwenImageTransformer2DModel``.

    Returns:
        ``folder``.

    Raises:
        ModelError: The folder cannot be written, or it holds something else.
        ValueError: The rotary axes do not fill a head.
    """
    if sum(axes_dims_rope) != attention_head_dim:
        raise ValueError(
            f"axes_dims_rope {axes_dims_rope} must sum to attention_head_dim {attention_head_dim}"
        )
    folder = Path(folder)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / DIGESTS_FILE).is_file():
        raise ModelError(f"{folder} holds other files", hint="name a new or an empty folder")
    transformer_config = {
        **TRANSFORMER_CONFIG,
        "num_layers": num_layers,
        "num_attention_heads": num_attention_heads,
        "attention_head_dim": attention_head_dim,
        "axes_dims_rope": axes_dims_rope,
        **transformer_overrides,
    }
    return _build(folder, transformer_config, seed)


def tiny_model_folder() -> Path:
    """The cached model ``tiny``; built on first use, and again when a file of it is damaged.

    It lies under ``$XDG_CACHE_HOME`` (else ``~/.cache``) in ``offline_diffusion``; the folder's name
    holds a digest of the recipe, so another version of this package builds its own.

    Raises:
        ModelError: The cache cannot be written.
    """
    try:
        folder = cache_folder() / f"tiny-qwen-image-v1-{_recipe_digest()}"
    except RuntimeError as error:
        raise ModelError(f"no place for the model tiny: {error}", hint=CACHE_HINT) from None
    return folder if is_intact(folder) else _build(folder, TRANSFORMER_CONFIG, seed=0)


def is_intact(folder: Path) -> bool:
    """Whether every file that the build wrote to ``folder`` is there with its bytes."""
    try:
        expected = json.loads((folder / DIGESTS_FILE).read_bytes())
        return bool(expected) and all(_sha256(folder / name) == digest for name, digest in expected.items())
    except (OSError, ValueError, AttributeError):
        return False


def _recipe_digest() -> str:
    sources = (Path(__file__), Path(tiny_weights.__file__), Path(tiny_words.__file__))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]


def _build(folder: Path, transformer_config: dict[str, Any], seed: int) -> Path:
    try:
        with _sibling(folder) as building:
            _write_components(building, transformer_config, seed)
            _write_json(building / "generation_config.json", DEFAULTS)
            digests = {name: _sha256(building / name) for name in _files(building)}
            _write_json(building / DIGESTS_FILE, digests)
            _publish(building, folder)
    except OSError as error:
        raise ModelError(f"cannot write the model folder {folder}: {error}", hint=CACHE_HINT) from error
    return folder


@contextlib.contextmanager
def _sibling(folder: Path) -> Iterator[Path]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    building.mkdir()
    try:
        yield building
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _publish(building: Path, folder: Path) -> None:
    """Renames ``building`` to ``folder``, or replaces its files one by one where it exists.

    Racing builders hold the same bytes, so whoever replaces last changes nothing, and a reader of
    the folder never finds a file missing.
    """
    try:
        building.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        for name in [*_files(building), DIGESTS_FILE]:
            (folder / name).parent.mkdir(exist_ok=True)
            (building / name).replace(folder / name)


def _files(folder: Path) -> list[str]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != DIGESTS_FILE)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_components(folder: Path, transformer_config: dict[str, Any], seed: int) -> None:
    import diffusers
    import torch

    tokenizer = make_tokenizer()
    # The constructors draw from the global generator before our own weights take their place.
    with torch.random.fork_rng(devices=[]):
        transformer = diffusers.QwenImageTransformer2DModel(**transformer_config)
        vae = diffusers.AutoencoderKLQwenImage(**VAE_CONFIG)
        text_encoder = make_text_encoder(tokenizer, TEXT_CONFIG, VISION_CONFIG)
    tiny_weights.fill_transformer(transformer, seed)
    tiny_weights.fill_vae(vae, seed)
    tiny_weights.fill_text_encoder(text_encoder, seed)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**SCHEDULER_CONFIG)
    pipeline = diffusers.QwenImagePipeline(
        scheduler=scheduler, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, transformer=transformer
    )
    with _no_progress_bars():
        pipeline.save_pretrained(folder)


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def make_text_encoder(tokenizer: Any, text_config: dict[str, Any], vision_config: dict[str, Any]) -> Any:
    """A ``Qwen2_5_VLForConditionalGeneration`` whose special tokens are those of ``tokenizer``."""
    import transformers

    def token(name: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(f"<|{name}|>"))

    config = transformers.Qwen2_5_VLConfig(
        text_config={
            **text_config,
            "vocab_size": len(tokenizer),
            "bos_token_id": token("endoftext"),
            "eos_token_id": token("im_end"),
            "pad_token_id": token("endoftext"),
        },
        vision_config=dict(vision_config),
        image_token_id=token("image_pad"),
        video_token_id=token("video_pad"),
        vision_start_token_id=token("vision_start"),
        vision_end_token_id=token("vision_end"),
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def make_tokenizer(texts: Iterable[str] | None = None, vocab_size: int = BPE_VOCAB_SIZE) -> Any:
    """A ``Qwen2Tokenizer`` whose merges are learnt from ``texts``, from ``tiny_words`` where None: any text
    encodes, byte by byte where need be, and what is common in ``texts`` is one token."""
    import transformers
    from tokenizers import Tokenizer, models, trainers

    untrained = transformers.Qwen2Tokenizer()
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = untrained.backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=_byte_alphabet(),
    )
    learner.train_from_iterator(_training_texts() if texts is None else texts, trainer)
    learnt = json.loads(learner.to_str())["model"]
    special_ids = {token: len(learnt["vocab"]) + i for i, token in enumerate(SPECIAL_TOKENS)}
    return transformers.Qwen2Tokenizer(
        vocab=learnt["vocab"] | special_ids,
        merges=[tuple(pair) for pair in learnt["merges"]],
        eos_token="<|im_end|>",
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in ("<|endoftext|>", "<|im_end|>")],
        model_max_length=131_072,
    )


def _byte_alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _training_texts() -> Iterator[str]:
    """Texts repeated by weight: frequent pairs are merged first, and the vocabulary is limited."""
    for _ in range(50):
        yield TEMPLATE_PREFIX.replace("<|im_start|>", "").replace("<|im_end|>", "")
        yield "assistant\n"
    for word in tiny_words.WORDS.split():
        yield from (f" {word}", f" {word}", f" {word.capitalize()}")
    for _ in range(4):
        yield from tiny_words.SENTENCES.splitlines()
    for fragment in tiny_words.FRAGMENTS.split():
        yield from (fragment,) * 6
