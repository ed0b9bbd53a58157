"""Sizes of a pi0.5 model and the presets a profile may name.

Owns every number that fixes a tensor's shape. Knows nothing of weights, devices or tasks.
The loader, the model and the engine read it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CAMERA_SLOTS = ('base_0_rgb', 'left_wrist_0_rgb', 'right_wrist_0_rgb')
"""openpi's camera slots in the order in which their tokens enter the prefix."""


@dataclass(frozen=True)
class GemmaConfig:
    """Shape of one Gemma stack: the vision-language backbone or the action expert."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f'num_heads ({self.num_heads}) must be a multiple of '
                f'num_kv_heads ({self.num_kv_heads})'
            )


@dataclass(frozen=True)
class SiglipConfig:
    """Shape of the vision tower."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    patch_size: int
    image_size: int

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size:
            raise ValueError(
                f'image_size ({self.image_size}) must be a multiple of '
                f'patch_size ({self.patch_size})'
            )

    @property
    def tokens_per_image(self) -> int:
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True)
class Pi05Config:
    """Shape of the whole model.

    `prefix_attention` is a property of the checkpoint, not a tuning knob: `bidirectional` (openpi,
    LeRobot: image and prompt tokens all see each other) or `causal` (OxyGen and subtask
    checkpoints: prompt tokens are causal and image tokens see only images).
    """

    vlm: GemmaConfig
    expert: GemmaConfig
    vision: SiglipConfig
    vocab_size: int
    action_dim: int = 32
    action_horizon: int = 50
    max_token_len: int = 200
    prefix_attention: str = 'bidirectional'
    camera_slots: tuple[str, ...] = CAMERA_SLOTS

    def __post_init__(self) -> None:
        # The expert attends to the backbone's K/V layer by layer, so these must agree.
        for field in ('depth', 'num_heads', 'num_kv_heads', 'head_dim'):
            ours, theirs = getattr(self.expert, field), getattr(self.vlm, field)
            if ours != theirs:
                raise ValueError(
                    f'expert.{field} must equal vlm.{field} ({theirs}) because the expert reads '
                    f'its K/V, got {ours}'
                )
        if self.prefix_attention not in ('bidirectional', 'causal'):
            raise ValueError(
                "prefix_attention: expected 'bidirectional' or 'causal', "
                f'got {self.prefix_attention!r}'
            )

    @property
    def max_prefix_len(self) -> int:
        """Tokens of a frame with every camera present and a prompt of full length."""
        return len(self.camera_slots) * self.vision.tokens_per_image + self.max_token_len


PRESETS: dict[str, Pi05Config] = {
    # The released model: Gemma 2B + Gemma 300M + SigLIP So400m/14 (openpi models/gemma.py).
    'pi05': Pi05Config(
        vlm=GemmaConfig(2048, 18, 16384, 8, 1, 256),
        expert=GemmaConfig(1024, 18, 4096, 8, 1, 256),
        vision=SiglipConfig(1152, 27, 4304, 16, 14, 224),
        vocab_size=257152,
    ),
    # Large enough that compute, not call overhead, decides on a CPU; for benchmarks.
    'mid': Pi05Config(
        vlm=GemmaConfig(512, 8, 2048, 8, 1, 64),
        expert=GemmaConfig(256, 8, 1024, 8, 1, 64),
        vision=SiglipConfig(256, 4, 1024, 4, 14, 224),
        vocab_size=32000,
        action_horizon=10,
        max_token_len=100,
    ),
    # The real network, tiny: random weights run it in milliseconds; for tests and first steps.
    'dummy': Pi05Config(
        vlm=GemmaConfig(64, 4, 128, 8, 1, 16),
        expert=GemmaConfig(32, 4, 64, 8, 1, 16),
        vision=SiglipConfig(48, 2, 96, 4, 14, 56),
        vocab_size=512,
        action_horizon=20,
        max_token_len=96,
    ),
    # Trained and shipped (resource/tabletop): it plays the simulated table of oxygen_ros/sim.
    'tabletop': Pi05Config(
        vlm=GemmaConfig(96, 4, 256, 4, 2, 32),
        expert=GemmaConfig(64, 4, 128, 4, 2, 32),
        vision=SiglipConfig(96, 3, 192, 4, 16, 96),
        vocab_size=704,
        action_dim=8,
        action_horizon=10,
        max_token_len=48,
        camera_slots=CAMERA_SLOTS[:2],
    ),
}


def preset(name: str, *, prefix_attention: str, action_horizon: int = 0) -> Pi05Config:
    """Return the preset `name`; `action_horizon` 0 keeps the preset's own.

    Raises:
        ValueError: unknown preset, naming those that exist.
    """
    if name not in PRESETS:
        raise ValueError(f'model preset: expected one of {sorted(PRESETS)}, got {name!r}')
    config = PRESETS[name]
    return replace(
        config,
        prefix_attention=prefix_attention,
        action_horizon=action_horizon or config.action_horizon,
    )
