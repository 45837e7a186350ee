"""What the shipped model is made of: configs in the real layout, small widths, and the sizes it learns.

Everything that training and packaging must agree on, and nothing else.
"""

from __future__ import annotations

from typing import Any

MODEL_NAME = "shapes"

SIZES = (
    (64, 64),
    (96, 96),
    (128, 128),
    (192, 192),
    (256, 256),
    (64, 128),
    (128, 64),
    (96, 144),
    (144, 96),
    (128, 192),
    (192, 128),
    (128, 256),
    (256, 128),
    (96, 160),
    (160, 96),
    (160, 160),
)
"""Heights and widths in pixels, from 64 to 256 and from 1:2 to 2:1; multiples of 16, the side of a token."""

VAE_CONFIG: dict[str, Any] = {
    "base_dim": 16,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
}

TRANSFORMER_CONFIG: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 7,
    "num_attention_heads": 3,
    "attention_head_dim": 64,
    "axes_dims_rope": (16, 24, 24),
    "joint_attention_dim": 128,
}

TEXT_CONFIG: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    "tie_word_embeddings": True,
}

SHIFT = 1.7
"""Exponent of the timestep shift, of every size: a caption decides between noise levels 0.85 and 1, so half
of all training steps and of all denoise steps lie there."""

SCHEDULER_CONFIG: dict[str, Any] = {
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "base_shift": SHIFT,
    "max_shift": SHIFT,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}

DEFAULTS = {"height": 128, "width": 128, "num_inference_steps": 20, "true_cfg_scale": 4.0}
"""``generation_config.json``: what silent rows get."""

VISION_CONFIG: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": TEXT_CONFIG["hidden_size"],
    "fullatt_block_indexes": [0],
}
"""The real class has a vision tower; nobody runs it here."""
